"""The table of `generating.py` in the documents."""

from __future__ import annotations

from results_read import has, load, markdown, show_ratio

_TITLES = {
    "served": "`manyhands serve`",
    "engine": "in one process",
    "batch": "`generate`, batch of 16",
    "one by one": "`generate`, one by one",
}


def generating_rates() -> str:
    """The tables of a CPU and, where it is measured, of a GPU."""
    return "\n\n".join(_rates(name) for name in ("generating-2", "generating-gpu") if has(name))


def _rates(name: str) -> str:
    """Tokens a second of each contender, and ours to the better of transformers'."""
    result = load(name)
    rows = [["tokens/s", *_TITLES.values(), "served to batch"]]
    for row in result["rows"]:
        rates = row["tokens_per_s"]
        cells = [f"{rates[way]:,.0f}" if way in rates else "" for way in _TITLES]
        ratio = show_ratio(rates["served"] / rates["batch"]) if "served" in rates else ""
        rows.append([f"{row['model']}, {row['case']}", *cells, ratio])
    place = f"{result['cores']} cores ({result['machine']})"
    if result["device"] != "cpu":
        place = f"One {result['machine']}, {result['cores']} cores, bfloat16"
    about = f"**{place}, torch {result['torch']}, transformers {result['transformers']}**"
    return f"{about}\n\n{markdown(rows)}"
