"""An actor: a process that acts for the tickets that its learner gives it, and writes rollouts into shared memory.

    learner ──►  {path, number}, and descriptors of its job, of where stacks go and of the memory
    learner ──►  {number, incarnation, rollout, version} of a ticket
    learner ◄──  {ready}, then {episodes} and {done} for each ticket, or {failed}, and it ends

The job is packed as a worker's is (see `packed_job`): only the learner, its parent, can write to this socket. The actor
ends with its learner: the socket closes, and a step that takes forever is ended by the kernel (PDEATHSIG).
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from torch import nn

from manyhands.data.randomness import mix, seed_host
from manyhands.errors import UserError, first_line
from manyhands.native.segment import Segment
from manyhands.places.local.packed_job import load
from manyhands.places.local.stacks import answer_with_stacks
from manyhands.workloads.rl.acting import Actor
from manyhands.workloads.rl.actor_memory import ActorMemory, MemoryPlan
from manyhands.workloads.rl.episodes import Episode
from manyhands.workloads.rl.inference_requests import ActionRequest, groups_of
from manyhands.workloads.rl.rollouts import Rollouts, RolloutSpec
from manyhands.workloads.rl.stepping import Environments
from manyhands.workloads.rl.tickets import Ticket

__all__ = ["MESSAGE_BYTES", "ActorJob", "run_actor"]

MESSAGE_BYTES = 1 << 17
_EPISODES = 500  # in a message
_TRACE = 1 << 15
_END: Final = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorJob:
    """What an actor needs to act, besides weights and tickets."""

    make: Callable[[int], Environments]  # so many, side by side
    policy: Callable[[], nn.Module]
    spec: RolloutSpec
    environments: range  # the numbers of those of all actors of this learner, the first actor's first
    seed: int


class LearnerLeft(Exception):
    """Nobody answers what an actor asked."""


def run_actor(end: socket.socket) -> int:
    """Be an actor until the learner, at the other end of the socket, is done; leaves the process by itself."""
    status = 1
    try:
        with end:
            status = _live(end)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _live(end: socket.socket) -> int:
    data, descriptors, _, _ = socket.recv_fds(end, MESSAGE_BYTES, 3)
    if not data:
        return 0
    setup = json.loads(data)
    job, stacks, memory = descriptors
    sys.path[:] = setup["path"]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    answer_with_stacks(stacks)
    try:
        loaded: tuple[ActorJob, MemoryPlan] = load(job)
        os.close(job)
        acting = _Acting(
            *loaded, Segment.attach(memory), setup["number"], setup["incarnation"], partial(_is_there, end)
        )
        _send(end, ready=True)
        while data := _receive(end):
            began = time.monotonic()
            ticket = Ticket(**json.loads(data))
            episodes = acting.act(ticket)
            for first in range(0, len(episodes), _EPISODES):
                _send(end, episodes=episodes[first : first + _EPISODES])
            _send(end, done=ticket.number, seconds=time.monotonic() - began)
    except LearnerLeft:
        return 0
    except Exception as error:
        said = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
        _send(
            end,
            failed=said[:4096],
            by_user=isinstance(error, UserError),
            trace=traceback.format_exc()[-_TRACE:],
        )
        return 1
    return 0


class _Acting:
    """The environments of an actor, made anew for each incarnation, and its policy unless inference is central."""

    def __init__(
        self,
        job: ActorJob,
        plan: MemoryPlan,
        segment: Segment,
        number: int,
        incarnation: int,
        goes_on: Callable[[], bool],
    ) -> None:
        self._job, self._number, self._goes_on = job, number, goes_on
        self._memory = ActorMemory(plan, segment)
        self._progress = self._memory.progress[number]
        rows = plan.rows
        self._keys = job.environments[number * rows : (number + 1) * rows]
        self._groups = groups_of(rows, plan.groups or 1)
        self._policy = None if plan.groups else job.policy()
        self._version = -1
        self._environments: list[Environments] = []
        self._begin(incarnation)

    def act(self, ticket: Ticket) -> list[Episode]:
        if ticket.incarnation != self._incarnation:
            self._begin(ticket.incarnation)
        self._progress.begin(ticket.incarnation, ticket.rollout)
        into = self._memory.rollout(ticket.number)
        parts = [into.part(group.start, group.stop) for group in self._groups]
        if self._policy is None:
            requests = self._memory.requests.of_actors[self._number]
            acting = [
                self._ask(ticket, part, actor, request)
                for part, actor, request in zip(parts, self._actors, requests, strict=True)
            ]
        else:
            if ticket.version != self._version:
                self._policy.load_state_dict(self._memory.weights(ticket.version))
                self._version = ticket.version
            acting = [
                actor.acting(self._policy, part, ticket.version)
                for part, actor in zip(parts, self._actors, strict=True)
            ]
        self._take_turns(acting)
        return [
            one._replace(environment=self._keys[group.start + one.environment])
            for group, actor in zip(self._groups, self._actors, strict=True)
            for one in actor.ended
        ]

    def _ask(self, ticket: Ticket, into: Rollouts, actor: Actor, request: ActionRequest) -> Iterator[None]:
        """Act with what central inference says; pauses while that computes."""
        request.uniforms[:] = actor.uniforms()
        for row, _, finals in actor.rows(into):
            request.ask(ticket.number, row, finals)
            yield
            if not request.wait(self._memory.requests.spins, self._goes_on):
                raise LearnerLeft

    def _take_turns(self, acting: list[Iterator[None]]) -> None:
        for one in acting:
            next(one)
        first = acting[0]
        while acting:
            for one in tuple(acting):
                if one is first:  # its step is on record before it is taken
                    self._progress.step(sum(int(each.recorder.numbers.sum()) for each in self._environments))
                if next(one, _END) is _END:
                    acting.remove(one)

    def _begin(self, incarnation: int) -> None:
        for one in self._environments:
            one.close()
        # The first incarnation acts as a worker would that has these environments itself.
        seed = mix(self._job.seed, incarnation) if incarnation else self._job.seed
        seed_host(mix(seed, self._number))  # what environments draw from global generators
        self._incarnation = incarnation
        self._environments = [self._job.make(len(group)) for group in self._groups]
        self._actors = [
            Actor(made, self._job.spec, self._keys[group.start : group.stop], seed)
            for made, group in zip(self._environments, self._groups, strict=True)
        ]


def _receive(end: socket.socket) -> bytes:
    try:
        return end.recv(MESSAGE_BYTES)
    except ConnectionResetError:
        return b""


def _is_there(end: socket.socket) -> bool:
    """Whether the learner is; it says nothing while an actor acts."""
    try:
        return bool(end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def _send(end: socket.socket, **message: Any) -> None:
    try:
        end.send(json.dumps(message).encode())
    except (BrokenPipeError, ConnectionResetError):  # the learner is gone, which the next `recv` says
        pass
