"""The register of ranks in a run: decides from a process's hello which rank it may take. Does no I/O."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from manyhands.places.external.control_messages import ControlHello, ControlRefused, Term

__all__ = ["Register", "clock_notice", "terms_of"]

_SHOWN: Final = 60
_CLOCKS_AGREE_S: Final = 60.0


def terms_of(values: Mapping[str, Any]) -> tuple[Term, ...]:
    """The terms of a run as text; a long value is shortened to its beginning and a digest."""
    terms = []
    for name, value in values.items():
        text = str(value)
        if len(text) > _SHOWN:
            text = f"{text[: _SHOWN - 20]}… ({hashlib.sha256(text.encode()).hexdigest()[:16]})"
        terms.append(Term(name=name, value=text))
    return tuple(terms)


def clock_notice(name: str, theirs_unix_s: float, ours_unix_s: float) -> str | None:
    """A warning if a process's wall clock is off by more than a minute; event times are right anyway, by round
    trips.
    """
    off_s = theirs_unix_s - ours_unix_s
    if abs(off_s) <= _CLOCKS_AGREE_S:
        return None
    much = f"{abs(off_s) / 3600:.1f} h" if abs(off_s) >= 3600 else f"{abs(off_s) / 60:.0f} min"
    way = "ahead of" if off_s > 0 else "behind"
    return (
        f"the clock of {name} is {much} {way} the leader's: set it right, or dates in its own logs mislead; "
        "the run's events are on one time axis all the same"
    )


class Register:
    """The ranks of one run; a rank is free until a process takes it, and again once that process has left."""

    def __init__(self, leader: ControlHello) -> None:
        self._leader = leader
        self._seats: dict[int, ControlHello] = {}
        self.rejected: list[str] = []
        """One sentence for each process that was rejected."""

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(1, self._leader.world) if rank not in self._seats)

    def arrive(self, hello: ControlHello) -> ControlRefused | None:
        """Admit a process to its rank, or return why it does not belong to this run."""
        refused = self._check(hello)
        if refused is None:
            self._seats[hello.rank] = hello
        else:
            self.rejected.append(refused.reason)
        return refused

    def leave(self, rank: int) -> None:
        self._seats.pop(rank, None)

    def late(self, deed: str, waited_s: float, named: Callable[[int], str] = "rank {}".format) -> str:
        """The sentence on ranks that did not join in time, with what is known of rejected processes."""
        who = f"{', '.join(map(named, self.missing))} of {self._leader.world}"
        reasons = "".join(f"; {sentence}" for sentence in self.rejected[-3:])
        return f"{who} did not {deed} within {waited_s:.1f} s; see whether it was started{reasons}"

    def _check(self, hello: ControlHello) -> ControlRefused | None:
        mine = self._leader
        if hello.world != mine.world:
            return ControlRefused(
                field="world",
                reason=f"{hello.name} is one of {hello.world} processes, and the leader, {mine.name}, one of "
                f"{mine.world}: start all of them by one command",
            )
        if not 0 < hello.rank < mine.world:
            return ControlRefused(
                field="rank",
                reason=f"{_process(hello)} says it is rank {hello.rank}: the ranks of this run are 0, which is "
                f"{_process(mine)}, to {mine.world - 1}",
            )
        other = self._seats.get(hello.rank)
        if other is not None:
            return ControlRefused(
                field="rank",
                reason=f"two processes are rank {hello.rank}: {_process(other)} and {_process(hello)}; give each a "
                "rank, or each job a port, of its own",
            )
        ours = {term.name: term.value for term in mine.terms}
        theirs = {term.name: term.value for term in hello.terms}
        for name in {**ours, **theirs}:
            here, there = ours.get(name, "nothing"), theirs.get(name, "nothing")
            if here != there:
                return ControlRefused(
                    field=name,
                    reason=f"{hello.name} has {name}={there}, and the leader, {mine.name}, {name}={here}: all "
                    "processes of a run must be started alike",
                )
        return None


def _process(hello: ControlHello) -> str:
    return f"process {hello.pid} ({hello.name})"
