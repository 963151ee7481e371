"""`tensor` for compiled steps: some dimensions of everything for every worker, and all records."""

from __future__ import annotations

from manyhands.engine.compiled_worker import Control
from manyhands.engine.kernel_processes import KernelProcesses
from manyhands.engine.kernel_task import KernelStep, KernelTask
from manyhands.native.group.shared_group import SharedGroup
from manyhands.strategy import Strategy

__all__ = ["TensorKernels"]


class TensorKernels(KernelProcesses):
    """All take every step together."""

    @classmethod
    def assemble(cls, task: KernelTask, strategy: Strategy, group: SharedGroup) -> tuple[KernelStep, Control]:
        """What travels goes through memory that the step lays out."""
        del strategy
        step = task.step_on_slices(group, Control.num_bytes(group.world))
        assert step.segment is not None, "the workers share memory"
        return step, Control(step.segment, group, "together", task)
