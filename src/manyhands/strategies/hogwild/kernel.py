"""`hogwild` for compiled steps: threads on one memory, or processes that share it."""

from __future__ import annotations

from manyhands.engine.compiled_worker import Control, KernelProcesses, kernel_task
from manyhands.engine.kernel_task import KernelStep, KernelTask
from manyhands.engine.kernel_threads import KernelThreads
from manyhands.engine.training import Result, Stage, Training
from manyhands.native.group.shared_group import SharedGroup
from manyhands.strategy import Strategy


class HogwildKernels(Training):
    """Runs threads or processes of this host, as the strategy's `hands` says."""

    can_take_part = False  # threads cannot

    @classmethod
    def chosen_for(cls, strategy: Strategy) -> type[Training]:
        return _Threads if strategy.facts.in_threads else _Processes

    def run(self, stage: Stage) -> Result:
        result = super().run(stage)  # type: ignore[safe-super]  # of threads or processes
        task, workers = kernel_task(self._request.plan), self._request.workers
        took_steps = sum(worker["steps"] > 0 for worker in result.observed["per_worker"])
        busy, steps = min(took_steps, task.passes.steps), task.passes.steps
        if 0 < busy < workers:  # short data has few steps per pass
            hands = "threads" if self._request.strategy.facts.in_threads else "processes"
            alone = ", and the numbers are those of strategy=single" if busy == 1 else ""
            stage.say(
                f"only {busy} of {workers} {hands} worked at once{alone}: a pass over {task.samples:,} records "
                f"is {steps} step{'s' * (steps > 1)}, and one worker computes each step; use more data"
            )
        return result


class _Threads(HogwildKernels, KernelThreads):
    """Threads on the memory of one process."""


class _Processes(HogwildKernels, KernelProcesses):
    """Worker processes that map the same memory."""

    @classmethod
    def assemble(cls, task: KernelTask, strategy: Strategy, group: SharedGroup) -> tuple[KernelStep, Control]:
        control_bytes = Control.num_bytes(group.world)
        segment = group.share(control_bytes + task.num_bytes, f"the memory of {task.name}")
        control = Control(segment, group, strategy.facts.record_order or "free", task)
        step = task.step(task.shared_model(segment, control_bytes), control.order.compiled_gate)
        step.segment = segment
        return step, control
