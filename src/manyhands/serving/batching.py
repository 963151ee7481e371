"""Which requests go to which worker, and when: a pure core (`Dispatch`), and its driver (`Switchboard`).

    a request comes  ──► asked    ┐
    a worker is free ──► free     │   what is to be done: send a batch to a worker, refuse a request,
    a worker is gone ──► gone     │   kill a worker that computes for too long
    time has passed  ──► look     ┘   `wakes_at` is when to look again

A batch leaves as soon as a worker is free and the requests that wait fill it, or the oldest has waited for `wait_s`. A
request may be computed twice, so those of a worker that died go to another, before all others and each in
a batch of its own: one that kills workers takes no second request with it, and after `tries` workers it is refused.

Two clocks: a request is refused when `deadline_s` have passed since it came, wherever it is then; a worker is killed
when it has computed for that long. Were it killed for requests that had waited before it got them, a server with too
much to do would kill its own workers.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from bisect import insort_left
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from manyhands.errors import UserError, check_count
from manyhands.observe.analyse.serving_view import ServingTally
from manyhands.serving.worker_switchboard import ENDING, WorkerSwitchboard


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """Limits of batches and of the queue; validated on construction."""

    batch: int = 64  # inputs in a batch; a request that has more is a batch of its own
    wait_s: float = 0.002  # how long a request waits for others to fill a batch
    waiting: int = 4096  # inputs that may wait; a request that would make them more is refused
    deadline_s: float = 30.0  # from a request to its answer, and for one batch in a worker
    tries: int = 2  # workers that a request may lose

    def __post_init__(self) -> None:
        for name in ("batch", "waiting", "tries"):
            check_count(name, getattr(self, name))
        if not 0 <= self.wait_s < self.deadline_s < math.inf:
            raise UserError(
                f"wait_s={self.wait_s:g} must be at least 0 and less than a finite deadline_s={self.deadline_s:g}"
            )


@dataclass(frozen=True, slots=True)
class SendBatch:
    """Send these requests to `worker` as one batch."""

    worker: int
    requests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RefuseRequest:
    """Answer with an HTTP status and one sentence."""

    request: int
    status: int
    sentence: str


@dataclass(frozen=True, slots=True)
class KillReplica:
    """Kill a worker that has exceeded its deadline."""

    worker: int


BatchAction: TypeAlias = SendBatch | RefuseRequest | KillReplica


@dataclass(slots=True)
class _Request:
    number: int
    size: int
    asked_at: float
    lost: int = 0  # workers that died while they had it


@dataclass(slots=True)
class _Busy:
    requests: deque[_Request]  # those that still want their answer, the oldest first
    until: float  # when it is killed
    killed: bool = False


class Dispatch:
    """The unanswered requests and the current workers; times are seconds of any one clock."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._queue: deque[_Request] = deque()  # the oldest first
        self.free_workers: deque[int] = deque()
        self.busy: dict[int, _Busy] = {}  # by worker
        self.waiting_inputs = 0  # in the queue

    def asked(self, number: int, size: int, now: float) -> list[BatchAction]:
        if self.waiting_inputs and self.waiting_inputs + size > self.limits.waiting:
            sentence = f"{self.waiting_inputs} inputs are already waiting; try again in a moment."
            return [RefuseRequest(number, 503, sentence)]
        self._queue.append(_Request(number, size, now))
        self.waiting_inputs += size
        return self.look(now)

    def free(self, worker: int, now: float) -> list[BatchAction]:
        self.busy.pop(worker, None)
        self.free_workers.append(worker)
        return self.look(now)

    def gone(self, worker: int, now: float) -> list[BatchAction]:
        """A worker has died: requeue its requests, unless past the deadline or out of tries."""
        if worker in self.free_workers:
            self.free_workers.remove(worker)
        lost = self.busy.pop(worker, None)
        actions: list[BatchAction] = []
        for request in reversed(lost.requests if lost is not None else ()):
            request.lost += 1
            if request.lost >= self.limits.tries:
                sentence = f"{request.lost} workers died while computing this request; it was abandoned."
                actions.append(RefuseRequest(request.number, 503, sentence))
            else:
                insort_left(self._queue, request, key=lambda one: one.asked_at)
                self.waiting_inputs += request.size
        return [*actions, *self.look(now)]

    def look(self, now: float) -> list[BatchAction]:
        within, actions = f"within {self.limits.deadline_s:g} s", list[BatchAction]()
        before = now - self.limits.deadline_s
        while self._queue and self._queue[0].asked_at <= before:
            sentence = f"No worker was free {within}; try again later."
            actions.append(RefuseRequest(self._taken().number, 503, sentence))
        too_slow = f"The answer was not computed {within}; send fewer inputs at a time, or try again later."
        for worker, busy in self.busy.items():
            while busy.requests and busy.requests[0].asked_at <= before:
                actions.append(RefuseRequest(busy.requests.popleft().number, 503, too_slow))
            if not busy.killed and now >= busy.until:
                busy.killed = True
                actions.append(KillReplica(worker))
        return [*actions, *self._batches(now)]

    @property
    def wakes_at(self) -> float | None:
        limits = self.limits
        times = [one.until for one in self.busy.values() if not one.killed]
        times += [one.requests[0].asked_at + limits.deadline_s for one in self.busy.values() if one.requests]
        if self._queue:
            oldest = self._queue[0]
            times.append(oldest.asked_at + (limits.wait_s if self.free_workers else limits.deadline_s))
        return min(times, default=None)

    def _batches(self, now: float) -> list[BatchAction]:
        actions: list[BatchAction] = []
        while self._queue and self.free_workers:
            oldest, limits = self._queue[0], self.limits
            is_full = self.waiting_inputs >= limits.batch
            if not (oldest.lost or is_full or now >= oldest.asked_at + limits.wait_s):
                break
            batch = deque([self._taken()])
            size = batch[0].size
            while not oldest.lost and self._queue and not self._queue[0].lost:
                if size + self._queue[0].size > limits.batch:
                    break
                batch.append(self._taken())
                size += batch[-1].size
            worker = self.free_workers.popleft()
            self.busy[worker] = _Busy(batch, now + limits.deadline_s)
            actions.append(SendBatch(worker, tuple(one.number for one in batch)))
        return actions

    def _taken(self) -> _Request:
        request = self._queue.popleft()
        self.waiting_inputs -= request.size
        return request


