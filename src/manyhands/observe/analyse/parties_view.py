"""The parties of a federated run as shown in views, from its history and its summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.observe.analyse.curves import ThinnedCurve
from manyhands.observe.analyse.view import Curve, PartiesView, PartyView
from manyhands.observe.record.checked_values import number, text, whole

__all__ = ["COURSES", "PartiesHistory", "parties_view"]

COURSES = ("highest_tenth", "mean", "lowest_tenth")  # parts of a spread that are shown over the run

_MOST = 100_000  # upper bound on the parties that are counted
_MOST_COURSES = 20  # upper bound on the measures


class PartiesHistory:
    """Participation and evaluation of the parties over the rounds, from the rows of the history."""

    def __init__(self) -> None:
        self.rounds: Counter[int] = Counter()
        self._courses: dict[str, dict[str, ThinnedCurve]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        for one in _list(row.get("clients")):
            client = whole(one)
            if client is not None and 0 <= client < _MOST:
                self.rounds[client] += 1
        step, at_s = whole(row.get("step")), number(row.get("at_s") or 0.0)
        if step is not None and at_s is not None:
            for name, parts in _spread(row.get("fairness")).items():
                if name in self._courses or len(self._courses) < _MOST_COURSES:
                    curves = self._courses.setdefault(name, {part: ThinnedCurve(part) for part in COURSES})
                    for part in curves.keys() & parts.keys():
                        curves[part].add(step, at_s, parts[part])

    @property
    def courses(self) -> dict[str, tuple[Curve, ...]]:
        return {
            name: tuple(curve.curve() for curve in curves.values()) for name, curves in self._courses.items()
        }


def parties_view(
    rounds: Mapping[int, int],
    summary: Mapping[str, Any] | None,
    courses: Mapping[str, tuple[Curve, ...]] | None = None,
) -> PartiesView:
    """Return what is known: `courses` from the first evaluation, most of the rest at the end."""
    found = (summary or {}).get("parties")
    found = found if isinstance(found, Mapping) else {}
    numbers = [whole(one) for one in _list(found.get("numbers"))]
    names, samples, counts = (_list(found.get(name)) for name in ("names", "samples", "counts"))
    own, common = (_columns(found.get(name)) for name in ("measures", "measures_common"))
    labels = tuple(text(str(one)) for one in _list(found.get("labels")))
    parties = []
    for place, client in enumerate(numbers):
        if client is None:
            continue
        mine = _list(_at(counts, place))
        parties.append(
            PartyView(
                number=client,
                name=text(_at(names, place)) or f"client {client}",
                samples=whole(_at(samples, place)) or 0,
                rounds=rounds.get(client, 0),
                labels=tuple(whole(one) or 0 for one in mine) if len(mine) == len(labels) else (),
                measures=_row(own, place),
                common=_row(common, place),
            )
        )
    return PartiesView(
        count=whole(found.get("clients")) or 0,
        rounds=dict(sorted(rounds.items())),
        labels=labels,
        parties=tuple(parties),
        spread=_spread((summary or {}).get("fairness")),
        spread_common=_spread((summary or {}).get("fairness_common")),
        held_out=number(found.get("held_out")) or 0.0,
        courses=dict(courses or {}),
    )


def _columns(found: Any) -> dict[str, Sequence[Any]]:
    return {text(name): _list(values) for name, values in found.items()} if isinstance(found, Mapping) else {}


def _row(columns: Mapping[str, Sequence[Any]], place: int) -> dict[str, float]:
    found = {name: number(_at(values, place)) for name, values in columns.items()}
    return {name: value for name, value in found.items() if value is not None}


def _spread(found: Any) -> dict[str, dict[str, float]]:
    rows = found.items() if isinstance(found, Mapping) else ()
    return {
        text(name): {text(part): value for part, one in row.items() if (value := number(one)) is not None}
        for name, row in rows
        if isinstance(row, Mapping)
    }


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else None
