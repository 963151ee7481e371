"""An elastic run in virtual time: the launcher's core and the workers' counts as they are, everything else modelled.

Workers are generators that stop wherever another process could come between; a seed chooses who goes on, and who dies
where. What a worker has trained is a list of (step, slots that took it): two workers are bit-identical exactly if their
lists are equal.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from manyhands.errors import UserError
from manyhands.foresight.simulate.faults import FaultRole, Kill, Pause, WorkerComes, WorkerGoes, draw_storm
from manyhands.places.place import AddWorker, RemoveWorker
from manyhands.strategies.allreduce.elastic.elastic_membership import (
    ArrivedInEpoch,
    BeginEpoch,
    Depart,
    Done,
    ElasticMembership,
    EpochView,
    GatherEpoch,
    LeaveEpoch,
    LeftEpoch,
    MemberReady,
    Notify,
    RunOver,
)
from manyhands.strategies.allreduce.elastic.exchange import StepChannel
from manyhands.strategies.common.membership import Died, Fail, KillMember, MemberSilent, StartWorker

Trained = list[tuple[int, tuple[int, ...]]]
Wait = Generator[None, None, Any]
BEGINNING = 2  # exchanges in which all take over the weights of rank 0
DUTY_EVERY = 3


class Changed(Exception):
    """What was begun in an epoch does not count."""


class Departed(Exception):
    """The member was removed."""


@dataclass
class Memory:
    """What the members of one epoch share."""

    view: EpochView
    aborted: bool = False
    arrived: dict[int, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    pauses: set[int] = field(default_factory=set)
    given: tuple[int, Trained] | None = None
    """By the donor: the step, and what it has trained."""

    def all_at(self, where: dict[int, int], number: int) -> bool:
        return not any([where.get(seat.member, 0) < number for seat in self.view.seats])  # noqa: C419 - half the time


class Worker:
    """One process; `life` is its program."""

    def __init__(self, run: Run, member: int, slot: int) -> None:
        self.run, self.member, self.slot = run, member, slot
        self.passage = StepChannel(member)
        self.inbox: deque[Any] = deque()
        self.trained: Trained = []
        self.step = 0
        self.has_state = self.at_border = self.began = False
        self.gather = -1
        self.leave_epoch = -1
        self.views: deque[EpochView] = deque()
        self.departs = False
        self.pause_agreed = False
        self.left_weights = False
        self.dead = self.stopped = False
        self.life = self._life()

    @property
    def memory(self) -> Memory:
        return self.run.memories[self.passage.epoch]

    def _hear(self) -> None:
        while self.inbox:
            match self.inbox.popleft():
                case EpochView() as view:
                    self.views.append(view)
                case GatherEpoch(epoch=epoch):
                    self.gather = epoch
                case LeaveEpoch(epoch=epoch):
                    self.leave_epoch = epoch
                case Depart():
                    self.departs = True

    def _next_view(self) -> Wait:
        while True:
            self._hear()
            while self.views:
                view = self.views.popleft()
                if view.epoch > self.passage.epoch:
                    return view
            if self.departs:
                raise Departed
            yield

    def _leave(self) -> Wait:
        """Tell how far it is and wait for the next epoch; whether the exchange that was cut is complete."""
        if self.passage.next is not None:
            return False
        self.run.tell(
            LeftEpoch(
                member=self.member,
                epoch=self.passage.epoch,
                passed=self.passage.passed,
                step=self.step,
                at_border=self.at_border,
                began=self.began,
                has_state=self.has_state,
            )
        )
        view = yield from self._next_view()
        return self.passage.learn(view)

    def _exchange(self, *, pause: bool = False) -> Wait:
        """One exchange: all arrive, all do their part, and each notices at its own time that all have."""
        if self.passage.next is not None:
            raise Changed
        number, memory = self.passage.passed + 1, self.memory
        yield
        if memory.aborted:
            yield from self._leave()
            raise Changed
        memory.arrived[self.member] = number
        if pause:
            memory.pauses.add(number)
        for place in (memory.arrived, memory.done):
            while not memory.all_at(place, number):
                if memory.aborted and self.run.chance.random() < 0.5:
                    if not (yield from self._leave()):
                        raise Changed
                    self.passage.passes()
                    return number in memory.pauses
                yield
            if place is memory.arrived:
                yield
                memory.done[self.member] = number
        self.passage.passes()
        return number in memory.pauses

    def _enter(self) -> Wait:
        """Be in the next epoch: give or take the state, and have the memory."""
        assert self.passage.next is not None
        self.passage.begin(self.passage.next)
        self.pause_agreed = False
        view, memory = self.passage.view, self.memory
        assert view is not None
        mine = view.seats[view.rank_of(self.member)]
        assert mine.fresh != self.has_state or view.donor is None, "the launcher knows who has the state"
        if view.donor == self.member and view.has_fresh:
            yield
            memory.given = self.step, list(self.trained)
        elif mine.fresh:
            while memory.given is None:
                if memory.aborted:
                    raise Changed
                yield
            self.step, self.trained = memory.given[0], list(memory.given[1])
            self.has_state = True
        yield
        if memory.aborted:
            raise Changed
        self.run.tell(ArrivedInEpoch(member=self.member, epoch=view.epoch, step=self.step))

    def _regroup(self) -> Wait:
        while self.passage.next is not None:
            try:
                yield from self._enter()
            except Changed:
                yield from self._leave()

    def _whole(self, work: Callable[[], Wait], *, at_border: bool) -> Wait:
        """As the exchange of the library has it: all do all of it, or none."""
        while True:
            self.at_border = at_border
            if at_border and self.pause_agreed and self.passage.next is None:
                yield from self._leave()
            yield from self._regroup()
            try:
                return (yield from work())
            except Changed:
                yield from self._leave()
            finally:
                self.began = False

    def _found(self) -> Wait:
        """All take over the weights of rank 0."""
        while not self.has_state:
            self.at_border = True
            yield from self._regroup()
            if self.has_state:
                return
            assert self.passage.view is not None
            assert self.passage.view.donor is None
            try:
                for _ in range(BEGINNING):
                    yield from self._exchange()
                self.has_state = True
            except Changed:
                yield from self._leave()

    def _step(self) -> Wait:
        self.began = True
        yield
        self._hear()
        paused = yield from self._exchange(pause=self.gather == self.passage.epoch)
        assert self.passage.view is not None
        slots = tuple(seat.slot for seat in self.passage.view.seats)
        self.pause_agreed = paused
        self.trained.append((self.step, slots))
        self.step += 1
        self.run.check(self)
        self.began = False
        yield

    def _duty(self) -> Wait:
        yield from self._exchange()
        yield from self._exchange()

    def _life(self) -> Iterator[None]:
        self.at_border = True
        self.run.tell(MemberReady(member=self.member))
        self.passage.next = yield from self._next_view()
        yield from self._found()
        while self.step < self.run.steps:
            yield from self._whole(self._step, at_border=True)
            if self.step % DUTY_EVERY == 0:
                yield from self._whole(self._duty, at_border=False)
        self.at_border = False
        while not self.departs:
            if self.passage.next is not None:
                self.passage.begin(self.passage.next)
            assert self.passage.view is not None
            if self.passage.view.rank_of(self.member) == 0 and not self.left_weights:
                yield
                self.left_weights = True
                self.run.tell(Done(member=self.member, epoch=self.passage.epoch))
            self._hear()
            if self.leave_epoch == self.passage.epoch:
                yield from self._leave()
            yield


class Run:
    """One run of the model; `go` plays it to its end."""

    def __init__(self, *, workers: int, steps: int, seed: int, min_workers: int = 1) -> None:
        self.chance = random.Random(seed)
        self.steps = steps
        self.core = ElasticMembership(workers, min_workers)
        self.workers: dict[int, Worker] = {}
        self.memories: dict[int, Memory] = {}
        self.report: deque[Any] = deque()
        self.dying: dict[int, int] = {}
        """Members that are dead, and in how many ticks the launcher notices."""

        self.by_step: dict[int, Trained] = {}
        self.failed = ""
        self.is_over = False
        self.losses = self.ticks = 0
        self._do(self.core.begin())

    def tell(self, event: Any) -> None:
        self.report.append(event)

    def check(self, worker: Worker) -> None:
        """Whoever has taken so many steps and lives has taken the same ones, with the same others."""
        alive = [one for one in self.workers.values() if not one.dead and len(one.trained) >= worker.step]
        assert [step for step, _ in worker.trained] == list(range(worker.step))
        for other in alive:
            assert other.trained[: worker.step] == worker.trained, (other.member, worker.member)

    def present(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if not worker.dead]

    def kill(self, worker: Worker, noticed_after: int = 0) -> None:
        worker.dead = True
        worker.life.close()
        self.dying[worker.member] = noticed_after
        self.losses += 1

    def change(self, event: AddWorker | RemoveWorker) -> None:
        self._do(self.core.handle(event))

    def go(self, before_tick: Callable[[Run], None] = lambda run: None, limit: int = 60_000) -> Run:
        while not (self.failed or self.is_over):
            self.ticks += 1
            assert self.ticks < limit, "it never ends"
            before_tick(self)
            self._tick()
        return self

    def _tick(self) -> None:
        choices = [worker for worker in self.workers.values() if not worker.dead and not worker.stopped]
        if self.report and (not choices or self.chance.random() < 0.4):
            self._do(self.core.handle(self.report.popleft()))
        elif choices:
            worker = self.chance.choice(choices)
            try:
                next(worker.life)
            except (StopIteration, Departed):
                worker.dead = True
        for member, ticks in list(self.dying.items()):
            heard_all = not any(getattr(event, "member", None) == member for event in self.report)
            if ticks <= 0 and heard_all:  # what it said before is heard first
                del self.dying[member]
                self._do(self.core.handle(Died(member=member, sentence=f"member {member} was killed")))
            else:
                self.dying[member] = ticks - 1

    def silent(self, worker: Worker) -> None:
        """It was stopped, and the launcher has noticed."""
        worker.stopped = True
        self._do(self.core.handle(MemberSilent(member=worker.member)))

    def _do(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case StartWorker(member=member, slot=slot):
                    self.workers[member] = Worker(self, member, slot)
                case KillMember(member=member):
                    self.kill(self.workers[member])
                case Notify(members=members, order=order):
                    if isinstance(order, LeaveEpoch):
                        self.memories[order.epoch].aborted = True
                    self._post(members, order)
                case BeginEpoch(view=view):
                    self.memories[view.epoch] = Memory(view)
                    self._post([seat.member for seat in view.seats], view)
                case Fail(sentence=sentence):
                    self.failed = sentence
                case RunOver():
                    self.is_over = True

    def _post(self, members: Any, order: Any) -> None:
        for member in members:
            self.workers[member].inbox.append(order)


# ── runs of a seed, with the simulator's faults ───────────────────────────────────────────────────────────────────────

TICKS_PER_S = 250
STEPS = 8
BY_DESIGN = (
    "no worker that has the state",
    "left, but min_workers=",
    "times in a row without completing a step",
)


def _strikes(seed: int) -> Callable[[Run], None]:
    """Strikes with the faults of `draw_storm`, whose seconds are ticks here.

    There are no servers: a fault that would strike one strikes the lowest slot, which donates the state and leaves the
    weights. Whoever is stopped for long is noticed; a slow link is a stop that nobody notices.
    """
    faults = deque(draw_storm(seed, 2.5))
    wakes: dict[int, int] = {}

    def strike(run: Run) -> None:
        for member, tick in list(wakes.items()):
            if run.ticks >= tick:
                del wakes[member]
                run.workers[member].stopped = False
        while faults and run.ticks >= faults[0].at_s * TICKS_PER_S:
            fault = faults.popleft()
            if not run.present():
                continue
            if isinstance(fault, WorkerComes):
                run.change(AddWorker())
                continue
            pick = fault.pick
            if isinstance(fault, WorkerGoes):
                slots = sorted({worker.slot for worker in run.present()})
                with suppress(UserError):  # it is gone already, or too few would be left
                    run.change(RemoveWorker(slot=slots[pick % len(slots)]))
                continue
            present = sorted(run.present(), key=lambda worker: worker.slot)
            worker = present[0 if fault.role is FaultRole.SERVER else pick % len(present)]
            if isinstance(fault, Kill):
                run.kill(worker, noticed_after=pick % 20)
            elif isinstance(fault, Pause) and fault.seconds > 0.3:
                run.silent(worker)
            else:
                worker.stopped = True
                wakes[worker.member] = run.ticks + int(min(fault.seconds, 1.0) * TICKS_PER_S)

    return strike


def elastic_complaints(seed: int) -> list[str]:
    """What is wrong with the run of a seed, in which workers die, stop, come and go."""
    draw = random.Random(f"elastic {seed}")
    workers = draw.randint(1, 6)
    run = Run(workers=workers, steps=STEPS, seed=seed, min_workers=draw.randint(1, workers))
    run.go(_strikes(seed))
    if run.failed:
        by_design = run.losses > 0 and any(words in run.failed for words in BY_DESIGN)
        return [] if by_design else [run.failed]
    left = [worker.trained for worker in run.workers.values() if worker.left_weights]
    found = [] if left else ["nobody left the weights"]
    found += [
        f"trained {trained}" for trained in left if [step for step, _ in trained] != list(range(run.steps))
    ]
    if run.core.redone > run.core.changes:
        found.append(f"{run.core.redone} steps were computed again for {run.core.changes} changes")
    return found
