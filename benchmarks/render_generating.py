"""The table of `generating.py` in the documents."""

from __future__ import annotations

from results_read import load, markdown, show_ratio

_TITLES = {
    "served": "`manyhands serve`",
    "engine": "in one process",
    "batch": "`generate`, batch of 16",
    "one by one": "`generate`, one by one",
}


def generating_rates() -> str:
    """Tokens a second of each contender, and ours to the better of transformers'."""
    result = load("generating-2")
    rows = [["tokens/s", *_TITLES.values(), "served to batch"]]
    for row in result["rows"]:
        rates = row["tokens_per_s"]
        cells = [f"{rates[name]:,.0f}" for name in _TITLES]
        rows.append([f"{row['model']}, {row['case']}", *cells, show_ratio(rates["served"] / rates["batch"])])
    about = (
        f"**{result['cores']} cores ({result['machine']}), torch {result['torch']}, transformers "
        f"{result['transformers']}**"
    )
    return f"{about}\n\n{markdown(rows)}"
