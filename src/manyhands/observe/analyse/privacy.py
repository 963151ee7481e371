"""Sentences on the differential privacy of a run that adds noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.observe.record.checked_values import text

__all__ = ["privacy_words"]


def privacy_words(summary: Mapping[str, Any]) -> list[str]:
    """Return sentences on the privacy guarantee, and on a run that ended because its privacy budget was used up."""
    found = summary.get("privacy")
    if not isinstance(found, Mapping):
        return []
    said = [found.get(name) for name in ("sentence", "ended")]
    words = [text(one) for one in said if isinstance(one, str) and one]
    return [f"{one[:1].upper()}{one[1:]}." for one in words]
