"""Where a worker's time goes from one exchange to the next, as events: the launcher's table is made from them.

The clock is read when backward has ended and before anyone is waited for, so that a slow worker shows as itself. What
lies between two exchanges counts as computing: the step, forward and backward, less what was reduced or waited for
meanwhile; reading from a prepared loader counts as input.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping

from manyhands.engine.exchange import Exchange, PeerTraffic, Traffic
from manyhands.engine.reporting import StepBook, WorkerContext
from manyhands.interop.own_loop.small_sums import Words
from manyhands.places.local.status import State

__all__ = ["RoundClock"]


class RoundClock:
    """Times one worker's rounds: `start`, then `computed` and `exchanged` in each."""

    def __init__(
        self,
        words: Words,
        exchange: Exchange,
        worker_context: WorkerContext,
        take_input_ns: Callable[[], int],
    ) -> None:
        """`take_input_ns` tells what reading took since it was last asked."""
        self._words = words
        self._exchange = exchange
        self._worker_context = worker_context
        self._take_input_ns = take_input_ns
        self.rounds = 0
        """How many exchanges this worker has taken part in."""

        self._sent = Traffic()
        self._started_ns = self._computed_ns = self._overlapped_ns = 0
        self._waited_before: Counter[int] = Counter()
        self._input_ns = 0

    def start(self) -> None:
        """Start the clock: this worker computes from now on; earlier time is not booked."""
        self._worker_context.mark(self.rounds + 1, State.COMPUTING)
        self._take()
        self._take_input_ns()
        self._sent = self._exchange.meter.traffic()
        self._started_ns = time.monotonic_ns()

    def computed(self) -> None:
        """Mark that backward has ended, and the exchange begins."""
        self._worker_context.mark(self.rounds + 1, State.EXCHANGING)
        self._computed_ns = time.monotonic_ns()
        self._overlapped_ns, self._waited_before, _ = self._take()
        # At the first batch of an epoch the loader asks worker 0 for its order, and waits.
        self._input_ns = max(0, self._take_input_ns() - self._waited_before.total())

    def exchanged(self, samples: int) -> None:
        """Mark that the exchange is complete; `samples` were this worker's share."""
        now_ns, started_ns, computed_ns = time.monotonic_ns(), self._started_ns, self._computed_ns
        _, waited, posts = self._take()
        book = StepBook(self._worker_context.record, self.rounds, started_ns)
        book.input(self._input_ns, samples)
        book.compute(computed_ns, less_ns=self._overlapped_ns + self._waited_before.total())
        book.go_on_at(computed_ns - self._waited_before.total())
        book.waits(self._waited_before)
        book.waits(waited)
        if self._exchange.world > 1:
            sent = self._exchange.meter.traffic() - self._sent
            book.exchange(now_ns, sent, self._exchange.wire, hidden_ns=self._overlapped_ns)
            book.posts(posts, self._exchange.wire)
        book.end(now_ns, samples)
        self.rounds += 1
        self.start()

    def _take(self) -> tuple[int, Counter[int], Mapping[int, PeerTraffic]]:
        """Nanoseconds spent reducing, and waiting for each worker, and the exchange's messages, since the last look."""
        times = (self._exchange.meter.take_times(), self._words.take_times())
        waited: Counter[int] = Counter()
        for one in times:
            waited.update(one.wait_ns)
        return sum(one.exchange_ns for one in times), waited, times[0].posts
