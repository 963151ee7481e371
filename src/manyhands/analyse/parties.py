"""The parties of a federated run as they are shown, from its history and its summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.analyse.view import PartiesView, PartyView
from manyhands.record.plain import number, text, whole

__all__ = ["Participation", "parties_view"]

_MOST = 100_000  # parties that are counted


class Participation:
    """Who took part in how many rounds, as the rows of the history tell it."""

    def __init__(self) -> None:
        self.rounds: Counter[int] = Counter()

    def add(self, row: Mapping[str, Any]) -> None:
        """One row; what makes no sense in it is passed over."""
        told = row.get("clients")
        for one in told if isinstance(told, list) else ():
            client = whole(one)
            if client is not None and 0 <= client < _MOST:
                self.rounds[client] += 1


def parties_view(rounds: Mapping[int, int], summary: Mapping[str, Any] | None) -> PartiesView:
    """What is known: participation from the first round on, the rest at the end."""
    told = (summary or {}).get("parties")
    told = told if isinstance(told, Mapping) else {}
    numbers = [whole(one) for one in _list(told.get("numbers"))]
    names, samples, counts = (_list(told.get(name)) for name in ("names", "samples", "counts"))
    measures = told.get("measures") if isinstance(told.get("measures"), Mapping) else {}
    assert isinstance(measures, Mapping), "checked just now"
    labels = tuple(text(str(one)) for one in _list(told.get("labels")))
    parties = []
    for place, client in enumerate(numbers):
        if client is None:
            continue
        own = _list(_at(counts, place))
        parties.append(
            PartyView(
                number=client,
                name=text(_at(names, place)) or f"client {client}",
                samples=whole(_at(samples, place)) or 0,
                rounds=rounds.get(client, 0),
                labels=tuple(whole(one) or 0 for one in own) if len(own) == len(labels) else (),
                measures={
                    text(name): value
                    for name, values in measures.items()
                    if (value := number(_at(_list(values), place))) is not None
                },
            )
        )
    return PartiesView(
        count=whole(told.get("clients")) or 0,
        rounds=dict(sorted(rounds.items())),
        labels=labels,
        parties=tuple(parties),
        spread=_spread((summary or {}).get("fairness")),
    )


def _spread(told: Any) -> Mapping[str, Mapping[str, float]]:
    if not isinstance(told, Mapping):
        return {}
    found = {}
    for name, row in told.items():
        if isinstance(row, Mapping):
            found[text(name)] = {
                text(part): value for part, one in row.items() if (value := number(one)) is not None
            }
    return found


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else None
