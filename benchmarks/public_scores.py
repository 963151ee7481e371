"""How a table of others was predicted: the rows that were held out, the errors, and those of null models."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from public_models import Constants, calibrated

__all__ = ["HeldOut", "Scored", "left_out_in_turn"]

Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOut:
    """A row that no constant was calibrated on: what was seen, predicted, and what null models say."""

    row: str
    seen: float
    predicted: float
    nulls: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """A table with its predictions."""

    name: str
    section: str  # of the reference
    calibrated_on: str
    unit: str
    rows: list[HeldOut]
    left_out: str = ""
    choices: list[dict[str, Any]] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        names = self.rows[0].nulls if self.rows else {}
        told = {name: _errors([one.nulls[name] / one.seen - 1 for one in self.rows]) for name in names}
        error = _errors([one.predicted / one.seen - 1 for one in self.rows])
        best = min(told, key=lambda name: told[name]["mean"])
        return {
            "table": self.name,
            "section": self.section,
            "calibrated_on": self.calibrated_on,
            "unit": self.unit,
            "left_out": self.left_out,
            "error": error,
            "nulls": told,
            "best_null": best,
            "verdict": _verdict(error["mean"], told[best]["mean"]),
            "held_out": [
                {
                    "row": one.row,
                    "seen": float(f"{one.seen:.5g}"),
                    "predicted": float(f"{one.predicted:.4g}"),
                    "error": round(one.predicted / one.seen - 1, 4),
                }
                for one in self.rows
            ],
            "choices": self.choices,
        }


_EVEN = 0.005  # a difference of errors that is nobody's merit


def _verdict(error: float, of_null: float) -> str:
    """Of a prediction beside the best null model."""
    if abs(error - of_null) < _EVEN:
        return "even"
    return "better" if error < of_null else "worse"


def _errors(found: Sequence[float]) -> dict[str, float]:
    return {"mean": round(statistics.mean(map(abs, found)), 4), "worst": round(max(map(abs, found)), 4)}


def left_out_in_turn(
    rows: Sequence[Row],
    seen: Sequence[float],
    key: Callable[[Row], Hashable],
    predict: Callable[[Row, Constants], float],
    start: Constants,
    rounds: int = 1,
) -> list[float]:
    """Each row as predicted from the rows with other keys."""  # fmt: skip
    found = []
    for row in rows:
        kept = [(one, took) for one, took in zip(rows, seen, strict=True) if key(one) != key(row)]
        constants = calibrated(predict, [one for one, _ in kept], [took for _, took in kept], start, rounds)
        found.append(predict(row, constants))
    return found
