"""Runs whose parcels are encoded: half the bytes travel, the numbers are those of one process that rounds alike."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.observe.record.events import EventKind, Wire
from manyhands.observe.record.recorded import read_run_events
from manyhands.strategies.ps.replay import replay
from manyhands.transport.link.wire import codec_of

STEPS = 6
WORLD = 2
LINE = 16  # items of float32: every parameter begins at one of its own


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As workers on two cores have: sums over samples are taken in the same order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_task() -> mh.Task:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(90, 24, generator=generator)
    template = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 3))
    for parameter in template.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return mh.Task(
        model=lambda: copy.deepcopy(template),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(x, x[:, :3].sin()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=15,  # 8 and 7 to the two workers
    )


def rounded(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16).to(torch.float32)


def flat(tensors: list[Tensor]) -> Tensor:
    """One after the other, each filled up to a line."""
    return torch.cat([nn.functional.pad(one.reshape(-1), (0, -one.numel() % LINE)) for one in tensors])


def spread(vector: Tensor, tensors: list[Tensor]) -> Iterator[Tensor]:
    at = 0
    for one in tensors:
        yield vector[at : at + one.numel()].view(one.shape)
        at += one.numel() + -one.numel() % LINE


def ring_of_two(parts: list[Tensor]) -> Tensor:
    """Each half goes from the worker that it is named for to the other, which adds its own and sends the sum back."""
    half = (len(parts[0]) + 1) // 2
    first = rounded(parts[0][:half]) + parts[1][:half]
    second = rounded(parts[1][half:]) + parts[0][half:]
    return rounded(torch.cat([first, second]))


class OneProcess:
    """All workers' parts, one after the other."""

    def __init__(self, task: mh.Task) -> None:
        plan = TrainingPlan(task=task, steps=STEPS, seed=0, evaluate_every=0, checkpoint_every=0)
        self.computer = Computer(plan, 0)
        built = self.computer.build()
        self.model, self.optimizer = built.model, built.optimizer
        self.parameters = list(self.model.parameters())

    def gradients(self, step: int, part: int, backward: Callable[[Tensor, float], None]) -> list[Tensor]:
        self.model.zero_grad()
        self.computer.compute(self.model, step, part, WORLD, backward)
        return [parameter.grad.clone() for parameter in self.parameters if parameter.grad is not None]


def all_reduced(task: mh.Task) -> dict[str, Tensor]:
    one = OneProcess(task)
    for step in range(STEPS):
        parts = [
            flat(list(reversed(one.gradients(step, part, lambda loss, share: (loss * share).backward()))))
            for part in range(WORLD)
        ]
        summed = list(spread(ring_of_two(parts), list(reversed(one.parameters))))
        for parameter, gradient in zip(one.parameters, reversed(summed), strict=True):
            parameter.grad = gradient
        one.optimizer.step()
    return one.model.state_dict()


def served(task: mh.Task) -> dict[str, Tensor]:
    """Workers compute with rounded parameters; the server keeps them whole, and adds rounded gradients."""
    one = OneProcess(task)
    fused = torch.optim.SGD(
        one.parameters, lr=0.1, momentum=0.9, fused=True
    )  # which servers take, and rounds once
    for step in range(STEPS):
        whole = [parameter.detach().clone() for parameter in one.parameters]
        for parameter in one.parameters:
            parameter.data.copy_(rounded(parameter.data))
        parts = []
        for part in range(WORLD):
            shares: list[float] = []

            def backward(loss: Tensor, share: float, report: list[float] = shares) -> None:
                report.append(share)
                loss.backward()

            gradients = one.gradients(step, part, backward)
            parts.append([rounded(gradient * shares[0]) for gradient in gradients])
        for parameter, values, mine, yours in zip(one.parameters, whole, *parts, strict=True):
            parameter.data.copy_(values)
            parameter.grad = mine + yours
        fused.step()
    return one.model.state_dict()


def averaged(task: mh.Task, period: int = 3) -> dict[str, Tensor]:
    """Replicas that step by themselves; every few steps the rounded changes of each are added to what all had."""
    replicas = [OneProcess(task) for _ in range(WORLD)]

    def held(one: OneProcess) -> list[Tensor]:
        states = [one.optimizer.state.get(parameter, {}) for parameter in one.parameters]
        kept = [
            state.get("momentum_buffer", torch.zeros_like(parameter))
            for state, parameter in zip(states, one.parameters, strict=True)
        ]
        return [parameter.data for parameter in one.parameters] + kept

    before = flat(held(replicas[0]))
    for step in range(STEPS):
        for part, one in enumerate(replicas):
            one.gradients(step, part, lambda loss, share: loss.backward())
            one.optimizer.step()
        if (step + 1) % period == 0:
            parts = []
            for weight, one in zip((8 / 15, 7 / 15), replicas, strict=True):
                parts.append((flat(held(one)) - before) * (sum([weight] * period) / period))
            before = before + ring_of_two(parts)
            for one in replicas:
                for value, mean in zip(held(one), spread(before, held(one)), strict=True):
                    value.copy_(mean)
    return replicas[0].model.state_dict()


PADDED = sum(count + -count % LINE for count in (24 * 40, 40, 40 * 3, 3))
ROWS = {
    # what travels of it in one step of one worker, in items, by the ring's 2 (P - 1) / P of each
    "allreduce algorithm=ring link=tcp": (all_reduced, WORLD * STEPS * PADDED, 0),
    # parameters and momentum, twice in the run
    "local steps=3 link=tcp": (averaged, WORLD * 2 * 2 * PADDED, 0),
    # gradients from each worker; 64 bytes say how long they are encoded
    "ps link=tcp": (served, WORLD * STEPS * PADDED, WORLD * STEPS * 64),
}


@pytest.mark.parametrize("text", ROWS)
def test_half_the_bytes_and_the_numbers_of_one_process_that_rounds_alike(text: str, tmp_path: Path) -> None:
    reference, items, besides = ROWS[text]
    task = make_task()
    plain = mh.fit(task, text, workers=WORLD, steps=STEPS)
    coded = mh.fit(task, f"{text} codec=bf16", workers=WORLD, steps=STEPS, out=tmp_path / "run")
    expected = reference(task)
    for name, value in coded.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert any(not torch.equal(value, plain.model.state_dict()[name]) for name, value in expected.items())
    assert plain.summary["bytes_sent"] - coded.summary["bytes_sent"] == 2 * items - besides
    check_events(tmp_path / "run", coded.summary)
    if text.startswith("ps"):
        assert replay(tmp_path / "run", task).same_bytes


def test_an_asynchronous_run_with_replicas_is_replayed_to_the_same_bytes(tmp_path: Path) -> None:
    text = "ps servers=2 consistency=async replicas=1 link=tcp codec=fp16"
    task = make_task()
    run = mh.fit(task, text, workers=WORLD, steps=STEPS, out=tmp_path / "run")
    assert run.summary["strategy"] == text
    assert replay(tmp_path / "run", task).same_bytes


def check_events(path: Path, summary: dict[str, Any]) -> None:
    """What workers recorded as sent is what they counted, and tells the codec."""
    sent = 0
    for role in read_run_events(path / "events").roles:
        records = role.records[role.records["kind"] == EventKind.SEND]
        assert set(records["wire"].tolist()) == {Wire.TCP}
        assert {codec_of(number) for number in records["codec"].tolist()} == {"bf16"}
        sent += int(records["num_bytes"].sum()) if role.name.startswith("worker") else 0
    assert 0 < sent <= summary["bytes_sent"]
