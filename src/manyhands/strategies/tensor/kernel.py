"""Strategy `tensor` for compiled steps: each worker holds some dimensions of every vector and sees all records."""

from __future__ import annotations

from manyhands.engine.compiled_worker import Control, KernelProcesses
from manyhands.engine.kernel_task import KernelStep, KernelTask
from manyhands.native.group.shared_group import SharedGroup
from manyhands.strategy import Strategy


class TensorKernels(KernelProcesses):
    """Worker processes that execute every compiled step together."""

    @classmethod
    def assemble(
        cls, task: KernelTask, _strategy: Strategy, group: SharedGroup
    ) -> tuple[KernelStep, Control]:
        step = task.step_on_slices(group, Control.num_bytes(group.world))
        assert step.segment is not None, "the workers share memory"
        return step, Control(step.segment, group, "together", task)
