"""One model on more and more devices: data parallelism, FSDP, parameter servers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import public_rows
from public_models import (
    A100,
    V100,
    Constants,
    Host,
    calibrated,
    data_parallel_s,
    fsdp_s,
    served_s,
    summed_s,
)
from public_scores import HeldOut, Scored

__all__ = [
    "bert",
    "bert_1472",
    "bert_a100",
    "bert_one_host",
    "bert_tensorflow",
    "fsdp",
    "fsdp_small",
    "nemo",
    "one_dgx",
    "servers",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """What was seen by the number of devices, as a rate of all of them."""

    name: str
    rates: dict[int, float]
    batch: float  # samples of a step
    sample_s: float  # of a device, about
    gradient_bytes: float


def curves(
    found: Sequence[Curve], host: Host, most: int, *, name: str, section: str, unit: str, calibrated_on: str
) -> Scored:
    """Rows of up to `most` devices predict the others."""
    rows = []
    for one in found:
        few = [devices for devices in one.rates if devices <= most]
        predict = partial(
            data_parallel_s, host=host, batch=round(one.batch), gradient_bytes=one.gradient_bytes
        )
        seen = [one.batch / one.rates[devices] for devices in few]
        constants = calibrated(predict, few, seen, (one.sample_s, 1e-2))
        mean = statistics.mean(one.rates[devices] / devices for devices in few)
        for devices, rate in one.rates.items():
            if devices > most:
                nulls = {"constant": mean * devices, "proportional": one.rates[few[-1]] / few[-1] * devices}
                predicted = one.batch / predict(devices, constants)
                rows.append(
                    HeldOut(row=f"{one.name}, {devices}", seen=rate, predicted=predicted, nulls=nulls)
                )
    return Scored(
        name=name, section=section, unit=unit, calibrated_on=calibrated_on, rows=rows
    )  # fmt: skip


_BERT_BYTES = 2 * 335e6
_PHASES = ((65_536, 3e-3), (32_768, 2e-2))


def bert() -> Scored:
    nodes = public_rows.bert_nodes()
    found = [
        Curve(
            name=f"phase {phase + 1}", rates={16 * many: seen[phase] for many, seen in nodes.items()}, batch=batch,
            sample_s=sample_s, gradient_bytes=_BERT_BYTES,
        )
        for phase, (batch, sample_s) in enumerate(_PHASES)
    ]  # fmt: skip
    return curves(
        found,
        V100,
        256,
        name="BERT-large, DGX-2H",
        section="4.1",
        unit="sequences/s",
        calibrated_on="1, 4 and 16 nodes",
    )


def bert_1472() -> Scored:
    """47 minutes on 1,472 GPUs, from throughput, and what other choices of the calibration rows would have said."""
    nodes, told = public_rows.bert_nodes(), public_rows.told_minutes()
    by_throughput = sum(
        steps * batch / nodes[64][phase] * 64 / 92 / 60 for phase, (steps, (batch, _)) in enumerate(_RUNS)
    )
    whole = 60 * public_rows.told_hours(64) * 64 / 92
    others = [
        {"calibrated_on": f"{', '.join(map(str, few))} nodes", "minutes": round(_minutes(few), 1)}
        for few in ((1, 4), (1, 16), (4, 16), (1, 64), (4, 64), (16, 64), (1, 4, 16))
    ]
    nulls = {"proportional, by throughput": by_throughput, "proportional, whole runs": whole}
    return Scored(
        name="BERT-large, 1,472 GPUs",
        section="4.1",
        unit="minutes",
        calibrated_on="1, 4, 16 and 64 nodes",
        left_out="start, checkpoints and the end: throughput times steps",
        rows=[HeldOut(row="92 nodes", seen=told, predicted=_minutes(tuple(nodes)), nulls=nulls)],
        choices=others,
    )


_RUNS = tuple(zip((7038, 1563), _PHASES, strict=True))
"""Steps of each phase."""


def _minutes(few: Sequence[int]) -> float:
    """Of both phases on 92 nodes, calibrated on so many nodes."""
    nodes, minutes = public_rows.bert_nodes(), 0.0
    for phase, (steps, (batch, sample_s)) in enumerate(_RUNS):
        predict = partial(data_parallel_s, host=V100, batch=batch, gradient_bytes=_BERT_BYTES)
        seen = [batch / nodes[many][phase] for many in few]
        constants = calibrated(predict, [16 * many for many in few], seen, (sample_s, 1e-2))
        minutes += steps * predict(1472, constants) / 60
    return minutes


def bert_a100() -> Scored:
    nodes, found = (1, 2, 4, 8, 16, 32), []
    texts = {
        "phase 1": ("nodes 1/2/4/8/16/32: phase 1", 0, 1e-3),
        "phase 2": (r"nodes 1/2/4/8/16/32: phase 1 [\d,/]+; phase 2", 1, 4e-3),
        "phase 2, TF32": ("TF32 phase 2:", 1, 8e-3),
    }
    for name, (text, phase, sample_s) in texts.items():
        rates = dict(zip((8 * many for many in nodes), public_rows.series_of("4.1", text), strict=True))
        size = _BERT_BYTES * (2 if "TF32" in name else 1)
        found.append(
            Curve(name=name, rates=rates, batch=_PHASES[phase][0], sample_s=sample_s, gradient_bytes=size)
        )
    return curves(
        found,
        A100,
        64,
        name="BERT-large, DGX A100",
        section="4.1",
        unit="sequences/s",
        calibrated_on="1 to 8 nodes",
    )


def bert_tensorflow() -> Scored:
    texts = ("TensorFlow, DGX-2H, nodes 1/4/16/32:", r"TensorFlow, DGX-2H[^;]* and")
    found = []
    for phase, text in enumerate(texts):
        seen = public_rows.series_of("4.1", text)
        rates = dict(zip((64, 256, 512), seen[1:], strict=True))
        batch, sample_s = _PHASES[phase]
        found.append(
            Curve(
                name=f"phase {phase + 1}",
                rates=rates,
                batch=batch,
                sample_s=sample_s,
                gradient_bytes=_BERT_BYTES,
            )
        )
    scored = curves(
        found, V100, 256, name="BERT-large, TensorFlow", section="4.1", unit="sequences/s",
        calibrated_on="4 and 16 nodes",
    )  # fmt: skip
    return replace(scored, left_out="1 node, which is another machine")


def bert_one_host() -> Scored:
    found = []
    texts = ("phase 1 at 1/4/8/16 GPUs:", r"phase 1 at 1/4/8/16 GPUs: [\d,./]+; phase 2:")
    for phase, text in enumerate(texts):
        rates = dict(zip((1, 4, 8, 16), public_rows.series_of("4.1", text), strict=True))
        batch, sample_s = _PHASES[phase]
        found.append(
            Curve(
                name=f"phase {phase + 1}",
                rates=rates,
                batch=batch,
                sample_s=sample_s,
                gradient_bytes=_BERT_BYTES,
            )
        )
    return curves(
        found,
        V100,
        4,
        name="BERT-large, one DGX-2",
        section="4.1",
        unit="sequences/s",
        calibrated_on="1 and 4 GPUs",
    )


def nemo() -> Scored:
    rates = dict(zip((8, 16, 32, 64, 128), public_rows.series_of("4.1", "A100-80G 1/2/4/8/16:"), strict=True))
    curve = Curve(name="4 B", rates=rates, batch=2**20, sample_s=1.4e-4, gradient_bytes=2 * 4e9)
    return curves(
        [curve],
        A100,
        32,
        name="BERT-4 B, NeMo",
        section="4.1",
        unit="tokens/s",
        calibrated_on="1, 2 and 4 nodes",
    )


def fsdp(table: str, host: Host, tokens: int = 2048) -> Scored:
    """A model's smallest cluster gives its compute, all clusters of the other models the link."""
    rows, held = public_rows.fsdp()[table], []

    def ratio(case: tuple[public_rows.Fsdp, int], constants: Constants) -> float:
        row, devices = case
        took_s = fsdp_s(row, devices, constants, host=host, tokens=tokens)
        return took_s * row.seen[min(row.seen)] / (row.micro * tokens)

    for row in rows:
        fewest = min(row.seen)
        cases = [(one, many) for one in rows if one is not row for many in one.seen if many > fewest]
        seen = [one.seen[fewest] / one.seen[many] for one, many in cases]
        constants = calibrated(ratio, cases, seen, (1 / host.between, 2e-6), 4)
        for many, rate in row.seen.items():
            if many > fewest:
                mean = statistics.mean(one.seen[many] / one.seen[fewest] for one in rows if one is not row)
                nulls = {"proportional": row.seen[fewest], "others' mean": row.seen[fewest] * mean}
                predicted = row.seen[fewest] / ratio((row, many), constants)
                held.append(HeldOut(row=f"{row.name}, {many}", seen=rate, predicted=predicted, nulls=nulls))
    return Scored(
        name=table, section="4.3", unit="tokens/s of a GPU", rows=held,
        calibrated_on="the other models, and its own smallest cluster",
    )  # fmt: skip


