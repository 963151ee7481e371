"""A learner's actors: processes that act with its newest weights while it learns, and hand over whole batches.

    with Actors(job, settings, policy.state_dict()) as actors:
        for update in range(updates):
            rollouts = actors.collect(policy.state_dict(), update)      # valid until the next call

`tickets` decides who acts for what; this carries it out. A thread gives actors their tickets, so that none waits for a
learner that computes, and replaces those that are gone, raise an error or take no step for too long: the process is
ended first, so that nobody writes into a rollout that another acts again.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from manyhands.data.store.atomic import WriteFailed
from manyhands.errors import Desync, ManyhandsError, UserError, num_of
from manyhands.native.closeable import Closeable
from manyhands.native.segment import Segment
from manyhands.places.local.failure import describe_exit
from manyhands.places.local.forking import born_children
from manyhands.places.local.packed_job import pack
from manyhands.places.local.stacks import answered_by, answers_to, ask_for_stack, call_of
from manyhands.places.local.template import (
    AdoptedProcess,
    StillRunning,
    expect,
    serving_children,
    warm,
)
from manyhands.places.local.watchdog import Stall, is_stopped
from manyhands.workloads.rl.actor_memory import ActorMemory, ActorProgress, MemoryPlan, layout_of
from manyhands.workloads.rl.actor_process import MESSAGE_BYTES, ActorJob
from manyhands.workloads.rl.central_inference import CentralInference
from manyhands.workloads.rl.episodes import Episode
from manyhands.workloads.rl.rollouts import Rollouts
from manyhands.workloads.rl.ticket_log import TicketHeader, TicketRecord, TicketWriter, rollouts_hash
from manyhands.workloads.rl.tickets import LogRow, Ticket, Tickets

__all__ = ["ActorFacts", "ActorSettings", "Actors"]

_LOOK_S = 0.2
_START_S = 120.0  # at least, to import and to make environments
_LEAVE_S = 1.0  # how long an actor may finish its rollout when it is needed no more
_MODULE = "manyhands.workloads.rl.actor_process"


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorSettings:
    """How many actors, how far ahead, and what happens to those that fail."""

    actors: int
    environments: int  # of each actor: the rows of a ticket
    rollouts_per_update: int  # tickets of a batch
    lag: int = 0  # updates that a rollout's weights may be behind those that learn from it
    timeout_s: float = 60.0  # that one step of all environments of an actor may take
    replacements: int = 10  # of each actor, before the run ends
    central: bool = False  # a thread of this process chooses the actions, for all actors that wait for them
    groups: int | None = None  # in which each actor's environments then are; None: two where that gains time
    first_step: int = 0  # of the run, where a start of it begins: for the log
    steps_each: int = 1  # of the run, by each batch: for the log
    owner: str = "the learner"

    def __post_init__(self) -> None:
        for name in ("actors", "environments", "rollouts_per_update"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}; give at least 1")
        for name in ("lag", "replacements"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)}; give 0 or more")
        if not self.timeout_s > 0:
            raise UserError(f"timeout_s={self.timeout_s:g}; give more than 0 seconds")


@dataclass(slots=True)
class ActorFacts:
    """What has happened so far, of the batches that were collected."""

    frames: int = 0  # steps of environments; where one only began anew is none
    rollouts: int = 0  # of single environments
    lags: Counter[int] = field(default_factory=Counter)  # tickets by the policy lag of their rows
    dropped: int = 0  # tickets, with the actors that had begun them
    replaced: list[str] = field(default_factory=list)  # a sentence for each actor
    learner_waited_s: float = 0.0
    actors_waited_s: float = 0.0  # all actors together
    acted_s: float = 0.0
    unrecorded: str = ""  # why the log ends early, where it does


class Actors(Closeable):
    """The actors of one learner: `log` has every ticket's end, `episodes` those of the last batch."""

    def __init__(
        self,
        job: ActorJob,
        settings: ActorSettings,
        state: Mapping[str, Tensor],
        *,
        record: Path | None = None,
        replayed: TicketRecord | None = None,
    ) -> None:
        """`state` is the policy's `state_dict`, for its layout.

        `record` is the file of the log, which goes on where there is one; `replayed` is what to repeat of another run.
        """
        self._settings = settings
        self._job = job
        header = _header_of(job, settings)
        if replayed is not None:
            if replayed.header.central or settings.central:
                raise UserError(
                    'inference="central" is not replayed, as its results depend in their last bits on which actors it '
                    'answered together; use inference="actor"'
                )
            _require_same(replayed.header, header)
        self._replayed = replayed
        self._writer = TicketWriter(record, header) if record is not None else None
        device = next(iter(state.values())).device
        self._plan = MemoryPlan(
            spec=job.spec,
            rows=settings.environments,
            rollouts_per_update=settings.rollouts_per_update,
            lag=settings.lag,
            actors=settings.actors,
            weights=() if settings.central else layout_of(state),
            groups=_groups_of(settings, device),
        )
        self._device = device
        self._inference: CentralInference | None = None
        self._tickets = Tickets(
            settings.actors,
            settings.rollouts_per_update,
            settings.lag,
            forced=replayed.rows if replayed is not None else None,
        )
        self._newest: int | None = None  # version that is published
        self._facts = ActorFacts()
        self._acted: dict[int, list[Episode]] = {}  # by ticket, until it is collected
        self.episodes: list[Episode] = []
        self._children: dict[int, _Child] = {}
        self._replaced: Counter[int] = Counter()
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._poll = select.poll()
        self._held = ExitStack()
        self._is_open = False
        expect([_MODULE, *({"gymnasium"} & sys.modules.keys())])  # imported once, for all actors
        if len(born_children) < settings.actors:
            warm()  # while the learner builds its model

    @property
    def log(self) -> list[LogRow]:
        return self._tickets.log

    @property
    def pids(self) -> Mapping[int, int]:
        """The process of each actor, while it has one."""
        with self._changed:
            return {number: child.process.pid for number, child in self._children.items()}

    def __enter__(self) -> Self:
        settings = self._settings
        with ExitStack() as made:
            segment = Segment.create(
                self._plan.num_bytes, f"the rollouts of {num_of(settings.actors, 'actor')}"
            )
            self._memory = made.enter_context(ActorMemory(self._plan, segment))
            stacks = answers_to()
            if stacks is None:
                stacks = os.memfd_create("manyhands:stacks", os.MFD_CLOEXEC)
                made.callback(os.close, stacks)
            job = _packed((self._job, self._plan))
            made.callback(os.close, job)
            self._passed = [job, stacks, segment.descriptor]
            if settings.central:
                self._inference = made.enter_context(
                    CentralInference(
                        self._job.policy, self._plan, self._memory, self._device, settings.timeout_s
                    )
                )
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            made.callback(os.close, self._wake)
            self._poll.register(self._wake, select.POLLIN)
            made.callback(self._end_all)
            self._is_open = True
            self._start(range(settings.actors), 0)
            self._held = made.pop_all()
        self._thread = threading.Thread(target=self._attend_all, name="actors", daemon=True)
        self._thread.start()
        return self

    def collect(self, state: Mapping[str, Tensor], update: int) -> Rollouts:
        """Publish the weights that have seen `update` updates; the batch to learn from next, until the next call.

        Raises UserError for what an environment did too often, and ManyhandsError for what happened to an actor.
        """
        began = time.monotonic()
        if self._inference is not None:
            self._inference.publish(update, state)
        else:
            self._memory.publish(update, state)
        with self._changed:
            self._newest = update
            for child in self._children.values():
                self._give(child)
            while (batch := self._tickets.ready(update)) is None:
                if self._error is not None:
                    raise self._error
                self._wait_for(self._tickets.missing(update)[0], time.monotonic() - began > _LOOK_S)
            facts = self._facts
            facts.learner_waited_s += time.monotonic() - began
            facts.lags.update(update - ticket.version for ticket in batch)
            self.episodes = [one for ticket in batch for one in self._acted.pop(ticket.number)]
        rollouts = self._memory.batch(update)
        self._keep_record(rollouts, update)
        facts.frames += int(rollouts.valid.sum())
        facts.rollouts += len(rollouts.valid)
        return rollouts

    def facts(self) -> ActorFacts:
        return self._facts

    def close(self) -> None:
        """End the actors, which may finish what they act; the memory goes with the last batch that is still used."""
        if self._is_open:
            self._is_open = False
            os.eventfd_write(self._wake, 1)
            self._thread.join()
        self._held.close()
        if self._writer is not None:
            self._writer.close()

    def _keep_record(self, rollouts: Rollouts, update: int) -> None:
        if self._writer is None and self._replayed is None:
            return
        found = rollouts_hash(rollouts)
        if self._replayed is not None:
            expected = self._replayed.batches[update].rollouts
            if found != expected:
                raise Desync(
                    f"the replay differs from the recorded run: the batch of update {update} has other bytes; "
                    "environments must follow from their seeds and actions alone, on the same kind of processor"
                )
        if self._writer is not None:
            try:
                self._writer.write(self.log, update, found)
            except WriteFailed as error:
                self._writer.close()
                self._writer = None
                self._facts.unrecorded = (
                    f"{error}: the log of tickets ends; the run continues, but cannot be replayed or audited"
                )

    def _wait_for(self, ticket: int, is_long: bool) -> None:
        # Who asks where the learner is shall hear where the actor is that it waits for.
        acting = (
            one.process.pid
            for one in self._children.values()
            if one.ticket is not None and one.ticket.number == ticket
        )
        pid = next(acting, None)
        with answered_by(pid) if is_long and pid is not None else nullcontext():
            self._changed.wait(_LOOK_S)

    def _attend_all(self) -> None:
        """In a thread of its own, until `close`."""
        try:
            while self._is_open:
                ready = {descriptor for descriptor, _ in self._poll.poll(round(_LOOK_S * 1000))}
                with self._changed:
                    self._check_inference()
                    for child in tuple(self._children.values()):
                        self._attend(child, ready)
                    if ready:
                        self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _attend(self, child: _Child, ready: set[int]) -> None:
        is_gone = child.process.pidfd in ready
        if is_gone or child.end.fileno() in ready:
            while message := child.receive():
                self._take(child, message)
        if is_gone:
            self._replace(child, describe_exit(child.leave()))
        elif not self._awaits_inference(child) and child.is_silent():
            found = child.where(self._passed[1])
            child.leave()
            self._replace(child, found)

    def _awaits_inference(self, child: _Child) -> bool:
        return self._inference is not None and self._inference.is_asked_by(child.number)

    def _check_inference(self) -> None:
        if self._inference is not None:
            self._inference.check()

    def _take(self, child: _Child, message: Mapping[str, Any]) -> None:
        match message:
            case {"ready": _}:
                child.idle_since = time.monotonic()
                self._give(child)
            case {"episodes": episodes}:
                child.episodes += (Episode(*one) for one in episodes)
            case {"done": number, "seconds": seconds}:
                assert child.ticket is not None
                self._tickets.finished(child.ticket)
                self._acted[number], child.episodes, child.ticket = child.episodes, [], None
                self._facts.acted_s += seconds
                child.idle_since = time.monotonic()
                self._give(child)
            case {"failed": _}:
                child.failed = message

    def _give(self, child: _Child) -> None:
        """The next ticket, if it can begin one."""
        if self._newest is None or child.idle_since is None or child.ticket is not None:
            return
        answer = self._tickets.begin(child.number, self._newest)
        if isinstance(answer, Ticket):
            self._facts.actors_waited_s += time.monotonic() - child.idle_since
            child.ticket = answer
            child.send(**answer._asdict())

    def _replace(self, child: _Child, what: str) -> None:
        """Its process has ended: what it had begun can be begun again."""
        del self._children[child.number]
        self._check_inference()  # actors leave where it has failed
        if self._inference is not None:
            self._inference.forget(child.number)
        failed = child.failed
        if failed is not None:
            what = f"failed: {failed['failed']}"
        sentence = f"actor {child.number} {what}, {child.progress}"
        kind = UserError if failed is not None and failed["by_user"] else ManyhandsError
        try:
            self._facts.dropped += len(self._tickets.lost(child.number))
        except UserError as error:  # of a replay
            raise kind(f"{sentence}; {error}") from error
        count = self._replaced[child.number]
        if failed is not None and child.idle_since is None:  # it never could act: nor could another
            count, sentence = self._settings.replacements, f"actor {child.number} {what}"
        elif count == self._settings.replacements and count:
            sentence += (
                f"; it had been replaced {num_of(count, 'time')}, as often as replacements={count} allows"
            )
        if count == self._settings.replacements:
            raised = kind(sentence)
            if failed is not None:
                raised.add_note(f"in actor {child.number}:\n{failed['trace']}")
            raise raised
        self._replaced[child.number] = count + 1
        self._facts.replaced.append(sentence)
        self._start([child.number], count + 1)
        if not born_children:
            warm()  # for the next one

    def _start(self, numbers: Sequence[int], incarnation: int) -> None:
        names = [f"actor {number} of {self._settings.owner}" for number in numbers]
        started = serving_children(names, f"{_MODULE}:run_actor")
        for number, (process, end) in zip(numbers, started, strict=True):
            self._set_up(number, process, end, incarnation)

    def _set_up(self, number: int, process: AdoptedProcess, ours: socket.socket, incarnation: int) -> None:
        progress = self._memory.progress[number]
        progress.begin(incarnation, 0)
        child = self._children[number] = _Child(number, process, ours, progress, self._settings.timeout_s)
        setup = {"path": sys.path, "number": number, "incarnation": incarnation}
        with suppress(BrokenPipeError):  # it has ended, which its process descriptor tells
            socket.send_fds(ours, [json.dumps(setup).encode()], self._passed)
        for descriptor in (ours.fileno(), process.pidfd):
            self._poll.register(descriptor, select.POLLIN)
        child.ended.callback(self._poll.unregister, ours.fileno())
        child.ended.callback(self._poll.unregister, process.pidfd)

    def _end_all(self) -> None:
        for child in self._children.values():
            child.end.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _LEAVE_S
        for child in self._children.values():
            with suppress(StillRunning):
                child.process.wait(max(0.0, deadline - time.monotonic()))
            child.leave()
        self._children.clear()


