"""Tables of smaller and of fewer exchanges: time to accuracy by codec, and loss by how often workers meet."""

from __future__ import annotations

import statistics
from typing import Any

from manyhands.errors import format_bytes
from results_read import RENAMED, has, load, markdown

FP16, DDP = "fp16", "ddp fp16"
NAMES = {"raw": "none", FP16: "`fp16`", DDP: "fp16 by DDP on Gloo"}
SAME = 1.05  # times that are nearer make no difference, nor do those whose rounds overlap
CONDITIONS = {"plain": "a step", "delays": "with delays", "network": "at 100 Mbit/s"}


def wire_time() -> str:
    """The committed result, as soon as there is one."""
    return wire_tables(load("wire-time")) if has("wire-time") else "*No result is committed yet.*"


def wire_tables(result: dict[str, Any]) -> str:
    """One table a task: each codec at each bandwidth, beside the better of the two half precisions."""
    parts = []
    for task, about in result["tasks"].items():
        rows = {(row["bandwidth"], row["codec"]): row for row in result["rows"] if row["task"] == task}
        bandwidths = list(dict.fromkeys(bandwidth for bandwidth, _ in rows))
        codecs = list(dict.fromkeys(codec for _, codec in rows))
        table = [["codec", "sent in a step", "steps", *map(_speed, bandwidths)]]
        for codec in codecs:
            known = [rows[bandwidth, codec] for bandwidth in bandwidths if (bandwidth, codec) in rows]
            sent = known[0].get("busiest_bytes_per_step")
            steps = known[0].get("steps", "") or "never"
            table.append(
                [
                    NAMES.get(codec, f"`{codec}`"),
                    format_bytes(round(sent)) if sent else "",
                    "" if codec == DDP else str(steps),
                    *(_cell(rows, bandwidth, codec) for bandwidth in bandwidths),
                ]
            )
        head = (
            f"**{RENAMED.get(task, task)}** to {about['target']}, "
            f"gradients of {format_bytes(about['gradient_bytes'])}, "
            f"{result['workers']} hosts of one core each"
        )
        parts.append(f"{head}\n\n{markdown(table)}")
    return "\n\n".join(parts)


def _speed(bandwidth: str) -> str:
    return bandwidth.replace("Mbit", " Mbit/s").replace("Gbit", " Gbit/s")


def _seconds(rows: dict[tuple[str, str], Any], bandwidth: str, codec: str) -> list[float]:
    """To the target, by the median step and by that of each round; torch's has as many as ours in half precision."""
    row, counted = rows.get((bandwidth, codec)), rows.get((bandwidth, FP16 if codec == DDP else codec))
    if not row or not counted or not counted["steps"]:
        return []
    return [step_s * counted["steps"] for step_s in (row["step_s"], *row["step_s_rounds"])]


def _cell(rows: dict[tuple[str, str], Any], bandwidth: str, codec: str) -> str:
    """The time, and how it compares with the better half precision; where rounds overlap, there is no difference."""
    took = _seconds(rows, bandwidth, codec)
    if not took:
        return "never" if (bandwidth, codec) in rows else ""
    halves = [known for one in (FP16, DDP) if (known := _seconds(rows, bandwidth, one))]
    if codec in (FP16, DDP) or not halves:
        return f"{took[0]:.1f} s"
    better = min(halves)
    ratio, verdict = better[0] / took[0], "no difference"
    if ratio > SAME and max(took) < min(better):
        verdict = "pays"
    elif ratio < 1 / SAME and min(took) > max(better):
        verdict = "loses"
    return f"{took[0]:.1f} s, {ratio:.2f}×, {verdict}"


def local_steps() -> str:
    """Traffic against loss against time."""
    result = load("local-steps")
    together = result["ways"]["every step"]
    rounds = [one["step_s"] for one in result["times"]]
    rows = [
        ["strategy", "exchanges", "busiest worker sends", "loss", "beside every step", *CONDITIONS.values()]
    ]
    for way, row in result["ways"].items():
        pairs = result["steps"] - row["exchanges"]
        taken = [[one[name][way] for one in rounds if way in one[name]] for name in CONDITIONS]
        rows.append(
            [
                f"`{row['strategy']}`",
                f"{row['exchanges']:,}" + (f" and {pairs:,} in pairs" if "gossip" in row["strategy"] else ""),
                format_bytes(row["busiest_bytes"]),
                f"{row['evaluation_loss']:.4f}",
                f"{100 * (row['evaluation_loss'] / together['evaluation_loss'] - 1):+.1f} %",
                *(f"{1e3 * statistics.median(seconds):.1f} ms" if seconds else "" for seconds in taken),
            ]
        )
    head = (
        f"**{result['workers']} workers on {result['cores']} cores, {result['steps']:,} steps, {result['text']}**; "
        f"times are medians of {len(rounds)} rounds. At {result['rate']}, `mirrored` is `allreduce link=tcp`."
    )
    return f"{head}\n\n{markdown(rows)}"
