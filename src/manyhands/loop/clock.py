"""Where a worker's time goes from one exchange to the next, as events: the launcher's table is made from them.

The clock is read when backward has ended and before anyone is waited for, so that a slow worker shows as itself. What
lies between two exchanges counts as computing: the step, forward and backward, less what was reduced or waited for
meanwhile; reading from a prepared loader counts as input.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from manyhands.cluster.board import State
from manyhands.loop.agreement import Words
from manyhands.record.events import EventKind
from manyhands.training.exchange import Exchange, Post, Traffic
from manyhands.training.reporting import Surroundings, record_posts

__all__ = ["RoundClock"]


class RoundClock:
    """Times one worker's rounds: `start`, then `computed` and `exchanged` in each."""

    def __init__(
        self, words: Words, exchange: Exchange, around: Surroundings, take_input_ns: Callable[[], int]
    ) -> None:
        """`take_input_ns` tells what reading took since it was last asked."""
        self._words = words
        self._exchange = exchange
        self._around = around
        self._take_input_ns = take_input_ns
        self.rounds = 0
        """How many exchanges this worker has taken part in."""

        self._sent = Traffic()
        self._started_ns = self._computed_ns = self._overlapped_ns = 0
        self._waited_before: Counter[int] = Counter()
        self._input_ns = 0

    def start(self) -> None:
        """From now on this worker computes; what was before is nobody's."""
        self._around.mark(self.rounds + 1, State.COMPUTING)
        self._take()
        self._take_input_ns()
        self._sent = self._exchange.traffic()
        self._started_ns = time.monotonic_ns()

    def computed(self) -> None:
        """Backward has ended, and the exchange begins."""
        self._around.mark(self.rounds + 1, State.EXCHANGING)
        self._computed_ns = time.monotonic_ns()
        self._overlapped_ns, self._waited_before, _ = self._take()
        # At the first batch of an epoch the loader asks worker 0 for its order, and waits.
        self._input_ns = max(0, self._take_input_ns() - self._waited_before.total())

    def exchanged(self, samples: int) -> None:
        """The exchange is complete; `samples` were this worker's share."""
        now_ns, started_ns, computed_ns = time.monotonic_ns(), self._started_ns, self._computed_ns
        _, waited, posts = self._take()
        record, step = self._around.record, self.rounds
        fetched_ns = started_ns + self._input_ns
        busy_ns = computed_ns - fetched_ns - self._overlapped_ns - self._waited_before.total()
        record(EventKind.INPUT, started_ns, self._input_ns, step=step, count=samples)
        record(EventKind.COMPUTE, fetched_ns, max(0, busy_ns), step=step)
        for waits in (self._waited_before, waited):
            for peer, duration_ns in waits.items():
                record(EventKind.WAIT, computed_ns, duration_ns, step=step, peer=peer)
        if self._exchange.world > 1:
            sent = self._exchange.traffic() - self._sent
            moving_ns = max(0, now_ns - computed_ns - waited.total()) + self._overlapped_ns
            record(
                EventKind.EXCHANGE,
                computed_ns,
                moving_ns,
                step=step,
                num_bytes=sent.bytes_sent,
                count=sent.messages_sent,
                wire=self._exchange.wire,
            )
            record_posts(self._around, step, posts, self._exchange.wire)
        record(EventKind.STEP, started_ns, now_ns - started_ns, step=step, count=samples)
        self.rounds += 1
        self.start()

    def _take(self) -> tuple[int, Counter[int], Mapping[int, Post]]:
        """Nanoseconds spent reducing, and waiting for each worker, and the exchange's messages, since the last look."""
        times = (self._exchange.take_times(), self._words.take_times())
        waited: Counter[int] = Counter()
        for one in times:
            waited.update(one.wait_ns)
        return sum(one.exchange_ns for one in times), waited, times[0].posts
