"""`single` for compiled steps: one thread, record after record."""

from __future__ import annotations

from manyhands.engine.kernel_threads import KernelThreads

__all__ = ["SingleKernels"]


class SingleKernels(KernelThreads):
    """One thread, so that the caller's own hears signals."""
