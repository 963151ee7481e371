"""Every strategy of the registry through the wiring of `fit`: its numbers, resume, a killed worker, events, refusals.

One row a strategy. A strategy without a row, or a row without a strategy, fails.
"""

from __future__ import annotations

import copy
import os
import re
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from equality import OPTIMIZERS, distance, make_task, same_bits, train_plainly
from manyhands.errors import UserError, WorkerFailed
from manyhands.facts import Answer
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import read_run_events
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy

STEPS = 12


@dataclass(frozen=True, kw_only=True)
class Row:
    """How one strategy is held to its contract."""

    text: str
    """With settings for which its numbers are those of one process, where there are any."""

    workers: int = 2
    optimizer: str = "momentum"
    calls: int = 1
    """How often a worker calls the loss in a step, at most."""

    def length(self, number: int) -> dict[str, Any]:
        """So many steps, or rounds where it counts those."""
        return {"rounds" if Strategy.parse(self.text).facts.counts_rounds else "steps": number}


ROWS = {
    "single": Row(text="single", workers=1),
    "mirrored": Row(text="mirrored"),
    "allreduce": Row(text="allreduce algorithm=ring"),
    "central": Row(text="central"),
    "sharded": Row(text="sharded"),
    "ps": Row(text="ps servers=2"),
    "hogwild": Row(text="hogwild order=turns"),
    "local": Row(text="local steps=1", optimizer="sgd"),
    "federated": Row(text="federated clients=4 batch=all together=1", optimizer="sgd", calls=2),
    "pipeline": Row(text="pipeline microbatches=3", calls=3),
    "tensor": Row(text="tensor slices=2"),
}
VARIANTS = {
    "allreduce by tcp": Row(text="allreduce algorithm=ring link=tcp"),
    "helpers": Row(text="allreduce link=tcp helpers=2", workers=3),
    "elastic": Row(text="allreduce elastic=yes"),
    "elastic over links": Row(text="allreduce algorithm=ring elastic=yes", workers=3),
    "sharded by tcp": Row(text="sharded link=tcp"),
    "local by tcp": Row(text="local steps=1 link=tcp", optimizer="sgd"),
    "tensor by tcp": Row(text="tensor link=tcp"),
}
"""Other settings that reach another carrier: held to the promised numbers, and a death is noticed."""
TOGETHER = Row(text="federated clients=4 batch=all", optimizer="sgd", calls=2)
"""As it is by default: the run itself decides whether clients are trained as one stacked model."""
OTHER_NUMBERS = ("federated",)
"""Whose steps are not those of one process on the same batches: what they are is tested with them."""


def test_every_strategy_of_the_registry_has_a_row() -> None:
    assert ROWS.keys() == STRATEGIES.keys()


def test_numbers_are_promised_but_for_a_few() -> None:
    others = {word for word, row in ROWS.items() if promised(row) is not Answer.YES}
    assert others == set(OTHER_NUMBERS)


def promised(row: Row) -> Answer:
    return Strategy.parse(row.text).facts.promises.same_numbers.answer


@pytest.mark.parametrize(
    "row",
    [*(row for word, row in ROWS.items() if word not in OTHER_NUMBERS), *VARIANTS.values()],
    ids=lambda row: row.text,
)
def test_weights_are_those_of_one_process_where_that_is_promised(row: Row) -> None:
    assert promised(row) is Answer.YES
    task = make_task(OPTIMIZERS[row.optimizer])
    run = mh.fit(task, row.text, workers=row.workers, steps=STEPS)
    assert distance(run.model.state_dict(), train_plainly(task, STEPS)) < 1e-9
    assert [entry["step"] for entry in run.history.steps] == list(range(1, STEPS + 1))
    assert run.summary["strategy"] == row.text
    assert run.summary["samples"] == sum((13, 13, 13, 6)) * 3


@dataclass(frozen=True)
class Finished:
    """What an uninterrupted run has left."""

    path: Path
    summary: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Row], Finished]:
    """Runs that are looked at several times, each made when it is first asked for."""

    @cache
    def finish(row: Row) -> Finished:
        run = mh.fit(
            make_task(OPTIMIZERS[row.optimizer]),
            row.text,
            workers=row.workers,
            options=mh.Options(checkpoint_every=4),
            out=tmp_path_factory.mktemp("finished") / "run",
            **row.length(STEPS),
        )
        assert run.path is not None
        weights = {name: value.clone() for name, value in run.model.state_dict().items()}
        return Finished(run.path, run.summary, weights)

    return finish


