"""What a group does besides training: stopping together, gathering, checkpoints, and workers that go their own way."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Sampler, TensorDataset

from equality import distance, same_bits
from manyhands.errors import Aborted, PeerTimeout, UserError
from manyhands.interop.own_loop.worker_group import WorkerGroup
from own_loop import Nobody, mlp, on_workers, regression, shuffled, weights


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


COUNTS = [2, 5, 3]
"""Steps of workers that go different distances."""


def prepared(group: WorkerGroup, *others: Any, lr: float = 0.1) -> Any:
    model = mlp()
    return group.prepare(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), *others)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    x, y = batch
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def rows(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("moment", ["before forward", "before backward", "after step"])
def test_a_stop_by_one_worker_ends_the_loops_of_all_after_the_same_step(world: int, moment: str) -> None:
    def loop(group: WorkerGroup) -> tuple[int, int, bool]:
        model, optimizer, loader, evaluation = prepared(
            group, shuffled(regression()), DataLoader(rows(10), batch_size=4)
        )
        steps = evaluated = 0
        for _ in range(3):
            for x, y in loader:
                asked = group.rank == world - 1 and steps == 5
                if asked and moment == "before forward":
                    group.stop()
                loss = nn.functional.mse_loss(model(x), y)
                if asked and moment == "before backward":
                    group.stop()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if asked and moment == "after step":
                    group.stop()
                steps += 1
            evaluated += sum(1 for _ in evaluation)
        return steps, evaluated, group.is_stopped

    expected = (6 if moment == "before forward" else 7, 9, True)
    assert on_workers(world, loop) == [expected] * world


def test_a_stop_holds_for_a_loop_that_was_broken_off() -> None:
    def loop(group: WorkerGroup) -> list[int]:
        model, optimizer, loader = prepared(group, shuffled(regression()))
        lengths = []
        for _ in range(3):
            steps = 0
            for batch in loader:
                group.stop()
                step(model, optimizer, batch)
                steps += 1
                break
            lengths.append(steps)
        return lengths

    assert on_workers(2, loop) == [[1, 0, 0]] * 2


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_gathered_shares_are_the_batches_of_the_loader(world: int) -> None:
    def loop(group: WorkerGroup) -> list[list[int]]:
        loader = group.prepare(DataLoader(rows(45), batch_size=13))
        return [group.gather(x).tolist() for (x,) in loader]

    expected = [batch.tolist() for (batch,) in DataLoader(rows(45), batch_size=13)]
    assert on_workers(world, loop) == [expected] * world


def test_no_worker_meets_an_empty_batch_and_fillers_weigh_nothing() -> None:
    def loop(group: WorkerGroup) -> list[tuple[int, float]]:
        loader = group.prepare(DataLoader(rows(6), batch_size=5))
        return [(len(x), float(group.mean(x.double().mean()))) for (x,) in loader]

    sizes = [[size for size, _ in found] for found in on_workers(4, loop)]
    assert sizes == [[2, 1], [1, 1], [1, 1], [1, 1]]
    means = [[mean for _, mean in found] for found in on_workers(4, loop)]
    assert means == [[2.0, 5.0]] * 4


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64],
)
def test_gather_keeps_every_bit_of_uneven_tensors(dtype: torch.dtype) -> None:
    def part(rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rank)
        return (torch.randn(3 * rank, 5, 2, generator=generator) * 50).to(dtype)

    expected = torch.cat([part(rank) for rank in range(3)])
    for found in on_workers(3, lambda group: group.gather(part(group.rank))):
        assert found.dtype == dtype
        assert torch.equal(found, expected)


def test_gather_of_a_large_tensor_and_of_scalars() -> None:
    def loop(group: WorkerGroup) -> tuple[torch.Tensor, list[int]]:
        return group.gather(torch.full((200_000,), float(group.rank))), group.gather(
            torch.tensor(group.rank)
        ).tolist()

    for large, scalars in on_workers(2, loop):
        assert torch.equal(large, torch.cat([torch.zeros(200_000), torch.ones(200_000)]))
        assert scalars == [0, 1]


@pytest.mark.parametrize(
    ("odd", "report"),
    [
        (
            torch.zeros(4, 3),
            r"worker 0 has 4 × \(2,\) of torch.float32, worker 1 has 4 × \(3,\) of torch.float32",
        ),
        (torch.zeros(4, 2).double(), "worker 1 has 4 × .* of torch.float64"),
    ],
)
def test_tensors_that_do_not_fit_together_are_named(odd: torch.Tensor, report: str) -> None:
    found = on_workers(2, lambda group: group.gather(odd if group.rank else torch.zeros(4, 2)), errors=True)
    for error in found:
        assert isinstance(error, UserError)
        assert re.search(report, str(error))


def test_only_worker_0_prints(capsys: pytest.CaptureFixture[str]) -> None:
    on_workers(3, lambda group: group.print("from", group.rank, end="!\n"))
    assert capsys.readouterr().out == "from 0!\n"


@pytest.mark.parametrize(
    ("first", "second"),
    [("mirrored", "central"), ("central", "mirrored"), ("allreduce link=tcp codec=topk:0.1",) * 2],
)
def test_a_run_goes_on_from_a_checkpoint_to_the_weights_of_an_uninterrupted_one(
    first: str, second: str, tmp_path: Path
) -> None:
    batches = [tuple(column[at : at + 5] for column in regression().tensors) for at in range(0, 45, 5)]

    def train(group: WorkerGroup, save_at: int | None, stop_at: int) -> dict[str, torch.Tensor]:
        model, optimizer = prepared(group)
        resumed = group.load(tmp_path)
        start = 0
        if resumed is not None:
            start = resumed.step
            assert resumed.extra["note"] == "from worker 0"
            assert torch.equal(resumed.extra["numbers"], torch.tensor([1, 2]))
        for number in range(start, stop_at):
            step(model, optimizer, batches[number])
            if number + 1 == save_at:
                extra = {"note": f"from worker {group.rank}", "numbers": torch.tensor([1, 2])}
                group.save(tmp_path, step=number + 1, extra=extra)
        return weights(model)

    whole = on_workers(2, lambda group: train(group, None, 9), strategy=first)
    on_workers(2, lambda group: train(group, 4, 6), strategy=first)
    parts = on_workers(2, lambda group: train(group, None, 9), strategy=second)
    assert same_bits(parts[0], parts[1])
    assert distance(parts[0], whole[0]) < 1e-12


def test_a_checkpoint_of_two_models_and_optimizers(tmp_path: Path) -> None:
    def train(group: WorkerGroup, folder: Path, steps: range) -> dict[str, torch.Tensor]:
        one, two = mlp(), mlp()
        adam = torch.optim.Adam(one.parameters(), lr=0.01)
        sgd = torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9)
        group.prepare(one, two, adam, sgd)
        resumed = group.load(folder)
        assert (resumed.step if resumed is not None else 0) == steps.start
        for _ in steps:
            x = torch.ones(4, 6).double()
            (one(x) + two(x)).square().mean().backward()
            for optimizer in (adam, sgd):
                optimizer.step()
                optimizer.zero_grad()
        group.save(folder, step=steps.stop)
        return weights(nn.ModuleList([one, two]))

    (whole, _) = on_workers(2, lambda group: train(group, tmp_path / "whole", range(8)))
    on_workers(2, lambda group: train(group, tmp_path / "parts", range(3)))
    (parts, _) = on_workers(2, lambda group: train(group, tmp_path / "parts", range(3, 8)))
    assert same_bits(parts, whole)


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows from `begin` to `end`, one by one."""

    def __init__(self, begin: int, end: int) -> None:
        self._columns = regression().tensors
        self._range = range(begin, end)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        x, y = self._columns
        return ((x[row], y[row]) for row in self._range)


