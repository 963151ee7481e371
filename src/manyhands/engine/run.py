"""What came out of a run: the model, its history and its summary."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from torch import nn

__all__ = ["History", "Run"]


class History(Sequence[dict[str, Any]]):
    """The rows of a run in the order they were made, as they stand in `metrics.jsonl`.

    A step's row has `step` (global batches done), `loss` (mean over the global batch, or None where that is not told),
    `seconds` (that step's own) and `at_s` (since training began); an evaluation's row has `step`, `metrics`
    ({name: value}) and `at_s`. A strategy may add to them: under `federated` a step's row says who took part, an
    evaluation's how the measures spread over parties (`fairness`).
    """

    def __init__(self, rows: Iterable[dict[str, Any]] = ()) -> None:
        self._rows = list(rows)

    def extend(self, rows: Iterable[dict[str, Any]]) -> None:
        """Add rows at the end."""
        self._rows.extend(rows)

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The rows of steps."""
        return [row for row in self._rows if "loss" in row]

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        """The rows of evaluations."""
        return [row for row in self._rows if "metrics" in row]

    @property
    def loss(self) -> list[float]:
        """The loss of each step; not a number where a strategy does not tell it."""
        return [math.nan if row["loss"] is None else row["loss"] for row in self.steps]

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"History({len(self.steps)} steps, {len(self.evaluations)} evaluations)"


@dataclass(frozen=True, kw_only=True, repr=False)
class Run:
    """A finished run; it shows itself as one line, and in a notebook as a table with the curve of its loss."""

    model: nn.Module
    """The final weights, on the CPU."""

    history: History
    """One row for every step and evaluation."""
    summary: dict[str, Any]
    """What `--json` writes: strategy, workers, steps, seconds, samples_per_s, final, traffic, time per worker."""

    path: Path | None = None
    """The run directory, where one was asked for."""

    def __repr__(self) -> str:
        from manyhands.observe.draw.notebook import facts_of, run_line

        return f"Run({run_line(facts_of(self.summary, self.history.steps, self.path))})"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from manyhands.observe.draw.notebook import run_html

        return run_html(self.summary, self.history.steps, self.path)
