"""`single` for compiled steps: one thread, record after record."""

from __future__ import annotations

from manyhands.engine.kernel_threads import KernelThreads

__all__ = ["SingleKernels"]


class SingleKernels(KernelThreads):
    """Runs one thread beside the caller's, so that the caller's thread receives signals."""
