"""Early stopping: a run ends when a metric of its evaluations no longer improves. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.errors import UserError, named_arguments, nearest

__all__ = ["EarlyStopping", "StoppingCount"]


@named_arguments
@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """End a run after `patience` evaluations in a row that were not better than the best before them."""

    metric: str = "evaluation_loss"
    """The name of a metric of the task, or `evaluation_loss`."""

    patience: int = 3
    """How many evaluations in a row without a better one end the run."""
    min_delta: float = 0.0
    """What counts as better is better by more than this."""

    mode: str = "min"
    """Whether lower (`min`) or higher (`max`) is better."""

    def __post_init__(self) -> None:
        if not isinstance(self.patience, int) or self.patience < 1:
            raise UserError(
                f"early_stopping: patience is {self.patience!r}; it must be a whole number from 1 on"
            )
        if not 0 <= self.min_delta < math.inf:
            raise UserError(f"early_stopping: min_delta is {self.min_delta!r}; it must be a number from 0 on")
        if self.mode not in ("min", "max"):
            raise UserError(
                f"early_stopping: mode is {self.mode!r}; {nearest(str(self.mode), ('min', 'max'))}"
            )


class StoppingCount:
    """Counts the evaluations of one run; every worker that sees the same ones comes to the same end."""

    def __init__(self, rule: EarlyStopping) -> None:
        self._rule = rule
        self._best, self._best_step, self._left = math.nan, 0, rule.patience

    def add(self, step: int, metrics: Mapping[str, float]) -> bool:
        """The evaluation after `step` steps; whether the run ends with it."""
        value = metrics[self._rule.metric]
        if self._is_better(value):
            self._best, self._best_step, self._left = value, step, self._rule.patience
        else:
            self._left -= 1
        return self._left <= 0

    @property
    def best_step(self) -> int:
        """After which step the best evaluation was; 0 where none was a number."""
        return self._best_step

    @property
    def sentence(self) -> str:
        """Why the run ended."""
        rule = self._rule
        word = "fallen" if rule.mode == "min" else "risen"
        by = f" by more than {rule.min_delta:g}" if rule.min_delta else ""
        best = (
            f"the best was {self._best:.6g} after step {self._best_step}"
            if self._best_step
            else "it was never a number"
        )
        return f"{rule.metric} has not {word}{by} in {rule.patience} evaluations; {best}"

    def state(self) -> dict[str, Any]:
        """What a resumed run goes on from."""
        best = None if math.isnan(self._best) else self._best
        return {"metric": self._rule.metric, "best": best, "best_step": self._best_step, "left": self._left}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from there; a run that had ended may be resumed to see the next evaluations.

        Of another metric nothing is known yet.
        """
        if state["metric"] != self._rule.metric:
            return
        self._best = math.nan if state["best"] is None else float(state["best"])
        self._best_step = int(state["best_step"])
        self._left = int(state["left"]) or self._rule.patience

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if math.isnan(self._best):
            return True
        gained = self._best - value if self._rule.mode == "min" else value - self._best
        return gained > self._rule.min_delta
