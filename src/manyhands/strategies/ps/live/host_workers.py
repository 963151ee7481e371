"""The workers of one host at one of them: the driver of `HostGroup`.

They are connected by Unix sockets and map each other's memory: gradients are added up where backward left them, and
values are copied from where the carrier received them. The worker with the higher number connects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from manyhands.native.segment import Segment
from manyhands.places.local.host import host_identity
from manyhands.strategies.ps.client_core import ClientAction, ClientCore, Compute
from manyhands.strategies.ps.host_group import (
    Begin,
    Carried,
    Carry,
    Confirm,
    GroupAction,
    GroupMessage,
    HostGroup,
    Offer,
    PushAlone,
    ReadAgain,
    Tell,
)
from manyhands.strategies.ps.live.area import WorkerArea
from manyhands.strategies.ps.live.reports import WorkerReady
from manyhands.strategies.ps.live.worker_mail import WorkerMail
from manyhands.strategies.ps.live.worker_state import WorkerState
from manyhands.strategies.ps.ps_messages import Push, View
from manyhands.strategies.ps.shard_store import Contribution, add_up
from manyhands.transport.hub.hub import Hub
from manyhands.transport.messages import ProtocolError

WorkerAction = ClientAction | Begin


class HostWorkers:
    """The group of one worker in one slot."""

    def __init__(
        self,
        core: ClientCore,
        hub: Hub,
        body: WorkerState,
        mail: WorkerMail,
        *,
        confirms: bool,
    ) -> None:
        self._core, self._hub, self._body, self._mail, self._confirms = core, hub, body, mail, confirms
        self._group = HostGroup(core.member)
        self.ready = WorkerReady(host=host_identity(), address=hub.listen("unix"))
        """What other workers of this host need to know."""
        self._near: dict[int, int] = {}  # the slots of others of this host, by member, by the newest view
        self._dialled: set[int] = set()
        self._areas: dict[int, WorkerArea] = {}  # their memory, while they are connected
        self._sums: WorkerArea | None = None

    def close(self) -> None:
        self._mail.sums.clear()
        for area in (*self._areas.values(), *([self._sums] if self._sums is not None else [])):
            area.close()
        self._areas.clear()

    @property
    def is_alone(self) -> bool:
        return not self._group.carrier

    @property
    def waits_for(self) -> tuple[int, ...]:
        """The workers of this host whose word is awaited."""
        return self._group.waits_for

    def view(self, view: View, workers: Mapping[int, WorkerReady]) -> list[WorkerAction]:
        """Connect to the other workers of this host; one that is not in the view, or no longer, has none."""
        left = {last.slot for last in view.gone}
        slots = {place.member: place.slot for place in view.slots if place.slot not in left}
        host = self.ready.host if self._core.member in slots else None
        self._near = {
            member: slots[member]
            for member, ready in workers.items()
            if host and ready.host == host and member in slots and member != self._core.member
        }
        for member in self._dialled - self._near.keys():
            self._dialled.discard(member)
            self._hub.hang_up(member)
        for member in self._near.keys() - self._dialled:
            if member < self._core.member and member not in self._hub.members():
                self._dialled.add(member)
                self._hub.connect(member, workers[member].address)
        return self._follow()

    def joined(self, member: int) -> None:
        """Share this worker's memory with another one of this host."""
        self._hub.share(member, self._body.area.segment, self._core.member)

    def shared(self, member: int, tag: int, segment: Segment) -> list[WorkerAction]:
        """Map the memory of another one; ProtocolError if it is not what workers of this task share."""
        if tag != member:
            segment.close()
            raise ProtocolError("tag", f"member {member} shares memory as member {tag}")
        try:
            area = WorkerArea(segment, self._body.layout)
        except ValueError as error:
            raise ProtocolError("segment", str(error)) from error
        before, self._areas[member] = self._areas.get(member), area
        if before is not None:
            before.close()
        return self._follow()

    def lost(self, member: int) -> list[WorkerAction]:
        """The connection to a worker of this host has ended."""
        self._dialled.discard(member)
        area = self._areas.pop(member, None)
        actions = self._follow()
        if area is not None:
            area.close()
        return actions

    def hear(self, message: GroupMessage, sender: int) -> list[WorkerAction]:
        if isinstance(message, Offer):
            self._require_pushes(message.pushes, sender)
        return self._act(self._group.hear(message, sender))

    def _require_pushes(self, pushes: Sequence[Push], sender: int) -> None:
        """ProtocolError unless these are one push for each shard, of one clock and all of the sender."""
        shards = sorted(push.shard for push in pushes)
        names = {(push.member, push.slot, push.clock) for push in pushes}
        if shards != [*range(self._body.layout.shards)] or len(names) > 1 or pushes[0].member != sender:
            raise ProtocolError(
                "pushes", f"member {sender} offers {len(pushes)} pushes that are not one update"
            )

    def expects(self) -> list[WorkerAction]:
        """Called after every call of the client core, at the end of what follows from it."""
        return self._act(self._group.expects(self._core.clock))

    def offers(self, pushes: tuple[Push, ...]) -> list[WorkerAction]:
        return self._act(self._group.offers(pushes))

    def computes(self, compute: Compute) -> list[WorkerAction]:
        return self._act(self._group.computes(compute))

    def flushed(self) -> list[WorkerAction]:
        return self._act(self._group.flushed())

    def _follow(self) -> list[WorkerAction]:
        slots = {member: slot for member, slot in self._near.items() if member in self._areas}
        slots[self._core.member] = self._core.slot
        return self._act(self._group.follow(sorted(slots, key=slots.__getitem__)))

    def _act(self, actions: Sequence[GroupAction]) -> list[WorkerAction]:
        found: list[WorkerAction] = []
        for action in actions:
            match action:
                case Tell(to=to, message=message):
                    self._hub.send(to, message)
                case Carry(members=members, groups=groups):
                    self._add_up(members)
                    found += self._core.carry(groups)
                    if not self._confirms:  # nothing has to be flushed
                        found += self.flushed()
                case Carried():
                    found += self._core.carried()
                case PushAlone():
                    found += self._core.push_alone()
                case Confirm():
                    found += self._core.flushed()
                case ReadAgain():
                    found += self._core.read_again()
                case Begin(source=source):
                    if source:
                        self._body.area.values.copy_(self._areas[source].values)
                    found.append(action)
        return found

    def _add_up(self, members: Sequence[int]) -> None:
        """Add up the gradients of these members in their order, in memory of this worker alone."""
        layout, mail = self._body.layout, self._mail
        if self._sums is None:
            self._sums = WorkerArea.create(layout, self._body.area.values)
            mail.sums = [self._sums.part(shard) for shard in range(layout.shards)]
        areas = [self._body.area if one == self._core.member else self._areas[one] for one in members]
        for shard, into in enumerate(mail.sums):
            parts = [area.part(shard) for area in areas]
            terms = [Contribution(gradient=part.gradient, present=part.flags) for part in parts]
            reached = add_up(terms, into.gradient)
            into.flags[: len(reached)] = into.flags.new_tensor(reached)