@dataclass(slots=True)
class _Asked:
    """A request without an answer yet."""

    body: bytes | bytearray
    size: int
    answer: asyncio.Future[tuple[int, bytes]]


class Switchboard(WorkerSwitchboard):
    """The driver of `Dispatch`."""

    core: Dispatch

    def __init__(self, limits: BatchLimits, tally: ServingTally, kill: Callable[[int], None]) -> None:
        super().__init__(tally, kill)
        self.core = Dispatch(limits)
        self._asked: dict[int, _Asked] = {}

    @property
    def is_ready(self) -> bool:
        return not self._ending and bool(self.core.free_workers or self.core.busy)

    @property
    def unanswered(self) -> int:
        return len(self._asked)

    async def ask(self, body: bytes | bytearray, size: int) -> tuple[int, bytes]:
        if self._ending:
            return 503, _error(ENDING)
        self._number += 1
        number = self._number
        answer: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()
        self._asked[number] = _Asked(body, size, answer)
        self._do(self.core.asked(number, size, time.monotonic()))
        return await answer

    def _state(self, worker: int) -> str:
        busy, free = self.core.busy.copy(), self.core.free_workers.copy()
        return "computing" if worker in busy else "free" if worker in free else "starting"

    def _ready(self, worker: int) -> None:
        self._do(self.core.free(worker, time.monotonic()))

    def _heard(self, worker: int, message: Any) -> None:
        connection = self._connections[worker]
        for number, answer in zip(connection.sent, message, strict=True):
            status = int(answer.pop("status"))
            self._give(number, status, json.dumps(answer).encode())
        connection.sent = ()
        self._do(self.core.free(worker, time.monotonic()))

    def _gone(self, worker: int) -> None:
        self._do(self.core.gone(worker, time.monotonic()))

    def _act(self, action: BatchAction) -> None:
        match action:
            case SendBatch(worker, requests):
                connection = self._connections[worker]
                connection.sent = requests
                asked = [self._asked[number] for number in requests]
                size = sum(one.size for one in asked)
                connection.batches += 1
                connection.inputs += size
                self._tally.batch(size)
                # Each body is JSON that was validated before: the array is joined without encoding it again.
                connection.send(b"[" + b",".join(one.body for one in asked) + b"]")
            case RefuseRequest(request, status, sentence):
                self._give(request, status, _error(sentence))
            case KillReplica(worker):
                self._kill(worker)

    def _refuse_all(self) -> None:
        for number in list(self._asked):
            self._give(number, 503, _error(ENDING))

    def _give(self, number: int, status: int, answer: bytes) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None and not asked.answer.done():
            asked.answer.set_result((status, answer))


def _error(sentence: str) -> bytes:
    return json.dumps({"error": sentence}).encode()
