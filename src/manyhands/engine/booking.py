"""Books where the time of a step went, as events; shared by the loops of all strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from manyhands.engine.exchange import MicrobatchTime, PeerTraffic, Traffic
from manyhands.observe.record.events import EventKind

__all__ = ["StepBook"]


class StepBook:
    """Books the parts of one step in order: each part begins where the one before it ended.

    `step` is the global batch, from 0, and `record` is that of `WorkerContext`. Time that no call books is left
    unaccounted.
    """

    def __init__(self, record: Callable[..., bool], step: int, begin_ns: int) -> None:
        self._record, self._step, self._begin_ns = record, step, begin_ns
        self._at_ns = begin_ns

    @property
    def at_ns(self) -> int:
        """The moment at which the last part ended, in nanoseconds."""
        return self._at_ns

    def go_on_at(self, moment_ns: int) -> None:
        """Let the next part begin at `moment_ns` instead of where the last one ended."""
        self._at_ns = moment_ns

    def input(self, duration_ns: int, samples: int) -> None:
        """Book reading `samples` samples."""
        self._record(EventKind.INPUT, self._at_ns, duration_ns, step=self._step, count=samples)
        self._at_ns += duration_ns

    def compute(self, until_ns: int, less_ns: int = 0) -> None:
        """Book computing up to `until_ns`, less the time `less_ns` that is booked as something else."""
        duration_ns = max(0, until_ns - self._at_ns - less_ns)
        self._record(EventKind.COMPUTE, self._at_ns, duration_ns, step=self._step)
        self._at_ns = until_ns

    def turns(self, turns: Sequence[MicrobatchTime]) -> None:
        """Book the work items that computing was made of, each at its time, where workers share micro-batches."""
        for turn in turns:
            kind = EventKind.COMPUTE if turn.waited_for is None else EventKind.WAIT
            who = {} if turn.waited_for is None else {"peer": turn.waited_for}
            duration_ns = turn.end_ns - turn.begin_ns
            self._record(kind, turn.begin_ns, duration_ns, step=self._step, count=turn.microbatch + 1, **who)
            self._at_ns = turn.end_ns + turn.exchange_ns

    def waits(self, waited_ns: Mapping[int, int]) -> None:
        """Book the waits for late workers, one after another."""
        for peer, duration_ns in waited_ns.items():
            self._record(EventKind.WAIT, self._at_ns, duration_ns, step=self._step, peer=peer)
            self._at_ns += duration_ns

    def exchange(self, until_ns: int, sent: Traffic, wire: int, hidden_ns: int = 0) -> None:
        """Book the exchange up to `until_ns`, plus `hidden_ns` that computing overlapped, with the traffic `sent`."""
        self._record(
            EventKind.EXCHANGE,
            self._at_ns,
            max(0, until_ns - self._at_ns) + hidden_ns,
            step=self._step,
            num_bytes=sent.bytes_sent,
            count=sent.messages_sent,
            wire=wire,
        )
        self._at_ns = until_ns

    def posts(self, posts: Mapping[int, PeerTraffic], wire: int) -> None:
        """Book the traffic with each other worker: all of a step in one direction counts as one message.

        The message has the same number at both ends.
        """
        message = (self._step + 1) & 0xFFFFFFFF
        for peer, post in posts.items():
            if post.messages_sent:
                self._record(
                    EventKind.SEND,
                    post.sent_ns,
                    step=self._step,
                    peer=peer,
                    num_bytes=post.bytes_sent,
                    count=post.messages_sent,
                    message=message,
                    wire=wire,
                )
            if post.received_ns:
                self._record(
                    EventKind.RECEIVE,
                    post.received_ns,
                    step=self._step,
                    peer=peer,
                    message=message,
                    wire=wire,
                )

    def end(self, end_ns: int, samples: int, loss: float = 0.0) -> None:
        """Book the whole step, from its beginning to `end_ns`."""
        self._record(
            EventKind.STEP,
            self._begin_ns,
            end_ns - self._begin_ns,
            step=self._step,
            count=samples,
            value=loss,
        )
