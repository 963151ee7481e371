"""The driver of `StepAhead` at a server: parameters are computed, and sent, while gradients are still arriving."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import count
from typing import Any

from manyhands.strategies.ps.live.payloads import Gradients
from manyhands.strategies.ps.live.ps_job import AHEAD_BYTES
from manyhands.strategies.ps.ps_messages import HostPush, Parameters, Push, ValuesAhead
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_replica import ServerCore
from manyhands.strategies.ps.shard_store import ShardStore
from manyhands.strategies.ps.step_ahead import Span, StepAhead
from manyhands.wire.flat_layout import LINE_BYTES


class AnswersAhead:
    """All shards of one server process; `send` says whether a member is connected."""

    def __init__(
        self,
        core: ServerCore,
        layout: FlatLayout,
        gradients: Gradients,
        store: Callable[[int], ShardStore],
        send: Callable[[int, ValuesAhead, list[Any]], bool],
        *,
        least: int = AHEAD_BYTES,
    ) -> None:
        self._core, self._layout, self._gradients = core, layout, gradients
        self._store, self._send, self._least = store, send, least
        self._steps: dict[int, StepAhead] = {}
        self._attempts: dict[int, int] = {}  # by shard, the one that its store has begun
        self._numbers = count(1)
        self._sent: defaultdict[int, dict[int, tuple[int, int]]] = defaultdict(dict)
        """By member and shard: the attempt that it was sent last, and how many bytes of it."""

    def arriving(self, message: Push | HostPush, num_bytes: int) -> None:
        """So many bytes of the payload are here."""
        replica = self._core.replicas.get(message.shard) if num_bytes else None
        if replica is None or replica.serving is None or replica.core.awaiting:
            return
        shard, steps = message.shard, replica.core.steps
        ahead = self._steps.get(shard)
        if ahead is None:
            ahead = self._steps[shard] = StepAhead(self._layout.range_bytes(shard), self._least)
        dense = max(0, num_bytes - self._layout.flag_bytes(shard))
        if dense < self._layout.range_bytes(shard):
            dense -= dense % LINE_BYTES
        if not ahead.arrives(message, dense):
            self._drop(shard)
        span = ahead.span(steps.step, steps.slots_at(steps.step))
        if span is not None:
            self._advance(shard, span, steps.version + 1)

    def _advance(self, shard: int, span: Span, version: int) -> None:
        following = self._store(shard).following
        if following is None:
            return
        if span.begin == 0:
            contributions = [self._gradients.arriving(push) for push in span.pushes]
            pieces = len(self._layout.pieces[shard])
            if any(one is None or not one.present[:pieces].all() for one in contributions):
                self._drop(shard)
                return
            following.begin([one.gradient.memory for one in contributions if one is not None])
            self._attempts[shard] = next(self._numbers)
        attempt = self._attempts.get(shard)
        if attempt is None:
            return
        following.advance(span.until)
        part = [following.view[span.begin : span.until]]
        for push in span.pushes:
            before = self._sent[push.member].get(shard, (0, 0))
            if before != (attempt, span.begin) and span.begin:
                continue
            if self._send(push.member, ValuesAhead(shard, push.clock + 1, version, span.begin), part):
                self._sent[push.member][shard] = (attempt, span.until)

    def sent(self, to: int, message: Parameters) -> int:
        """How many bytes of these parameters `to` was sent before."""
        attempt, until = self._sent[to].pop(message.shard, (0, 0))
        store = self._store(message.shard)
        is_it = store.followed and attempt == self._attempts.get(message.shard)
        return until if is_it else 0

    def gone(self, member: int) -> None:
        """A member is not connected any more."""
        self._sent.pop(member, None)
        for shard, ahead in self._steps.items():
            if not ahead.gone(member):
                self._drop(shard)

    def _drop(self, shard: int) -> None:
        """What was begun has another gradient than the step will have."""
        self._attempts.pop(shard, None)
        following = self._store(shard).following
        if following is not None:
            following.begin(())
