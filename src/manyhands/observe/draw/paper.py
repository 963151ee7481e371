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

PART_COLOURS: Final = {"compute": 2, "input": 3, "exchange": 0, "waiting": 1}
"""The colour of each part of a worker's time, the same on every page."""

STYLE: Final = files("manyhands.observe.draw").joinpath("paper.css").read_text()
NUM_COLOURS, NUM_DASHES, NUM_HEATS = 8, 5, 10
"""The classes in it: s0, f0, ... (strokes and fills), d0, ... (dashes) and h0, ... (heat)."""

_NARROW = 4  # columns that fit on a phone
_HALF_LETTERS = 20  # characters that fit in half a phone's width
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def document(
    title: str, sections: Iterable[str], *, style: str = STYLE, lead: str = "", script: str = ""
) -> str:
    """Return one self-contained page; `sections` and `lead` are HTML, `title` is text.

    Without a `script` the page forbids scripts and connections, so that a report can be passed on safely.
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

    `kind` is "wide" for all columns, "broad" for two, "roomy" for two of three, "beside" for the last of three, "" for
    one, "absent" for none; one that is wide and "slim" is a line with its heading at the left.
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
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return section("shows", "What the data show", f'<div class="findings">{paragraphs}</div>', "wide")


def made_section(command: str, facts: Mapping[str, str], *notes: str, kind: str = "wide") -> str:
    """Return the last section of a report: the command, the machine by name and value, and notes."""
    machine = " · ".join(f"{name} {value}" for name, value in facts.items())
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in (machine, *notes))
    return section("made", "How this was made", f"<p><code>{escape(command)}</code></p>{paragraphs}", kind)


def quiet(sentence: str) -> str:
    return f'<p class="quiet">{escape(sentence)}</p>'


def sentence_list(sentences: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences) + "</ul>"


def tile(name: str, value: str, small: str = "", kind: str = "") -> str:
    shape, beside = (f' class="{kind}"' if kind else ""), (f"<small>{small}</small>" if small else "")
    return f"<div{shape}><dt>{escape(name)}</dt><dd>{escape(value)}{beside}</dd></div>"


def svg_text(x: float, y: float, text: str, kind: str = "", anchor: str = "start", letters: int = 0) -> str:
    """A text; one of more than so many letters is cut, and whole when pointed at."""
    short = text if not letters or len(text) <= letters else f"{text[: letters - 1]}…"
    whole = f"<title>{escape(text)}</title>" if short != text else ""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{kind}" {place}>{escape(short)}{whole}</text>'


def svg_rect(kind: str, x: float, y: float, width: float, height: float, said: str = "") -> str:
    inside = f"<title>{escape(said)}</title>" if said else ""
    place = f'x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}"'
    return f'<rect class="{kind}" {place}>{inside}</rect>'


def svg_line(kind: str, x1: float, y1: float, x2: float, y2: float, said: str = "") -> str:
    inside = f"<title>{escape(said)}</title>" if said else ""
    return f'<line class="{kind}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}">{inside}</line>'


def svg_chart(drawn: Iterable[str], width: float, height: float, said: str, kind: str = "chart") -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{kind}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(said)}">{"".join(drawn)}</svg>'
    )


def line_mark(attributes: str) -> str:
    return (
        f'<svg viewBox="0 0 26 10" aria-hidden="true"><line {attributes} x1="1" y1="5" x2="25" y2="5"/></svg>'
    )


def legend(names: Sequence[str], marks: Sequence[str]) -> str:
    """What each mark is; without names an empty line, so that pictures side by side begin at one height."""
    if not names:
        return '<div class="legend"></div>'
    items = "".join(f"<li>{mark}{escape(name)}</li>" for name, mark in zip(names, marks, strict=True))
    return f'<ul class="legend">{items}</ul>'


def figure(title: str, picture: str, explained: str = "", kind: str = "") -> str:
    shape = f' class="{kind}"' if kind else ""
    return f"<figure{shape}><figcaption>{escape(title)}</figcaption>{explained}{picture}</figure>"


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
    """Draw numbers as a table with cells coloured by magnitude, 0 as a dot; it `scrolls` by keyboard, too."""
    show = show or short_number
    greatest = max((abs(v) for row in values for v in row if math.isfinite(v)), default=0.0) or 1.0
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in columns)
    body = ""
    for name, row in zip(rows, values, strict=True):
        cells = ""
        for value in row:
            if value == 0 or not math.isfinite(value):
                cells += f'<td class="quiet">{"·" if value == 0 else escape(show(value))}</td>'
            else:
                heat = min(NUM_HEATS - 1, max(1, round((NUM_HEATS - 1) * (abs(value) / greatest))))
                cells += f'<td class="h{heat}">{escape(show(value))}</td>'
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

    On a phone a table of many columns is a block for each row; the roles keep it a table for those who listen.
    """
    rows = [tuple(row) for row in rows]
    kinds = []
    for index, name in enumerate(columns):
        longest = len(name) + max((len(row[index]) for row in rows), default=0)
        kind = " ".join(["number"] * (index not in words) + ["long"] * (longest > _HALF_LETTERS))
        kinds.append(f' class="{kind}"' if kind else "")
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


def _scroll(title: str, table: str, scrolls: bool) -> str:
    if not scrolls:
        return table
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(title)}">{table}</div>'
