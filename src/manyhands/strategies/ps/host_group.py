"""The workers of one host at one of them: who sends for all, and when each sends for itself. Pure.

    follower ──Offer c──► carrier ──HostPush c (the sum of all)──► every shard
             ◄──SumSent c──    ┊ when it has left, to every shard
             ◄──Fetched c+1──┊ when the answers are here: the values lie in the carrier's memory

The carrier is the worker of the lowest slot. A follower that has told it that it will push clock c next (`Expects`)
is waited for; where one has not, or cannot, the carrier and all others push clock c alone, as without a group. That is
right at any moment before the sum has left: nobody but these workers has seen it, and each still has its own gradient.

    membership changes   before the sum is out of the carrier's hands: the carrier takes it back, by pushing alone,
                         before it sends the Read that would confirm it; the shards drop the sum and ask for the parts
                         after that: every shard has the sum, and so every part
    the carrier dies     a follower pushes alone what was not answered; a shard that has the sum keeps both until the
                         successor of the carrier decides which of them counts (`Unconfirmed`)
                         what the carrier was to fetch, the follower reads again
    a follower dies      the others push alone until its successor says what it will push

So one update may reach a shard within a sum and alone, and counts once: by slot and clock, as all updates do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from manyhands.strategies.ps.client_core import Compute
from manyhands.strategies.ps.ps_messages import HostPush, Push

# ── what workers of a host tell each other ────────────────────────────────────────────────────────────────────────────


class Expects(NamedTuple):
    """Follower to carrier: the update that this worker reads for is `clock`; it is pushed unless an Expects follows."""

    clock: int


class Offer(NamedTuple):
    """Follower to carrier: these pushes, one for each shard, whose gradients lie in the memory that it shares."""

    pushes: tuple[Push, ...]


class SumSent(NamedTuple):
    """Carrier to follower: its update `clock` has left for every shard, within a sum."""

    clock: int


class Alone(NamedTuple):
    """Carrier to follower: push the update `clock` alone."""

    clock: int


class Fetched(NamedTuple):
    """Carrier to follower: the values for update `clock`, of these versions of the shards, lie in its memory."""

    clock: int
    versions: tuple[int, ...]


GroupMessage = Expects | Offer | SumSent | Alone | Fetched

# ── what the driver does ──────────────────────────────────────────────────────────────────────────────────────────────


class Tell(NamedTuple):
    """Send a message to a worker of this host."""

    to: int
    message: GroupMessage


class Carry(NamedTuple):
    """Add up the gradients of these members, in this order, and call `ClientCore.carry`."""

    members: tuple[int, ...]
    groups: tuple[HostPush, ...]


@dataclass(frozen=True, slots=True)
class Carried:
    """Call `ClientCore.carried`."""


@dataclass(frozen=True, slots=True)
class PushAlone:
    """Call `ClientCore.push_alone`."""


@dataclass(frozen=True, slots=True)
class Confirm:
    """Call `ClientCore.flushed`."""


class Begin(NamedTuple):
    """Compute; before that, copy the values from the memory of member `source`, unless it is 0."""

    compute: Compute
    source: int


@dataclass(frozen=True, slots=True)
class ReadAgain:
    """Call `ClientCore.read_again`: the values will not come from another worker."""


GroupAction = Tell | Carry | Carried | PushAlone | Confirm | Begin | ReadAgain


class HostGroup:
    """The group of one host as its member `member` sees it; every call returns what to do, in order."""

    def __init__(self, member: int) -> None:
        self._member = member
        self._members: tuple[int, ...] = (member,)  # in the order of their slots; the first one carries
        self._expected: dict[int, int] = {}  # at the carrier: the clock that each follower will push
        self._offers: dict[int, tuple[Push, ...]] = {}  # at the carrier, by follower
        self._own: tuple[Push, ...] = ()  # of a Pool that is not decided
        self._partners: tuple[int, ...] = ()  # the members when it was offered, or added up
        self._leaving = -1  # at the carrier: the clock of a sum that has not left yet
        self._decided = -1  # at the carrier: the last clock that it pushed, alone or in a sum
        self._said = -1  # at a follower: the clock of its last Expects
        self._outside = False  # at a follower: its last push left within a sum, and was not answered
        self._fetched: dict[int, Fetched] = {}  # the last of each member, this one included
        self._waiting: Compute | None = None  # at a follower: for values that the carrier fetches

    @property
    def carrier(self) -> int:
        """The member that sends for all of this host; 0 where each sends for itself."""
        return self._members[0] if len(self._members) > 1 else 0

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The members whose word is awaited."""
        if self._own and self._partners[0] != self._member:
            return self._partners[:1]
        if self._own:
            return tuple(one for one in self._members[1:] if one not in self._offers)
        return (self.carrier,) if self._waiting is not None else ()

    def follow(self, members: Sequence[int]) -> list[GroupAction]:
        """The workers that share memory here now, this one among them, in the order of their slots."""
        before, self._members = self._members, tuple(members)
        if self._members == before:
            return []
        for known in (self._expected, self._offers, self._fetched):
            for gone in known.keys() - set(members):
                known.pop(gone)
        self._said = -1
        actions: list[GroupAction] = []
        if self._members[0] != before[0] and self._waiting is not None:
            self._waiting = None
            actions.append(ReadAgain())
        if self.carrier != self._member:
            actions += [Tell(one, Alone(offer[0].clock)) for one, offer in self._offers.items()]
            self._offers.clear()
        mine = self._fetched.get(self._member)
        if self.carrier == self._member and mine is not None:  # some may wait for it under this view
            actions += [Tell(one, mine) for one in self._members[1:]]
        if self._own and self._partners[0] == self._member:
            actions += self._decide()
        elif (self._own or self._outside) and self._partners[0] not in members:
            actions += self._push_alone()
        return actions

    def expects(self, clock: int | None) -> list[GroupAction]:
        """The clock that is read for, or pushed next; called after every call of the client core."""
        if clock is None:
            return []
        if self.carrier not in (0, self._member):
            is_known = clock == self._said
            self._said = clock
            return [] if is_known else [Tell(self.carrier, Expects(clock))]
        if self._own or clock <= self._decided + 1:
            return []
        return self._decided_alone(clock - 1)

    def offers(self, pushes: tuple[Push, ...]) -> list[GroupAction]:
        """Decide about a Pool."""
        self._own, self._partners = pushes, self._members
        if self.carrier in (0, self._member):
            return self._decide()
        return [Tell(self.carrier, Offer(pushes))]

    def hear(self, message: GroupMessage, sender: int) -> list[GroupAction]:
        match message:
            case Expects(clock=clock):
                self._expected[sender] = clock
                return self._decide()
            case Offer(pushes=pushes):
                clock = pushes[0].clock
                if sender not in self._members[1:] or self.carrier != self._member or clock <= self._decided:
                    return [Tell(sender, Alone(clock))]
                self._offers[sender] = pushes
                return self._decide()
            case SumSent(clock=clock) if self._has_offered(clock, sender):
                self._own, self._outside = (), True
                return [Carried()]
            case Alone(clock=clock) if self._has_offered(clock, sender):
                return self._push_alone()
            case Fetched():
                self._fetched[sender] = message
                return self._begin()
        return []

    def flushed(self) -> list[GroupAction]:
        """Everything sent has left: confirm it, unless the group has changed since, and it is taken back."""
        clock, self._leaving = self._leaving, -1
        if clock < 0:
            return [Confirm()]
        if self._partners != self._members:
            near = [one for one in self._partners[1:] if one in self._members]
            return [*(Tell(one, Alone(clock)) for one in near), *self._push_alone()]
        return [Confirm(), *(Tell(one, SumSent(clock)) for one in self._partners[1:])]

    def computes(self, compute: Compute) -> list[GroupAction]:
        """Every shard has answered: compute, as soon as all values are here."""
        self._outside = False
        if compute.bare and self.carrier in (0, self._member):
            return [ReadAgain()]
        if compute.bare:
            self._waiting = compute
            return self._begin()
        fetched = self._fetched[self._member] = Fetched(compute.work.clock, compute.versions)
        followers = self._members[1:] if self.carrier == self._member else ()
        return [*(Tell(one, fetched) for one in followers), Begin(compute, 0)]

    def _has_offered(self, clock: int, carrier: int) -> bool:
        return bool(self._own) and self._own[0].clock == clock and self._partners[0] == carrier

    def _begin(self) -> list[GroupAction]:
        """At a follower: compute with what the carrier fetched, once it has; other versions are read again."""
        compute, fetched = self._waiting, self._fetched.get(self.carrier)
        if compute is None or fetched is None or fetched.clock != compute.work.clock:
            return []
        self._waiting = None
        return [Begin(compute, self.carrier) if fetched.versions == compute.versions else ReadAgain()]

    def _decide(self) -> list[GroupAction]:
        """At the carrier: add up once everybody's push is here, or go alone if somebody's will not come."""
        if not self._own or self._partners[0] != self._member:
            return []
        clock, followers = self._own[0].clock, self._members[1:]
        offers = [self._offers.get(one) for one in followers]
        clocks = [
            offer[0].clock if offer else self._expected.get(one)
            for one, offer in zip(followers, offers, strict=True)
        ]
        if self.carrier != self._member or any(one != clock for one in clocks):
            return [*self._decided_alone(clock), *self._push_alone()]
        parts = {push.shard: [push] for push in self._own}
        for offer in offers:
            if offer is None:
                return []
            for push in offer:
                parts[push.shard].append(push._replace(carrier=self._own[0].slot, bare=True))
        self._own, self._leaving, self._partners = (), clock, self._members
        self._decided = clock
        self._offers.clear()
        return [Carry(self._members, tuple(HostPush(shard, tuple(of)) for shard, of in parts.items()))]

    def _decided_alone(self, clock: int) -> list[GroupAction]:
        """At the carrier: it has nothing more to carry up to this clock; who offers it later is told then."""
        self._decided = clock
        late = [(one, offer[0].clock) for one, offer in self._offers.items() if offer[0].clock <= clock]
        for one, _ in late:
            del self._offers[one]
        return [Tell(one, Alone(offered)) for one, offered in late]

    def _push_alone(self) -> list[GroupAction]:
        self._own, self._leaving, self._outside = (), -1, False
        return [PushAlone()]
