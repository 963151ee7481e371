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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from manyhands.data.randomness import mix, seed_host
from manyhands.errors import UserError, first_line
from manyhands.native.segment import Segment
from manyhands.places.local.packed_job import load
from manyhands.places.local.stacks import answer_with_stacks
from manyhands.workloads.rl.acting import Actor
from manyhands.workloads.rl.actor_memory import ActorMemory, ActorProgress, MemoryPlan
from manyhands.workloads.rl.episodes import Episode
from manyhands.workloads.rl.rollouts import RolloutSpec
from manyhands.workloads.rl.stepping import Environments
from manyhands.workloads.rl.tickets import Ticket

__all__ = ["MESSAGE_BYTES", "ActorJob", "run_actor"]

MESSAGE_BYTES = 1 << 17
_EPISODES = 500  # in a message
_TRACE = 1 << 15


@dataclass(frozen=True, kw_only=True, slots=True)
class ActorJob:
    """What an actor needs to act, besides weights and tickets."""

    make: Callable[[int], Environments]  # so many, side by side
    policy: Callable[[], nn.Module]
    spec: RolloutSpec
    environments: range  # the numbers of those of all actors of this learner, the first actor's first
    seed: int


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
        acting = _Acting(*loaded, Segment.attach(memory), setup["number"], setup["incarnation"])
        _send(end, ready=True)
        while data := _receive(end):
            began = time.monotonic()
            ticket = Ticket(**json.loads(data))
            episodes = acting.act(ticket)
            for first in range(0, len(episodes), _EPISODES):
                _send(end, episodes=episodes[first : first + _EPISODES])
            _send(end, done=ticket.number, seconds=time.monotonic() - began)
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
    """The environments and the policy of an actor; those of another incarnation are made anew."""

    def __init__(
        self, job: ActorJob, plan: MemoryPlan, segment: Segment, number: int, incarnation: int
    ) -> None:
        self._job, self._number = job, number
        self._memory = ActorMemory(plan, segment)
        self._progress = self._memory.progress[number]
        rows = plan.rows
        self._keys = job.environments[number * rows : (number + 1) * rows]
        self._policy = job.policy()
        self._version = -1
        self._begin(incarnation)

    def act(self, ticket: Ticket) -> list[Episode]:
        if ticket.incarnation != self._incarnation:
            self._environments.close()
            self._begin(ticket.incarnation)
        self._progress.begin(ticket.incarnation, ticket.rollout)
        if ticket.version != self._version:
            self._policy.load_state_dict(self._memory.weights(ticket.version))
            self._version = ticket.version
        ended = self._actor.act(self._policy, self._memory.rollout(ticket.number), ticket.version)
        return [one._replace(environment=self._keys[one.environment]) for one in ended]

    def _begin(self, incarnation: int) -> None:
        # The first incarnation acts as a worker would that has these environments itself.
        seed = mix(self._job.seed, incarnation) if incarnation else self._job.seed
        seed_host(mix(seed, self._number))  # what environments draw from global generators
        self._incarnation = incarnation
        self._environments = self._job.make(len(self._keys))
        counted = cast(Environments, _Counted(self._environments, self._progress))
        self._actor = Actor(counted, self._job.spec, self._keys, seed)


class _Counted:
    """Environments whose every step is on record before it is taken."""

    def __init__(self, environments: Environments, progress: ActorProgress) -> None:
        self._environments, self._progress = environments, progress

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environments, name)

    def step(self, actions: Any) -> Any:
        self._progress.step(int(self._environments.recorder.numbers.sum()))
        return self._environments.step(actions)


def _receive(end: socket.socket) -> bytes:
    try:
        return end.recv(MESSAGE_BYTES)
    except ConnectionResetError:
        return b""


def _send(end: socket.socket, **message: Any) -> None:
    try:
        end.send(json.dumps(message).encode())
    except (BrokenPipeError, ConnectionResetError):  # the learner is gone, which the next `recv` says
        pass
