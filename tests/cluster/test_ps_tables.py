"""Row-sparse tables on a parameter server of threads, against torch in one process, whatever the servers do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, Optimizer

import manyhands as mh
from manyhands.data.batches import BatchPlan, BatchSource
from manyhands.strategies.ps.live.ps_job import Job
from manyhands.strategies.ps.live.reports import Evaluated, Notice, StepComputed
from manyhands.strategies.ps.ps_messages import Hello, Installed, ReadRows, RowsUnknown, RowValues
from manyhands.transport.hub.hub_events import Arrived, Joined, Lost
from threaded_ps import ThreadedRun, job_for

WORDS, TAGS, SAMPLES, BATCH = 40, 9, 60, 12
STEPS = 12

OptimizerOf = Callable[[Iterable[Parameter]], Optimizer]


class Tagger(nn.Module):
    """Two tables, of 3 and of 2 items a row, and a dense layer; one gradient is sparse, the other dense."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(7)
        self.words = nn.Embedding(WORDS, 3, sparse=True, dtype=torch.float64)
        self.tags = nn.Embedding(TAGS, 2, dtype=torch.float64)
        self.out = nn.Linear(5, 2, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        logits: Tensor = self.out(torch.cat([self.words(words).mean(dim=1), self.tags(tags)], dim=1))
        return logits


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    words, tags, label = batch
    return F.cross_entropy(model(words, tags), label)


def columns() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    words = torch.randint(0, WORDS, (SAMPLES, 3), generator=draw)
    return words, torch.randint(0, TAGS, (SAMPLES,), generator=draw), words.sum(dim=1) % 2


def task_of(optimizer: OptimizerOf, **options: Any) -> mh.Task:
    return mh.Task(
        model=Tagger,
        loss=loss,
        data=columns(),
        optimizer=optimizer,
        batch_size=BATCH,
        sparse={"words.weight": lambda batch: batch[0], "tags.weight": lambda batch: batch[1]},
        **options,
    )


def batch_of(step: int) -> list[Tensor]:
    source = BatchSource(columns(), None)
    batch: list[Tensor] = source.fetch(BatchPlan(SAMPLES, BATCH, 0).indices(step))
    return batch


def dense(optimizer: OptimizerOf, steps: int = STEPS) -> nn.Module:
    """The same training in one process with torch's own dense optimizer."""
    model = Tagger()
    model.words.sparse = False
    steps_of = optimizer(model.parameters())
    for step in range(steps):
        steps_of.zero_grad()
        loss(model, batch_of(step)).backward()  # type: ignore[no-untyped-call]
        steps_of.step()
    return model


def lazy_adam(lr: float) -> nn.Module:
    """Adam by its formulas: rows of tables that a batch does not name are left alone, and so are their moments."""
    model = Tagger()
    model.words.sparse = False
    moments = {
        name: (torch.zeros_like(value), torch.zeros_like(value)) for name, value in model.named_parameters()
    }
    for step in range(STEPS):
        model.zero_grad()
        batch = batch_of(step)
        loss(model, batch).backward()  # type: ignore[no-untyped-call]
        named = {"words.weight": set(batch[0].view(-1).tolist()), "tags.weight": set(batch[1].tolist())}
        for name, value in model.named_parameters():
            first, second = moments[name]
            assert value.grad is not None
            for row in named.get(name, set(range(len(value)))):
                gradient = value.grad[row]
                first[row] = 0.9 * first[row] + 0.1 * gradient
                second[row] = 0.999 * second[row] + 0.001 * gradient**2
                corrected = first[row] / (1 - 0.9 ** (step + 1))
                with torch.no_grad():
                    value[row] -= lr * corrected / ((second[row] / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8)
    return model


def train(job: Job, primaries: tuple[int, ...], backups: tuple[int, ...] = ()) -> nn.Module:
    with ThreadedRun(job) as run:
        run.start_workers()
        run.await_joined(job.workers + job.strategy.num_server_processes)
        run.publish(1, primaries, backups)
        return run.finish()


def assert_equal(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), (_, theirs) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        difference = (mine - theirs).abs().max().item()
        assert difference < 1e-9, f"{name} differs by {difference}"


EQUAL_TO_DENSE: list[OptimizerOf] = [
    lambda parameters: SGD(parameters, lr=0.5),
    lambda parameters: Adagrad(parameters, lr=0.3),
]


@pytest.mark.parametrize("optimizer", EQUAL_TO_DENSE, ids=["SGD", "Adagrad"])
@pytest.mark.parametrize(
    ("strategy", "primaries", "backups"),
    [
        ("ps servers=2", (1, 2), ()),
        ("ps servers=2 link=tcp", (1, 2), ()),
        ("ps servers=2 replicas=1", (1, 2), (2, 1)),
        ("ps servers=3 replicas=1 link=tcp", (1, 2, 3), (2, 3, 1)),
    ],
)
def test_two_workers_in_step_equal_the_dense_run(
    optimizer: OptimizerOf, strategy: str, primaries: tuple[int, ...], backups: tuple[int, ...]
) -> None:
    job = job_for(task_of(optimizer), strategy, steps=STEPS, workers=2)
    assert_equal(train(job, primaries, backups), dense(optimizer))


@pytest.mark.parametrize(("consistency", "servers"), [("bounded:2", 2), ("async", 2), ("softsync:1", 1)])
def test_one_worker_equals_the_dense_run_at_every_consistency(consistency: str, servers: int) -> None:
    optimizer = EQUAL_TO_DENSE[1]
    strategy = f"ps servers={servers} consistency={consistency}"
    job = job_for(task_of(optimizer), strategy, steps=STEPS, workers=1)
    assert_equal(train(job, tuple(range(1, servers + 1))), dense(optimizer))


def test_adam_leaves_rows_alone_that_do_not_come() -> None:
    job = job_for(task_of(lambda p: Adam(p, lr=0.05)), "ps servers=2", steps=STEPS, workers=2)
    trained = train(job, (1, 2))
    assert_equal(trained, lazy_adam(0.05))
    with pytest.raises(AssertionError):
        assert_equal(trained, dense(lambda p: Adam(p, lr=0.05)))


@pytest.mark.parametrize("link", ["shared", "tcp"])
def test_groups_that_outlive_a_read_keep_their_rows(link: str) -> None:
    # Gradients of SoftSync wait for their group while their worker goes on; any two make a step of their mean. At so
    # small a rate all gradients are those of the first weights, to a few percent.
    strategy = f"ps servers=2 consistency=softsync:1 replicas=1 link={link}"
    job = job_for(task_of(lambda p: SGD(p, lr=1e-3)), strategy, steps=6, workers=2)
    trained, start = train(job, (1, 2), (2, 1)), Tagger()
    gradient = {name: torch.zeros_like(value) for name, value in start.named_parameters()}
    start.words.sparse = False
    for step in range(6):
        start.zero_grad()
        loss(start, batch_of(step)).backward()  # type: ignore[no-untyped-call]
        for name, value in start.named_parameters():
            assert value.grad is not None
            gradient[name] += value.grad / 2
    for (name, value), (_, begun) in zip(trained.named_parameters(), start.named_parameters(), strict=True):
        torch.testing.assert_close(value - begun, -1e-3 * gradient[name], rtol=0.05, atol=2e-5)


def test_a_change_of_primaries_in_the_middle_loses_no_row() -> None:
    optimizer = EQUAL_TO_DENSE[1]
    steps = 40
    job = job_for(task_of(optimizer), "ps servers=2 replicas=1", steps=steps, workers=2)
    with ThreadedRun(job) as run:
        run.start_workers()
        run.await_joined(4)
        run.publish(1, (1, 2), (2, 1))
        run.await_said(2, Installed)
        run.await_said(20, StepComputed)
        run.publish(2, (2, 2))
        trained = run.finish()
    assert_equal(trained, dense(optimizer, steps))


def test_an_evaluation_sees_the_whole_tables() -> None:
    optimizer = EQUAL_TO_DENSE[0]
    task = task_of(optimizer, evaluation=columns())
    with ThreadedRun(job_for(task, "ps servers=2", steps=6, workers=2, evaluate_every=4)) as run:
        run.start_workers()
        run.await_joined(4)
        run.publish(1, (1, 2))
        run.finish()
        [said] = run.said(Evaluated)
    expected = loss(dense(optimizer, 4), list(columns())).item()
    assert said.metrics["evaluation_loss"] == pytest.approx(expected, abs=1e-9)


class Scores(nn.Module):
    """A linear model over 10,000 features: nothing but a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10_000, 1, sparse=True, dtype=torch.float64)
        nn.init.zeros_(self.table.weight)

    def forward(self, features: Tensor) -> Tensor:
        scores: Tensor = self.table(features).sum(dim=(1, 2))
        return scores


def counted(rows: int, steps: int, link: str) -> tuple[nn.Module, int]:
    """Train on one batch of the first `rows` features again and again: the model, and the messages of the worker."""
    task = mh.Task(
        model=Scores,
        loss=lambda model, batch: (model(batch) - 1).square().mean(),
        data=torch.arange(rows).view(2, -1),
        optimizer=lambda parameters: SGD(parameters, lr=1 / rows),
        batch_size=2,
        sparse={"table.weight": lambda batch: batch},
    )
    with ThreadedRun(job_for(task, f"ps link={link}", steps=steps, workers=1)) as run:
        run.start_workers()
        run.await_joined(2)
        run.publish(1, (1,))
        model = run.finish()
    return model, run.totals[2]["messages_sent"]


@pytest.mark.parametrize("link", ["shared", "tcp"])
def test_a_server_that_forgot_a_set_is_sent_it_again(link: str) -> None:
    # A server of this table remembers sets of 64 KiB in all. One of 1,000 rows is sent once and named from then on. One
    # of 9,000 is forgotten at once: once in each update, in its Push or before in its ReadRows, it is named in vain.
    steps = 4
    plain = 2 + 2 * steps  # Hello and Read; then ReadRows, and Push and Read in one
    model, messages = counted(1_000, steps, link)
    assert messages == plain
    forgetful, more = counted(9_000, steps, link)
    assert more == plain + steps
    for trained, rows in ((model, 1_000), (forgetful, 9_000)):
        expected = torch.zeros(10_000, 1, dtype=torch.float64)
        expected[:rows] = (1 - 0.5**steps) / (rows // 2)  # each step halves the error of both scores
        torch.testing.assert_close(
            trained.get_parameter("table.weight").detach(), expected, rtol=0, atol=1e-12
        )


@pytest.mark.parametrize(
    ("rows_of", "sentence"),
    [
        (
            lambda batch: batch[0][:, :1],
            r"sparse\['words.weight'\] did not return row \d+, but the batch has",
        ),
        (lambda batch: batch[0] + WORDS, r"sparse\['words.weight'\] returned row \d+; .* from 0 to 39"),
    ],
)
def test_a_task_that_names_the_wrong_rows_is_reported(
    rows_of: Callable[[Any], Tensor], sentence: str
) -> None:
    task = mh.Task(
        model=Tagger,
        loss=loss,
        data=columns(),
        optimizer=EQUAL_TO_DENSE[0],
        batch_size=BATCH,
        sparse={"words.weight": rows_of},
    )
    with pytest.raises(mh.UserError, match=sentence):
        train(job_for(task, "ps servers=2", steps=2, workers=1), (1, 2))


# ── a stranger with the right token ───────────────────────────────────────────────────────────────────────────────────

ROGUE = 9


def talk(run: ThreadedRun, *sent: tuple[object, bytes]) -> list[Any]:
    """Say this to server 1 as another member, and hear its messages until it hangs up or has answered the last."""
    heard: list[Any] = []
    with run.job.hub(ROGUE, "worker") as hub:
        hub.connect(1, run.addresses[1])
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            for event in hub.poll(0.1):
                match event:
                    case Joined():
                        for message, payload in sent:
                            hub.send(1, message, [payload])
                    case Arrived(message=message):
                        heard.append(message)
                        if isinstance(message, RowValues):
                            return heard
                    case Lost(reason=reason):
                        return [*heard, reason]
    raise AssertionError(f"no end; heard {heard}")


def reading(**options: Any) -> ReadRows:
    return ReadRows(**{"shard": 0, "slot": 0, "member": ROGUE, "clock": 0, **options})


def test_rows_that_make_no_sense_end_that_connection_and_nothing_else() -> None:
    optimizer = EQUAL_TO_DENSE[0]
    with ThreadedRun(job_for(task_of(optimizer), "ps servers=2", steps=STEPS, workers=2)) as run:
        run.publish(1, (1, 2))
        assert "it ended the connection" in talk(run, (reading(), b"\x07" * 128))[-1]
        assert "at most" in talk(run, (reading(), bytes(1 << 20)))[-1]
        assert "no shard 7 of 2" in talk(run, (reading(shard=7), bytes(128)))[-1]
        named = (1).to_bytes(8, "little") + bytes(40)
        unknown, reason = talk(run, (reading(), named * 2 + bytes(32)), (reading(), b"!"))
        assert unknown == RowsUnknown(shard=0, slot=0, clock=0, names=("00" * 32,) * 2)
        assert "too few" in reason
        run.await_said(2, Notice)
        run.start_workers()
        run.await_joined(4)
        run.publish(2, (1, 2))
        assert_equal(run.finish(), dense(optimizer))


def test_who_is_not_primary_gives_no_rows() -> None:
    with ThreadedRun(job_for(task_of(EQUAL_TO_DENSE[0]), "ps servers=2", steps=1, workers=1)) as run:
        run.publish(1, (1, 2))
        hello = Hello(shard=1, slot=0, member=ROGUE, settled=0)
        heard = talk(run, (hello, b""), (reading(shard=1, whole=True), b""), (reading(whole=True), b""))
        assert [type(one).__name__ for one in heard] == ["NotPrimary", "NotPrimary", "RowValues"]