def fsdp_small() -> Scored:
    """MPT on A100: up to 32 devices for 64 and 128."""
    host, tokens, held = replace(A100, between=200e9), 2048, []
    for row in public_rows.fsdp()["MPT, A100"]:
        few = {many: rate for many, rate in row.seen.items() if many <= 32 and (row.name, many) != ("1b", 32)}
        short = replace(row, seen=few)
        mean = statistics.mean(few.values())
        cases = [many for many in few if many > min(few)]
        seen = [row.micro * tokens / few[many] for many in cases]

        def predict(many: int, now: Constants, row: public_rows.Fsdp = short) -> float:
            return fsdp_s(row, many, now, host=host, tokens=tokens)

        constants = calibrated(predict, cases, seen, (1 / host.between, 2e-6))
        for many in (64, 128):
            held.append(
                HeldOut(
                    row=f"{row.name}, {many}", seen=row.seen[many],
                    predicted=row.micro * tokens / predict(many, constants),
                    nulls={"constant": mean, "proportional": few[max(few)]},
                )
            )  # fmt: skip
    return Scored(
        name="MPT, A100", section="4.3", unit="tokens/s of a GPU", calibrated_on="8, 16 and 32 GPUs", rows=held,
        left_out="1b on 32 GPUs, an outlier as published; micro-batch 8 is assumed",
    )  # fmt: skip


