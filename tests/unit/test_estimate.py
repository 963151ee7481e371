"""What a model needs, said beforehand, against what is there when it is trained; and what each strategy makes of it."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.profiler import profile
from typer.testing import CliRunner

import manyhands as mh
from manyhands.cli.model_commands import memory_app
from manyhands.errors import UserError
from manyhands.facts import LayerFootprint, ModelFootprint
from manyhands.foresight.estimate import estimate
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.next_token import next_byte_loss

BATCH = 6


def transformer(**more: Any) -> mh.Task:
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "optimizer": lambda parameters: optim.AdamW(parameters),
        "batch_size": BATCH,
        **more,
    }
    return mh.Task(
        model=lambda: GPT(context=32, layers=3, width=64, heads=4, vocabulary=50),
        loss=next_byte_loss,
        data=torch.randint(0, 50, (64, 33)),
        **options,
    )


def convolutions() -> mh.Task:
    return mh.Task(
        model=lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 5)
        ),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        data=(torch.randn(20, 1, 16, 16), torch.randint(0, 5, (20,))),
        optimizer=lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=10,
    )


def looks_at_values() -> mh.Task:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        kept = batch[batch[:, 0] > 0] if float(batch.sum()) else batch
        return model(batch).square().mean() + 0 * kept.sum()

    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)),
        loss=loss,
        data=torch.randn(32, 40),
        optimizer=lambda parameters: optim.SGD(parameters, lr=0.1),
        batch_size=16,
    )


def live_bytes(tensors: Any) -> int:
    return sum({one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in tensors}.values())


def measured(task: mh.Task) -> dict[str, int]:
    """What is there in earnest: activations as the allocator counts them between two moments."""
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    data = task.data if isinstance(task.data, tuple) else (task.data,)
    batch = tuple(one[: task.batch_size].clone() for one in data)
    given = batch if isinstance(task.data, tuple) else batch[0]
    task.loss(model, given).backward()  # torch's own memory of a first time
    model.zero_grad()
    gc.collect()
    with profile(profile_memory=True) as seen:
        loss = task.loss(model, given)
    activations = sum(event.self_cpu_memory_usage for event in seen.events())
    loss.backward()
    optimizer.step()
    states = [one for state in optimizer.state.values() for one in state.values() if isinstance(one, Tensor)]
    return {
        "parameters": live_bytes(model.parameters()),
        "gradients": live_bytes(one.grad for one in model.parameters() if one.grad is not None),
        "state": live_bytes(states),
        "buffers": live_bytes(model.buffers()),
        "activations": activations,
    }


@pytest.mark.parametrize("make", [transformer, convolutions, looks_at_values])
def test_what_is_said_is_what_is_there(make: Callable[[], mh.Task]) -> None:
    task = make()
    found = estimate(task)
    said, there = found.footprint, measured(task)
    assert said.parameters == there["parameters"]
    assert said.gradients == there["gradients"]
    assert said.state == there["state"]
    assert said.buffers == there["buffers"]
    assert said.activations() == pytest.approx(there["activations"], rel=0.05)
    assert ("without allocating memory" in found.how) == (make is not looks_at_values)


def test_nothing_large_is_allocated() -> None:
    task = transformer()
    huge = mh.Task(
        model=lambda: GPT(context=32, layers=10, width=16384, heads=4),
        loss=task.loss,
        data=task.data,
        optimizer=task.optimizer,
    )
    footprint = estimate(huge).footprint
    assert footprint.parameters > 100 << 30
    assert footprint.state == pytest.approx(2 * footprint.parameters, rel=1e-6)


def test_an_optimizer_that_keeps_rows_and_columns_is_counted_as_it_is() -> None:
    model = GPT(context=32, layers=3, width=64, heads=4, vocabulary=50)
    optimizer = optim.Adafactor(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    there = live_bytes(v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor))
    assert estimate(transformer(optimizer=lambda rows: optim.Adafactor(rows))).footprint.state == there


def test_layers_add_up_and_have_their_own_activations() -> None:
    footprint = estimate(transformer()).footprint
    assert sum(layer.parameters for layer in footprint.layers) == footprint.parameters
    blocks = [layer for layer in footprint.layers if layer.name.startswith("transformer.h")]
    assert len({layer.activations for layer in blocks}) == 1
    assert 0 < sum(layer.activations for layer in footprint.layers) <= footprint.activations() / BATCH


MODEL = ModelFootprint(
    parameters=120,
    gradients=100,
    state=200,
    buffers=3,
    per_sample=10,
    batch_size=8,
    layers=(LayerFootprint(name="a", parameters=20), LayerFootprint(name="b", parameters=6, lasts=True)),
)


@pytest.mark.parametrize(
    ("text", "workers", "totals"),
    [
        ("single", 1, {"worker": 123 + 100 + 200 + 80}),
        ("mirrored", 4, {"worker": 123 + 100 + 200 + 20}),
        ("allreduce", 3, {"worker": 123 + 100 + 200 + 30}),
        ("central", 4, {"worker": 3 + 100 + 20, "shared by all": 120 + 200}),
        ("hogwild", 4, {"worker": 3 + 100 + 80, "shared by all": 120 + 200}),
        ("local", 4, {"worker": 123 + 100 + 200 + 20 + 323}),
        ("sharded", 4, {"worker": 33 + 25 + 50 + 20 + 5 * 20 + 2 * 6}),
        ("tensor", 4, {"worker": 30 + 3 + 25 + 50 + 80}),
        ("pipeline", 2, {"worker": 60 + 3 + 50 + 100 + 20}),
        ("pipeline schedule=gpipe", 2, {"worker": 60 + 3 + 50 + 100 + 40}),
        # Two replicas: the gradients in one piece, beside those of the other replica and the sum.
        ("pipeline", 4, {"worker": 60 + 3 + 50 + 100 + 3 * 50}),
        ("pipeline schedule=gpipe", 4, {"worker": 60 + 3 + 50 + 100 + 3 * 50}),
        ("ps servers=2", 4, {"worker": 3 + 100 + 20, "server": 60 + 50 + 100, "shared by all": 120}),
        ("ps servers=2 link=tcp", 4, {"worker": 123 + 100 + 20, "server": 60 + 50 + 100}),
        ("ps servers=2 replicas=1 consistency=async", 4, {"worker": 123 + 100 + 80, "server": 120 + 200}),
    ],
)
def test_who_holds_what(text: str, workers: int, totals: dict[str, int]) -> None:
    rows = Strategy.parse(text).needs(MODEL, workers)
    assert {row.who: row.total for row in rows} == totals
    assert rows[0].count == workers


def test_every_strategy_says_something() -> None:
    for word in STRATEGIES:
        assert Strategy.parse(word).needs(MODEL, 4)[0].total > 0


def test_the_command_has_a_row_for_every_strategy_and_writes_it(tmp_path: Path) -> None:
    report = tmp_path / "memory.json"
    asked = ["gpt", "--layers", "3", "--width", "96", "--workers", "4", "--json", str(report)]
    shown = CliRunner().invoke(memory_app, asked)
    assert shown.exit_code == 0, shown.output
    for word in ("single", "mirrored", "sharded", "ps", "shared by all"):
        assert word in shown.output
    written = json.loads(report.read_text())
    rows, sent = written["memory"], written["sent_per_step"]
    assert {row["strategy"] for row in rows} == STRATEGIES.keys() == sent.keys()
    assert sent["single"] == [{"who": "worker", "count": 1, "num_bytes": 0, "messages": 0}]
    assert sent["mirrored"][0]["num_bytes"] > sent["central"][0]["num_bytes"] > 0
    assert all(text in shown.output for text in ("sent/step", "messages", "10 × client"))
    assert "traced" not in written["model"]
    total = {row["strategy"]: row["total"] for row in rows if row["who"] == "worker"}
    assert total["sharded"] < total["mirrored"] < total["single"]


def test_it_says_what_it_does_before_it_does_what_takes_long() -> None:
    report: list[str] = []
    heard: list[list[str]] = []
    task = transformer()

    def model() -> nn.Module:
        heard.append([*report])
        return task.model()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        heard.append([*report])
        return task.loss(model, batch)

    found = estimate(replace(task, model=model, loss=loss), report.append)
    building, *computing = heard
    assert building[-1] == "building the model, without allocating its memory"
    tracing = f"tracing a batch of {task.batch_size} through {found.footprint.parameters // 4:,} parameters"
    assert {said[-1] for said in computing} == {tracing}


def test_the_command_is_not_silent_and_says_how_many_stages_it_takes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    memory_app(["line", "--strategy", "single"], standalone_mode=False)
    printed = capsys.readouterr()
    assert "building the model" in printed.err
    assert "building" not in printed.out
    memory_app(["digits", "--strategy", "pipeline", "--workers", "4"], standalone_mode=False)
    words = " ".join(capsys.readouterr().out.split())
    assert "cuts=4 have as much work each" in words


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--strategy", "shraded"], "did you mean 'sharded'"),
        (["--strategy", "pipeline stages=3"], "must be a multiple of 3"),
        (["--workers", "0"], "workers=0 must be an integer of at least 1"),
        (["--strategy", "pipeline stages=9", "--workers", "9"], "cannot be cut into 9 parts"),
        (["--strategy", "pipeline schedule=wavefront"], "may not support slices of a sequence"),
        (["--strategy", "tensor slices=5", "--workers", "5"], "which is too small for 5 slices"),
        (["--strategy", "single device_memory=16KiB"], "use at least device_memory="),
        (["--width", "wide"], "width is 'wide'"),
    ],
)
def test_what_makes_no_sense_is_refused(asked: list[str], said: str) -> None:
    shown = CliRunner().invoke(memory_app, ["gpt", *asked])
    assert isinstance(shown.exception, UserError)
    assert said in str(shown.exception)
