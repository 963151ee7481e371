"""`pipeline` as a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from manyhands.errors import UserError, check_count
from manyhands.facts import (
    Facts,
    Machines,
    ModelFootprint,
    PredictedStep,
    Split,
    StepCosts,
    Stepping,
    TaskProfile,
    Truth,
)
from manyhands.strategies.common.grid.grid_layout import Grid
from manyhands.strategies.common.usual_promises import CUT_ON_ONE_HOST, IN_STEP
from manyhands.strategies.pipeline.cuts import balanced, check_cuts, parts_of
from manyhands.strategies.pipeline.schedule_cost import cost, equal_times, most_held
from manyhands.strategies.pipeline.schedules import SCHEDULES, Schedule
from manyhands.strategy import (
    Searched,
    Strategy,
    WorkerMemory,
    check_choice,
    check_link,
    integer,
    link_setting,
    parse_size,
    setting,
    show_size,
    switch_setting,
)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(integer(number) for number in text.split(","))


@lru_cache(maxsize=256)
def _table(name: str, stages: int, microbatches: int) -> Schedule:
    return SCHEDULES[name](stages, microbatches)


@dataclass(frozen=True, kw_only=True)
class Pipeline(Strategy):
    """The model's layers are cut into stages, each on a worker of its own, through which micro-batches flow.

    `schedule` says in which order the stages work on them. Workers beyond `stages` × `tensor` make replicas of the
    pipeline, which share out each batch; `data` may say how many.
    """

    word: ClassVar[str] = "pipeline"
    about: ClassVar[str] = (
        "the model's layers cut into stages, one worker each, through which micro-batches flow"
    )
    split: ClassVar[Split] = Split.LAYERS
    truth: ClassVar[Truth] = Truth.EVERYONE
    refuses: ClassVar[Mapping[str, str]] = {
        "codec": "stages send outputs and gradients uncompressed; allreduce link=tcp, local link=tcp and "
        "ps link=tcp have a codec"
    }
    searched: ClassVar[Searched] = {
        "stages": lambda machines: [count for count in (2, 4, 8, 16) if machines.workers % count == 0],
        "microbatches": lambda _: (2, 4, 8, 16, 32),
    }
    stages: int = setting(2, integer)
    """Into how many stages the model's layers are cut."""
    microbatches: int = setting(4, integer)
    """In how many pieces a worker's share of a batch flows through the stages; `wavefront` cuts time into so many."""
    schedule: str = setting("1f1b", str)
    """In which order a stage works: naive, gpipe, 1f1b, interleaved, zb-h1 or wavefront."""
    data: int = setting(0, integer)
    """How many replicas of the pipeline share out a batch; 0: as many as there are workers for."""
    tensor: int = setting(1, integer)
    """Over how many workers each layer of a stage is sliced."""
    recompute: bool = switch_setting()
    """Keep only a stage's inputs until backward, and compute the rest again: less memory, a third more time."""
    cuts: tuple[int, ...] = setting((), _numbers, lambda cuts: ",".join(map(str, cuts)) or "3,7")
    """The layers that begin the second and later parts, from 0; without them, measured and balanced."""
    memory: int = setting(0, parse_size, lambda size: show_size(size) if size else "2GiB")
    """The most that a worker's part may take, of parameters, gradients, optimizer state and activations; 0: any."""
    link: str = link_setting()
    """How stages talk: through `shared` memory, or by `tcp` on loopback."""

    def __post_init__(self) -> None:
        check_choice("schedule", self.schedule, SCHEDULES)
        check_link(self.link)
        for name in ("stages", "microbatches", "tensor"):
            check_count(name, getattr(self, name))
        if self.data < 0:
            raise UserError(f"data={self.data}: must be at least 1, or 0 to use all workers")
        table = self.table()
        if table.over_time and self.recompute:
            why = "it needs the states of all slices"
            raise UserError(f"recompute=yes: schedule={self.schedule} cannot; {why}")
        if self.cuts and self.memory:
            raise UserError("cuts and memory cannot both be given; leave one out")
        if self.cuts:
            check_cuts(self.cuts, max(self.cuts) + 1, table.parts)

    def table(self) -> Schedule:
        """Who works on which micro-batch when; UserError where the numbers do not fit the schedule."""
        return _table(self.schedule, self.stages, self.microbatches)

    def grid(self, workers: int) -> Grid:
        """Which worker has which place; UserError with the nearest numbers where so many do not fill it."""
        return Grid.of(workers, stages=self.stages, slices=self.tensor, data=self.data or None)

    def assignment(self, cuts: tuple[int, ...], layers: int) -> tuple[int, ...]:
        return tuple(part % self.stages for part, places in enumerate(parts_of(cuts, layers)) for _ in places)

    def stages_of(self, costs: Sequence[float], workers: int) -> tuple[int, ...]:
        self.grid(workers)
        parts, layers = self.table().parts, len(costs)
        if layers < parts:
            raise UserError(
                f"stages={self.stages}: a chain of {layers} layers cannot be cut into {parts} parts; use at most "
                f"stages={layers * self.stages // parts}"
            )
        if self.cuts:
            check_cuts(self.cuts, layers, parts)
        found = self.cuts or balanced(costs, parts)
        assert found is not None, "there are enough layers"
        return self.assignment(found, layers)

    def shares(self, workers: int) -> int:
        return self.grid(workers).data

    @classmethod
    def choices(
        cls, machines: Machines, *, survives: bool = False, lossy: bool = False
    ) -> Sequence[Strategy]:
        """Every number of stages that divides the workers, with few and with many micro-batches."""
        del survives, lossy
        stages = [count for count in (2, 4, 8, 16) if machines.workers % count == 0]
        return [cls(stages=count, microbatches=many * count) for count in stages for many in (1, 2, 4)]

    def needs(self, model: ModelFootprint, workers: int) -> list[WorkerMemory]:
        """Of each stage of a model that is known, by default with as much work each; else of stages of equal size."""
        grid, table = self.grid(workers), self.table()
        held, parts = max(most_held(table)), self.stages * self.tensor
        samples = -(-model.batch_size // (grid.data * self.microbatches))
        if self.tensor == 1 and model.traced is not None and not table.over_time:
            from manyhands.strategies.pipeline.predicted_parts import cuts_by_work, needs_of_stages

            cuts = self.cuts or cuts_by_work(model.traced, table.parts, samples)
            if cuts is not None:
                rows = needs_of_stages(table, model, cuts, samples, grid.data, recompute=self.recompute)
                shown = ",".join(map(str, cuts))
                by_work = f"nothing; cuts={shown} have as much work each, and a run measures where that is"
                return rows if self.cuts else [replace(rows[0], what=by_work), *rows[1:]]
        from manyhands.strategies.common.grid.grid_group import memory_of_sums

        return [
            WorkerMemory(
                who="worker",
                count=workers,
                weights=model.parameters // parts + model.buffers,
                gradients=model.gradients // parts,
                state=model.state // parts,
                activations=max(
                    round(model.per_sample * samples * held / table.parts),
                    memory_of_sums(model.gradients // parts, grid.data),
                ),
                what=f"nothing; with stages={self.stages} of equal size and data={grid.data}; the fullest stage has "
                f"{held} micro-batches in flight",
            )
        ]

    def predict(self, profile: TaskProfile, machines: Machines) -> PredictedStep | None:
        """The schedule is played with the times of its parts; replicas sum the gradients of a stage afterwards."""
        table = self.table()
        if self.tensor > 1 or table.over_time:
            return None
        from manyhands.strategies.pipeline.predicted_parts import predicted_cuts, predicted_parts

        replicas = self.grid(machines.workers).data
        cuts = self.cuts or predicted_cuts(table, profile, replicas)
        if cuts is None:
            return None
        found = predicted_parts(
            table, profile, machines, replicas=replicas, cuts=cuts, recompute=self.recompute
        )
        measures = not self.cuts and not self.memory and profile.model.traced is not None
        return replace(found, with_settings=replace(self, cuts=cuts)) if measures else found

    def check(self, workers: int, device: str, *, compiled: bool = False) -> None:
        super().check(workers, device, compiled=compiled)
        if compiled:
            instead = "use hogwild or allreduce"
            raise UserError(f"strategy pipeline: a compiled step has no layers to cut; {instead}")
        self.grid(workers)

    @property
    def facts(self) -> Facts:
        """All workers take every step together; a batch flows through all stages, and replicas share it out."""
        apart = Stepping.APART if self.stages > 1 else Stepping.TOGETHER
        return Facts(
            usual_costs=StepCosts(step_s=4e-4, message_s=3.5e-4, byte_s=5e-10),
            promises=IN_STEP,
            stepping=(Stepping.IN_PIECES if self.tensor > 1 else apart,),
            splits_batches=False,
            leaves_steps_out=True,
            uses_links=True,
            model_parts=self.stages * self.tensor,
            straggler_advice="a pipeline is as fast as its slowest stage; give that stage fewer layers with cuts=…",
            cannot_compile=f"torch.compile needs a complete model, and under `{self.word}` no worker has one",
            cannot_act=f"acting needs a complete model, and under `{self.word}` no worker has one",
            cannot_cross_hosts="",
            cannot_loop_across_hosts=CUT_ON_ONE_HOST,
            refused_buffers={
                "synchronize": "its batch norms see one micro-batch at a time, never the complete batch"
            },
        )

    def planned_waits(self) -> str:
        table = self.table()
        bubble = cost(table, equal_times(table)).bubble
        if not bubble:
            return ""
        return (
            f"Some waiting is part of the schedule: with {self.stages} equal stages and {self.microbatches} "
            f"micro-batches, {self.schedule} leaves each stage idle for {100 * bubble:.0f} % of a step."
        )
