"""What the trainings of glove, logreg, svd and gbdt have in common: a run of `fit` behind a bar, and what it left."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from manyhands.engine.fitting import fit_or_kept
from manyhands.engine.kernel_task import AnyTask
from manyhands.engine.options import Options
from manyhands.engine.run import PASS_LOSS
from manyhands.engine.training import Keeping, Kept
from manyhands.observe.draw.bars import BarPhase, bar_view
from manyhands.strategy import Strategy

AfterPass = Callable[[int, float], None]
"""Called in the caller's thread with the number of a pass that is over, from 1, and its mean loss."""
Rows = Sequence[Mapping[str, Any]]


@dataclass(kw_only=True, slots=True)
class CompiledResult:
    """How a training came about; each workload's has its `model` beside."""

    seconds: float  # from reading to the end; compiling kernels, where they were missing, not counted
    interrupted: bool = False  # whether Ctrl-C ended it early; the model is the one that was kept
    summary: Mapping[str, Any] = field(default_factory=dict)
    """That of `fit`; of an interrupted run there is none."""

    def full_summary(self) -> dict[str, Any]:
        """The summary of `fit`, and what else is known here, by the names of the fields."""
        names = [one.name for one in fields(self) if one.name not in ("model", "summary")]
        return {**self.summary, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """What a run left: its parameters and buffers by name, its history, and no summary where it was interrupted."""

    values: Mapping[str, Tensor]
    model: nn.Module | None
    """That of `fit`; `values` are its own. None where it was interrupted."""
    rows: Rows
    summary: Mapping[str, Any]

    @property
    def pass_losses(self) -> list[float]:
        return [row["metrics"][PASS_LOSS] for row in self.rows if PASS_LOSS in row.get("metrics", {})]


def train_compiled(
    task: AnyTask,
    strategy: Strategy,
    *,
    workers: int,
    options: Any,
    epochs: int,
    shown: tuple[BarPhase, Callable[[int], float]] | None,
    keep: Keeping | None,
    after_pass: AfterPass | None = None,
    on_step: Callable[[int], None] | None = None,
    is_result: Callable[[Mapping[str, Tensor]], bool] = lambda _: True,
) -> TrainedRun:
    """Train through `fit`; `shown` is a bar, and how far it is after so many steps.

    `options` are those of the workload, of which `seed` and `allow_overload` are used here. With `keep`, the run has a
    directory: Ctrl-C (or a signal that `places.local.signals` raises) then keeps what is done, and the run can be
    resumed. Without one, or before the newest checkpoint `is_result`, it is raised.
    """
    assert task.passes is not None, "of every workload"
    steps = task.passes.steps

    def hear(rows: Rows) -> None:
        for row in rows:
            if PASS_LOSS not in row.get("metrics", {}):
                if on_step is not None:
                    on_step(row["step"])
            elif after_pass is not None:
                after_pass(row["step"] // steps, row["metrics"][PASS_LOSS])

    asked = keep.options if keep is not None else Options(resume_command="", progress="none")
    if shown is not None:
        asked = replace(asked, view=partial(bar_view, *shown))
    if after_pass is not None or on_step is not None:
        asked = replace(asked, on_rows=hear)
    ended = fit_or_kept(
        task,
        strategy,
        workers=workers,
        epochs=epochs,
        seed=options.seed,
        options=replace(asked, allow_overload=options.allow_overload),
        keep=keep,
        is_result=lambda kept: is_result(kept.values),
    )
    if isinstance(ended, Kept):
        return TrainedRun(values=ended.values, model=None, rows=ended.rows, summary={})
    model = ended.model
    return TrainedRun(values=model.state_dict(), model=model, rows=list(ended.history), summary=ended.summary)
