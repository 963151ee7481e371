"""What a run with noise says of the privacy of its clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.observe.record.checked_values import text

__all__ = ["privacy_words"]


def privacy_words(summary: Mapping[str, Any]) -> list[str]:
    """Sentences on what was promised, and on why the run ended where that was for its budget."""
    found = summary.get("privacy")
    if not isinstance(found, Mapping):
        return []
    said = [found.get(name) for name in ("sentence", "ended")]
    words = [text(one) for one in said if isinstance(one, str) and one]
    return [f"{one[:1].upper()}{one[1:]}." for one in words]
