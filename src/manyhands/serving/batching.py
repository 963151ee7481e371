"""Which requests go to which worker, and when: a pure core, told of events with the time they happened at.

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

import math
from bisect import insort_left
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

from manyhands.errors import UserError

__all__ = ["BatchAction", "BatchLimits", "Dispatch", "KillReplica", "RefuseRequest", "SendBatch"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchLimits:
    """Limits of batches and of the queue; validated on construction."""

    batch: int = 64  # inputs in a batch; a request that has more is a batch of its own
    wait_s: float = 0.002  # how long a request waits for others to fill a batch
    waiting: int = 4096  # inputs that may wait; a request that would make them more is refused
    deadline_s: float = 30.0
    """From a request to its answer, and the longest that a worker may compute one batch."""
    tries: int = 2  # workers that a request may lose

    def __post_init__(self) -> None:
        for name in ("batch", "waiting", "tries"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.wait_s < self.deadline_s < math.inf:
            raise UserError(
                f"wait_s={self.wait_s:g} must be from 0 to less than deadline_s={self.deadline_s:g}, which is finite"
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
            sentence = f"{self.waiting_inputs} inputs wait already; try again in a moment."
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
                sentence = f"{request.lost} workers died while they computed this; it was given up."
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
        too_slow = f"The answer was not computed {within}; ask for less at a time, or try again later."
        for worker, busy in self.busy.items():
            while busy.requests and busy.requests[0].asked_at <= before:
                actions.append(RefuseRequest(busy.requests.popleft().number, 503, too_slow))
            if not busy.killed and now >= busy.until:
                busy.killed = True
                actions.append(KillReplica(worker))
        return [*actions, *self._batches(now)]

    @property
    def wakes_at(self) -> float | None:
        """Return when the next action is due without a further event; None: never."""
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
