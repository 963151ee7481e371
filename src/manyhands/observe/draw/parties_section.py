"""The parties of a federated run: participation, label skew, and the parties that the model serves worst."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from manyhands.observe.analyse.view import PartiesView, PartyView, RunView
from manyhands.observe.draw.charts import Series, histogram, line_chart
from manyhands.observe.draw.paper import PageSection, data_table, matrix, quiet

__all__ = ["parties", "skew_lines", "skew_picture"]

_MOST_COLUMNS = 24
_MOST_ROWS = 60
_SHADES = " ·░▒▓█"
_MOST_COURSES = 4
_COMMON = "{} of the common model"


def parties(run: RunView) -> PageSection | None:
    """Return the section of the page; unknown parts have a placeholder."""
    view = run.parties
    if view is None:
        return None
    often = Counter(view.rounds.values())
    if view.count > len(view.rounds):
        often[0] = view.count - len(view.rounds)
    parts = [
        (
            histogram(
                often,
                title=f"{len(view.rounds)}{f' of {view.count}' if view.count else ''} parties have taken part",
                x_label="rounds",
                y_label="parties",
                empty="No round has ended yet.",
            )
        ),
        *[
            line_chart(
                [Series(name=one.name.replace("_", " "), xs=one.steps, ys=one.values) for one in curves],
                title=f"{name} over the parties, at each evaluation",
                x_label="round",
                y_label=name,
            )
            for name, curves in list(view.courses.items())[:_MOST_COURSES]
        ],
    ]
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
    title = "Samples of each label" + (
        "" if len(shown) == view.count else f", {len(shown)} of {view.count} parties"
    )
    values = [[float(party.labels[row]) for party in shown] for row in range(len(view.labels))]
    names = [party.name.removeprefix("client ") for party in shown]
    return matrix(values, view.labels, names, title=title, corner="label")


def skew_lines(labels: Sequence[object], counts: Sequence[Sequence[int]]) -> list[str]:
    """Return the same as text, one line per label and one character per party: darker for more samples."""
    width = max((len(str(label)) for label in labels), default=0)
    lines = []
    for row, label in enumerate(labels):
        shares = [own[row] / max(1, sum(own)) for own in counts]
        cells = "".join(
            _SHADES[min(len(_SHADES) - 1, math.ceil(share * (len(_SHADES) - 1)))] for share in shares
        )
        lines.append(f"{label!s:>{width}} {cells}")
    return lines


def _spread(view: PartiesView) -> str:
    if not view.spread:
        return ""
    columns = ("mean", "lowest_tenth", "highest_tenth", "deviation")
    named = [*view.spread.items(), *((_COMMON.format(name), one) for name, one in view.spread_common.items())]
    rows = [
        (name, *(f"{parts[column]:.4g}" if column in parts else "–" for column in columns))
        for name, parts in named
    ]
    head = ("measure", "mean", "lowest tenth", "highest tenth", "standard deviation")
    which = "held out" if view.held_out else "that they trained on"
    return data_table(head, rows, title=f"On samples of the parties' own, {which}, over the parties")


def _table(view: PartiesView) -> str:
    shown = _some(view.parties, _MOST_ROWS)
    own = list(dict.fromkeys(chain.from_iterable(party.measures for party in shown)))
    common = list(dict.fromkeys(chain.from_iterable(party.common for party in shown)))
    rows = [
        (
            party.name,
            f"{party.samples:,}",
            f"{party.rounds:,}",
            *(_cell(party.measures, name) for name in own),
            *(_cell(party.common, name) for name in common),
        )
        for party in shown
    ]
    title = "Each party" if len(shown) == view.count else f"{len(shown)} of {view.count} parties"
    names = [*own, *(_COMMON.format(name) for name in common)]
    return data_table(("party", "samples", "rounds", *names), rows, title=title)


def _cell(measures: Mapping[str, float], name: str) -> str:
    return f"{measures[name]:.4g}" if name in measures else "–"


def _some(parties: Sequence[PartyView], most: int) -> list[PartyView]:
    if len(parties) <= most:
        return list(parties)
    return [parties[place * (len(parties) - 1) // (most - 1)] for place in range(most)]
