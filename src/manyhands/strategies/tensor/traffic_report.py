"""Per-layer traffic of sliced layers: each worker's report at the end of a run, and the sum over workers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from manyhands.strategies.tensor.moves import LayerTraffic

__all__ = ["layer_traffic", "sum_layer_traffic"]

_AMOUNTS = ("forward_bytes", "backward_bytes", "messages")


def layer_traffic(traffic: Mapping[str, LayerTraffic], steps: int) -> list[dict[str, Any]]:
    """One worker's average traffic per training step, one row per layer, as plain values."""
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
    """Sum the workers' final reports into one row per layer, under `layers`; an empty dict where none reported.

    Layers keep the order in which they were reported.
    """
    found: dict[str, dict[str, Any]] = {}
    for one in finished:
        for row in one.get("layers", ()):
            total = found.setdefault(row["layer"], {**row, **dict.fromkeys(_AMOUNTS, 0)})
            for name in _AMOUNTS:
                total[name] += row[name]
    return {"layers": list(found.values())} if found else {}
