"""Loader processes: the same batches in the same order under every strategy, read while the worker computes.

What goes wrong in one is named, and none is left behind.
"""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import manyhands as mh
from equality import same_bits
from manyhands.errors import Hang, ManyhandsError, WorkerFailed
from manyhands.places.local.loaders import Loaders
from manyhands.strategies.registry import STRATEGIES

pytestmark = pytest.mark.filterwarnings("ignore:hogwild on a dense model")

STEPS, SAMPLES, BATCH = 5, 14, 6
"""Of 6, 6 and 2 samples: an epoch ends within a run."""
SOON_S = 30.0
WAYS = {
    "single": ("single", 1),
    "mirrored": ("mirrored", 2),
    "allreduce": ("allreduce algorithm=ring elastic=yes", 2),
    "central": ("central", 2),
    "sharded": ("sharded", 2),
    "ps": ("ps consistency=sync", 2),
    "hogwild": ("hogwild order=turns", 2),
    "local": ("local steps=2", 2),
    "federated": ("federated clients=4 batch=2 together=1", 2),
    "pipeline": ("pipeline microbatches=2", 2),
    "tensor": ("tensor slices=2", 2),
}
NO_STREAMS = ("ps", "federated")
"""Which refuse data that can only be iterated."""


def drawn(index: int) -> tuple[Tensor, Tensor]:
    """A sample, augmented by all generators that there are."""
    chance = torch.rand(4) + random.random() + float(np.random.rand())
    return chance + index / SAMPLES, torch.tensor([index % 3.0])


