"""`mirrored` and `allreduce` for compiled steps: a copy of the model per worker, and a part of each batch."""

from __future__ import annotations

from manyhands.engine.compiled_worker import Control, KernelProcesses
from manyhands.engine.kernel_task import KernelStep, KernelTask
from manyhands.native.group.shared_group import SharedGroup
from manyhands.strategy import Strategy


class AllReduceKernels(KernelProcesses):
    """Worker processes that take every step together."""

    @classmethod
    def assemble(cls, task: KernelTask, strategy: Strategy, group: SharedGroup) -> tuple[KernelStep, Control]:
        del strategy
        step = task.step_on_copies(group, Control.num_bytes(group.world))
        assert step.segment is not None, "the workers share memory"
        return step, Control(step.segment, group, "together", task)