@pytest.mark.parametrize("row", [*ROWS.values(), TOGETHER], ids=lambda row: row.text)
def test_run_goes_on_from_its_directory_to_the_weights_of_an_uninterrupted_one(
    row: Row, tmp_path: Path, finished: Callable[[Row], Finished]
) -> None:
    task = make_task(OPTIMIZERS[row.optimizer])
    options = mh.Options(checkpoint_every=4)
    arguments: dict[str, Any] = {"workers": row.workers, "options": options, **row.length(STEPS)}
    broken = replace(task, loss=breaking_loss(task, after=5 * row.calls))
    with pytest.raises(Exception, match="on purpose"):
        mh.fit(broken, row.text, out=tmp_path / "run", **arguments)
    resumed = mh.fit(task, row.text, out=tmp_path / "run", resume=True, **arguments)
    assert resumed.summary["resumed_from_step"] in (4, 8)
    assert same_bits(dict(finished(row).weights), resumed.model.state_dict())
    assert [entry["step"] for entry in resumed.history.steps] == list(range(1, STEPS + 1))


def breaking_loss(task: mh.Task, after: int) -> Any:
    """The task's loss, which raises in the worker that is asked for its part number `after`."""
    calls = []
    plain = task.loss

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled():  # in a step, and not in the trial of the loss before the first
            calls.append(len(calls))
        if len(calls) > after:
            raise ArithmeticError("on purpose")
        return plain(model, batch)

    return loss


@pytest.mark.parametrize(
    "row",
    [
        *(ROWS[word] for word in ROWS if word != "single"),
        TOGETHER,
        *(VARIANTS[name] for name in ("allreduce by tcp", "helpers", "elastic", "elastic over links")),
    ],
    ids=lambda row: row.text,
)
def test_killed_worker_ends_the_run_by_name_or_is_replaced_as_promised(row: Row, tmp_path: Path) -> None:
    task = make_task(OPTIMIZERS[row.optimizer])
    mark = tmp_path / "killed"
    fatal = replace(task, loss=killing_loss(task, mark))
    if Strategy.parse(row.text).facts.promises.worker_dies.answer is Answer.YES:
        run = mh.fit(fatal, row.text, workers=row.workers, steps=STEPS, out=tmp_path / "run")
        assert run.summary["recoveries"]
        assert distance(run.model.state_dict(), train_plainly(task, STEPS)) < 1e-9
    else:
        options = mh.Options(checkpoint_every=1)
        with pytest.raises(WorkerFailed, match=r"worker \d .*was killed by SIGKILL") as caught:
            mh.fit(
                fatal,
                row.text,
                workers=row.workers,
                out=tmp_path / "run",
                options=options,
                **row.length(STEPS),
            )
        kept = rf"step \d+ of {STEPS} is kept in {tmp_path}/run; "
        how = re.escape(f"continue with: fit(…, out='{tmp_path}/run', resume=True)")
        assert re.search(f"{kept}{how}$", str(caught.value)), str(caught.value)
    assert mark.exists(), "somebody was killed"


def killing_loss(task: mh.Task, mark: Path) -> Any:
    """The task's loss, which kills the first worker that is asked for its fourth part."""
    calls = []
    plain = task.loss

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        if torch.is_grad_enabled():  # in a step, and not in the trial of the loss before the first
            calls.append(len(calls))
        if len(calls) == 4:
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return plain(model, batch)

    return loss


@pytest.mark.parametrize("word", ROWS)
def test_every_worker_records_where_its_time_goes(word: str, finished: Callable[[Row], Finished]) -> None:
    row = ROWS[word]
    run = finished(row)
    assert len(run.summary["per_worker"]) == row.workers
    roles = read_run_events(run.path / "events").roles
    workers = [role for role in roles if role.name.startswith("worker")]
    assert len(workers) == row.workers
    for role in workers:
        kinds = set(role.records["kind"].tolist())
        assert {EventKind.COMPUTE, EventKind.STEP, EventKind.INPUT} <= kinds, role.name


@pytest.mark.parametrize("word", STRATEGIES)
def test_more_workers_than_it_can_have_are_refused(word: str) -> None:
    most = Strategy.parse(word).most_workers
    if most is None:
        return
    with pytest.raises(UserError, match=f"workers={most + 1}"):
        mh.fit(make_task(OPTIMIZERS["sgd"]), word, workers=most + 1, steps=2)


def test_rows_are_not_changed_by_a_run() -> None:
    task = make_task(OPTIMIZERS["sgd"])
    before = copy.deepcopy(task.data)
    mh.fit(task, "single", steps=3)
    assert all(map(torch.equal, before, task.data))
