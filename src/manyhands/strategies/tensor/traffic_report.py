"""What workers tell of the traffic of sliced layers at the end of a run, and what that comes to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from manyhands.strategies.tensor.moves import LayerTraffic

__all__ = ["layer_traffic", "sum_layer_traffic"]

_AMOUNTS = ("forward_bytes", "backward_bytes", "messages")


def layer_traffic(traffic: Mapping[str, LayerTraffic], steps: int) -> list[dict[str, Any]]:
    """One worker's: what a step of training sent for each layer, a row each, as plain values."""
    steps = max(1, steps)
    return [
        {
            "layer": name,
            "how": one.how,
            "forward_bytes": one.forward_bytes / steps,
            "backward_bytes": one.backward_bytes / steps,
            "messages": (one.forward_messages + one.backward_messages) / steps,
        }
        for name, one in traffic.items()
    ]


def sum_layer_traffic(finished: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What all workers, by what each ended with, sent for each layer is added up, as `layers`; nothing where none did.

    Layers are in the order in which they are told of.
    """
    found: dict[str, dict[str, Any]] = {}
    for one in finished:
        for row in one.get("layers", ()):
            total = found.setdefault(row["layer"], {**row, **dict.fromkeys(_AMOUNTS, 0)})
            for name in _AMOUNTS:
                total[name] += row[name]
    return {"layers": list(found.values())} if found else {}