class _Child:
    """One process of an actor, the learner's end of its socket, and what it acts for."""

    def __init__(
        self,
        number: int,
        process: AdoptedProcess,
        end: socket.socket,
        progress: ActorProgress,
        timeout_s: float,
    ) -> None:
        self.number, self.process, self.end, self.progress = number, process, end, progress
        end.setblocking(False)
        self.ended = ExitStack()
        self.ended.push(end)
        self.ticket: Ticket | None = None
        self.episodes: list[Episode] = []  # of its ticket
        self.idle_since: float | None = None  # when it last had nothing to do; None until it can act
        self.failed: Mapping[str, Any] | None = None
        self._timeout_s = timeout_s
        self._stall = Stall(max(_START_S, timeout_s), time.monotonic_ns())
        self._acts = Stall(timeout_s, time.monotonic_ns())

    def receive(self) -> Mapping[str, Any] | None:
        try:
            data = self.end.recv(MESSAGE_BYTES)
        except (BlockingIOError, ConnectionResetError):
            return None
        return dict(json.loads(data)) if data else None

    def send(self, **message: Any) -> None:
        with suppress(
            BrokenPipeError, ConnectionResetError
        ):  # it has ended, which its process descriptor tells
            self.end.send(json.dumps(message).encode())

    def is_silent(self) -> bool:
        """Whether it has shown no progress for as long as it may."""
        if self.idle_since is not None and self.ticket is None:
            return False
        stall = self._stall if self.idle_since is None else self._acts
        stall.look((self.ticket, self.progress.read()), time.monotonic_ns())
        return stall.is_over

    def where(self, stacks: int) -> str:
        """What a silent process is doing, for a sentence; it writes its stack to the file `stacks`."""
        if is_stopped(self.process.pid):
            return "is stopped (SIGSTOP, or a debugger)"
        at = call_of(ask_for_stack(self.process.pid, stacks))
        return f"took no step for {self._timeout_s:g} s and is {at}"

    def leave(self) -> int:
        """End the process and all that it has started; its return code."""
        with suppress(ProcessLookupError):  # it leads a session
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        self.ended.close()
        self.process.close()
        return status


def _groups_of(settings: ActorSettings, device: torch.device) -> int:
    """One group steps while the other is answered, which takes twice the batches: it pays where cores would idle."""
    if not settings.central:
        return 0
    if settings.groups is not None:
        return settings.groups
    idle = len(os.sched_getaffinity(0)) - settings.actors - 1  # without inference
    return 2 if device.type != "cpu" or idle > 0 else 1


def _header_of(job: ActorJob, settings: ActorSettings) -> TicketHeader:
    given = {name: int(getattr(settings, name)) for name in TicketHeader._fields if name != "seed"}
    return TicketHeader(**given, seed=job.seed)


def _require_same(recorded: TicketHeader, header: TicketHeader) -> None:
    for name, then, now in zip(header._fields, recorded, header, strict=True):
        if then != now:
            raise UserError(f"{name}={now}, but the recorded run had {name}={then}; replay it with the same")


def _packed(job: object) -> int:
    try:
        return pack(job)
    except UserError as error:
        raise UserError(
            f"environment and policy cannot be sent to actors ({error.__cause__ or error}); use functions, arrays and "
            "plain objects, and make whatever else they need where they are made"
        ) from error
