"""What the documents say about links and hubs, from the committed results."""

from __future__ import annotations

from typing import Any

from manyhands.errors import format_bytes
from overlap_model import Model, Order
from results_read import RESULTS, load, markdown, show_time


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
    """Throughput of a link, plain and with TLS, and what TLS takes of it, by machine, place and size."""
    names = [name for name in ("tls", "tls-16core") if (RESULTS / f"{name}.json").exists()]
    return "\n\n".join(_tls_table(load(name)) for name in names)


def _tls_table(result: dict[str, Any]) -> str:
    by_end = "limit" in result["places"][0]["rows"][0]  # not in what was measured before it was asked
    table = [["", "plain", "TLS", "cost", "core s/GB, plain to TLS"]]
    if by_end:
        table[0] += ["of it the receiver", "limit with TLS", "bare TLS socket"]
    for place in result["places"]:
        cells = {(row["num_bytes"], row["carrier"]): row for row in place["rows"]}
        for size in sorted({row["num_bytes"] for row in place["rows"]} - {1 << 20}):
            line = [f"{place['place']}, {format_bytes(size)}"]
            plain, tls = (cells[size, f"link, {how}"]["bytes_per_s"] for how in ("plain", "TLS"))
            line += [
                f"{plain / 1e9:.2f} GB/s",
                f"{tls / 1e9:.2f} GB/s",
                f"{100 * (1 - tls / plain):.0f} %",
            ]
            ends = [cells[size, f"link, {how}"] for how in ("plain", "TLS")]
            line.append(_change(ends, "core_seconds_per_gb"))
            if by_end:
                bare = cells[size, "socket, TLS"]["bytes_per_s"] / 1e9
                line += [_change(ends, "receiver_core_seconds_per_gb"), ends[1]["limit"], f"{bare:.2f} GB/s"]
            table.append(line)
    about = (
        f"{result['cores']} cores for both processes, medians of {result['rounds']} rounds, {result['openssl']}, load "
        f"{result['load_before']:.1f} when it began."
    )
    return f"{about}\n\n{markdown(table)}"


def _change(ends: list[dict[str, Any]], what: str) -> str:
    return f"{ends[0][what]:.2f} to {ends[1][what]:.2f}"


def hosts_speed() -> str:
    """A step between hosts beside its bound and DDP on Gloo, by machine; and the bytes of each way, by formula."""
    names = [name for name in ("hosts-grid-16", "hosts") if (RESULTS / f"{name}.json").exists()]
    return "\n\n".join([*(_steps_table(load(name)) for name in names), _ways_table(load("hosts-ways"))])


_ASKED_OVER_BOUND = {"1": 1.10, "10": 1.25}  # by Gbit/s
_ASKED_OVER_PEER, _MATTERS = 1.2, 1.2


def _steps_table(result: dict[str, Any]) -> str:
    extra = [one["way"] for one in result["cells"][0]["ways"][3:]]  # beside alone, the peer and ours
    cores = {row.get("cores_per_host", 1) for row in result["cells"]}
    table = [
        [
            "hosts × workers, cable",
            "bound by",
            "computing",
            "bytes ÷ rate",
            "in order",
            "a step",
            "÷ bound",
            "DDP ÷ ours",
            *extra,
        ]
    ]
    over_bound, over_peer = [], []
    for row in result["cells"]:
        ways = {one["way"]: one["step_s"] for one in row["ways"]}
        shaped = row["cable_s"] is not None
        cable = f"{row['rate']} Gbit/s" if shaped else "not held to a rate"
        near = row["over_bound"] <= _ASKED_OVER_BOUND.get(row["rate"], float("inf"))
        ahead = row["peer_over_ours"] >= _asked_of_peer(ways)
        over_bound += [near] * (row["rate"] in _ASKED_OVER_BOUND)
        over_peer.append(ahead)
        table.append(
            [
                f"{row['hosts']} × {row['per_host']}, {cable}{_of_cores(row) if len(cores) > 1 else ''}",
                f"{row['bound']}: {row['rows']} rows",
                _milliseconds(ways["alone"]),
                _milliseconds(row["cable_s"]) if shaped else "–",
                _milliseconds(row["in_order_s"]) if shaped else "–",
                _milliseconds(ways["allreduce"]),
                _marked(row["over_bound"], near),
                _marked(row["peer_over_ours"], ahead),
                *(_milliseconds(ways[way]) for way in extra),
            ]
        )
    counts = [len(one["step_s_rounds"]) for row in result["cells"] for one in row["ways"]]
    rounds = " to ".join(map(str, sorted({min(counts), max(counts)})))
    about = (
        f"`allreduce` on {result['cores']} cores, {result['cells'][0]['gradient_bytes'] / 1e6:.1f} MB of gradients of "
        f"16 layers, medians of {rounds} rounds, load {_loads(result)} when it began. Aims: ÷ bound at most "
        f"1.10 at 1 Gbit/s and 1.25 at 10 ({sum(over_bound)} of {len(over_bound)}); DDP ÷ ours at least 1.2 where DDP "
        f"takes 1.2 × computing or more, at least 1 elsewhere ({sum(over_peer)} of {len(over_peer)}). Misses have a ✗."
    )
    return f"{about}\n\n{markdown(table)}"


