"""`compare --elastic`: a worker joins a live run and another leaves it; what each brought, by the run's events."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from manyhands.data.store.rundir import RunDirectory
from manyhands.engine.background_run import Running, start
from manyhands.engine.request import Request
from manyhands.errors import ManyhandsError
from manyhands.facts import Answer
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import RunEvents, read_run_events
from manyhands.strategy import Strategy
from manyhands.task import Task

JOINS_AT: Final = 0.3  # of the steps
LEAVES_AT: Final = 0.6
LEAVER: Final = 0  # the slot that is given up: a newcomer must be able to stand in for the first worker
_LOOK_S = 0.01
_MARGIN_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class StepsTaken:
    """When each worker had a step done, and how many samples were in it; times in ns of one clock."""

    ends_ns: npt.NDArray[np.int64]
    starts_ns: npt.NDArray[np.int64]
    samples: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class ElasticCost:
    """What a join and a leave did to a run; `None` where it cannot be seen."""

    went_on: bool
    computes_s: float | None = None  # from the request for a worker to the beginning of its first step
    leaves_s: float | None = None  # from the request to leave to the end of the leaver's last step
    each: tuple[float | None, ...] = ()
    """Samples per second of each worker: before, with one more, after the other has left."""
    sentence: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def elastic_cost(
    workers: Mapping[int, StepsTaken], newcomer: int, joined_ns: int, left_ns: int
) -> ElasticCost:
    """From all steps of a run in which `newcomer` was asked for, and later `LEAVER` asked to leave."""
    new, old = workers.get(newcomer), workers[LEAVER]
    if new is None or not len(new.starts_ns):
        return ElasticCost(went_on=True, sentence="the newcomer computed nothing")
    begins_ns = int(new.starts_ns[0])
    gone_ns = int(old.ends_ns[-1])
    first_ns = min(int(one.starts_ns[0]) for one in workers.values() if len(one.starts_ns))
    end_ns = max(int(one.ends_ns[-1]) for one in workers.values() if len(one.ends_ns))
    count = len(workers)
    spans = (
        (first_ns, joined_ns, count - 1),
        (begins_ns, left_ns, count),
        (max(left_ns, gone_ns), end_ns, count - 1),
    )
    return ElasticCost(
        went_on=True,
        computes_s=(begins_ns - joined_ns) / 1e9,
        leaves_s=max(0.0, (gone_ns - left_ns) / 1e9),
        each=tuple(_each(workers.values(), *span) for span in spans),
    )


def _each(workers: Any, since_ns: int, until_ns: int, count: int) -> float | None:
    """Samples per second of each of `count` workers, by the steps that ended in a span."""
    done = sum(
        int(one.samples[(one.ends_ns > since_ns) & (one.ends_ns <= until_ns)].sum()) for one in workers
    )
    return done / count / ((until_ns - since_ns) / 1e9) if done and until_ns > since_ns else None


def broken_elasticity(strategy: Strategy, cost: ElasticCost) -> str:
    """The sentence for a promise that workers may come and go, where they could not; empty where it was kept."""
    if strategy.facts.promises.workers_join.answer not in (Answer.YES, Answer.PARTLY):
        return ""
    if cost.went_on and cost.computes_s is not None:
        return ""
    return f"{strategy}: it promises that workers may join and leave: {cost.sentence}"


def resize(request: Request, out: Path, expected_s: float) -> ElasticCost:
    """Run it in `out`, with one worker more and then another one less; a run that ends by that is a cost, too."""
    plan = request.plan
    options = dataclasses.replace(request.options, progress="none")
    deadline = time.monotonic() + expected_s + _MARGIN_S
    started = start(
        cast(Task, plan.task), request.strategy, workers=request.workers, steps=plan.steps, seed=plan.seed,
        device=plan.device, out=out, options=options,
    )  # fmt: skip
    with started as running:
        try:
            _await(
                running, lambda: running.steps_done >= JOINS_AT * plan.steps, deadline, "a worker was to join"
            )
            joined_ns, newcomer = time.monotonic_ns(), running.add_worker()
            _await(
                running,
                lambda: running.steps_done >= LEAVES_AT * plan.steps and _has_joined(out, newcomer),
                deadline,
                f"worker {newcomer} had joined and worker {LEAVER} was to leave; use more --steps",
            )
            left_ns = time.monotonic_ns()
            running.remove_worker(LEAVER)
            running.result(max(1.0, deadline - time.monotonic()))
        except TimeoutError as late:
            waited_for = str(late) or "its end"
            raise ManyhandsError(
                f"the run in {out} was given up at step {running.steps_done}, waiting for {waited_for}"
            ) from None
    return elastic_cost(_seen(read_run_events(out / "events")), newcomer, joined_ns, left_ns)


def _await(running: Running, reached: Callable[[], bool], deadline: float, what: str) -> None:
    while not reached():
        if running.done:
            running.result()  # raises what ended it
            raise ManyhandsError(f"the run ended before {what}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the moment in which {what}")
        time.sleep(_LOOK_S)


def _has_joined(out: Path, slot: int) -> bool:
    with suppress(OSError):
        lines = RunDirectory.open(out, lock=False).members_path.read_bytes()
        for line in lines[: lines.rfind(b"\n") + 1].splitlines():
            row = json.loads(line)
            if row["event"] == "joined" and row["name"] == f"worker {slot}":
                return True
    return False


def _seen(events: RunEvents) -> dict[int, StepsTaken]:
    """The steps of every worker that took one, by its number."""
    found = {}
    for role in events.roles:
        steps = role.of(EventKind.STEP)
        if role.name.startswith("worker") and len(steps):
            starts = steps["start_ns"].astype(np.int64)
            found[role.role] = StepsTaken(
                starts_ns=starts,
                ends_ns=starts + steps["duration_ns"].astype(np.int64),
                samples=steps["count"].astype(np.int64),
            )
    return found
