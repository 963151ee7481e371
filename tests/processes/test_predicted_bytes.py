"""What each strategy says beforehand that its processes send in a step, against what a run counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.facts import (
    ModelFootprint,
)
from manyhands.foresight.estimate import estimate
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import read_run_events
from manyhands.strategy import Strategy, WorkerTraffic
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.next_token import next_byte_loss
from manyhands.workloads.tasks import build


def layers() -> mh.Task:
    def model() -> nn.Module:
        first, last = nn.Linear(24, 50), nn.Linear(50, 7)
        return nn.Sequential(first, nn.Tanh(), nn.Linear(50, 50), nn.Tanh(), last)

    return mh.Task(
        model=model,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        data=(torch.randn(640, 24), torch.randint(0, 7, (640,))),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        batch_size=32,
    )


def transformer() -> mh.Task:
    return mh.Task(
        model=lambda: GPT(context=32, layers=2, width=48, heads=4, vocabulary=64),
        loss=next_byte_loss,
        data=torch.randint(0, 64, (640, 33)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=16,
    )


TASKS: dict[str, Callable[[], mh.Task]] = {
    "layers": layers,
    "digits": lambda: build("digits"),
    "gpt": transformer,
}


@cache
def prepared(name: str) -> tuple[mh.Task, ModelFootprint]:
    torch.manual_seed(0)
    task = TASKS[name]()
    return task, estimate(task).footprint


def run(task: mh.Task, text: str, workers: int, steps: int, out: Path | None = None) -> mh.Run:
    length: dict[str, Any] = {"rounds" if text.startswith("federated") else "steps": steps}
    return mh.fit(task, text, workers=workers, out=out, **length)


def of_all(rows: list[WorkerTraffic] | None, *, servers: bool = False) -> tuple[float, float]:
    """Bytes and messages of all processes; a run counts what workers, helpers and clients send."""
    assert rows is not None, "it is modelled"
    counted = [row for row in rows if (row.who == "server") is servers]
    return sum(row.count * row.num_bytes for row in counted), sum(row.count * row.messages for row in counted)


STEPS = 6
CASES = [
    ("layers", 2, "mirrored"),
    ("digits", 3, "mirrored buckets=8KiB"),
    ("gpt", 3, "allreduce algorithm=ring"),
    ("layers", 3, "allreduce algorithm=tree"),
    ("gpt", 3, "allreduce link=tcp codec=bf16"),
    ("digits", 3, "allreduce link=tcp codec=int8"),
    ("gpt", 4, "allreduce link=tcp codec=topk:0.01"),
    ("layers", 3, "allreduce helpers=2 link=tcp buckets=2KiB"),
    ("digits", 3, "central"),
    ("layers", 3, "ps servers=2 link=tcp"),
    ("layers", 3, "ps servers=2 consistency=async"),
    ("layers", 2, "hogwild"),
    ("layers", 3, "local steps=3 gossip=yes"),
    ("digits", 2, "local steps=2 link=tcp codec=int8"),
    ("digits", 3, "pipeline stages=3 cuts=3,6"),
    ("gpt", 2, "pipeline"),
    ("gpt", 4, "tensor data=2"),
    ("layers", 2, "federated clients=4"),
]
LONG = [
    ("layers", 1, "single"),
    ("layers", 5, "allreduce algorithm=butterfly link=tcp"),
    ("layers", 5, "allreduce algorithm=doubling"),
    ("layers", 3, "allreduce algorithm=round-robin"),
    ("layers", 6, "allreduce algorithm=master-worker"),
    ("layers", 4, "allreduce algorithm=all-to-all"),
    ("digits", 8, "allreduce algorithm=hierarchical group=2"),
    ("digits", 4, "allreduce algorithm=ring codec=fp16 link=tcp"),
    ("gpt", 3, "allreduce link=tcp codec=topk:0.05+int8"),
    ("gpt", 3, "allreduce link=tcp codec=powersgd:2"),
    ("gpt", 3, "allreduce link=tcp codec=sign"),
    ("gpt", 3, "allreduce link=tcp codec=sign:vote"),
    ("gpt", 3, "allreduce link=tcp codec=qsgd:7"),
    ("gpt", 3, "allreduce link=tcp codec=ternary"),
    ("gpt", 3, "allreduce link=tcp codec=randomk:0.02"),
    ("gpt", 3, "allreduce link=tcp codec=dgc:0.01"),
    ("gpt", 3, "allreduce link=tcp codec=fp8 buckets=16KiB"),
    ("layers", 3, "allreduce helpers=1"),
    ("gpt", 3, "allreduce helpers=3 link=tcp codec=bf16"),
    ("layers", 3, "allreduce elastic=yes"),
    ("digits", 3, "allreduce elastic=yes algorithm=ring"),
    ("gpt", 8, "central"),
    ("layers", 3, "local steps=3 link=tcp codec=bf16"),
    ("gpt", 3, "local steps=2 link=tcp codec=topk:0.05"),
    ("layers", 3, "local steps=3 outer=nesterov"),
    ("layers", 3, "local steps=3 outer=elastic"),
    ("gpt", 4, "local steps=3 gossip=yes link=tcp"),
    ("gpt", 4, "ps servers=3"),
    ("layers", 3, "ps servers=2 consistency=bounded:2"),
    ("digits", 3, "ps consistency=softsync:3"),
    ("digits", 2, "ps servers=2 link=tcp codec=bf16"),
    ("digits", 2, "ps link=tcp codec=int8 consistency=async"),
    ("digits", 2, "ps link=tcp codec=topk:0.01"),
    ("layers", 2, "ps servers=2 push=parameters"),
    ("layers", 2, "ps servers=2 replicas=1 link=tcp"),
    ("digits", 8, "hogwild"),
    ("layers", 4, "pipeline cuts=2"),
    ("digits", 2, "pipeline schedule=interleaved cuts=3,6,9"),
    ("digits", 2, "pipeline schedule=zb-h1 cuts=5"),
    ("digits", 2, "pipeline schedule=naive cuts=5 recompute=yes"),
    ("gpt", 8, "pipeline tensor=2 microbatches=2"),
    ("gpt", 4, "pipeline schedule=gpipe"),
    ("layers", 3, "tensor"),
    ("layers", 6, "tensor slices=3"),
    ("digits", 4, "tensor"),
    ("digits", 8, "tensor slices=2"),
    ("gpt", 8, "tensor slices=4"),
    ("digits", 3, "federated clients=6 fraction=0.5 codec=int8"),
    ("layers", 2, "federated clients=4 algorithm=scaffold"),
    ("layers", 2, "federated clients=4 algorithm=fednova"),
    ("layers", 2, "federated clients=6 algorithm=fedbuff"),
]


@pytest.mark.filterwarnings("ignore:hogwild on a dense model")
@pytest.mark.parametrize(
    ("name", "workers", "text"), [*CASES, *(pytest.param(*case, marks=pytest.mark.soak) for case in LONG)]
)
def test_every_byte_and_every_message_is_foretold(name: str, workers: int, text: str) -> None:
    task, footprint = prepared(name)
    num_bytes, messages = of_all(Strategy.parse(text).sends(footprint, workers))
    counted = run(task, text, workers, STEPS).summary["sent"]["gradients"]
    assert STEPS * num_bytes == pytest.approx(counted["bytes_sent"], rel=1e-9)
    assert STEPS * messages == pytest.approx(counted["messages_sent"], rel=1e-9)


@pytest.mark.parametrize(
    ("name", "workers", "text"),
    [
        ("digits", 3, "sharded link=tcp"),
        pytest.param("layers", 8, "sharded", marks=pytest.mark.soak),
        pytest.param("gpt", 2, "sharded", marks=pytest.mark.soak),
    ],
)
def test_sharded_sends_as_foretold_once_it_has_begun(name: str, workers: int, text: str) -> None:
    """What lasts for a step is there in the first one already, from the check of the loss."""
    task, footprint = prepared(name)
    num_bytes, messages = of_all(Strategy.parse(text).sends(footprint, workers))
    few, many = (run(task, text, workers, steps).summary["sent"]["gradients"] for steps in (2, 7))
    assert 5 * num_bytes == many["bytes_sent"] - few["bytes_sent"]
    assert 5 * messages == many["messages_sent"] - few["messages_sent"]


@pytest.mark.parametrize("text", ["fragments=2", "fragments=2 overlap=1 link=tcp codec=int4"])
def test_fragments_are_sent_as_foretold_in_each_round(text: str) -> None:
    """After the last step all of them are sent once more, in a run of any length."""
    task, footprint = prepared("layers")
    strategy = f"local steps=4 outer=nesterov {text}"
    num_bytes, messages = of_all(Strategy.parse(strategy).sends(footprint, 2))
    few, many = (run(task, strategy, 2, steps).summary["sent"]["gradients"] for steps in (4, 12))
    assert 8 * num_bytes == many["bytes_sent"] - few["bytes_sent"]
    assert 8 * messages == many["messages_sent"] - few["messages_sent"]


@pytest.mark.parametrize(
    ("workers", "text", "first"),
    [
        (2, "ps servers=2 link=tcp", 1),
        pytest.param(3, "ps servers=2 link=tcp codec=bf16", 1, marks=pytest.mark.soak),
        pytest.param(3, "ps servers=3", 1, marks=pytest.mark.soak),
        pytest.param(2, "ps consistency=async", 2, marks=pytest.mark.soak),
    ],
)
def test_servers_answer_as_foretold(workers: int, text: str, first: int, tmp_path: Path) -> None:
    """Each server records its answers; every worker also reads before its first batch, as in so many steps."""
    task, footprint = prepared("layers")
    num_bytes, messages = of_all(Strategy.parse(text).sends(footprint, workers), servers=True)
    run(task, text, workers, STEPS, tmp_path / "run")
    roles = read_run_events(tmp_path / "run" / "events").roles
    answers = [role.of(EventKind.SEND) for role in roles if role.name.startswith("server")]
    assert sum(map(len, answers)) == messages * (STEPS + first)
    assert sum(int(one["num_bytes"].sum()) for one in answers) == num_bytes * (STEPS + first)