def test_a_stream_that_all_read_gives_the_weights_of_the_plain_loop() -> None:
    """45 rows in batches of 7: the last is of 3, and whole batches of 9 rows in between; in eval, too."""

    def loop(group: Any) -> tuple[dict[str, torch.Tensor], float]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = regression().tensors
        streams = [
            DataLoader(Stream(0, 45), batch_size=7),
            [(x[at : at + 9], y[at : at + 9]) for at in (0, 40)],
        ]
        model, optimizer, *streams = group.prepare(model, optimizer, *streams)
        for _ in range(2):
            for stream in streams:
                for batch in stream:
                    step(model, optimizer, batch)
        with torch.no_grad():
            losses = [group.mean((model(a) - b).square().mean()) for a, b in streams[0]]
        return weights(model), float(torch.stack(losses).sum())

    reference, loss = loop(Nobody())
    for world in (2, 5):
        for found, seen in on_workers(world, loop):
            assert distance(found, reference) < 1e-9
            assert abs(seen - loss) < 1e-9


def test_data_that_the_script_has_split_is_refused_with_the_word_that_is_missing() -> None:
    def loop(group: WorkerGroup) -> None:
        for _ in group.prepare(DataLoader(Stream(9 * group.rank, 45), batch_size=4)):
            pass

    for error in on_workers(2, loop, errors=True):
        assert isinstance(error, UserError)
        assert "worker 1 reads a different batch than worker 0" in str(error)
        assert "group.prepare(loader, split=False)" in str(error)


