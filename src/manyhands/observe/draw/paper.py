"""Page layout for charts: one stylesheet, the page frame, its sections and tables.

A page is one self-contained document. Colours are variables that follow the reader's light or dark setting; series
differ by dash or by words as well as by colour. No element has an inline style, so that a content security policy can
allow the one stylesheet and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Final, NamedTuple

from manyhands.observe.draw.axes import short_number

__all__ = [
    "NUM_COLOURS",
    "NUM_DASHES",
    "NUM_HEATS",
    "PART_COLOURS",
    "STYLE",
    "PageSection",
    "data_table",
    "document",
    "findings_section",
    "made_section",
    "matrix",
    "quiet",
    "section",
]

PART_COLOURS: Final = {"compute": 2, "input": 3, "exchange": 0, "waiting": 1}
"""The colour of each part of a worker's time, the same on every page."""

STYLE: Final = files("manyhands.observe.draw").joinpath("paper.css").read_text()
NUM_COLOURS, NUM_DASHES, NUM_HEATS = 8, 5, 10
"""The classes in it: s0, f0, ... (strokes and fills), d0, ... (dashes) and h0, ... (heat)."""

_NARROW = 4  # columns that fit on a phone
_HALF_LETTERS = 20  # characters that fit in half a phone's width
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(
    title: str,
    sections: Iterable[str],
    *,
    style: str = STYLE,
    lead: str = "",
    script: str = "",
) -> str:
    """Return one self-contained page; `sections` and `lead` are HTML, `title` is text.

    Without a `script` the page forbids scripts and connections, so that a report can be passed on safely. With one,
    the server sets the policy, and the body has the class `live`.
    """
    policy = f'<meta http-equiv="Content-Security-Policy" content="{_REPORT_POLICY}"/>\n'
    body = "\n".join(sections)
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"{'' if script else policy}"
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>\n<link rel="icon" href="data:,"/>\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n"
        f'<body class="{"live" if script else "still"}">\n'
        f'<a class="skip" href="#main">Skip to the content</a>\n<h1>{escape(title)}</h1>\n{lead}'
        f'<main id="main" tabindex="-1">\n{body}\n</main>\n'
        f"{f'<script>{script}</script>' if script else ''}</body>\n</html>\n"
    )
    return page.encode(errors="backslashreplace").decode()  # a title from a file may not be text


class PageSection(NamedTuple):
    """A part of a page.

    `kind` is "wide" for all columns, "broad" for two, "roomy" for two of three, "beside" for the last of three and a
    row of its own where there are fewer columns, "" for one, "absent" for none. One that is wide and "slim" is a line
    with its heading at the left.
    """

    heading: str
    body: str
    kind: str = ""


def section(key: str, heading: str, body: str, kind: str = "") -> str:
    return (
        f'<section id="{escape(key)}" class="{escape(kind)}" aria-labelledby="{escape(key)}-name">\n'
        f'<h2 id="{escape(key)}-name">{escape(heading)}</h2>\n{body}\n</section>'
    )


def findings_section(sentences: Iterable[str]) -> str:
    """Return the first section of a report: what the data show."""
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return section("shows", "What the data show", f'<div class="findings">{paragraphs}</div>', "wide")


def made_section(command: str, facts: Mapping[str, str], *notes: str, kind: str = "wide") -> str:
    """Return the last section of a report: the command, the machine by name and value, and notes."""
    machine = " · ".join(f"{name} {value}" for name, value in facts.items())
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in (machine, *notes))
    return section("made", "How this was made", f"<p><code>{escape(command)}</code></p>{paragraphs}", kind)


def quiet(sentence: str) -> str:
    return f'<p class="quiet">{escape(sentence)}</p>'


def matrix(
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    title: str,
    corner: str = "",
    show: Callable[[float], str] | None = None,
    scrolls: bool = True,
) -> str:
    """Draw numbers as a table with cells coloured by magnitude; 0 is a dot.

    Where it `scrolls` it is a focusable region for the keyboard.
    """
    show = show or short_number
    greatest = max((abs(v) for row in values for v in row if math.isfinite(v)), default=0.0) or 1.0
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = ""
    for name, row in zip(rows, values, strict=True):
        cells = "".join(_cell(value, greatest, show) for value in row)
        body += f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>'
    return _scroll(
        title,
        f'<table class="heat"><caption>{escape(title)}</caption><thead><tr>'
        f'<th scope="col" class="corner">{escape(corner)}</th>{head}</tr></thead><tbody>{body}</tbody></table>',
        scrolls,
    )


def data_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str,
    words: Sequence[int] = (0,),
    scrolls: bool = True,
) -> str:
    """Rows of text under their columns; those of `words` are read from the left, the others are numbers.

    On a phone a table of many columns is a block for each row, every cell with its column's name; the roles keep
    it a table for those who listen. Where it `scrolls` it is a region of its own that the keyboard reaches.
    """
    rows = [tuple(row) for row in rows]
    kinds = [
        _kinds(
            "" if index in words else "number",
            "long"
            if (
                len(name) + max((len(cell) for cell in [row[index] for row in rows]), default=0)
                > _HALF_LETTERS
            )
            else "",
        )
        for index, name in enumerate(columns)
    ]
    head = "".join(
        f'<th role="columnheader" scope="col"{kind}>{escape(name)}</th>'
        for name, kind in zip(columns, kinds, strict=True)
    )
    body = ""
    for first, *others in rows:
        cells = "".join(
            f'<td role="cell"{kind} data-name="{escape(name)}">{escape(text)}</td>'
            for name, text, kind in zip(columns[1:], others, kinds[1:], strict=True)
        )
        body += f'<tr role="row"><th role="rowheader" scope="row"{kinds[0]}>{escape(first)}</th>{cells}</tr>'
    prose = " prose" if len(words) == len(columns) else ""
    shape = f"stack{prose}" if len(columns) > _NARROW else "plain"
    return _scroll(
        title,
        f'<table class="{shape}" role="table"><caption>{escape(title)}</caption><thead role="rowgroup">'
        f'<tr role="row">{head}</tr></thead><tbody role="rowgroup">{body}</tbody></table>',
        scrolls,
    )


def _cell(value: float, greatest: float, show: Callable[[float], str]) -> str:
    if value == 0 or not math.isfinite(value):
        return f'<td class="quiet">{"·" if value == 0 else escape(show(value))}</td>'
    heat = min(NUM_HEATS - 1, max(1, round((NUM_HEATS - 1) * (abs(value) / greatest))))
    return f'<td class="h{heat}">{escape(show(value))}</td>'


def _kinds(*kinds: str) -> str:
    named = " ".join(kind for kind in kinds if kind)
    return f' class="{named}"' if named else ""


def _scroll(title: str, table: str, scrolls: bool) -> str:
    if not scrolls:
        return table
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">{table}</div>'
