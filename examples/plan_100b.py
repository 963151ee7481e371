"""A plan for a transformer of 100 billion parameters on machines in a file. Nothing is run, and nothing is measured.

    python plan_100b.py
    python plan_100b.py --cluster my_cluster.toml --batch 1024

`manyhands plan TASK` measures a task here; a model that fits nowhere here is described instead. Its layers take the
time of their arithmetic at a share of the devices' peak, and of their traffic in memory; everything else is as in
`manyhands plan`. How wrong that was on public tables, with these two figures calibrated on other models, is in
docs/internals/public-tables.md. Here they are guesses: expect more.

Not modelled: exchanges that hide behind computing within a pipeline; an optimizer whose state replicas share; several
micro-batches under `sharded`; the embedding; checkpoints, evaluation, failures.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from manyhands.errors import format_bytes, format_seconds
from manyhands.facts import LinkRate
from manyhands.foresight.plan.described_cluster import DescribedCluster
from manyhands.foresight.plan.described_model import DescribedTransformer, DescribedWorker
from manyhands.foresight.plan.plan_search import Question, RankedPlans, make_plan

DEVICES = 8  # that slice every layer between them and make a worker
DEVICE = DescribedWorker(
    flops=0.8 * 312e12,  # an A100's peak in 16 bits, and the share that large matrices reach
    slices=DEVICES,
    link=LinkRate(latency_s=3e-6, bytes_per_s=300e9),
    memory=2e12,
    moves=4.0,
)


def make_model(batch_size: int) -> DescribedTransformer:
    """80 layers of 10,240 and 51,200 words: 101 billion parameters."""
    return DescribedTransformer(
        layers=80, hidden=10240, sequence=2048, vocabulary=51200, batch_size=batch_size
    )


def candidates(workers: int, batch_size: int) -> Iterator[str]:
    """Data parallelism, and pipelines of several lengths in whose replicas two samples make a micro-batch."""
    yield "allreduce algorithm=ring buckets=1GiB"
    yield "sharded"
    for stages in (4, 8, 16):
        for schedule in ("gpipe", "1f1b", "interleaved"):
            pieces = batch_size * stages // workers // 2
            if workers % stages == 0 and pieces % stages == 0 and pieces:
                yield f"pipeline stages={stages} microbatches={pieces} schedule={schedule}"


def make_ranking(cluster: DescribedCluster, model: DescribedTransformer) -> RankedPlans:
    """Every candidate on all workers of the cluster, the fastest that fits first."""
    profile, workers = model.profile(DEVICE), cluster.machines.workers
    return make_plan(
        Question(
            profile_of=lambda _workers, _processes: profile,
            cluster=cluster,
            workers=(workers,),
            strategies=tuple(candidates(workers, model.batch_size)),
            steps=1,
        )
    )


def main() -> None:
    """Read the machines, rank the plans, and say what the figures are worth."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", type=Path, default=Path(__file__).with_suffix(".toml"))
    parser.add_argument("--batch", type=int, default=512, help="sequences of 2,048 tokens in a global batch")
    asked = parser.parse_args()
    cluster, model = DescribedCluster.from_file(asked.cluster), make_model(asked.batch)
    ranked, devices = make_ranking(cluster, model), cluster.machines.workers * DEVICES
    print(f"{model.parameters / 1e9:.0f} billion parameters on {devices} devices; not run, not measured")
    for row in ranked.rows:
        step = f"{format_seconds(row.seconds)}" if row.seconds else "–"
        print(f"{row.strategy!s:<56}{step:>8}{format_bytes(row.memory):>12}  {row.reason}")
    for sentence in ranked.sensitivities:
        print(sentence)
    best = ranked.best
    assert best.seconds is not None, "the best is predicted"
    rate = model.step_flops / best.seconds / devices / 1e12
    print(f"{best.strategy}: {rate:.0f} TFLOP/s of each device, as predicted. Not run, not measured.")


if __name__ == "__main__":
    main()
