"""Around a run of `fit`: a bar while it goes on, and the weights of its last whole pass where it was interrupted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from manyhands.analyse.totals import Snapshot as Totals
from manyhands.draw.bars import Bars, following
from manyhands.store.rundir import RunDirectory
from manyhands.strategy import Strategy
from manyhands.task import Task
from manyhands.training.training import training_class

__all__ = ["Kept", "bar_view", "last_kept"]


@contextmanager
def bar_view(bars: Bars, batch: int, steps: int, snapshot: Callable[[], Totals]) -> Iterator[None]:
    """Move a bar along with the steps of a run, as `fit` asks a view to."""
    with (
        bars.phase("learning", steps * batch, "examples") as phase,
        following(lambda: snapshot().step * batch, phase.advance),
    ):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What an interrupted run left: parameters by name after `steps` steps, and the losses of those steps."""

    values: Mapping[str, Tensor]
    steps: int
    losses: list[float]


def last_kept(folder: Path, task: Task, strategy: Strategy) -> Kept | None:
    """The newest checkpoint in a run's directory; None where there is none yet."""
    directory = RunDirectory.open(folder, lock=False)
    try:
        found = training_class(strategy).kept(directory, task, strategy)
        if found is None:
            return None
        steps, values = found
        losses = [row["loss"] for row in directory.metrics.read() if "loss" in row][:steps]
    finally:
        directory.close()
    return Kept(values=values, steps=steps, losses=losses)
