"""What a worker will ask for next, and what is drawn by chance while a batch is made: pure parts of loading ahead."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import manyhands as mh
from manyhands.data.randomness import GENERATORS, drawn_apart, seed_all
from manyhands.data.reading import Key, Loading, Upcoming
from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.errors import UserError


def steps(keys: list[Key]) -> list[int]:
    return [step for step, _, _ in keys]


@pytest.mark.parametrize(
    ("settings", "report"),
    [
        ({"workers": -1}, "loading: workers is -1; it must be an integer of at least 0"),
        ({"workers": True}, "loading: workers is True"),
        ({"workers": 1.5}, "loading: workers is 1.5"),
        ({"ahead": 0}, "loading: ahead is 0; it must be an integer of at least 1"),
        ({"pinned": 1}, "loading: pinned is 1; it must be True or False"),
        ({"timeout_s": 0}, "loading: timeout_s is 0; it must be a number above 0"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(settings: dict[str, Any], report: str) -> None:
    with pytest.raises(UserError, match=report):
        Loading(**settings)


def test_batches_are_expected_as_far_apart_as_they_came() -> None:
    upcoming = Upcoming(steps=20)
    assert upcoming.after((3, 1, 2), 3) == [(4, 1, 2), (5, 1, 2), (6, 1, 2)], (
        "the next ones, of the same part"
    )
    assert steps(upcoming.after((6, 0, 1), 2)) == [9, 12], "every third"
    assert steps(upcoming.after((6, 0, 2), 2)) == [9, 12], "the same again, of another part"
    assert steps(upcoming.after((9, 0, 1), 2)) == [12, 15]
    assert steps(upcoming.after((10, 0, 1), 2)) == [13, 16], "one exception is no rule"
    assert steps(upcoming.after((16, 0, 1), 3)) == [19], "none is after the last"
    assert upcoming.after((19, 0, 1), 3) == []


def test_what_is_drawn_apart_follows_from_its_seed_and_leaves_no_trace() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    seed_all(1)
    expected = draw()
    seed_all(7)
    before = [take() for take, _ in GENERATORS]
    with drawn_apart(1):
        assert draw() == expected
        draw()
    for (take, _), state in zip(GENERATORS, before, strict=True):
        assert str(take()) == str(state)


class Augmented(Dataset[torch.Tensor]):
    """Every sample is drawn anew each time."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(()) + random.random() + float(np.random.rand())


def pieces(microbatches: int, *, model_draws: int) -> list[list[float]]:
    task = mh.Task(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch).mean(),
        data=Augmented(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=6,
        microbatches=microbatches,
    )
    computer = Computer(TrainingPlan(task=task, steps=4, seed=5, evaluate_every=9, checkpoint_every=0), 0)
    found = []
    for piece in computer.share(1, 0, 1).pieces:
        found.append(piece.fetch().tolist())
        torch.rand(model_draws)
    return found


def test_augmentation_depends_on_the_piece_and_not_on_what_the_model_draws() -> None:
    assert pieces(2, model_draws=3) == pieces(2, model_draws=8), "the second piece, too"
    first, second = pieces(2, model_draws=0)
    assert len({value % 1 for value in first + second}) == 6, "every sample draws its own"


def test_what_fails_to_load_names_its_sample() -> None:
    class Broken(Augmented):
        def __getitem__(self, index: int) -> torch.Tensor:
            raise OSError(f"image {index}.png is truncated")

    task = mh.Task(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch).mean(),
        data=Broken(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=1,
    )
    with pytest.raises(OSError, match=r"image \d+.png is truncated") as caught:
        mh.fit(task, "single", steps=1)
    number = str(caught.value).split()[1].removesuffix(".png")
    assert f"raised for sample {number} of data" in caught.value.__notes__


def test_arrays_need_no_loader_process() -> None:
    def task(data: Any, **changes: Any) -> mh.Task:
        settings = {
            "model": lambda: torch.nn.Linear(1, 1),
            "loss": lambda model, batch: model(batch).mean(),
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            "loading": mh.Loading(workers=3),
        }
        return mh.Task(data=data, **{**settings, **changes})

    assert task(torch.zeros(8, 1)).loaders == 0
    assert task(torch.zeros(8, 1), collate=torch.stack).loaders == 3, (
        "collate is the user's, and takes its time"
    )
    assert task(Augmented()).loaders == 3
    assert task(mh.PerWorker(lambda rank, world: [1.0])).loaders == 1, "a stream goes on from where it is"
    with pytest.raises(UserError, match=r"loading is 2; it must be a Loading, such as Loading\(workers=2\)"):
        task(torch.zeros(8, 1), loading=2)
