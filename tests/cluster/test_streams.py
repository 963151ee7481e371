"""Data that can only be iterated: batches are those of a DataLoader, and a resumed run finds its place."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import manyhands as mh
from equality import distance, train_in_threads
from manyhands.data.randomness import mix, seed_all
from manyhands.data.reading import StreamShares
from manyhands.errors import UserError
from manyhands.native.group.shared_group import SharedGroupFiles
from ways import connect

STEPS, BATCH = 12, 8
MODEL = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """So many samples a pass, 29 by default: batches of 8, 8, 8 and 5."""

    def __init__(self, samples: int = 29) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(4)
        for _ in range(self.samples):
            yield (
                torch.randn(5, generator=generator, dtype=torch.float64),
                torch.randn(3, generator=generator, dtype=torch.float64),
            )


class Chance(IterableDataset[float]):
    """Draws from the global generators, as a shuffle buffer does."""

    def __iter__(self) -> Iterator[float]:
        for _ in range(10):
            yield float(torch.rand(()))


def loss(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)


def task(**changes: Any) -> mh.Task:
    settings: dict[str, Any] = {
        "model": lambda: copy.deepcopy(MODEL),
        "loss": loss,
        "data": Stream(),
        "optimizer": optimizer,
        "batch_size": BATCH,
    }
    return mh.Task(**{**settings, **changes})


def plain_loop(steps: int = STEPS) -> dict[str, Tensor]:
    """What a user writes without us."""
    model = copy.deepcopy(MODEL)
    stepper = optimizer(model.parameters())
    loader = DataLoader(Stream(), batch_size=BATCH)
    batches = itertools.chain.from_iterable(itertools.repeat(loader))
    for batch in itertools.islice(batches, steps):
        stepper.zero_grad()
        loss(model, batch).backward()  # type: ignore[no-untyped-call]
        stepper.step()
    return model.state_dict()


def shares(stream: Any, microbatches: int = 1) -> StreamShares:
    return StreamShares(stream, None, BATCH, microbatches, seeded=lambda step: seed_all(mix(7, step)))


def numbers(found: StreamShares, step: int, part: int = 0, parts: int = 1) -> list[float]:
    share = found.share(step, part, parts)
    return [value for piece in share.pieces for value in piece.fetch().tolist()]


def test_batches_are_those_of_a_loader_that_begins_again() -> None:
    ours = shares(Stream())
    loader = list(DataLoader(Stream(), batch_size=BATCH))
    for step in range(8):
        expected = loader[step % 4]
        (whole,) = ours.share(step, 0, 1).pieces
        assert all(torch.equal(one, other) for one, other in zip(whole.fetch(), expected, strict=True))
        assert ours.share(step, 0, 1).batch_samples == len(expected[0])
        parts = [ours.share(step, part, 3) for part in range(3)]
        assert sum(part.weight for part in parts) == pytest.approx(1.0)
        rows = torch.cat([piece.fetch()[0] for part in parts for piece in part.pieces])
        assert torch.equal(rows, expected[0])


def test_chance_is_the_same_for_all_whatever_they_draw_between_and_wherever_they_begin() -> None:
    one, other = shares(Chance()), shares(Chance(), microbatches=2)
    found = {}
    for step in range(6):
        found[step] = numbers(one, step)
        torch.rand(step)  # what a model draws
    assert found[0] != found[2], "every pass draws anew"
    assert numbers(other, 4) == found[4], "begins late"
    assert numbers(other, 1, 1, 2) == found[1][len(found[1]) // 2 + len(found[1]) % 2 :], "and goes back"
    assert numbers(other, 5) == found[5]


@pytest.mark.parametrize(
    ("way", "world"), [("single", 1), ("mirrored", 3), ("central", 3), ("local steps=1", 1)]
)
def test_the_weights_are_those_of_the_plain_loop(way: str, world: int) -> None:
    with SharedGroupFiles.create(world) as files:
        found = train_in_threads(task(), world, lambda rank: connect(way, files, rank), STEPS)
    assert max(distance(weights, plain_loop()) for weights in found) < 1e-9


@pytest.mark.filterwarnings("ignore:hogwild on a dense model")
@pytest.mark.parametrize(
    ("strategy", "workers"), [("single", 1), ("mirrored", 2), ("hogwild order=turns", 2)]
)
def test_a_resumed_run_goes_on_in_the_stream(strategy: str, workers: int, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"workers": workers, "out": tmp_path / "run"}
    mh.fit(task(microbatches=2), strategy, steps=5, **arguments)
    run = mh.fit(task(), strategy, steps=STEPS, resume=True, **arguments)
    assert distance(run.model.state_dict(), plain_loop()) < 1e-9
    assert run.summary["samples"] == 29 * 3 - 37, "of the second life"
    assert [row["step"] for row in run.history.steps] == list(range(1, STEPS + 1))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match="give steps=, the number of global batches, instead of epochs="):
        mh.fit(task(), "single")
    with pytest.raises(UserError, match="whose epochs have no known length"):
        mh.fit(task(), "single", epochs=2)
    with pytest.raises(UserError, match="data is an IterableDataset: a batch of ps may be computed again"):
        mh.fit(task(), "ps", workers=2, steps=2)
    with pytest.raises(UserError, match=r"evaluation is .*Stream, which can only be iterated"):
        task(evaluation=Stream())
    with pytest.raises(UserError, match="data, a Stream, gave no sample; give at least one"):
        mh.fit(task(data=Stream(0)), "single", steps=2)

    class Once(IterableDataset[Any]):
        def __init__(self) -> None:
            self.left = iter(list(Stream()))

        def __iter__(self) -> Iterator[Any]:
            return self.left

    with pytest.raises(UserError, match="data, a Once, gave no sample in pass 2"):
        mh.fit(task(data=Once()), "single", steps=6)
