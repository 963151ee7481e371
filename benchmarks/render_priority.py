"""What the documents say about the order in which gradients leave, from the committed results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from results_read import load, markdown


def priority_gain() -> str:
    """What an order gains in the simulator beside its bound, and live where it was measured."""
    result = load("priority")
    table = [["Gbit/s", "exchange", "after backward", "overlapped", "by priority", "gain over overlapped"]]
    for row in result["simulated"]:
        names = ("exchange", "after", "overlapped", "priority")
        times = [f"{row[f'{name}_s'] * 1e3:.0f} ms" for name in names]
        table.append([f"{row['gbit']:g}", *times, f"{row['gain']:.2f}"])
    model = result["simulated_model"]
    about = (
        f"Simulated: {model['workers']} workers, {result['layers']} layers with {model['gradient_bytes'] >> 20} MiB of "
        f"gradients, forward {model['forward_s'] * 1e3:.0f} ms, backward {model['backward_s'] * 1e3:.0f} ms, slices "
        f"and credit of 1 MiB; the gain is at most {result['simulated'][0]['bound']:.2f}."
    )
    return f"{about}\n\n{markdown(table)}{_priority_live(result)}"


def _priority_live(result: Mapping[str, Any]) -> str:
    live = result["live"]
    if live is None:
        return ""
    steps, expected = live["step_s"], live["simulated_s"]
    arrival = f"{steps['arrival'] * 1e3:.0f} ms by arrival (the model: {expected['after'] * 1e3:.0f} ms)"
    if "arrival, 4 MiB" in steps:
        arrival = (
            f"{steps['arrival'] * 1e3:.0f} ms by arrival and {steps['arrival, 4 MiB'] * 1e3:.0f} ms with buckets of "
            f"4 MiB (the model of an exchange after backward: {expected['after'] * 1e3:.0f} ms)"
        )
    return (
        f"\n\nLive: {live['workers']} namespaces on {result['cores']} cores, a cable of {live['rate']}, "
        f"{live['gradient_bytes'] / 1e6:.1f} MB, forward {live['forward_s'] * 1e3:.0f} ms, backward "
        f"{live['backward_s'] * 1e3:.0f} ms, medians of {live['rounds']} rounds. A step takes {arrival}, "
        f"{steps['priority'] * 1e3:.0f} ms by priority and {steps['priority, 4 MiB'] * 1e3:.0f} ms with 4 MiB of "
        f"credit (the model: {expected['priority'] * 1e3:.0f} ms), {steps['ddp gloo'] * 1e3:.0f} ms by DDP on Gloo "
        f"(which overlaps; the model: {expected['overlapped'] * 1e3:.0f} ms): a gain of "
        f"{live['gain_over_arrival']:.2f} over arrival and of {live['gain_over_ddp']:.2f} over DDP, "
        f"beside a bound of {live['bound']:.2f} over a perfect overlap."
    )
