"""`tensor` as a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from manyhands.errors import UserError
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
from manyhands.strategies.common.grid.grid_layout import Grid, require_multiple
from manyhands.strategies.common.usual_promises import CUT_ON_ONE_HOST, IN_STEP
from manyhands.strategy import (
    Strategy,
    WorkerMemory,
    check_link,
    integer,
    link_setting,
    setting,
)


@dataclass(frozen=True, kw_only=True)
class Tensor(Strategy):
    """Every worker holds a slice of every layer: of word vectors, some dimensions of each."""

    word: ClassVar[str] = "tensor"
    about: ClassVar[str] = "every layer is sliced over the workers; all workers see every sample"
    split: ClassVar[Split] = Split.DIMENSIONS
    truth: ClassVar[Truth] = Truth.EVERYONE

    slices: int = setting(0, integer)
    """How many workers share each layer; 0: all of them, or as many as `data` leaves."""
    data: int = setting(0, integer)
    """How many replicas of the sliced model share each batch; 0: as many as the workers make."""
    link: str = link_setting()

    def __post_init__(self) -> None:
        check_link(self.link)
        for name in ("slices", "data"):
            if (given := getattr(self, name)) < 0:
                raise UserError(f"{name}={given}: must be at least 1, or 0 to use all workers")

    def grid(self, workers: int) -> Grid:
        """Who has which slice of which replica; UserError where so many workers do not fill it."""
        if self.slices:
            return Grid.of(workers, slices=self.slices, data=self.data or None)
        data = self.data or 1
        require_multiple(workers, data, f"data={data}")
        return Grid(data=data, slices=workers // data)

    def shares(self, workers: int) -> int:
        return self.grid(workers).data

    def needs(self, model: ModelFootprint, workers: int) -> list[WorkerMemory]:
        """Every worker holds all layers that are not sliced."""
        grid, traced = self.grid(workers), model.traced
        if grid.slices == 1:
            return super().needs(model, workers)
        from manyhands.strategies.common.grid.grid_group import memory_of_sums

        if traced is None:
            held, gradients = model.parameters // grid.slices, model.gradients // grid.slices
            working = model.activations(grid.data)
        else:
            from manyhands.strategies.tensor.played_slices import held_in_slices

            slice_ = held_in_slices(traced, grid.slices, -(-model.batch_size // grid.data))
            held, gradients = slice_.held, slice_.gradients
            backward = slice_.peaks.beside if model.microbatches > 1 else slice_.peaks.together - gradients
            working = max(backward, model.step_work * held // model.parameters)
        working = max(working, memory_of_sums(gradients, grid.data))
        return [
            WorkerMemory(
                who="worker",
                count=workers,
                weights=held + model.buffers,
                gradients=gradients,
                state=model.state * held // (model.parameters or 1),
                activations=working,
            )
        ]

    def predict(self, profile: TaskProfile, machines: Machines) -> PredictedStep | None:
        """Each slice computes its part of the layers that can be cut, and sums and gathers activations in between."""
        from manyhands.strategies.tensor.predicted_slices import predicted_slices

        return predicted_slices(profile, machines, self.grid(machines.workers))

    @classmethod
    def choices(
        cls, machines: Machines, *, survives: bool = False, lossy: bool = False
    ) -> Sequence[Strategy]:
        """All workers as slices of one copy, and every few of them that divide the workers.

        Of several hosts with several workers each, slices stay inside a host: every layer exchanges between them.
        """
        del survives, lossy
        workers = machines.workers
        near = machines.per_host if machines.hosts > 1 and machines.per_host > 1 else workers
        few = [cls(slices=count) for count in (2, 4, 8, 16) if count <= near and workers % count == 0]
        return [one for one in few if one.slices < workers] + ([cls()] if near == workers else [])

    def check(self, workers: int, device: str, *, compiled: bool = False) -> None:
        super().check(workers, device, compiled=compiled)
        grid = self.grid(workers)
        if compiled and (grid.data > 1 or self.uses_network):
            raise UserError(
                f"strategy {self}: word vectors are split over all workers in shared memory; use tensor"
            )

    @property
    def facts(self) -> Facts:
        """All workers take every step together; every slice of a layer sees all samples of its replica."""
        return Facts(
            promises=IN_STEP,
            usual_costs=StepCosts(step_s=4e-4, message_s=2e-4, byte_s=2e-9),
            stepping=(Stepping.IN_PIECES,),
            splits_batches=False,
            leaves_steps_out=True,
            uses_links=True,  # activations and their gradients travel inside forward and backward
            # As many as workers where nothing else is said, which the value does not know.
            model_parts=max(1, self.slices),
            straggler_advice="every layer waits for the slowest of its slices; use workers of equal speed",
            cannot_compile=f"torch.compile needs a complete model, and under `{self.word}` no worker has one",
            cannot_act=f"acting needs a complete model, and under `{self.word}` no worker has one",
            cannot_cross_hosts="",
            cannot_loop_across_hosts=CUT_ON_ONE_HOST,
            refused_buffers={
                "synchronize": "its slices compute on the same samples, and replicas of slices do not sum inside "
                "a layer"
            },
        )
