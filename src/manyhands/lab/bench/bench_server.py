"""Push and pull of a parameter server: ours over shared memory and TCP, a Ray actor, and torch.distributed.rpc.

One process is the worker of all servers, one after the other in small blocks, so that a busy minute of the machine hits
all of them. Only torch's rpc comes by itself, for its threads poll without rest and slow everybody else. Ours serves
three times: as `sync`, the default, where a worker reads the parameters in the server's memory; as `async`, which
copies; over TCP.
A round trip begins with a gradient where backward has left it and ends when the parameters that it led to are here; the
server's optimizer step lies in between. Ours is the real thing: the server process of a training, with the protocol
that makes every update count exactly once. What each contender gives back is compared with numpy's, before and after.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from manyhands.errors import UserError, format_bytes
from manyhands.lab.bench.harness import Workers, host_facts, percentiles, ratio_text, time_text
from manyhands.lab.bench.server_peers import RAY
from manyhands.lab.bench.server_work import Flat, RowWork, TimedExchange
from manyhands.lab.bench.server_worker import ServerPlan

__all__ = ["DEFAULT_EXCHANGES", "DEFAULT_ROUNDS", "HAS_RAY", "MEMORY_BYTES", "format_table", "run_bench"]

DEFAULT_EXCHANGES: tuple[TimedExchange, ...] = (
    Flat(name="dense", num_bytes=64 << 20),
    RowWork(name="rows", table_rows=100_000, width=64, rows=1000),
    Flat(name="small", num_bytes=1 << 10),
)
DEFAULT_ROUNDS = 15
MEMORY_BYTES = 64 << 20
HAS_RAY = importlib.util.find_spec("ray") is not None
_NO_RAY = "ray is not installed, so it is left out: pip install 'manyhands[ray]'"
_BLOCK_BYTES = 4 << 20  # a block has as many round trips as move this much, within limits
_MOST_IN_BLOCK = 20
_COLUMNS = (34, 12, 24, 12, 10)


def run_bench(
    exchanges: Sequence[TimedExchange] = DEFAULT_EXCHANGES,
    rounds: int = DEFAULT_ROUNDS,
    memory_bytes: int = MEMORY_BYTES,
    timeout_s: float = 900.0,
) -> dict[str, Any]:
    """Measure, and return a dictionary ready for JSON; raises if anything fails or `timeout_s` passes.

    Each contender has `rounds` blocks of every exchange: one round trip where it is large, up to 20 where it is small.
    `memory_bytes` is the size of the model whose server's memory is measured; 0 leaves that out.
    """
    if rounds < 1:
        raise UserError(f"rounds={rounds}: must be at least 1")
    if memory_bytes < 0:
        raise UserError(f"memory_bytes={memory_bytes}: must not be negative")
    blocks = tuple(min(max(_BLOCK_BYTES // one.gradient_bytes, 1), _MOST_IN_BLOCK) for one in exchanges)
    facts = {"benchmark": "server", "dtype": "float32", **host_facts()}
    with (
        tempfile.TemporaryDirectory(prefix="manyhands-bench-") as folder,
        Workers("manyhands.lab.bench.server_worker") as processes,
    ):
        plan = ServerPlan(
            exchanges=[one.to_json() for one in exchanges],
            rounds=rounds,
            blocks=blocks,
            with_ray=HAS_RAY,
            memory_bytes=memory_bytes,
            folder=folder,
            timeout_s=timeout_s,
        )
        processes.start(plan)
        (measured,) = processes.results(timeout_s)
    return {
        **facts,
        "ray": version("ray") if HAS_RAY else None,
        "results": [
            {
                "exchange": one.name,
                "about": one.about,
                "gradient_bytes": one.gradient_bytes,
                "round_trips": rounds * block,
                "contenders": _summaries(seconds, one.gradient_bytes),
            }
            for one, block, seconds in zip(exchanges, blocks, measured["seconds"], strict=True)
        ],
        "memory": measured["memory"],
    }


def format_table(result: dict[str, Any]) -> str:
    """The dictionary of `run_bench` as text: one block of lines per exchange, then the server's memory."""
    lines = [f"push and pull of a parameter server, one worker, on {result['cores']} cores"]
    if result["ray"] is None:
        lines.append(_NO_RAY)
    for row in result["results"]:
        head = (
            f"{row['exchange']}: {format_bytes(row['gradient_bytes'])}",
            "median",
            "10th to 90th",
            "per s",
            "to Ray",
        )
        lines += ["", f"{row['about']}", _line(head)]
        for name, cell in row["contenders"].items():
            spread = f"{time_text(cell['p10_us'])} to {time_text(cell['p90_us'])}"
            ratio = ratio_text(cell["times_ray"]) if "times_ray" in cell else ""
            rate = f"{cell['round_trips_per_s']:.0f}"
            lines.append(_line((name, time_text(cell["median_us"]), spread, rate, ratio)))
    if result["memory"]:
        lines += ["", "memory of a server with Adam, beyond one with an empty model"]
    for row in result["memory"]:
        known = row["parameters_bytes"] + row["state_bytes"]
        lines.append(
            f"{row['link']}, {row['workers']} workers: {format_bytes(row['private_bytes'])} of its own, "
            f"{format_bytes(known)} of them parameters and optimizer state, "
            f"{format_bytes(max(round(row['private_per_worker_bytes']), 0))} more for each worker; "
            f"{format_bytes(max(row['shared_bytes'], 0))} of the workers' memory mapped"
        )
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    (first, *others), (width, *widths) = cells, _COLUMNS
    return f"{first:<{width}}" + "".join(f"{cell:>{size}}" for cell, size in zip(others, widths, strict=True))


def _summaries(seconds: dict[str, list[float]], gradient_bytes: int) -> dict[str, dict[str, float]]:
    ray = float(np.median(seconds[RAY])) if RAY in seconds else None
    summaries = {}
    for name, times in seconds.items():
        median = float(np.median(times))
        summaries[name] = {
            **percentiles(1e6 * np.array(times), "us"),
            "round_trips_per_s": 1 / median,
            "moved_bytes_per_s": 2 * gradient_bytes / median,
            **({} if ray is None else {"times_ray": ray / median}),
        }
    return summaries
