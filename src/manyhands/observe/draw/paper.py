"""Page layout for charts: one stylesheet, the page frame, and its sections.

A page is one self-contained document. Colours are variables that follow the reader's light or dark setting; series
differ by dash or by words as well as by colour. No element has an inline style, so that a content security policy can
allow the one stylesheet and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Final, NamedTuple

__all__ = [
    "NUM_COLOURS",
    "NUM_DASHES",
    "NUM_HEATS",
    "PART_COLOURS",
    "STYLE",
    "PageSection",
    "document",
    "findings_section",
    "made_section",
    "quiet",
    "section",
]

PART_COLOURS: Final = {"compute": 2, "input": 3, "exchange": 0, "waiting": 1}
"""The colour of each part of a worker's time, the same on every page."""

STYLE: Final = files("manyhands.observe.draw").joinpath("paper.css").read_text()
NUM_COLOURS, NUM_DASHES, NUM_HEATS = 8, 5, 10
"""The classes in it: s0, f0, ... (strokes and fills), d0, ... (dashes) and h0, ... (heat)."""

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