def test_streams_end_together_with_the_shortest_and_every_batch_weighs_the_same() -> None:
    ends = [(0, 12), (12, 20), (20, 36)]  # 3, 2 and 4 batches of 4 rows

    def loop(group: WorkerGroup) -> tuple[int, dict[str, torch.Tensor]]:
        model, optimizer = prepared(group)
        loader = group.prepare(DataLoader(Stream(*ends[group.rank]), batch_size=4), split=False)
        steps = 0
        for _ in range(2):
            for batch in loader:
                step(model, optimizer, batch)
                steps += 1
        return steps, weights(model)

    reference = mlp()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    x, y = regression().tensors
    for at in (0, 4, 0, 4):
        taken = [row for begin, _ in ends for row in range(begin + at, begin + at + 4)]
        step(reference, optimizer, (x[taken], y[taken]))
    for steps, found in on_workers(3, loop):
        assert steps == 4
        assert distance(found, weights(reference)) < 1e-9


def test_an_empty_stream_ends_the_loops_of_all() -> None:
    def loop(group: WorkerGroup) -> int:
        loader = group.prepare(DataLoader(Stream(0, 4 * group.rank), batch_size=2), split=False)
        return sum(1 for _ in loader)

    assert on_workers(3, loop) == [0, 0, 0]


def loop_of_own_length(group: WorkerGroup) -> nn.Module:
    """As many steps as `COUNTS` has for this worker, each on three rows of its own."""
    model, optimizer = prepared(group)
    x, y = regression().tensors
    for number in range(COUNTS[group.rank]):
        optimizer.zero_grad()  # before backward: at the end everyone holds a gradient
        rows = slice(9 * number + 3 * group.rank, 9 * number + 3 * group.rank + 3)
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return model


def test_who_leaves_early_brings_nothing_and_ends_with_the_weights_of_the_others() -> None:
    """Each batch counts for a third, whoever is still there: as torch's own `Join` does it."""
    reference = mlp()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    x, y = regression().tensors
    for number in range(max(COUNTS)):
        optimizer.zero_grad()
        for rank, count in enumerate(COUNTS):
            if number < count:
                part = slice(9 * number + 3 * rank, 9 * number + 3 * rank + 3)
                (nn.functional.mse_loss(reference(x[part]), y[part]) / 3).backward()
        optimizer.step()
    for model in on_workers(3, loop_of_own_length):
        assert distance(weights(model), weights(reference)) < 1e-9


@pytest.mark.parametrize("strategy", ["local steps=2", "allreduce link=tcp codec=auto:0.5"])
def test_who_leaves_early_still_does_what_is_due_at_certain_steps(strategy: str) -> None:
    """Averages after every second step, and the choice of a codec, need all: who has left counts with the others."""
    first, *others = on_workers(3, loop_of_own_length, strategy=strategy, timeout_s=10.0)
    assert distance(weights(first), weights(mlp())) > 1e-3, "they have learned"
    for model in others:
        assert same_bits(weights(model), weights(first))


def test_under_central_nobody_leaves_early() -> None:
    def loop(group: WorkerGroup) -> None:
        model, optimizer = prepared(group)
        for _ in range(1 + group.rank):
            step(model, optimizer, regression().tensors)

    for error in on_workers(2, loop, strategy="central", errors=True):
        assert isinstance(error, UserError | Aborted)
        if isinstance(error, UserError):
            assert "worker 0 has left the group, worker 1 is in backward()" in str(error)


def test_workers_that_go_different_ways_are_named() -> None:
    def loop(group: WorkerGroup) -> None:
        model, optimizer = prepared(group)
        step(model, optimizer, regression().tensors)
        if group.rank == 1:
            group.barrier()
        else:
            step(model, optimizer, regression().tensors)

    for error in on_workers(3, loop, errors=True):
        assert isinstance(error, UserError | Aborted)
        if isinstance(error, UserError):
            report = "worker 0 is in backward(), worker 1 is in barrier(), worker 2 is in backward()"
            assert report in str(error)