def _of_cores(row: dict[str, Any]) -> str:
    each = row["cores_per_host"]
    return f", {each} core{'s' * (each > 1)} a host"


def _asked_of_peer(ways: dict[str, float]) -> float:
    """How many times as fast as DDP a step should be: more where communication matters."""
    return _ASKED_OVER_PEER if ways["ddp gloo"] >= _MATTERS * ways["alone"] else 1.0


def _loads(result: dict[str, Any]) -> str:
    """Of each part, where parts began one after the other."""
    return ", ".join(f"{load:.1f}" for load in result.get("loads_before", [result["load_before"]]))


def _marked(ratio: float, met: bool) -> str:
    return f"{ratio:.2f}{'' if met else ' ✗'}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def _ways_table(result: dict[str, Any]) -> str:
    row = result["cells"][0]
    ways = {one["way"]: one for one in row["ways"] if one["way"] != "alone"}
    table = [["way", "a step", "× DDP on Gloo", "a host sends", "by formula"]]
    for way, one in ways.items():
        by = f"{one['formula_bytes'] / 1e6:.2f} MB" if one["formula_bytes"] else "–"
        table.append(
            [
                "DDP on Gloo" if way == "ddp gloo" else f"`{way}`",
                _milliseconds(one["step_s"]),
                f"{ways['ddp gloo']['step_s'] / one['step_s']:.2f}",
                f"{one['sent_bytes'] / 1e6:.2f} MB",
                by,
            ]
        )
    about = (
        f"Bytes on the cable of {row['hosts']} hosts with {row['per_host']} processes each (all workers; under `ps` "
        f"the first is the server), {row['rate']} Gbit/s, {row['rows']} rows, {result['cores']} cores, medians of "
        f"{result['rounds']} rounds."
    )
    return f"{about}\n\n{markdown(table)}"


_LAYERS, _FRAMES = 16, 1514 / 1448
_OPTIMIZER_S, _AGREE_S = 6.4e-3, 2e-3  # measured where cells of `hosts.json` were
_SHARE = 0.2  # of a core that the sums took while the cable was busy: 27 ms of 134
_MESSAGE_S = 2.7e-3  # with it the model gives the 375 ms that sending by priority took where it was measured
ORDERS = {
    "by arrival, 4 MiB": Order(layers=4),
    "by arrival, 1 MiB": Order(layers=1),
    "layers released": Order(layers=1, released=True),
    "by need, layers released": Order(layers=1, by_need=True, released=True),
    "the same, 2.7 ms a slice": Order(layers=1, by_need=True, released=True, message_s=_MESSAGE_S),
}


def sending_orders() -> str:
    """What a step takes by the model of its overlap, in each order in which gradients may leave, beside live steps."""
    table = [["bound by", "a step, measured", "max(computing, bytes ÷ rate)", *ORDERS]]
    for row in load("hosts")["cells"]:
        if (row["hosts"], row["per_host"], row["rate"]) != (2, 1, "1"):
            continue
        ways = {one["way"]: one["step_s"] for one in row["ways"]}
        found = modelled(ways["alone"], row["cable_s"])
        bound = _milliseconds(max(ways["alone"], row["cable_s"]))
        table.append(
            [row["bound"], _milliseconds(ways["allreduce"]), bound, *map(_milliseconds, found.values())]
        )
    return markdown(table)


def modelled(alone_s: float, cable_s: float) -> dict[str, float]:
    """A step by each order, where one worker alone takes so long, and the bytes take so long without frames."""
    forward_s = (alone_s - _OPTIMIZER_S) / 3  # backward takes twice as long
    model = Model(_LAYERS, forward_s, 2 * forward_s, cable_s * _FRAMES, _OPTIMIZER_S + _AGREE_S, share=_SHARE)
    return {name: model.step_s(order) for name, order in ORDERS.items()}


def many_ranks() -> str:
    """A sum among more ranks than cores by each way, and what it takes to connect and to name a killed one."""
    names = sorted(path.stem for path in RESULTS.glob("many-ranks-*.json"))
    return "\n\n".join(_ranks_table(load(name)) for name in names)