def servers() -> Scored:
    """A host gives its compute, two hosts of all models the link."""
    rows, held = public_rows.servers()["EC2, 8 K80 a host"], []
    seen = [16 * row.batch / row.seen[16] for row in rows]
    constants = calibrated(lambda row, now: served_s(row, 16, now), rows, seen, (1 / 1.25e9,))
    for row in rows:
        for many in (32, 64):
            held.append(
                HeldOut(
                    row=f"{row.name}, {many}", seen=row.seen[many],
                    predicted=many * row.batch / served_s(row, many, constants),
                    nulls={
                        "constant": statistics.mean(row.seen[one] / one for one in (8, 16)) * many,
                        "proportional": row.seen[16] / 16 * many,
                    },
                )
            )  # fmt: skip
    return Scored(
        name="TensorFlow's servers, K80", section="4.6", unit="images/s", calibrated_on="8 and 16 GPUs", rows=held,
        left_out="as many servers as hosts, up to those that are said for 8 hosts",
    )  # fmt: skip


def one_dgx() -> Scored:
    rows, held = public_rows.servers()["DGX-1"], []
    seen = [2 * row.batch / row.seen[2] for row in rows]
    constants = calibrated(lambda row, now: summed_s(row, 2, now), rows, seen, (1 / 2e10,))
    for row in rows:
        for many in (4, 8):
            held.append(
                HeldOut(
                    row=f"{row.name}, {many}", seen=row.seen[many],
                    predicted=many * row.batch / summed_s(row, many, constants),
                    nulls={
                        "constant": statistics.mean(row.seen[one] / one for one in (1, 2)) * many,
                        "proportional": row.seen[2] / 2 * many,
                    },
                )
            )  # fmt: skip
    return Scored(
        name="TensorFlow, one DGX-1", section="4.6", unit="images/s", calibrated_on="1 and 2 GPUs", rows=held,
        left_out="real data, where the input limits",
    )  # fmt: skip
