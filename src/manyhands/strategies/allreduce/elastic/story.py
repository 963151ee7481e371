"""The event log of an elastic run's members: the rows of members.jsonl, and the summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from manyhands.strategies.allreduce.elastic.elastic_membership import ElasticMembership
from manyhands.strategies.allreduce.elastic.elastic_messages import ArrivedInEpoch, EpochView

__all__ = ["MemberStory"]


class MemberStory:
    """Driven by the launcher; `on_event` receives each event, with a sentence if users should know of it."""

    def __init__(
        self, on_event: Callable[[dict[str, Any]], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_event = on_event
        self._clock = clock
        self._began_s: float | None = None
        self._view = EpochView(epoch=0, seats=())
        self._arrived: set[int] = set()
        self._lost: dict[str, float] = {}  # lost since the run was last complete, and when
        self._redone = 0  # steps computed twice up to the last reported epoch
        self.names: dict[int, str] = {}
        """The name of every member that was ever started."""

        self.recoveries: list[dict[str, Any]] = []
        self._num_lost = self._num_joined = 0

    def started(self, member: int, pid: int) -> None:
        """Record that a member's process has started."""
        self._tell("started", member, pid=pid)

    def silent(self, member: int, seen: str) -> None:
        """Record that a member's heartbeat has stopped."""
        self._lost.setdefault(self.names[member], self._clock())
        self._tell("silent", member, sentence=f"{seen}; it is killed, and the others go on without it")

    def died(self, member: int, sentence: str) -> None:
        """Record that a member's process has died."""
        self._num_lost += 1
        self._lost.setdefault(self.names[member], self._clock())
        self._tell("died", member, sentence=sentence)

    def left(self, member: int) -> None:
        """Record that a member has ended as requested."""
        self._tell("left", member)

    def published(self, view: EpochView) -> None:
        """Record a new epoch."""
        if self._began_s is None:
            self._began_s = self._clock()
        self._view, self._arrived = view, set()
        self._on_event(
            {
                "event": "view",
                "at_s": self._seconds(),
                "epoch": view.epoch,
                "shards": [],
                "slots": [
                    {"slot": seat.slot, "member": seat.member, "fresh": seat.fresh} for seat in view.seats
                ],
                "names": {str(seat.member): self.names[seat.member] for seat in view.seats},
            }
        )

    def arrived(self, report: ArrivedInEpoch, membership: ElasticMembership) -> None:
        """Record that a member takes part in an epoch; with the last one the run is complete again."""
        view = self._view
        if report.epoch != view.epoch or report.member in self._arrived:
            return
        self._arrived.add(report.member)
        seat = view.seats[view.rank_of(report.member)]
        if view.epoch == 1:
            self._tell("joined", report.member)
        elif seat.fresh:
            self._num_joined += 1
            donor = self.names[view.donor] if view.donor is not None else "nobody"
            sentence = (
                f"{self.names[report.member]} joined after step {report.step}, with the state of {donor}"
            )
            self._tell("joined", report.member, sentence=sentence)
        if len(self._arrived) == len(view.seats):
            self._recovered(report, membership)

    def _recovered(self, report: ArrivedInEpoch, membership: ElasticMembership) -> None:
        again, self._redone = membership.redone - self._redone, membership.redone
        lost, self._lost = self._lost, {}
        if not lost:
            return
        seconds = self._clock() - min(lost.values())
        who, count = " and ".join(lost), len(self._view.seats)
        self.recoveries.append({"what": who, "seconds": seconds})
        there = f"{count} workers go" if count > 1 else "1 worker goes"
        were = "were" if len(lost) > 1 else "was"
        twice = f"; step {report.step + 1} is computed again" if again else ""
        self._tell(
            "recovered",
            self._view.seats[0].member,
            what=who,
            seconds=seconds,
            sentence=f"{there} on after step {report.step}, {seconds:.2f} s after {who} {were} lost{twice}",
        )

    def summary(self, membership: ElasticMembership) -> Mapping[str, Any]:
        """Return the counts for the run's summary."""
        return {
            "epochs": membership.view.epoch,
            "changes": membership.changes,
            "lost": self._num_lost,
            "joined": self._num_joined,
            "steps_computed_twice": membership.redone,
        }

    def _seconds(self) -> float:
        return 0.0 if self._began_s is None else self._clock() - self._began_s

    def _tell(self, event: str, member: int, **details: Any) -> None:
        known = {"name": self.names[member]} if member in self.names else {}
        self._on_event({"event": event, "at_s": self._seconds(), "member": member, **known, **details})
