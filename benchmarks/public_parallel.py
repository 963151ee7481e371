"""Models that are cut: Megatron, nanotron, GPipe, BLOOM, torchtitan's schedules."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import public_rows
from public_models import (
    A100,
    H100,
    Host,
    amoebanet_s,
    bloom_flops,
    bloom_s,
    calibrated,
    gpt_s,
    nanotron_gib,
    nanotron_s,
    titan_s,
    transformer_of,
)
from public_rows import Grid
from public_scores import HeldOut, Scored, left_out_in_turn

__all__ = [
    "bloom",
    "gpipe",
    "korthikanti",
    "megatron_column",
    "megatron_h100",
    "megatron_sc21",
    "nanotron",
    "nanotron_memory",
    "titan_schedule",
]


def models(
    rows: Sequence[public_rows.Gpt], host: Host, *, name: str, in_seconds: bool, more: str = ""
) -> Scored:
    """GPTs, one left out at a time; the null model is the mean TFLOP/s of a device of the others."""
    work = [transformer_of(row).step_flops / row.gpus for row in rows]
    seen = [row.seen if in_seconds else one / (1e12 * row.seen) for row, one in zip(rows, work, strict=True)]
    start = (1 / (0.6 * host.flops), 2.0)

    def key(row: public_rows.Gpt) -> str:
        return row.name.partition(",")[0]

    found = left_out_in_turn(rows, seen, key, lambda row, now: gpt_s(row, now, host), start)
    held = []
    for row, one, took, predicted in zip(rows, work, seen, found, strict=True):
        others = [
            other / took_s
            for of, other, took_s in zip(rows, work, seen, strict=True)
            if key(of) != key(row) and of.recompute == row.recompute
        ]
        held.append(
            HeldOut(
                row=row.name,
                seen=took,
                predicted=predicted,
                nulls={"constant": one / statistics.mean(others)},
            )
        )
    return Scored(
        name=name, section="4.2", unit="s", calibrated_on="the other models", rows=held, left_out=more
    )  # fmt: skip


_UNSAID = "micro-batch 1 and 1F1B are assumed: neither is said"


def megatron_column(column: str, host: Host) -> Scored:
    return models(public_rows.megatron_2020()[column], host, name=f"Megatron 2020, {column}", in_seconds=True)


def korthikanti() -> Scored:
    return models(public_rows.korthikanti(), A100, name="Megatron 2022, 22 B to 1 T", in_seconds=True)


def megatron_sc21() -> Scored:
    return models(
        public_rows.megatron_sc21(), A100, name="Megatron 2021, 1.7 B to 1 T", in_seconds=False, more=_UNSAID
    )


def megatron_h100() -> Scored:
    return models(
        public_rows.megatron_h100(),
        H100,
        name="Megatron 2024, 1.7 B to 462 B",
        in_seconds=False,
        more=_UNSAID,
    )


def titan_schedule() -> Scored:
    plain, better = public_rows.titan_schedules()
    tokens = 256 * 8192 / 512  # of a step and a GPU
    constants = calibrated(titan_s, ["1f1b"], [tokens / plain], (1 / (0.5 * H100.flops),), 1)
    predicted = tokens / titan_s("interleaved", constants)
    return Scored(
        name="torchtitan 405B, interleaved", section="4.3", unit="tokens/s of a GPU", calibrated_on="1F1B",
        rows=[HeldOut(row="interleaved", seen=better, predicted=predicted, nulls={"constant": plain})],
        left_out="micro-batch 1 is assumed",
    )  # fmt: skip


_NANOTRON_START = (1 / 4e14, 1e-3, 1 / 4.5e11, 1e-3)


def nanotron(*, starred: bool) -> Scored:
    """8 GPUs predict 16 and 64, and what would be chosen there; on 8 each row is predicted from the others."""
    ran = [one for one in public_rows.nanotron() if one.seconds is not None and (starred or not one.starred)]
    few = [one for one in ran if one.gpus == 8]
    seen = [one.seconds or 0.0 for one in few]
    constants = calibrated(nanotron_s, few, seen, _NANOTRON_START)
    mean = statistics.mean(seen)
    held = [
        HeldOut(
            row=one.name, seen=one.seconds or 0.0, predicted=nanotron_s(one, constants),
            nulls={"constant": mean * 8 / one.gpus},
        )
        for one in ran if one.gpus > 8
    ]  # fmt: skip
    alone = left_out_in_turn(few, seen, lambda one: one, nanotron_s, _NANOTRON_START, 2)
    predicted = dict(zip(few, alone, strict=True)) | {
        one: nanotron_s(one, constants) for one in ran if one.gpus > 8
    }
    return Scored(
        name=f"nanotron 1 B{', with the runs that stall' if starred else ''}", section="4.4", unit="s",
        calibrated_on="8 GPUs", rows=held, left_out="" if starred else "3 runs that stall; 1 out of memory",
        choices=[_choice([one for one in ran if one.gpus == gpus], predicted) for gpus in (8, 16, 64)],
    )  # fmt: skip


def _choice(rows: Sequence[Grid], predicted: dict[Grid, float]) -> dict[str, Any]:
    """What would be chosen, by prediction and by the rule of most data parallelism, and what that costs."""

    def regret(key: Callable[[Grid], Any]) -> tuple[str, float]:
        chosen = min(rows, key=key)
        best = min(one.seconds or 0.0 for one in rows)
        return chosen.name, round((chosen.seconds or 0.0) / best - 1, 4)

    (chosen, cost), (_, of_rule) = (
        regret(lambda one: predicted[one]),
        regret(lambda one: (-one.data, -one.micro)),
    )
    return {
        "gpus": rows[0].gpus,
        "rows": len(rows),
        "chosen": chosen,
        "regret": cost,
        "regret_of_rule": of_rule,
    }


_MOST_GIB = 0.92 * 80.0  # beyond, an allocator is not expected to find room (section 2.6)


def nanotron_memory() -> Scored:
    ran = [one for one in public_rows.nanotron() if one.gib is not None]
    few = [one for one in ran if one.gpus == 8]
    constants = calibrated(nanotron_gib, few, [one.gib or 0.0 for one in few], (1.0, 1.0))
    mean = statistics.mean(one.gib or 0.0 for one in few)
    held = [
        HeldOut(
            row=one.name,
            seen=one.gib or 0.0,
            predicted=nanotron_gib(one, constants),
            nulls={"constant": mean},
        )
        for one in ran
        if one.gpus > 8
    ]
    (lost,) = (one for one in public_rows.nanotron() if one.gib is None)
    predicted = nanotron_gib(lost, constants)
    told = {"row": lost.name, "predicted": round(predicted, 1), "said_not_to_fit": predicted > _MOST_GIB}
    return Scored(
        name="nanotron 1 B, memory",
        section="4.4",
        unit="GiB",
        calibrated_on="8 GPUs",
        rows=held,
        choices=[told],
    )


def gpipe(*, of_gpipe: bool) -> Scored:
    """Two stages predict four and eight."""
    rows = {row: seen[of_gpipe] for row, seen in public_rows.gpipe().items()}
    few = [row for row in rows if row[0] == 2]
    start = (1 / rows[2, 1], 1 / rows[2, 1])
    constants = calibrated(amoebanet_s, few, [1 / rows[row] for row in few], start)
    held = [
        HeldOut(
            row=f"{stages} stages, {pieces} micro-batches", seen=seen,
            predicted=1 / amoebanet_s((stages, pieces), constants),
            nulls={"constant": rows[2, pieces], "proportional": rows[2, pieces] * stages / 2},
        )
        for (stages, pieces), seen in rows.items() if stages > 2
    ]  # fmt: skip
    which = "GPipe, TPU" if of_gpipe else "torchgpipe, P40"
    return Scored(
        name=f"AmoebaNet-D, {which}", section="4.5", calibrated_on="2 stages", rows=held,
        unit="relative" if of_gpipe else "samples/s", left_out="24 equal layers and batches of 128 are assumed",
    )  # fmt: skip


def bloom() -> Scored:
    rows = public_rows.bloom()
    few = [(16, 2), (2048, 2)]

    def seconds(row: tuple[int, int]) -> float:
        return bloom_flops(row[0]) / (384e12 * rows[row])

    constants = calibrated(bloom_s, few, [seconds(row) for row in few], (1 / 2e14, 1.0))
    mean = statistics.mean(rows[row] for row in few)
    held = [
        HeldOut(
            row=f"batch {batch}, micro-batch {micro}", seen=rate,
            predicted=bloom_flops(batch) / (384e12 * bloom_s((batch, micro), constants)),
            nulls={"constant": mean, "proportional": rows[2048, 2]},
        )
        for (batch, micro), rate in rows.items() if (batch, micro) not in few
    ]  # fmt: skip
    return Scored(
        name="BLOOM-176B, 384 A100",
        section="4.5",
        unit="TFLOP/s",
        calibrated_on="batches 16 and 2,048",
        rows=held,
    )
