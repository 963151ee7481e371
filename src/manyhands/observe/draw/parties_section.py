"""The parties of a federated run: participation, label skew, and the parties that the model serves worst."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from manyhands.observe.analyse.view import PartiesView, PartyView, RunView
from manyhands.observe.draw.charts import Series, histogram, line_chart
from manyhands.observe.draw.paper import PageSection, data_table, matrix, quiet

__all__ = ["parties", "skew_picture"]

_MOST_COLUMNS = 24
_MOST_ROWS = 60
_MOST_COURSES = 4
_COMMON = "{} of the common model"


def parties(run: RunView) -> PageSection | None:
    view = run.parties
    if view is None:
        return None
    often = Counter(view.rounds.values())
    if view.count > len(view.rounds):
        often[0] = view.count - len(view.rounds)
    title = f"{len(view.rounds)}{f' of {view.count}' if view.count else ''} parties have taken part"
    empty = "No round has ended yet."
    parts = [histogram(often, title=title, x_label="rounds", y_label="parties", empty=empty)]
    for name, curves in list(view.courses.items())[:_MOST_COURSES]:
        series = [Series(name=one.name.replace("_", " "), xs=one.steps, ys=one.values) for one in curves]
        title = f"{name} over the parties, at each evaluation"
        parts.append(line_chart(series, title=title, x_label="round", y_label=name))
    if view.parties:
        parts += [skew_picture(view), _spread(view), _table(view)]
    else:
        parts.append(quiet("Who has which samples, and how the model does for each, is known at the end."))
    return PageSection("Parties", "\n".join(part for part in parts if part), "wide")


def skew_picture(view: PartiesView) -> str:
    """Draw the samples of each label (row) per party (column), darker for more; empty without labels."""
    shown = _some([party for party in view.parties if party.labels], _MOST_COLUMNS)
    if not shown:
        return ""
    some = "" if len(shown) == view.count else f", {len(shown)} of {view.count} parties"
    title = f"Samples of each label{some}"
    values = [[float(party.labels[row]) for party in shown] for row in range(len(view.labels))]
    names = [party.name.removeprefix("client ") for party in shown]
    return matrix(values, view.labels, names, title=title, corner="label")


def _spread(view: PartiesView) -> str:
    if not view.spread:
        return ""
    columns = ("mean", "lowest_tenth", "highest_tenth", "deviation")
    named = [*view.spread.items(), *((_COMMON.format(name), one) for name, one in view.spread_common.items())]
    rows = [(name, *(_cell(parts, column) for column in columns)) for name, parts in named]
    head = ("measure", "mean", "lowest tenth", "highest tenth", "standard deviation")
    which = "held out" if view.held_out else "that they trained on"
    return data_table(head, rows, title=f"On samples of the parties' own, {which}, over the parties")


def _table(view: PartiesView) -> str:
    shown = _some(view.parties, _MOST_ROWS)
    own = list(dict.fromkeys(chain.from_iterable(party.measures for party in shown)))
    common = list(dict.fromkeys(chain.from_iterable(party.common for party in shown)))
    rows = []
    for party in shown:
        cells = [
            *(_cell(party.measures, name) for name in own),
            *(_cell(party.common, name) for name in common),
        ]
        rows.append((party.name, f"{party.samples:,}", f"{party.rounds:,}", *cells))
    title = "Each party" if len(shown) == view.count else f"{len(shown)} of {view.count} parties"
    names = [*own, *(_COMMON.format(name) for name in common)]
    return data_table(("party", "samples", "rounds", *names), rows, title=title)


def _cell(measures: Mapping[str, float], name: str) -> str:
    return f"{measures[name]:.4g}" if name in measures else "–"


def _some(parties: Sequence[PartyView], most: int) -> list[PartyView]:
    if len(parties) <= most:
        return list(parties)
    return [parties[place * (len(parties) - 1) // (most - 1)] for place in range(most)]
