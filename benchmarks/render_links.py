"""What the documents say about links and hubs, from the committed results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from manyhands.errors import format_bytes
from results_read import load, markdown, show_percent, show_time


def links_speed() -> str:
    """The round trip of one message over each link, and how many times longer TCP takes than shared memory."""
    rows = load("links")["rows"]
    trips = {(row["num_bytes"], row["link"]): row["round_trip_s"] * 1e6 for row in rows}
    links = list(dict.fromkeys(row["link"] for row in rows))
    table = [["message", *links, "TCP ÷ shared memory"]]
    for size in dict.fromkeys(row["num_bytes"] for row in rows):
        ratio = trips[size, "TCP"] / trips[size, "shared memory"]
        table.append([format_bytes(size), *(show_time(trips[size, link]) for link in links), f"{ratio:.1f}"])
    return markdown(table)


def tls_cost() -> str:
    """Throughput of a link and a hub, plain and with TLS, and what TLS takes of it, by place and size."""
    result = load("tls")
    table = [
        ["", "link, plain", "link, TLS", "cost", "hub, plain", "hub, TLS", "cost", "core s/GB, plain to TLS"]
    ]
    for place in result["places"]:
        cells = {(row["num_bytes"], row["carrier"]): row for row in place["rows"]}
        for size in dict.fromkeys(row["num_bytes"] for row in place["rows"]):
            line = [f"{place['place']}, {format_bytes(size)}"]
            for carrier in ("link", "hub"):
                plain, tls = (cells[size, f"{carrier}, {how}"]["bytes_per_s"] for how in ("plain", "TLS"))
                cost = show_percent(max(0.0, 1 - tls / plain))
                line += [f"{plain / 1e9:.2f} GB/s", f"{tls / 1e9:.2f} GB/s", cost]
            spent = [cells[size, f"link, {how}"]["core_seconds_per_gb"] for how in ("plain", "TLS")]
            table.append([*line, f"{spent[0]:.2f} to {spent[1]:.2f}"])
    about = (
        f"{result['cores']} cores for both processes, medians of {result['rounds']} rounds, {result['openssl']}, load "
        f"{result['load_before']:.1f} when it began."
    )
    return f"{about}\n\n{markdown(table)}"


def hosts_speed() -> str:
    """A step over a slow cable by each way, and what each host sends in it, beside the formula."""
    result = load("hosts")
    table = [["way", "a step", "× DDP on Gloo", "a host sends", "by formula"]]
    ways = {row["way"]: row for row in result["ways"]}
    peer = ways["ddp gloo"]["step_s"]
    for way, row in ways.items():
        name = f"`{row['strategy']}`: {way}" if row["strategy"] else "DDP on Gloo"
        by = f"{row['formula_bytes'] / 1e6:.2f} MB" if row["formula_bytes"] else "–"
        table.append(
            [
                name,
                f"{row['step_s'] * 1e3:.0f} ms",
                f"{peer / row['step_s']:.2f}",
                f"{row['sent_bytes'] / 1e6:.2f} MB",
                by,
            ]
        )
    about = (
        f"{result['hosts']} hosts (network namespaces) with {result['workers']} workers on {result['cores']} cores, a "
        f"cable of {result['rate']}, {result['gradient_bytes'] / 1e6:.1f} MB of gradients, medians of "
        f"{result['rounds']} rounds."
    )
    return f"{about}\n\n{markdown(table)}"


def priority_gain() -> str:
    """What an order gains in the simulator beside its bound, and live where it was measured."""
    result = load("priority")
    table = [
        ["Gbit/s", "exchange", "after backward", "overlapped", "by priority", "gain over overlapped", "bound"]
    ]
    for row in result["simulated"]:
        names = ("exchange", "after", "overlapped", "priority")
        times = [f"{row[f'{name}_s'] * 1e3:.0f} ms" for name in names]
        table.append([f"{row['gbit']:g}", *times, f"{row['gain']:.2f}", f"{row['bound']:.2f}"])
    model = result["simulated_model"]
    about = (
        f"Simulated: {model['workers']} workers, {result['layers']} layers with {model['gradient_bytes'] >> 20} MiB of "
        f"gradients, forward {model['forward_s'] * 1e3:.0f} ms, backward {model['backward_s'] * 1e3:.0f} ms, slices "
        "and credit of 1 MiB."
    )
    return f"{about}\n\n{markdown(table)}{_priority_live(result)}"


def _priority_live(result: Mapping[str, Any]) -> str:
    live = result["live"]
    if live is None:
        return ""
    steps = live["step_s"]
    return (
        f"\n\nLive: {live['workers']} namespaces on {result['cores']} cores, a cable of {live['rate']}, "
        f"{live['gradient_bytes'] / 1e6:.1f} MB, forward {live['forward_s'] * 1e3:.0f} ms, backward "
        f"{live['backward_s'] * 1e3:.0f} ms, medians of {live['rounds']} rounds. A step takes "
        f"{steps['arrival'] * 1e3:.0f} ms by arrival, {steps['priority'] * 1e3:.0f} ms by priority and "
        f"{steps['ddp gloo'] * 1e3:.0f} ms by DDP on Gloo, which overlaps: a gain of {live['gain_over_arrival']:.2f} "
        f"over arrival and of {live['gain_over_ddp']:.2f} over DDP, beside a bound of {live['bound']:.2f} over a "
        "perfect overlap."
    )
