"""Faults that a run may meet, whom each strikes, and what one has cost; nothing is run here."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from manyhands.facts import Answer
from manyhands.strategy import Strategy

PAUSE_S: Final = 8.0
FULL_S: Final = 2.0
SLOW: Final = 3.0  # a slow worker runs a third of the time
WHOLE_RUN: Final = "run"  # the launcher and with it every process


class Kind(Enum):
    """What is done to a process."""

    KILL = "kill"
    PAUSE = "pause"
    SLOW = "slow"
    CUT = "cut"  # its connections are silent
    FULL = "full"  # the disk of the run's directory


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault, as `compare --faults` calls it."""

    name: str
    kind: Kind
    victim: str  # worker, server or the whole run
    promise: str = ""  # the field of `Promises` that says whether a run goes on
    all_go_on: bool = False  # whether the run of every strategy does
    of_tcp: bool = False  # whether it strikes only what is sent over TCP


FAULTS: Final = (
    Fault(name="worker killed", kind=Kind.KILL, victim="worker", promise="worker_dies"),
    Fault(name="server killed", kind=Kind.KILL, victim="server", promise="server_dies"),
    Fault(name="all killed", kind=Kind.KILL, victim=WHOLE_RUN),
    Fault(name=f"worker stopped {PAUSE_S:g} s", kind=Kind.PAUSE, victim="worker"),
    Fault(name=f"worker {SLOW:g}× slower", kind=Kind.SLOW, victim="worker", all_go_on=True),
    Fault(name=f"link cut {PAUSE_S:g} s", kind=Kind.CUT, victim="worker", of_tcp=True),
    Fault(name=f"disk full {FULL_S:g} s", kind=Kind.FULL, victim=WHOLE_RUN, all_go_on=True),
)


# A slow worker takes steps all the time, and a history is not written to a full disk
_UNSEEN_GAPS: Final = (Kind.SLOW, Kind.FULL)


def faults_of(strategy: Strategy, workers: int) -> tuple[Fault, ...]:
    """Those that can strike a run; a worker that is the only one trains in the launcher's process."""
    counts = strategy.processes(workers)
    there = {WHOLE_RUN} | {kind for kind, count in counts.items() if count}
    if sum(counts.values()) == 1:
        there.discard("worker")
    is_tcp = getattr(strategy, "link", "") == "tcp"
    return tuple(fault for fault in FAULTS if fault.victim in there and (is_tcp or not fault.of_tcp))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSeen:
    """When, in seconds since the run began, its history first had `step` done."""

    at_s: float
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StruckRun:
    """What was seen of a run and, if it ended, of the run that continued it."""

    struck_s: float
    seen: Sequence[StepSeen]  # each higher than the one before
    kept_step: int | None = None  # of the checkpoint that was continued from; None: the run did not end
    continued: Sequence[StepSeen] = ()  # of the run that continued, on the same clock
    slow_s: float = 0.0  # how long a worker was slow
    recomputed: int = 0  # steps that a worker computed twice, in a run that did not end
    lost: int | None = None  # updates that servers lack, by the audit; None: there is none
    final: Mapping[str, float] = dataclasses.field(default_factory=dict)
    sentence: str = ""  # what the run said when it ended


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultCost:
    """What a fault has cost; `None` where it cannot be seen."""

    went_on: bool  # without being started again
    ended_well: bool  # in the end
    still_s: float | None  # the longest time after the fault without a new step
    repeated: int
    lost: int | None
    slower: float | None = None  # a step while a worker is slow, by a step before
    changes: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of the final metrics
    sentence: str = ""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def fault_cost(fault: Fault, struck: StruckRun, undisturbed: Mapping[str, float]) -> FaultCost:
    """What a struck run shows beside the final metrics of one that was not struck."""
    went_on = struck.kept_step is None
    done = max((one.step for one in struck.seen), default=0)
    after = [*struck.seen, *(one for one in struck.continued if one.step > done)]
    return FaultCost(
        went_on=went_on,
        ended_well=went_on or bool(struck.final),  # a disk that is full at the end takes no final metrics
        still_s=None if fault.kind in _UNSEEN_GAPS else _longest_gap(after, struck.struck_s),
        repeated=struck.recomputed if struck.kept_step is None else max(0, done - struck.kept_step),
        lost=struck.lost,
        slower=_slower(struck) if fault.kind is Kind.SLOW else None,
        changes={
            name: value - undisturbed[name] for name, value in struck.final.items() if name in undisturbed
        },
        sentence=struck.sentence,
    )


def _longest_gap(seen: Sequence[StepSeen], struck_s: float) -> float | None:
    """The longest time without a new step that began after the fault, or that the fault fell into."""
    times = [one.at_s for one in seen]
    return max(
        (later - max(earlier, struck_s) for earlier, later in itertools.pairwise(times) if later > struck_s),
        default=None,
    )


def _slower(struck: StruckRun) -> float | None:
    """Seconds of a step while a worker was slow, by those before; None without a step on either side."""
    before = [one for one in struck.seen if one.at_s <= struck.struck_s]
    end_s = struck.struck_s + struck.slow_s
    during = [one for one in struck.seen if struck.struck_s <= one.at_s <= end_s]
    rates = [_step_s(part) for part in (before, during)]
    return None if None in rates else rates[1] / rates[0]  # type: ignore[operator]


def _step_s(seen: Sequence[StepSeen]) -> float | None:
    if len(seen) < 2 or seen[-1].step == seen[0].step:
        return None
    found = (seen[-1].at_s - seen[0].at_s) / (seen[-1].step - seen[0].step)
    return found if found > 0 and math.isfinite(found) else None


def broken_promise(strategy: Strategy, fault: Fault, cost: FaultCost) -> str:
    """The sentence for a promise that the run did not keep; empty where it kept it, or where there is none."""
    if not cost.ended_well:
        return f"{strategy}, {fault.name}: the run could not be continued: {cost.sentence}"
    if cost.went_on or not (fault.promise or fault.all_go_on):
        return ""
    if fault.all_go_on:
        return f"{strategy}, {fault.name}: every run goes on, and this one ended: {cost.sentence}"
    promise = getattr(strategy.facts.promises, fault.promise)
    if promise.answer not in (Answer.YES, Answer.PARTLY):
        return ""
    return f"{strategy}, {fault.name}: it promises to go on, and ended: {cost.sentence}"
