"""What came out of a run: the model, its history and its summary."""

from __future__ import annotations

import collections
import heapq
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from torch import nn

from manyhands.task import Passes


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


class RowsInOrder:
    """Releases rows of the history in step order; an evaluation comes after the steps that it has seen."""

    def __init__(self, steps_done: int = 0) -> None:
        self._given, self._count = steps_done, 0
        self._waiting: list[tuple[int, int, int, dict[str, Any]]] = []

    def add(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add rows of any worker; returns those that are complete up to their step."""
        for row in rows:
            self._count += 1
            heapq.heappush(self._waiting, (row["step"], "metrics" in row, self._count, row))
        ready = []
        while self._waiting:
            step, is_evaluation, _, _ = self._waiting[0]
            if step > self._given + (not is_evaluation):
                break
            ready.append(heapq.heappop(self._waiting)[-1])
            self._given = max(self._given, step)
        return ready

    def rest(self) -> list[dict[str, Any]]:
        """The rows that still wait for steps that never came, as after a failure."""
        return [heapq.heappop(self._waiting)[-1] for _ in range(len(self._waiting))]


PASS_LOSS = "pass_loss"  # the metric in the history: of every sample before the update with it


class PassLosses:
    """Adds a row with the mean loss of a pass after its last step's row to arrive; `known` rows have theirs."""

    def __init__(self, passes: Passes, known: Iterable[dict[str, Any]] = ()) -> None:
        self._passes = passes
        self._open: dict[int, tuple[int, float, float]] = {}  # by pass: steps, sums of losses and of weights
        self.add(known)

    def add(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Take rows of any steps; returns them with the rows of the passes that they complete."""
        out, passes = [], self._passes
        for row in rows:
            out.append(row)
            if row.get("loss") is None:
                continue
            number, place = divmod(row["step"] - 1, passes.steps)
            weight = row.get("weight", passes.last_weight if place == passes.steps - 1 else passes.weight)
            steps, losses, weights = self._open.pop(number, (0, 0.0, 0.0))
            steps, losses, weights = steps + 1, losses + row["loss"] * weight, weights + weight
            if steps < passes.steps:
                self._open[number] = steps, losses, weights
                continue
            total = weights if passes.total is None else passes.total
            metrics, step = {PASS_LOSS: losses / total if total else 0.0}, (number + 1) * passes.steps
            out.append({"step": step, "metrics": metrics, "at_s": row.get("at_s", 0.0)})
        return out


def overlap_summary(workers: Sequence[Mapping[Any, int]]) -> dict[str, Any]:
    """A histogram over all workers: steps of others between read and write, and how many steps had so many."""
    overlap: collections.Counter[int] = collections.Counter()
    for counts in workers:
        overlap.update({int(number): count for number, count in counts.items()})
    steps = sum(overlap.values())
    return {
        "mean": sum(number * count for number, count in overlap.items()) / steps if steps else 0.0,
        "max": max(overlap, default=0),
        "histogram": {str(number): overlap[number] for number in sorted(overlap)},
    }


def overlap_report(workers: Sequence[Mapping[Any, int]]) -> dict[str, Any]:
    """The summary's entry; empty for one worker, or where nothing was counted."""
    return {"overlap": overlap_summary(workers)} if len(workers) > 1 and any(workers) else {}
