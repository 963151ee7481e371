"""Loading while computing: `fit` with loader processes beside a plain torch loop with a `DataLoader`.

    python benchmarks/loading.py [--json benchmarks/results/loading-2.json] [--rounds 5] [--steps 24]

Three kinds of data, each with the same model and optimizer for everyone. *Waiting* data take 128 ms a batch and no
processor, as a network's or a disk's do, beside a step of 120 ms of which the host only waits, as for a GPU. A *stream*
of them can be read by one process alone. *Decoding* data are unpacked and normalised by the processor, beside a step
that computes. A step is the time from one call of the loss to the next, its median over a run without the first steps,
in which processes start; the contenders take turns, and of the rounds the median is told.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import manyhands as mh

BATCH = 16
SAMPLE_S, STEP_S = 0.008, 0.120  # 128 ms a batch beside 120 ms a step
SKIPPED = 6  # steps of a run that are not counted
SHAPE = (3, 96, 96)
SAMPLES = 4096


class Waiting(Dataset[tuple[Tensor, Tensor]]):
    """Samples that are waited for."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(SAMPLE_S)
        return torch.full((64,), index / SAMPLES), torch.tensor([float(index % 2)])


class WaitingStream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same, one after another."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        samples = Waiting()
        return (samples[index] for index in range(SAMPLES))


class Decoding(Dataset[tuple[Tensor, Tensor]]):
    """Images that are unpacked, cropped, flipped and normalised, as those of a folder are."""

    def __init__(self) -> None:
        chance = np.random.default_rng(0)
        pixels = chance.integers(0, 64, (4, SHAPE[0], SHAPE[1] + 16, SHAPE[2] + 16), np.uint8)
        self.packed = [zlib.compress(image.tobytes()) for image in pixels]

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raw = np.frombuffer(zlib.decompress(self.packed[index % 4]), np.uint8)
        image = raw.reshape(SHAPE[0], SHAPE[1] + 16, SHAPE[2] + 16)
        top, left = np.random.randint(0, 16, 2)
        cropped = image[:, top : top + SHAPE[1], left : left + SHAPE[2]][:, :, ::-1].astype(np.float32)
        found = torch.from_numpy((cropped - cropped.mean()) / (cropped.std() + 1e-3))
        return found, torch.tensor([float(index % 2)])


def small() -> nn.Module:
    """For data whose steps wait."""
    return nn.Linear(64, 1)


def convolving() -> nn.Module:
    """A step of about as long as its batch takes to decode."""
    layers = nn.Conv2d(3, 12, 5, stride=2), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2), nn.ReLU()
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(24 * 16, 1))


class Case:
    """Data, a model, and the moments at which its loss was called."""

    def __init__(self, data: Any, build: Callable[[], nn.Module], wait_s: float, loaders: int) -> None:
        self.data, self.build, self.wait_s, self.loaders = data, build, wait_s, loaders
        self.called: list[float] = []

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Which both loops call once a step."""
        self.called.append(time.monotonic())
        time.sleep(self.wait_s)
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def plain(self, workers: int, steps: int) -> None:
        """The loop that a user writes."""
        model = self.build()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        order = {} if isinstance(self.data, IterableDataset) else {"shuffle": True}
        loader = DataLoader(self.data, batch_size=BATCH, num_workers=workers, **order)
        for batch in itertools.islice(loader, steps):
            optimizer.zero_grad()
            self.loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def ours(self, workers: int, steps: int) -> None:
        """The same by `fit`."""
        task = mh.Task(
            model=self.build,
            loss=self.loss,
            data=self.data,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
            batch_size=BATCH,
            loading=mh.Loading(workers=workers),
        )
        mh.fit(task, "single", steps=steps, options=mh.Options(progress="none"))

    def step_s(self, run: Callable[[int, int], None], workers: int, steps: int) -> float:
        """The median step of one run."""
        self.called.clear()
        run(workers, steps)
        return statistics.median(later - one for one, later in itertools.pairwise(self.called[SKIPPED:]))


def measure(case: Case, rounds: int, steps: int) -> dict[str, Any]:
    """All contenders in turn, so many times."""
    contenders = {
        "plain loop, num_workers=0": (case.plain, 0),
        f"plain loop, num_workers={case.loaders}": (case.plain, case.loaders),
        "fit, workers=0": (case.ours, 0),
        f"fit, workers={case.loaders}": (case.ours, case.loaders),
    }
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, (run, workers) in contenders.items():
            found[name].append(case.step_s(run, workers, steps))
    medians = {name: statistics.median(times) for name, times in found.items()}
    _, plain, _, ours = medians.values()
    pairs = zip(found[list(found)[1]], found[list(found)[3]], strict=True)
    return {
        "loaders": case.loaders,
        "rate_to_plain": plain / ours,
        "rate_to_plain_by_round": [one / other for one, other in pairs],
        "contenders": {name: {"median_s": medians[name], "rounds_s": found[name]} for name in contenders},
    }


def main() -> None:
    """Measure, print a table, and write the results where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=24)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    cases = {
        "waiting, by number": Case(Waiting(), small, STEP_S, 2),
        "waiting, a stream": Case(WaitingStream(), small, STEP_S, 1),
        "decoding": Case(Decoding(), convolving, 0.0, 2),
    }
    result: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "torch": torch.__version__,
        "batch": BATCH,
        "rounds": asked.rounds,
        "load_average": os.getloadavg()[0],
        "cases": {},
    }
    print(f"{'':20} {'loop':28} {'a step':>10}")
    for name, case in cases.items():
        found = result["cases"][name] = measure(case, asked.rounds, asked.steps)
        for contender, row in found["contenders"].items():
            print(f"{name:20} {contender:28} {row['median_s'] * 1e3:7.1f} ms")
        print(f"{name:20} {'our rate to the plain loop':28} {found['rate_to_plain']:9.3f}")
    if asked.json is not None:
        asked.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