class Samples(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return drawn(index)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from map(drawn, range(SAMPLES))


computes: set[int] = set()
"""The processes that have built a model: no loader process is among them."""


def build() -> nn.Module:
    computes.add(os.getpid())
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


def in_loader() -> bool:
    """Whether this process loads batches; a worker reads some samples itself, to try the loss."""
    return os.getpid() not in computes


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def task(data: Any = None, loaders: int = 2, **changes: Any) -> mh.Task:
    settings: dict[str, Any] = {
        "model": build,
        "loss": loss,
        "data": Samples() if data is None else data,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        "batch_size": BATCH,
        "loading": mh.Loading(workers=loaders),
    }
    return mh.Task(**{**settings, **changes})


def weights(given: mh.Task, way: str, **arguments: Any) -> dict[str, Tensor]:
    text, workers = WAYS[way]
    return mh.fit(given, text, workers=workers, **{"steps": STEPS, **arguments}).model.state_dict()


def test_every_strategy_has_a_row() -> None:
    assert WAYS.keys() == STRATEGIES.keys()


@pytest.mark.parametrize(
    ("way", "data"),
    [
        *((way, Samples()) for way in WAYS),
        *((way, Stream()) for way in WAYS if way not in NO_STREAMS),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_weights_are_the_same_bits_with_and_without_loader_processes(way: str, data: Any) -> None:
    length = {"rounds": 2, "steps": None} if way == "federated" else {}
    plain = weights(task(data, loaders=0), way, **length)
    assert same_bits(plain, weights(task(data), way, **length))


@pytest.mark.parametrize("data", [Samples(), Stream()], ids=["map", "stream"])
def test_a_resumed_run_goes_on_within_the_epoch(data: Any, tmp_path: Path) -> None:
    whole = weights(task(data, loaders=0), "single")
    weights(task(data), "single", steps=2, out=tmp_path / "run")
    assert same_bits(whole, weights(task(data), "single", out=tmp_path / "run", resume=True))


class Counted(Samples):
    """Tells the worker whose batches are loaded, which is the parent of this process, of every sample."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if in_loader():
            with (self.folder / str(os.getppid())).open("ab") as file:
                file.write(b".")
        return drawn(index)


def waiting_loss(folder: Path) -> Callable[[nn.Module, Any], Tensor]:
    """Whose step k comes to its end only when a sample of batch k + 1 was asked for."""
    steps = 0

    def compute(model: nn.Module, batch: Any) -> Tensor:
        nonlocal steps
        if not torch.is_grad_enabled():  # the trial of the loss
            return loss(model, batch)
        steps += 1
        report, deadline = folder / str(os.getpid()), time.monotonic() + SOON_S
        while steps < STEPS and (not report.exists() or report.stat().st_size <= steps):
            assert time.monotonic() < deadline, f"nothing was loaded while batch {steps - 1} was computed"
            time.sleep(0.001)
        return loss(model, batch)

    return compute


@pytest.mark.parametrize(
    ("text", "workers", "batch_size", "length"),
    [
        ("single", 1, 1, {"steps": STEPS}),
        ("mirrored", 2, 2, {"steps": STEPS}),
        ("ps consistency=sync", 2, 2, {"steps": STEPS}),
        ("hogwild order=turns", 2, 1, {"steps": 2 * STEPS}),  # there a batch is one worker's
        ("federated clients=2 batch=1 together=1", 2, 1, {"rounds": 1}),
    ],
)
def test_the_next_batch_is_loaded_while_the_last_is_computed(
    text: str, workers: int, batch_size: int, length: dict[str, int], tmp_path: Path
) -> None:
    given = task(Counted(tmp_path), loaders=1, batch_size=batch_size, loss=waiting_loss(tmp_path))
    mh.fit(given, text, workers=workers, **length)


class Broken(Samples):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 3:
            raise KeyError("no image 3")
        return drawn(index)


@pytest.mark.parametrize(("way", "kind"), [("single", KeyError), ("mirrored", WorkerFailed)])
def test_what_the_dataset_raises_is_raised_with_its_sample_and_its_line(way: str, kind: type) -> None:
    with pytest.raises(kind, match="no image 3") as caught:
        weights(task(Broken()), way)
    report = "\n".join((str(caught.value), *getattr(caught.value, "__notes__", ())))
    assert "raised for sample 3 of data" in report
    assert re.search(r"in a loader process of worker \d:", report)
    assert 'raise KeyError("no image 3")' in report


class Wanting(Exception):
    """Cannot be made of its message alone."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} of {second}")


class Unlike(Samples):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        raise Wanting(1, 2)


def test_an_error_that_cannot_be_sent_is_reported() -> None:
    with pytest.raises(RuntimeError, match="Wanting: 1 of 2"):
        weights(task(Unlike()), "single")


def test_data_and_batches_that_cannot_be_sent_are_refused() -> None:
    locked = Samples()
    locked.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(mh.UserError, match=r"loading: data cannot be sent to loader processes .*workers=0"):
        weights(task(locked), "single")
    report = "a loader process cannot send its batch .*workers=0"
    with pytest.raises(mh.UserError, match=report):
        weights(task(collate=lambda samples: (one for one in samples)), "single")


class Deadly(Samples):
    """The process that loads sample 5 is killed."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 5 and in_loader():
            os.kill(os.getpid(), signal.SIGKILL)
        return drawn(index)


@pytest.mark.parametrize("way", ["single", "mirrored"])
def test_a_killed_loader_process_is_named(way: str) -> None:
    with pytest.raises(ManyhandsError, match=r"loader \d of worker \d \(pid \d+\) was killed by SIGKILL"):
        weights(task(Deadly()), way)


def dying_loss(model: nn.Module, batch: Any) -> Tensor:
    dying_loss.calls += torch.is_grad_enabled()  # type: ignore[attr-defined]
    if dying_loss.calls == 3:  # type: ignore[attr-defined]
        os.kill(os.getpid(), signal.SIGKILL)
    return loss(model, batch)


dying_loss.calls = 0  # type: ignore[attr-defined]


class Sleeper(Samples):
    """Leaves its process id, and is at work for ever at the end of an epoch."""

    def __init__(self, folder: Path, sleeps: bool = True) -> None:
        self.folder, self.sleeps = folder, sleeps

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not in_loader():
            return drawn(index)
        (self.folder / str(os.getpid())).touch()
        if index == 5 and self.sleeps:
            time.sleep(1e9)
        return drawn(index)


def test_loader_processes_end_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="was killed by SIGKILL"):
        weights(task(Sleeper(tmp_path, sleeps=False), loss=dying_loss), "mirrored")
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 4, "two for each worker"
    deadline = time.monotonic() + SOON_S
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "a loader process outlived its worker"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_loader_process_that_hangs_is_named_with_its_line(tmp_path: Path) -> None:
    slow = task(Sleeper(tmp_path), loading=mh.Loading(workers=1, timeout_s=1))
    with pytest.raises(
        ManyhandsError, match=r"loader 0 of worker 0 \(pid \d+\) returned nothing for 1 s: "
    ) as caught:
        weights(slow, "single")
    assert "it is in time.sleep(1e9) (test_loading.py:" in str(caught.value)


def test_the_watchdog_names_a_loader_process_and_its_line(tmp_path: Path) -> None:
    with pytest.raises(Hang, match="holds up the run") as caught:
        weights(task(Sleeper(tmp_path)), "mirrored", options=mh.Options(watchdog_s=3))
    report = "it has been waiting for its loader process, which is in time.sleep(1e9) (test_loading.py:"
    assert report in str(caught.value)


class Doubling:
    """Reads its key; 13 brings bad luck."""

    def read(self, key: tuple[int], kept_from: int) -> tuple[int, Tensor]:
        assert key[0] >= kept_from
        if key[0] == 13:
            raise ValueError("13")
        return key[0], torch.full((300_000,), float(key[0]))


def test_a_wrong_guess_is_forgotten_and_the_right_thing_is_read() -> None:
    chance = random.Random(4)
    with Loaders[tuple[int]](Doubling, mh.Loading(workers=2), 2, "the test") as loaders:
        at = 0
        for _ in range(60):
            at += chance.choice((1, 1, 1, 2, 3))
            guessed = [(at + chance.choice((1, 2)) * further,) for further in range(1, 5)]
            if at == 13:
                continue
            number, values = loaders.get((at,), guessed, kept_from=at)
            assert (number, values.unique().tolist()) == (at, [float(at)])
            values += 1  # it is the worker's own
        with pytest.raises(ValueError, match="13"):
            loaders.get((13,), [], kept_from=13)
