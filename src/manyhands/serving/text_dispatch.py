"""Which worker writes which text: a pure core.

A text goes at once to the worker that has the fewest, which lets it join its batch; see `text_scheduler`. The texts of
a worker that died are written again by another: a text is the same each time, so its reader continues where it was.

The worker refuses a text whose time is over. Two rules are for workers that do not: a request without an end
`_GRACE_S` after its deadline is refused here, and a worker that has texts and says nothing for `deadline_s` is killed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from manyhands.serving.batching import BatchLimits, KillReplica, RefuseRequest

_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class SendText:
    """Let `worker` write the text of this request, within so many seconds."""

    worker: int
    request: int
    within_s: float


@dataclass(frozen=True, slots=True)
class CancelText:
    """Tell `worker` that nobody waits for this request any more."""

    worker: int
    request: int


TextAction: TypeAlias = SendText | CancelText | RefuseRequest | KillReplica


@dataclass(slots=True)
class _Text:
    until: float
    worker: int | None = None
    lost: int = 0  # workers that died while they had it


@dataclass(slots=True)
class _Worker:
    heard_at: float  # or when it got the first of its texts
    texts: set[int] = field(default_factory=set)
    killed: bool = False


class TextDispatch:
    """The unfinished texts and the workers that are ready; times are seconds of any one clock."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self._texts: dict[int, _Text] = {}  # the oldest first
        self.workers: dict[int, _Worker] = {}

    @property
    def waiting_inputs(self) -> int:
        """Texts that no worker has yet."""
        return sum(text.worker is None for text in self._texts.values())

    def has_texts(self, worker: int) -> bool:
        return worker in self.workers and bool(self.workers[worker].texts)

    def asked(self, request: int, now: float) -> list[TextAction]:
        if len(self._texts) >= self.limits.waiting:
            sentence = f"{len(self._texts)} texts are already being written; try again in a moment."
            return [RefuseRequest(request, 503, sentence)]
        self._texts[request] = _Text(now + self.limits.deadline_s)
        return self.look(now)

    def ready(self, worker: int, now: float) -> list[TextAction]:
        self.workers[worker] = _Worker(now)
        return self.look(now)

    def heard(self, worker: int, now: float) -> None:
        if worker in self.workers:
            self.workers[worker].heard_at = now

    def ended(self, request: int) -> list[TextAction]:
        """Its text is complete, or nobody waits for it; one that a worker still writes is cancelled there."""
        text = self._texts.pop(request, None)
        if text is None or text.worker is None:
            return []
        self.workers[text.worker].texts.discard(request)
        return [CancelText(text.worker, request)]

    def gone(self, worker: int, now: float) -> list[TextAction]:
        """A worker has died: its texts go to others, unless they have lost too many."""
        lost = self.workers.pop(worker, None)
        actions = list[TextAction]()
        for request in sorted(lost.texts if lost is not None else ()):
            text = self._texts[request]
            text.worker, text.lost = None, text.lost + 1
            if text.lost >= self.limits.tries:
                del self._texts[request]
                sentence = f"{text.lost} workers died while writing this text; it was abandoned."
                actions.append(RefuseRequest(request, 503, sentence))
        return [*actions, *self.look(now)]

    def look(self, now: float) -> list[TextAction]:
        actions = list[TextAction]()
        late = [request for request, text in self._texts.items() if now >= text.until + _GRACE_S]
        for request in late:
            sentence = (
                f"The text was not complete within {self.limits.deadline_s:g} s; ask for fewer tokens, or try again "
                "later."
            )
            actions += [RefuseRequest(request, 503, sentence), *self.ended(request)]
        for number, worker in self.workers.items():
            if worker.texts and not worker.killed and now >= worker.heard_at + self.limits.deadline_s:
                worker.killed = True
                actions.append(KillReplica(number))
        able = {number: one for number, one in self.workers.items() if not one.killed}
        for request, text in self._texts.items() if able else ():
            if text.worker is None:
                text.worker = min(able, key=lambda number: len(able[number].texts))
                chosen = able[text.worker]
                chosen.heard_at = chosen.heard_at if chosen.texts else now
                chosen.texts.add(request)
                actions.append(SendText(text.worker, request, text.until - now))
        return actions

    @property
    def wakes_at(self) -> float | None:
        times = [text.until + _GRACE_S for text in self._texts.values()]
        times += [
            one.heard_at + self.limits.deadline_s
            for one in self.workers.values()
            if one.texts and not one.killed
        ]
        return min(times, default=None)
