"""Clusters that others measured, predicted by what `manyhands plan` predicts with, beside null models.

    python benchmarks/public_tables.py     # some minutes; writes benchmarks/results/public-tables.json

The tables are read from `../shared/reference/planner.md`, which is not part of this repository; without it there is
nothing to do. Of each table some rows calibrate two to four constants, and the others are predicted. The splits and the
rows left out were fixed before the first run: small scales calibrate for large ones, or one model is left out at a
time. The tables had been read before, so this is no registered test. What came after the first run: what a layer and
the optimizer move in a device's memory, and one bucket in place of many (Megatron); what a message between stages
costs, without which the choice of nanotron's 64 GPUs took 6.6 times as long as the best; 0.92 of a device as the bound
of its memory (section 2.6), since the run that failed was predicted at 79 of 80 GiB. Whole runs in proportion joined
the null models of the 47 minutes, on which they do best.

Null models: `constant`: each device does the mean of what it does in the calibration rows; `proportional`: what it does
in the calibration row nearest in scale, so that time is divided by the devices; `others' mean`: the model that is left
out slows down as the others do in the mean.

Left out beforehand: figures that the reference quotes from memory; BERT in fp32, whose phase is not said; ResNet-101
and U-Net under torchgpipe, whose micro-batches are not said; runs on real data, which wait for input; MLPerf, whose
times include convergence; efficiencies without times; tuners that choose the batch.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import public_parallel
import public_scaling
from public_models import A100, H100, V100
from public_rows import REFERENCE
from public_scores import Scored

RESULT = Path(__file__).resolve().parent / "results" / "public-tables.json"

TABLES: dict[str, Callable[[], Scored]] = {
    "bert": public_scaling.bert,
    "bert-1472": public_scaling.bert_1472,
    "bert-a100": public_scaling.bert_a100,
    "bert-tensorflow": public_scaling.bert_tensorflow,
    "bert-one-host": public_scaling.bert_one_host,
    "nemo": public_scaling.nemo,
    "megatron-v100": partial(public_parallel.megatron_column, "V100", V100),
    "megatron-a100": partial(public_parallel.megatron_column, "A100", A100),
    "megatron-replicas": partial(public_parallel.megatron_column, "A100, 128 replicas", A100),
    "megatron-2021": public_parallel.megatron_sc21,
    "megatron-2022": public_parallel.korthikanti,
    "megatron-2024": public_parallel.megatron_h100,
    "mpt-h100": partial(public_scaling.fsdp, "MPT, H100", H100),
    "mpt-a100": public_scaling.fsdp_small,
    "torchtitan": partial(public_scaling.fsdp, "torchtitan 8B, H100", H100, 8192),
    "torchtitan-schedule": public_parallel.titan_schedule,
    "nanotron": partial(public_parallel.nanotron, starred=False),
    "nanotron-stalls": partial(public_parallel.nanotron, starred=True),
    "nanotron-memory": public_parallel.nanotron_memory,
    "torchgpipe": partial(public_parallel.gpipe, of_gpipe=False),
    "gpipe": partial(public_parallel.gpipe, of_gpipe=True),
    "bloom": public_parallel.bloom,
    "servers": public_scaling.servers,
    "dgx-1": public_scaling.one_dgx,
}
"""What calibrates, and what is predicted, stands in each."""


def scores(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        began = time.perf_counter()
        found[name] = TABLES[name]().record()
        show(found[name])
        print(f"  {time.perf_counter() - began:.1f} s", file=sys.stderr)
    return found


def show(one: dict[str, Any]) -> None:
    nulls = ", ".join(
        f"{name} {errors['mean']:.1%} (worst {errors['worst']:.1%})" for name, errors in one["nulls"].items()
    )
    error = one["error"]
    print(
        f"{one['table']} ({one['section']}), from {one['calibrated_on']}: {len(one['held_out'])} held out, "
        f"error {error['mean']:.1%} (worst {error['worst']:.1%}); null models: {nulls}"
    )
    for row in one["held_out"]:
        print(
            f"  {row['row']:<36}{row['seen']:>12g}{row['predicted']:>12g} {one['unit']} {row['error']:+.1%}"
        )
    for choice in one["choices"]:
        print(f"  {choice}")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tables", default=",".join(TABLES), help="some of them, separated by commas")
    parser.add_argument("--json", type=Path, default=RESULT)
    asked = parser.parse_args()
    if not REFERENCE.exists():
        print(
            f"nothing to do: {REFERENCE} is not there, and the tables of others are not part of this repository"
        )
        return
    unknown = [name for name in asked.tables.split(",") if name not in TABLES]
    if unknown:
        parser.error(f"--tables {unknown[0]} is not known; allowed: {', '.join(TABLES)}")
    found = scores(asked.tables.split(","))
    if set(found) == set(TABLES):
        asked.json.write_text(json.dumps({"tables": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
