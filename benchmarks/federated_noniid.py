"""Clients whose labels differ: FedAvg, FedProx, SCAFFOLD, FedAdam and Ditto side by side, by `manyhands compare`.

    python benchmarks/federated_noniid.py [--rounds 40] [--repeats 3] [--clients 20] [--out FOLDER] [--fresh]

The digits of scikit-learn, dealt to clients by Dirichlet(0.1) over the labels, half of the clients in each round, some
epochs of plain SGD on each. The common model is measured on the test set. A client's own accuracy is that of the model
which it uses itself on the test samples, weighted as its labels are: Ditto's own, the common one of all others, and
FedAvg's after fine-tuning. Everything follows from the seed; nothing here is a time. Reports and pictures: --out. The
result is written after each seed; a seed whose runs have all ended is not run again, unless --fresh.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.data.store.rundir import RunDirectory
from manyhands.lab.compare.compare_report import machine, report
from manyhands.lab.compare.comparison import Target, trials
from manyhands.lab.compare.figures import Figures, figures
from manyhands.lab.compare.findings import paragraph
from manyhands.lab.compare.run_comparison import CompareSettings, compare, measure
from manyhands.strategies.federated.client_data import Partition, labels_of
from manyhands.strategies.federated.clients import held
from manyhands.strategies.federated.simulation import fine_tuned, models_kept
from manyhands.strategy import Strategy
from manyhands.workloads.tasks.digits import digits

RESULT = Path(__file__).parent / "results" / "federated-noniid.json"
PARTITION, FRACTION, EPOCHS, BATCH, RATE = "dirichlet:0.1", 0.5, 5, 10, 0.03
ALGORITHMS = ("fedavg", "fedprox:0.1", "scaffold", "fedadam:0.01", "ditto:0.1")
TARGET = "accuracy=0.9"
TUNED = 1  # epochs


def task() -> mh.Task:
    return replace(digits(), optimizer=partial(torch.optim.SGD, lr=RATE))


def words(algorithm: str, clients: int) -> str:
    return (
        f"federated clients={clients} fraction={FRACTION} epochs={EPOCHS} batch={BATCH} "
        f"algorithm={algorithm} partition={PARTITION}"
    )


def by_label(made: mh.Task, model: nn.Module) -> np.ndarray:
    """The accuracy on the test samples of each label."""
    images, labels = made.evaluation
    with torch.no_grad():
        right = (model.eval()(images).argmax(1) == labels).double()
    return np.array([float(right[labels == label].mean()) for label in range(10)])


def mixes(made: mh.Task, clients: int, seed: int) -> np.ndarray:
    """What part of each client's samples has which label."""
    parts = Partition.parse(PARTITION).split(made.data, made.samples, clients, seed)
    labels = labels_of(made.data, made.samples)
    return np.stack([np.bincount(labels[part], minlength=10) / len(part) for part in parts])


def with_tensors(model: nn.Module, tensors: Sequence[Tensor]) -> nn.Module:
    with torch.no_grad():
        for mine, given in zip(held(model), tensors, strict=True):
            mine.copy_(given)
    return model


def own_models(
    run: Path, made: mh.Task, strategy: Any, seed: int
) -> Iterator[tuple[str, dict[int, nn.Module]]]:
    """By the way in which it is each client's: the models that clients use themselves."""
    loaded = RunDirectory.open(run, lock=False).checkpoints().load()
    common = made.model()
    common.load_state_dict(loaded.model)
    kept = models_kept(loaded.extra.get("exchange", {})) if strategy.algorithm.startswith("ditto") else {}
    yield (
        strategy.algorithm,
        {
            client: with_tensors(made.model(), kept[client]) if client in kept else common
            for client in range(strategy.clients)
        },
    )
    if strategy.algorithm == "fedavg":
        tuned = fine_tuned(made, strategy, common, epochs=TUNED, seed=seed)
        yield "fedavg, fine-tuned", {client: with_tensors(made.model(), one) for client, one in tuned}


def own_accuracy(made: mh.Task, models: dict[int, nn.Module], mix: np.ndarray) -> dict[str, float]:
    each = [float(by_label(made, model) @ mix[client]) for client, model in sorted(models.items())]
    return {"mean": statistics.fmean(each), "worst": min(each), "deviation": statistics.pstdev(each)}


def ended(out: Path, strategies: Sequence[Strategy], settings: CompareSettings) -> Figures | None:
    """What came out of the runs of a seed, where all have ended before."""
    order = trials(len(strategies), 1)
    folders = [out / trial.folder(strategies[trial.place]) for trial in order]
    if not all((folder / "summary.json").is_file() for folder in folders):
        return None
    runs = [
        measure(trial, folder, strategies[trial.place]) for trial, folder in zip(order, folders, strict=True)
    ]
    every = settings.evaluate_every or 1
    return figures([(strategy, 1) for strategy in strategies], runs, settings.target, every)


def run_seed(
    made: mh.Task, strategies: Sequence[Strategy], out: Path, settings: CompareSettings, title: str
) -> Figures:
    """All algorithms with one seed, and their report."""
    shutil.rmtree(out, ignore_errors=True)
    found = compare(made, "; ".join(map(str, strategies)), out=out, settings=settings)
    if found.failed or found.interrupted:
        raise SystemExit(f"seed {settings.seed}: a run failed or was ended: {found.figures.to_dict()}")
    page = (title, "benchmarks/federated_noniid.py", machine(), found.notes)
    text = report(found.figures, paragraph(found.figures), *page)
    (out / "report.html").write_text(text)
    return found.figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3, help="seeds, from 0 on")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("runs/federated-noniid"))
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--fresh", action="store_true")
    options = parser.parse_args()
    made = task()
    strategies = [Strategy.parse(words(one, options.clients)) for one in ALGORITHMS]
    result: dict[str, Any] = {
        "task": "digits",
        "partition": PARTITION,
        "clients": options.clients,
        "fraction": FRACTION,
        "epochs": EPOCHS,
        "batch": BATCH,
        "rate": RATE,
        "rounds": options.rounds,
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "seeds": [],
    }
    for seed in range(options.repeats):
        out = options.out / f"seed-{seed}"
        settings = CompareSettings(
            workers=1,
            rounds=options.rounds,
            seed=seed,
            target=Target.parse(TARGET),
            evaluate_every=max(1, options.rounds // 30),
        )
        title = f"digits by {PARTITION} over {options.clients} clients, seed {seed}"
        found = None if options.fresh else ended(out, strategies, settings)
        found = found or run_seed(made, strategies, out, settings, title)
        mix = mixes(made, options.clients, seed)
        own: dict[str, dict[str, float]] = {}
        for trial in trials(len(strategies), 1):
            strategy = strategies[trial.place]
            run = out / trial.folder(strategy)
            for name, models in own_models(run, made, strategy, seed):
                own[name] = own_accuracy(made, models, mix)
        result["seeds"].append({"seed": seed, **found.to_dict(), "own": own})
        print(json.dumps({"seed": seed, "own": own}, indent=1), flush=True)
        options.result.write_text(json.dumps(result, indent=1) + "\n")
    print(options.result)


if __name__ == "__main__":
    main()
