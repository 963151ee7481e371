"""Page layout for charts: one stylesheet, the page frame, and its sections.

A page is one self-contained document. Colours are variables that follow the reader's light or dark setting; series
differ by dash or by words as well as by colour. No element has an inline style, so that a content security policy can
allow the one stylesheet and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Final

__all__ = [
    "COLOURS",
    "NUM_COLOURS",
    "NUM_DASHES",
    "NUM_HEATS",
    "PART_COLOURS",
    "STYLE",
    "document",
    "made_section",
    "quiet",
    "section",
    "told_section",
]

COLOURS = (
    ("#0067a5", "#58a9ee"),
    ("#b35900", "#f0a23b"),
    ("#007a5e", "#3fc295"),
    ("#a3437c", "#e58fc0"),
    ("#806300", "#d8bd4a"),
    ("#4a5fc1", "#98a7ff"),
    ("#6b4f3a", "#c7a386"),
    ("#59636e", "#a4aeb9"),
)
"""What tells series apart, on light and on dark paper."""

PART_COLOURS: Final = {"compute": 2, "input": 3, "exchange": 0, "waiting": 1}
"""The colour of each part of a worker's time, the same on every page."""

STYLE = """
:root { color-scheme: light dark; --paper: #f6f7f9; --card: #ffffff; --ink: #1f2328; --faint: #57606a;
  --line: #d5dae0; --grid: #e7eaee; --on: #ffffff; --heat: #e08a1e; --bad: #b42318; --bad-paper: #fdecea;
  --good: #00704f; --link: #0067a5;
  LIGHT }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0d1117; --card: #161b22; --ink: #e6edf3; --faint: #9aa4af; --line: #343b44;
    --grid: #262c35; --on: #0d1117; --heat: #f0a23b; --bad: #ff8f85; --bad-paper: #3a1d1d; --good: #4cc79d;
    --link: #6cb6ff;
    DARK } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 0 .75rem 2rem; max-width: 84rem; background: var(--paper); color: var(--ink);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; font-variant-numeric: tabular-nums; }
a { color: var(--link); } code { font: .92em ui-monospace, monospace; overflow-wrap: anywhere; }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; border-radius: 3px; }
.skip { position: absolute; left: -99rem; padding: .5rem; background: var(--card); }
.skip:focus { left: .5rem; top: .5rem; z-index: 2; }
h1 { font-size: 1.3rem; margin: 1rem 0 .5rem; overflow-wrap: anywhere; } h2 { font-size: 1rem; margin: 0 0 .4rem; }
main { display: grid; gap: .75rem; grid-auto-flow: dense;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
main > section { min-width: 0; padding: .75rem .85rem; background: var(--card); border: 1px solid var(--line);
  border-radius: .5rem; display: flex; flex-direction: column; }
main > section.wide { grid-column: 1 / -1; } main > section > div { min-width: 0; }
@media (min-width: 46rem) { main > section.broad { grid-column: span 2; } }
@media (min-width: 66rem) { main > section.roomy { grid-column: span 2; } }
@media (max-width: 65.99rem) { main > section.beside { grid-column: 1 / -1; } }
main > section.absent { display: none; }
main > section.slim { flex-flow: row wrap; align-items: baseline; gap: .1rem .9rem; padding: .55rem .85rem; }
.slim h2, .slim p { margin: 0; }
p { margin: 0 0 .5rem; max-width: 90ch; } .told { column-gap: 2.5rem; } .told p { break-inside: avoid; }
@media (min-width: 60rem) { .told { columns: 2; } } ul { margin: 0; padding-left: 1.1rem; }
.quiet { color: var(--faint); } .bad { color: var(--bad); } .good { color: var(--good); }
figure { margin: 0; min-width: 0; }
figcaption { color: var(--faint); font-size: .85rem; margin-bottom: .15rem; }
.plot .legend { min-height: 1.3rem; } .plot .quiet { margin: .2rem 0 0; font-size: .85rem; }
svg.chart { display: block; width: 100%; height: auto; max-height: 22rem; overflow: visible;
  font: 11px system-ui, sans-serif; font-variant-numeric: tabular-nums; }
svg.rows { max-width: 28rem; max-height: none; } svg.chart text { fill: var(--ink); }
svg.chart text.tick, svg.chart text.label { fill: var(--faint); font-size: 10.5px; }
svg.chart text.none { fill: var(--faint); font-size: 12px; }
svg.chart text.on { fill: var(--on); font-size: 10px; font-weight: 600; }
.axis { stroke: var(--line); } .grid { stroke: var(--grid); } .track { fill: var(--grid); }
.curve { fill: none; stroke-width: 1.8; stroke-linecap: round; stroke-linejoin: round; } .spot { fill: transparent; }
.spot:hover { fill: var(--ink); } .striped { stroke-linecap: butt; stroke-width: 2.4; }
.legend { display: flex; flex-wrap: wrap; gap: 0 .9rem; font-size: .82rem; margin: 0; padding: 0; list-style: none; }
.legend li { display: flex; align-items: center; gap: .35rem; min-width: 0; overflow-wrap: anywhere; }
.legend svg { width: 26px; height: 10px; flex: none; } .legend svg.swatch { width: 12px; }
.scroll { overflow: auto; max-width: 100%; position: relative; }
.scroll, .fill { --under: var(--card); --shade: color-mix(in srgb, var(--ink) 30%, transparent);
  background:
    linear-gradient(var(--under) 40%, transparent) 0 -1px / 100% 2.2rem local,
    linear-gradient(transparent, var(--under) 60%) 0 calc(100% + 1px) / 100% 2.2rem local,
    linear-gradient(to right, var(--under) 40%, transparent) -1px 0 / 2.2rem 100% local,
    linear-gradient(to left, var(--under) 40%, transparent) calc(100% + 1px) 0 / 2.2rem 100% local,
    linear-gradient(var(--shade), transparent) top / 100% .7rem scroll,
    linear-gradient(transparent, var(--shade)) bottom / 100% .7rem scroll,
    linear-gradient(to right, var(--shade), transparent) left / .7rem 100% scroll,
    linear-gradient(to left, var(--shade), transparent) right / .7rem 100% scroll;
  background-repeat: no-repeat; } .alarm .fill { --under: var(--bad-paper); }
.scroll::-webkit-scrollbar, .fill::-webkit-scrollbar { width: .55rem; height: .55rem; }
.scroll::-webkit-scrollbar-track, .fill::-webkit-scrollbar-track { background: var(--card); }
.scroll::-webkit-scrollbar-thumb, .fill::-webkit-scrollbar-thumb { background: var(--faint); border-radius: .3rem; }
table { border-collapse: collapse; width: 100%; font-size: .86rem; }
caption { text-align: left; color: var(--faint); font-size: .85rem; padding-bottom: .15rem; }
th, td { padding: .2rem .5rem; text-align: left; border-bottom: 1px solid var(--grid); vertical-align: top; }
th { font-weight: 600; background: var(--card); } thead th { color: var(--faint); white-space: nowrap; }
tbody th { white-space: nowrap; position: sticky; left: 0; } .number { text-align: right; white-space: nowrap; }
.heat td { text-align: right; white-space: nowrap; } .heat thead th { text-align: right; }
.heat thead th.corner { text-align: left; } tbody tr:last-child > * { border-bottom: 0; }
@media (max-width: 36rem) {
  th, td { padding: .2rem .3rem; }
  .stack, .stack tbody, .stack caption { display: block; }
  .stack thead { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
  .stack tr { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1.1rem; padding: .35rem 0;
    border-bottom: 1px solid var(--grid); }
  .stack tr > * { border: 0; padding: .08rem 0; white-space: normal; overflow-wrap: anywhere; }
  .stack td.number { white-space: nowrap; } .stack td.long { grid-column: 1 / -1; }
  .stack tbody tr:last-child { border-bottom: 0; padding-bottom: 0; }
  .stack tbody th { grid-column: 1 / -1; position: static; }
  .stack td { display: flex; justify-content: space-between; gap: .6rem; text-align: right; }
  .stack td::before { content: attr(data-name); color: var(--faint); text-align: left; white-space: nowrap; }
  .prose tr { grid-template-columns: 1fr; } .prose td { display: block; text-align: left; }
  .prose td::before { display: block; } }
"""

