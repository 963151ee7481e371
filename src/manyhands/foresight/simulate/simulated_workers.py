"""Workers of a simulated run, and what those of one host do for each other: the simulated driver of two cores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from manyhands.errors import ManyhandsError
from manyhands.foresight.simulate.faults import FaultRole
from manyhands.foresight.simulate.models import Gradient
from manyhands.foresight.simulate.simulated_processes import (
    Assignment,
    ComputeDone,
    FlushDone,
    Item,
    Process,
    Retry,
    SimulatedMessage,
    SimulatedWorld,
)
from manyhands.strategies.ps.actions import SendMessage
from manyhands.strategies.ps.client_core import (
    ClientAction,
    ClientCore,
    Compute,
    Flush,
    Leave,
    Pool,
    Reason,
    Wait,
)
from manyhands.strategies.ps.host_group import (
    Begin,
    Carried,
    Carry,
    Confirm,
    GroupAction,
    GroupMessage,
    HostGroup,
    PushAlone,
    ReadAgain,
    Tell,
)
from manyhands.strategies.ps.member_events import Progressed, PsEvent, Rejoin, SlotFinished
from manyhands.strategies.ps.ps_messages import HostPush, Message, Parameters, Push, View, Work

__all__ = ["WorkerProcess"]


class WorkerProcess(Process):
    """A worker; it has no core while it has no slot."""

    def __init__(self, member: int, world: SimulatedWorld) -> None:
        super().__init__(member, FaultRole.WORKER, world)
        self.core: ClientCore | None = None
        self.slot = -1
        self._waited_for = -1  # whose update the shard that answered last had waited for
        self._began_s = 0.0  # when it began to compute
        self._values: list[Any] = [None] * self._spec.shards
        self._gradients: list[list[Gradient]] = [[]] * self._spec.shards  # the terms of what is pushed
        self._flushes = 0
        self._early: list[Item] = []  # what workers of its host said before it knew its slot

    def take(self, item: Item) -> float:
        if isinstance(item, Assignment):
            (self.member, self.slot), shards = item, self._spec.shards
            self._confirms = self._spec.policy.lockstep and shards > 1
            self.core = ClientCore(
                slot=self.slot, member=self.member, num_shards=shards, confirms=self._confirms
            )
            self._group = HostGroup(self.member)
            early, self._early = self._early, []
            return sum(map(self.take, early))
        core = self.core
        if core is None:  # it is a spare
            if isinstance(item, SimulatedMessage) and isinstance(item.message, GroupMessage):
                self._early.append(item)
            return 0.0
        match item:
            case SimulatedMessage(message=View() as view):
                self._follow(view)
                self._do(core.view(view))
            case SimulatedMessage(source=source, message=message, payload=payload):
                if isinstance(message, GroupMessage):
                    self._do(self._group.hear(message, source))
                else:
                    if isinstance(message, Parameters) and core.awaits(message, source):
                        self._waited_for = message.waited_for
                        if not message.bare:
                            self._values[message.shard] = payload
                    self._do(core.handle(message, source))
            case ComputeDone(member=member, work=work) if member == self.member:
                gradients, weight = self._spec.model.gradient(self.slot, work, self._values)
                self._gradients = self._world.gradients[member] = [[one] for one in gradients]
                now_s = self._world.waiting_since_s[member] = self._world.agenda.now_s
                self._world.observer.computed(self.slot, work, self._began_s, now_s)
                self._do(core.computed(weight=weight, pools=bool(self._group.carrier)))
            case FlushDone(member=member, number=number) if (member, number) == (self.member, self._flushes):
                self._do(self._group.flushed())
            case Retry(member=member, shard=shard) if member == self.member:
                self._do(core.again(shard))
        if self.core is not None:
            self._do(self._group.expects(core.clock))
        return 0.0

    def _follow(self, view: View) -> None:
        """The workers of this host by a view; one that is not, or no longer, among them is alone."""
        host, left = self.slot // self._spec.per_host, {last.slot for last in view.gone}
        here = [one for one in view.slots if one.slot // self._spec.per_host == host]
        near = [one.member for one in here if one.member and one.slot not in left]
        together = self._spec.policy.lockstep and self.member in near
        self._do(self._group.follow(near if together else [self.member]))

    def _do(self, actions: Sequence[ClientAction | GroupAction]) -> None:
        core, arrives_s = self.core, 0.0
        for action in actions if core is not None else ():
            assert core is not None, "or there is nothing to do"
            match action:
                case SendMessage(to=to, message=message):
                    payload = self._payload(message)
                    arrives_s = max(arrives_s, self._world.post(self.member, to, message, payload))
                case Flush():
                    # The kernel has what was sent at once; here a network has it, from which the dead may take it.
                    self._flushes += 1
                    self._later(
                        FlushDone(self.member, self._flushes), arrives_s if self._spec.faults else 0.0
                    )
                case Compute():
                    self._do(self._group.computes(action))
                case Pool(pushes=pushes):
                    self._do(self._group.offers(pushes))
                case Wait(shard=shard):
                    self._later(Retry(self.member, shard), self._spec.timing.retry_s)
                case Leave():
                    self.core = None
                    self._left(action)
                    return
                case _:
                    self._do_in_group(core, action)

    def _do_in_group(self, core: ClientCore, action: GroupAction) -> None:
        """What the workers of a host do for each other; their memory outlives each of them."""
        world = self._world
        match action:
            case Tell(to=to, message=message):
                world.post(self.member, to, message)
            case Carry(members=members, groups=groups):
                terms = [world.gradients[member] for member in members]
                self._sums = [[one for part in of for one in part] for of in zip(*terms, strict=True)]
                self._do(core.carry(groups))
                if not self._confirms:
                    self._do(self._group.flushed())
            case Carried():
                self._do(core.carried())
            case PushAlone():
                self._do(core.push_alone())
            case Confirm():
                self._do(core.flushed())
            case ReadAgain():
                self._do(core.read_again())
            case Begin(compute=compute, source=source):
                self._values = list(world.values[source]) if source else self._values
                world.values[self.member] = list(self._values)
                self._later(ComputeDone(self.member, compute.work), self._compute_s(compute.work))

    def _payload(self, message: Message) -> list[Gradient] | None:
        match message:
            case Push(shard=shard):
                return self._gradients[shard]
            case HostPush(shard=shard):
                return self._sums[shard]
        return None

    def _later(self, item: Item, after_s: float) -> None:
        self._world.agenda.after(after_s, self.put, item)

    def _compute_s(self, work: Work) -> float:
        """Begin to compute from what was read; return how many seconds that takes."""
        world, observer = self._world, self._world.observer
        self._began_s = now_s = world.agenda.now_s
        since_s = world.waiting_since_s.pop(self.member, now_s)
        observer.waited(self.slot, work, self._waited_for, since_s, now_s)
        observer.computes(self.slot, work, list(self._values), now_s)
        world.report(Progressed(member=self.member, clock=work.clock))
        times = world.times[self.slot]
        seconds = self._spec.compute.seconds(self.slot, work, world.draw, self._spec.seed)
        times.waiting_s += now_s - since_s
        times.computing_s += seconds
        times.num_computed += 1
        return seconds

    def _left(self, leave: Leave) -> None:
        event: PsEvent
        match leave.reason:
            case Reason.FENCED:
                event = Rejoin(member=self.member)
            case Reason.FINISHED | Reason.RETIRED:
                event = SlotFinished(member=self.member, reason=leave.reason)
            case Reason.REFUSED:
                raise ManyhandsError(leave.sentence)
        self._world.note(f"left: {leave.sentence}", self.member)
        self._world.post_report(self.member, event)
