"""The sentence about the codec of a run that chose its codec automatically."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.observe.record.checked_values import text, whole
from manyhands.wire.choice import CHOSEN, codec_sentence

__all__ = ["codec_words"]


def codec_words(summary: Mapping[str, Any]) -> list[str]:
    """Return the sentence on the last choice in a summary, if any; malformed entries are ignored."""
    if CHOSEN not in summary:
        return []
    found = summary[CHOSEN]
    rows = [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []
    choices = [
        {"step": step, "codec": text(str(row.get("codec"))), "why": text(str(row.get("why")))}
        for row in rows
        if (step := whole(row.get("step"))) is not None
    ]
    return [f"{codec_sentence(choices if isinstance(found, list) else None)}."]