_DASHES = ("none", "7 3", "2 3", "9 3 2 3", "4 2")
NUM_COLOURS, NUM_DASHES, NUM_HEATS = len(COLOURS), len(_DASHES), 10
"""Classes s0, f0, ... (strokes and fills), d0, ... (dashes; no two of 40 series look alike) and h0, ... (heat)."""

for _word, _place in (("LIGHT", 0), ("DARK", 1)):
    STYLE = STYLE.replace(_word, " ".join(f"--c{n}: {one[_place]};" for n, one in enumerate(COLOURS)))
STYLE += "\n".join(
    [f".s{n} {{ stroke: var(--c{n}); }} .f{n} {{ fill: var(--c{n}); }}" for n in range(NUM_COLOURS)]
    + [f".d{n} {{ stroke-dasharray: {dash}; }}" for n, dash in enumerate(_DASHES)]
    + [
        f".h{n} {{ background: color-mix(in srgb, var(--heat) {6 * n}%, transparent); }}"
        for n in range(NUM_HEATS)
    ]
    + [""]
)

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


def section(key: str, heading: str, body: str, kind: str = "") -> str:
    """A part of a page with its heading.

    `kind` is "wide" for all columns, "broad" for two, "roomy" for two of three, "beside" for the last of
    three and a row of its own where there are fewer columns, "" for one, "absent" for none. One that
    is wide and "slim" is a line with its heading at the left.
    """
    return (
        f'<section id="{escape(key)}" class="{escape(kind)}" aria-labelledby="{escape(key)}-name">\n'
        f'<h2 id="{escape(key)}-name">{escape(heading)}</h2>\n{body}\n</section>'
    )


def told_section(sentences: Iterable[str]) -> str:
    """Return the first section of a report: what the data show."""
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in sentences)
    return section("shows", "What the data show", f'<div class="told">{paragraphs}</div>', "wide")


def made_section(command: str, facts: Mapping[str, str], *told: str, kind: str = "wide") -> str:
    """Return its last section: the command, the machine by name and value, and notes."""
    machine = " · ".join(f"{name} {value}" for name, value in facts.items())
    paragraphs = "".join(f"<p>{escape(sentence)}</p>" for sentence in (machine, *told))
    return section("made", "How this was made", f"<p><code>{escape(command)}</code></p>{paragraphs}", kind)


def quiet(sentence: str) -> str:
    """Return the placeholder of a section without content."""
    return f'<p class="quiet">{escape(sentence)}</p>'