def _ranks_table(result: dict[str, Any]) -> str:
    ways = list(dict.fromkeys(row["way"] for row in result["clusters"][0]["rows"]))
    table = [["ranks on hosts, size", *(f"{way}, core seconds" for way in ways)]]
    for cluster in result["clusters"]:
        cells = {(row["num_bytes"], row["way"]): row for row in cluster["rows"]}
        for size in dict.fromkeys(row["num_bytes"] for row in cluster["rows"]):
            found = [cells[size, way] for way in ways]
            times = [f"{show_time(one['seconds'] * 1e6)}, {one['core_seconds']:.3f}" for one in found]
            table.append([f"{cluster['ranks']} on {cluster['hosts']}, {format_bytes(size)}", *times])
    last = result["clusters"][-1]
    about = (
        f"All hosts on one machine of {result['cores']} cores, medians of {result['rounds']} rounds. {last['ranks']} "
        f"ranks on {last['hosts']} hosts connect in {last['links_s']:.1f} s; all others name a killed one after "
        f"{last['named_s']:.1f} s."
    )
    return f"{about}\n\n{markdown(table)}"


def helpers_live() -> str:
    """The same between namespaces with a cable each: bytes on the busiest one, and a step."""
    result = load("helpers")
    table = [["workers", "helpers", "busiest cable", "by formula", "a step", "cable alone, by formula"]]
    for row in result["live"]:
        table.append(
            [
                str(row["workers"]),
                str(row["helpers"] or "none: a ring"),
                f"{row['busiest_bytes'] / 1e6:.2f} MB",
                f"{row['formula_bytes'] / 1e6:.2f} MB",
                f"{row['step_s']:.2f} s",
                f"{row['formula_s']:.2f} s",
            ]
        )
    rounds = min(len(row["step_s_rounds"]) for row in result["live"])
    about = (
        f"Every process in a network namespace with a cable of {result['rate']} in each direction, on "
        f"{result['cores']} cores; {result['gradient_bytes'] / 1e6:.2f} MB of gradients, medians of {rounds} rounds."
    )
    return f"{about}\n\n{markdown(table)}"


def ray_actor() -> str:
    """A step of `ps` and of a Ray actor over a slow cable, and what crosses it."""
    result = load("ray-actor")
    ways = {row["way"]: row for row in result["ways"]}
    table = [["way", "a step", "× the Ray actor", "workers send", "they receive"]]
    for way, row in ways.items():
        peer = ways[way.replace("ps", "ray actor")]["step_s"]
        crossed = [row["sent_bytes"], row["received_bytes"]]
        table.append(
            [
                f"`{row['strategy']}`" if row["strategy"] else way.replace("ray", "Ray"),
                f"{row['step_s'] * 1e3:.0f} ms",
                f"{peer / row['step_s']:.2f}",
                *(f"{num_bytes / 1e6:.2f} MB" for num_bytes in crossed),
            ]
        )
    rounds = f"medians of {result['rounds']} rounds" if result["rounds"] > 1 else "one round"
    about = (
        f"Parameters on one host, {result['workers']} workers on another ({result['cores']} cores in all), a cable of "
        f"{result['rate']}, {result['gradient_bytes'] / 1e6:.1f} MB of gradients, {rounds}, Ray "
        f"{result['ray']}, load {result['load_before']:.1f} when it began."
    )
    return f"{about}\n\n{markdown(table)}"


def geo() -> str:
    """Between two regions: each way's bytes, times and losses."""
    result = load("geo")
    away_ms = 1e3 * 2 * result["delay_s"]
    about = (
        f"**{result['regions']} regions, {away_ms:.0f} ms there and back, {result['rate']}**: a worker in each, on "
        f"{result['cores']} cores, {result['steps']} steps, one run each, {result['text']}."
    )
    return f"{about}\n\n{markdown(geo_rows(result))}"


def geo_rows(result: dict[str, Any]) -> list[list[str]]:
    """Each way: what a region put on the cable, how long it took, and its loss."""
    ways = result["ways"]
    target = max(one["curve"][-1][2] for one in ways.values())
    rows = [
        ["way", "strategy", "sent by a region", "a step", f"to a loss of {target:.3f}", "loss at the end"]
    ]
    for way, one in ways.items():
        (warm, warm_s, _), *_, (steps, seconds, loss) = one["curve"]
        step_s = (seconds - warm_s) / (steps - warm)
        reached = next(point for point in one["curve"] if point[2] <= target)
        rows.append(
            [
                way,
                f"`{one['strategy']}`",
                f"{one['cable_bytes'] / 1e6:.1f} MB",
                f"{1e3 * step_s:.0f} ms",
                f"{reached[1] - warm_s + warm * step_s:.1f} s",
                f"{loss:.4f}",
            ]
        )
    return rows