class Moody(Sampler[int]):
    """Draws from Python's own generator, which nobody keeps alike."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return 45

    def __iter__(self) -> Iterator[int]:
        return iter(self._random.sample(range(45), 45))


def test_workers_that_read_different_batches_are_named() -> None:
    def loop(group: WorkerGroup) -> None:
        seed = 1 if group.rank == 2 else 0
        loader = DataLoader(regression(), batch_size=9, sampler=Moody(seed))
        model, optimizer, loader = prepared(group, loader)
        for batch in loader:
            step(model, optimizer, batch)

    for error in on_workers(3, loop, errors=True):
        assert isinstance(error, UserError | Aborted)
        if isinstance(error, UserError):
            assert "worker 2 reads a different batch than worker 0" in str(error)


def test_generators_that_differ_are_made_worker_0s() -> None:
    def loop(group: WorkerGroup) -> list[list[int]]:
        generator = torch.Generator().manual_seed(group.rank)
        loader = group.prepare(DataLoader(rows(20), batch_size=7, shuffle=True, generator=generator))
        return [group.gather(x).tolist() for _ in range(2) for (x,) in loader]

    generator = torch.Generator().manual_seed(0)
    plain = DataLoader(rows(20), batch_size=7, shuffle=True, generator=generator)
    expected = [x.tolist() for _ in range(2) for (x,) in plain]
    assert on_workers(3, loop) == [expected] * 3


def test_a_worker_that_raises_ends_the_waiting_of_the_others() -> None:
    def loop(group: WorkerGroup) -> None:
        if group.rank == 1:
            raise ZeroDivisionError("a batch without labels")
        group.barrier()

    first, second, third = on_workers(3, loop, errors=True)
    assert isinstance(second, ZeroDivisionError)
    for error in (first, third):
        assert isinstance(error, Aborted)
        assert "rank 1 failed first" in str(error)


def test_a_worker_that_does_not_come_is_named_at_the_deadline() -> None:
    def loop(group: WorkerGroup) -> None:
        model, optimizer = prepared(group)
        if group.rank == 1:
            assert release.wait(240)
            return
        try:
            step(model, optimizer, regression().tensors)
        finally:
            release.set()

    release = threading.Event()
    found = on_workers(2, loop, timeout_s=1.0, errors=True)
    assert isinstance(found[0], PeerTimeout)
    assert found[0].peer == 1
    assert "for rank 1" in str(found[0])


@pytest.mark.parametrize(
    ("wrong", "report"),
    [
        (lambda group, model, optimizer: group.prepare(model), "no optimizer"),
        (lambda group, model, optimizer: group.prepare(optimizer), "no model"),
        (lambda group, model, optimizer: group.prepare(model, optimizer, 3), "prepare got a int"),
        (
            lambda group, model, optimizer: group.prepare(nn.Linear(2, 2), optimizer),
            "is not in any prepared model",
        ),
        (
            lambda group, model, optimizer: [group.prepare(model, optimizer) for _ in range(2)],
            "in one call",
        ),
        (
            lambda group, model, optimizer: group.prepare(
                DataLoader(rows(4), sampler=DistributedSampler(rows(4), num_replicas=2, rank=0))
            ),
            "DistributedSampler",
        ),
        (lambda group, model, optimizer: group.clip_grad_norm_(1.0), "call prepare first"),
        (lambda group, model, optimizer: group.save("nowhere", step=1), "call prepare first"),
        (
            lambda group, model, optimizer: group.gather(torch.zeros(2).to(torch.float8_e5m2)),
            "cannot be gathered",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(wrong: Any, report: str) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (error,) = on_workers(1, lambda group: wrong(group, model, optimizer), errors=True)
    assert isinstance(error, UserError)
    assert report in str(error)
    assert "\n" not in str(error)


def test_central_refuses_two_optimizers_and_a_closure() -> None:
    def two(group: WorkerGroup) -> None:
        one, other = mlp(), mlp()
        group.prepare(one, other, *(torch.optim.SGD(m.parameters(), lr=0.1) for m in (one, other)))

    def closure(group: WorkerGroup) -> None:
        _, optimizer = prepared(group)
        optimizer.step(lambda: 0.0)

    for loop, report in ((two, "2 optimizers"), (closure, "closure")):
        found = on_workers(2, loop, strategy="central", errors=True)
        assert any(isinstance(error, UserError) and report in str(error) for error in found)
