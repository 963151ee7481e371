"""Committed results, and how their numbers look in the documents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
RENAMED = {"language": "gpt"}  # tasks that have another name since older results were measured


def data_file(name: str) -> Path | None:
    """A file of the data that lie beside the checkout; None where they do not."""
    path = ROOT.parent / "shared" / "data" / name
    return path if path.exists() else None


def has(name: str) -> bool:
    """Whether a result is committed."""
    return (RESULTS / f"{name}.json").exists()


def load(name: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return result


def markdown(rows: list[list[str]]) -> str:
    head, *body = rows
    first, *others = ("| " + " | ".join(line) + " |" for line in (head, *body))
    return "\n".join([first, "|---" + "|---:" * (len(head) - 1) + "|", *others])


def show_time(microseconds: float) -> str:
    if microseconds >= 1000:
        return f"{microseconds / 1000:.1f} ms"
    return f"{microseconds:.0f} µs" if microseconds >= 100 else f"{microseconds:.1f} µs"


def show_ratio(ratio: float) -> str:
    return f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.1f}×"


def show_percent(part: float | None) -> str:
    return "" if part is None else f"{100 * part:.0f} %"
