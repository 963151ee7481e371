"""What a run with noise says of the privacy of its clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.record.plain import text

__all__ = ["privacy_words"]


def privacy_words(summary: Mapping[str, Any]) -> list[str]:
    """A sentence on what was promised and why the run ended, where a summary has one."""
    found = summary.get("privacy")
    sentence = found.get("sentence") if isinstance(found, Mapping) else None
    if not isinstance(sentence, str):
        return []
    words = text(sentence)
    return [f"{words[:1].upper()}{words[1:]}."]
