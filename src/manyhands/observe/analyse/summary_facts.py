"""Bytes per step sent for each sharded layer, from the summary of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from manyhands.observe.record.checked_values import number, text, whole
from manyhands.wire.choice import CHOSEN, codec_sentence

__all__ = ["LayerSent", "codec_words", "layers_sent", "privacy_words"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSent:
    """The traffic of one layer: means over the training steps, summed over all workers."""

    layer: str
    how: str  # how it is sliced
    forward_bytes: float
    backward_bytes: float
    messages: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def layers_sent(summary: Mapping[str, Any]) -> tuple[LayerSent, ...]:
    """Return the layers in model order; malformed rows are left out."""
    recorded = summary.get("layers")
    rows = [row for row in recorded if isinstance(row, Mapping)] if isinstance(recorded, list) else []
    found = []
    for row in rows:
        amounts = [number(row.get(name)) for name in ("forward_bytes", "backward_bytes", "messages")]
        forward, backward, messages = amounts
        if forward is not None and backward is not None and messages is not None:
            layer, how = text(row.get("layer")), text(row.get("how"))
            found.append(
                LayerSent(
                    layer=layer, how=how, forward_bytes=forward, backward_bytes=backward, messages=messages
                )
            )
    return tuple(found)


def privacy_words(summary: Mapping[str, Any]) -> list[str]:
    """Return sentences on the privacy guarantee, and on a run that ended because its privacy budget was used up."""
    found = summary.get("privacy")
    if not isinstance(found, Mapping):
        return []
    said = [found.get(name) for name in ("sentence", "ended")]
    words = [text(one) for one in said if isinstance(one, str) and one]
    return [f"{one[:1].upper()}{one[1:]}." for one in words]


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
