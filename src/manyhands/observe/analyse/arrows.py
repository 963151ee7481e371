"""Arrows of a timeline: the end of each wait that names a peer, and each message with both ends recorded."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from manyhands.observe.analyse.picture import Arrow, Row, Slice
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import RoleEvents

__all__ = ["Span", "message_arrows", "wait_arrows"]

_NEAR_NS = 1_000_000  # a record may begin or end slightly before or after the message that it belongs to

Span = tuple[int, int]  # A stretch of time, both ends included, in nanoseconds on the clock of the events


def wait_arrows(rows: Sequence[Row]) -> Iterator[Arrow]:
    """Return an arrow for each wait whose peer had a visible slice when the wait ended."""
    by_role = {row.role: _Track(row) for row in rows}
    for row in rows:
        for wait in row.slices:
            if wait.kind is not EventKind.WAIT or wait.peer not in by_role or wait.peer == row.role:
                continue
            # One nanosecond inside both slices, so that a trace viewer attaches the arrow to the right slices.
            target_ns = wait.end_ns - 1
            source_ns = by_role[wait.peer].before(target_ns)
            if source_ns is not None:
                yield Arrow(
                    source=wait.peer,
                    source_ns=source_ns,
                    target=row.role,
                    target_ns=target_ns,
                    step=wait.step,
                )


def message_arrows(
    rows: Sequence[Row], roles: Iterable[RoleEvents], spans: Sequence[Span], zero_ns: int
) -> Iterator[Arrow]:
    """Return an arrow for each message whose two ends lie within `spans` and on visible slices."""
    tracks = {row.role: _Track(row) for row in rows}
    for (source, target), (sent, received) in _ends(roles, spans).items():
        if source not in tracks or target not in tracks:
            continue
        for number, sends in sent.items():
            for send, arrival in zip(sends, received.get(number, ()), strict=False):
                target_ns = tracks[target].near(arrival.at_ns - zero_ns)
                if target_ns is None:
                    continue
                # A message may arrive before the call that sent it has returned.
                left_ns = max(send.began_ns, min(send.at_ns, arrival.at_ns))
                source_ns = tracks[source].near(left_ns - zero_ns, latest_ns=target_ns)
                if source_ns is not None:
                    yield Arrow(
                        source=source,
                        source_ns=source_ns,
                        target=target,
                        target_ns=target_ns,
                        step=max(send.step, arrival.step),
                        is_message=True,
                        num_bytes=send.num_bytes,
                    )


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a message."""

    began_ns: int
    at_ns: int
    step: int
    num_bytes: int


_Ends = dict[int, list[_End]]  # by message number, in recording order


def _ends(roles: Iterable[RoleEvents], spans: Sequence[Span]) -> dict[tuple[int, int], tuple[_Ends, _Ends]]:
    """Return the sent and the received ends for each (sender, receiver) pair."""
    found: dict[tuple[int, int], tuple[_Ends, _Ends]] = defaultdict(
        lambda: (defaultdict(list), defaultdict(list))
    )
    names = ("kind", "peer", "message", "start_ns", "step", "num_bytes")
    for events in roles:
        records = events.of(EventKind.SEND, EventKind.RECEIVE)
        starts = records["start_ns"].astype(np.int64)
        ends = starts + np.where(
            records["kind"] == EventKind.SEND, records["duration_ns"].astype(np.int64), 0
        )
        inside = np.zeros(len(records), bool)
        for begin, end in spans:
            inside |= (starts >= begin) & (ends <= end)
        columns = [records[name][inside].tolist() for name in names]
        for kind, peer, number, began_ns, step, num_bytes, at_ns in zip(
            *columns, ends[inside].tolist(), strict=True
        ):
            is_send = kind == EventKind.SEND
            pair = (events.role, peer) if is_send else (peer, events.role)
            found[pair][0 if is_send else 1][number].append(_End(began_ns, at_ns, step, num_bytes))
    return found


class _Track:
    """The slices of a row, searchable by time."""

    def __init__(self, row: Row) -> None:
        self._slices: Sequence[Slice] = row.slices
        self._starts = [part.start_ns for part in row.slices]

    def before(self, at_ns: int) -> int | None:
        """Return the moment if it lies in a slice, else the latest earlier moment that does."""
        index = bisect.bisect_right(self._starts, at_ns) - 1
        return min(at_ns, self._slices[index].end_ns - 1) if index >= 0 else None

    def near(self, at_ns: int, latest_ns: int | None = None) -> int | None:
        """Return the moment if it lies in a slice, else the nearest one that does, within the tolerance."""
        index = bisect.bisect_right(self._starts, at_ns)
        moments = [min(at_ns, part.end_ns - 1) for part in self._slices[max(0, index - 1) : index]]
        moments += self._starts[index : index + 1]
        moments = [moment for moment in moments if latest_ns is None or moment <= latest_ns]
        nearest = min(moments, key=lambda moment: abs(moment - at_ns), default=None)
        return nearest if nearest is not None and abs(nearest - at_ns) <= _NEAR_NS else None
