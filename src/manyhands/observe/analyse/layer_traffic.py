"""Bytes per step sent for each sharded layer, from the summary of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from manyhands.observe.record.checked_values import number, text

__all__ = ["LayerSent", "layers_sent"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSent:
    """The traffic of one layer: means over the training steps, summed over all workers."""

    layer: str
    how: str  # how it is sliced
    forward_bytes: float
    backward_bytes: float
    messages: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def layers_sent(summary: Mapping[str, Any]) -> tuple[LayerSent, ...]:
    """Return the layers in model order; malformed rows are left out."""
    told = summary.get("layers")
    rows = [row for row in told if isinstance(row, Mapping)] if isinstance(told, list) else []
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
