"""`allreduce elastic=yes`, one worker's end: the all-reduce of each epoch, and the way from one to the next.

    atomically(step) ──► exchanges ──► MembersChanged ──► report progress, wait for the next view ──► enter it ──► again
                       │
                       └► complete: the step is taken, by all

Parameters and optimizer change only after the last exchange of a step, so what a worker holds when a step is cut is
what it held before it; buffers, which a forward may change, are copied before each step and put back.

An exchange is complete for one member only when every member has its result in memory: a property of the collective in
shared memory; over links, a barrier ensures it. Members are therefore never more than one exchange apart, and after a
loss one number decides: the highest count among the survivors. A member that is one behind has the result in its
memory and continues with it; no member has taken anything later. `StepChannel` counts; it is pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.data.store.checkpoint import Loaded
from manyhands.engine.computing import Computed, Computer
from manyhands.engine.exchange import Exchange, LocalStep, Meter, SharedStep, Times, Traffic, WorkerPart
from manyhands.errors import Aborted, WorkerFailed
from manyhands.strategies.allreduce.elastic.elastic_membership import ArrivedInEpoch, EpochView, LeftEpoch
from manyhands.strategies.allreduce.elastic.epochs import Epoch, Epochs, restore_buffers, state_tree
from manyhands.strategies.allreduce.elastic.member_control import MemberLine
from manyhands.strategies.allreduce.exchange import AllReduceExchange
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.wire.parcels import Parcel

_T = TypeVar("_T")
LOST = (Aborted, WorkerFailed)  # what an exchange raises when one of its members is lost


class MembersChanged(Aborted):
    """The epoch is over, and the exchange begun in it does not count."""


class StepChannel:
    """One member's count of complete exchanges in the epoch that it is in."""

    def __init__(self, member: int) -> None:
        self.member = member
        self.view: EpochView | None = None
        self.passed = 0  # the number of exchanges of the epoch that this member knows to be complete
        self.next: EpochView | None = None  # the next view, from its announcement until it is entered

    @property
    def epoch(self) -> int:
        return self.view.epoch if self.view is not None else 0

    def begin(self, view: EpochView) -> None:
        self.view, self.passed, self.next = view, 0, None

    def passes(self) -> None:
        self.passed += 1

    def learn(self, view: EpochView) -> bool:
        """The epoch is over and this view follows: return whether the interrupted exchange is complete."""
        if self.view is not None and not self.passed <= view.passed <= self.passed + 1:
            raise AssertionError(
                f"member {self.member} has passed {self.passed} exchanges of epoch {self.epoch}, and the survivors "
                f"{view.passed}"
            )
        self.next = view
        return self.view is not None and view.passed == self.passed + 1


class ElasticCollective(Collective):
    """Wraps `inner`, and counts its exchanges.

    `confirm` waits until all members have the result, if `inner` alone does not prove it. `complete` is called after an
    interrupted exchange and returns whether it counts nevertheless. `passes` is called for each exchange that counts.
    """

    instead_of_rows = (
        "its rows are not summed with elastic=yes; leave that out, or build it with sparse=False"
    )

    def __init__(
        self,
        inner: Collective,
        confirm: Callable[[], None] | None,
        complete: Callable[[], bool],
        passes: Callable[[], None],
    ) -> None:
        self.rank, self.world, self.wire = inner.rank, inner.world, inner.wire
        self._inner, self._confirm, self._complete, self._passes = inner, confirm, complete, passes

    def allocate(self, parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        return self._inner.allocate(parcels)

    def begin(self, step: int) -> None:
        self._inner.begin(step)

    def launch(self, index: int) -> None:
        try:
            self._inner.launch(index)
        except LOST as error:  # no member can have passed what this member has not launched
            raise MembersChanged(str(error)) from error

    def poll(self) -> bool:
        try:
            return self._inner.poll()
        except LOST as error:
            raise MembersChanged(str(error)) from error

    def finish(self) -> None:
        self._exchange(self._inner.finish)

    def broadcast(self, index: int, root: int = 0) -> None:
        self._exchange(lambda: self._inner.broadcast(index, root))

    def _exchange(self, work: Callable[[], None]) -> None:
        """Do one exchange; raises MembersChanged if it does not count."""
        try:
            work()
            if self._confirm is not None:
                self._confirm()
        except LOST as error:
            if self._confirm is not None:
                self._inner.close()  # otherwise the others would keep waiting for this member's messages
            if not self._complete():
                raise MembersChanged(str(error)) from error
        self._passes()

    def take_times(self) -> Times:
        return self._inner.take_times()

    def traffic(self) -> Traffic:
        return self._inner.traffic()

    def close(self) -> None:
        self._inner.close()


class ElasticExchange(Exchange):
    """One worker's end across epochs; `receive` is called first, then the calls of any exchange."""

    _trained: tuple[nn.Module, Optimizer]

    def __init__(self, strategy: AllReduce, line: MemberLine, slot: int, epochs: Epochs) -> None:
        self._sent = Traffic()  # in epochs that are over
        self.meter = Meter(
            take_times=self._take_times,
            traffic=lambda: self._sent if self._inner is None else self._sent + self._inner.meter.traffic(),
        )
        self.members = self
        self.slot, self.rank, self.world = slot, 0, 1
        self.part = WorkerPart(index=0, count=1, copies=(range(1),))
        self._strategy, self._line, self._epochs = strategy, line, epochs
        self.channel = StepChannel(line.member)
        self._opened: Epoch | None = None
        self._inner: AllReduceExchange | None = None
        self._loaded: Loaded | None = None
        self._joining_state: Callable[[], Mapping[str, Any]] = dict
        self._buffers: list[torch.Tensor] = []
        self._steps_done = 0
        self.at_border = True  # whether the next action is a step
        self._began = self._has_state = self._paused = self._is_fresh = False

    def receive(self) -> Loaded | None:
        """Wait for an epoch; return the donor's state, or None if this member begins together with all others."""
        self._line.tell(self._epochs.ready(self._line.member))
        self.channel.next = self._line.next_view(0)
        while True:
            try:
                self._open()
                if self._opened is None or not self._is_fresh:
                    return None
                self._loaded = self._opened.take()  # collective with the others' `_open`
                self._has_state = True
                return self._loaded
            except LOST:
                self.leave()

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._trained = model, optimizer
        if self._loaded is not None:
            restore_buffers(model, self._loaded)
            # Until the loop has begun, the next member gets what this one got.
            self._joining_state = partial(dict, self._loaded.extra)
            self._steps_done, self._loaded = self._loaded.step, None
        self._buffers = [torch.empty_like(buffer) for buffer in model.buffers()]
        while True:
            try:
                if self.channel.next is not None:
                    self._open()
                self._lay_out()
                if not self._has_state:
                    assert self._current.hooks is not None, "it is laid out"
                    self._current.hooks.broadcast([*model.parameters(), *model.buffers()])
                    self._has_state = True
                return
            except LOST:
                self.leave()

    def on_join(self, state: Callable[[], Mapping[str, Any]]) -> None:
        self._joining_state = state

    def atomically(self, work: Callable[[], _T], *, steps_done: int, at_border: bool) -> _T:
        """Run `work` with the current members, and repeat it if one is lost before it is complete."""
        self._steps_done, self.at_border = steps_done, at_border
        while True:
            if at_border and self._paused and self.channel.next is None:
                self.leave()
            while self.channel.next is not None:  # enter the newest epoch
                try:
                    self._open()
                    self._lay_out()
                except LOST:
                    self.leave()
            try:
                return work()
            except MembersChanged:
                self.leave()
                model, optimizer = self._trained
                if self._began:  # the step was interrupted: restore the state before it
                    with torch.no_grad():
                        for kept, buffer in zip(self._buffers, model.buffers(), strict=True):
                            buffer.copy_(kept)
                optimizer.zero_grad()
            finally:
                self._began = False

    def follow(self) -> None:
        """Enter the next epoch, if one was announced; after the last step nothing more is exchanged in it."""
        view = self.channel.next
        if view is not None:
            self.channel.begin(view)
            self.rank, self.world = view.rank_of(self._line.member), len(view.seats)
            # Every worker of the epoch holds the model.
            self.part = WorkerPart(index=self.rank, count=self.world, copies=(range(self.world),))

    def leave(self) -> bool:
        """Report progress and wait for the next view; return whether the interrupted exchange is complete."""
        if self.channel.next is not None:
            return False  # it has been told already
        self._line.tell(
            LeftEpoch(
                member=self._line.member,
                epoch=self.channel.epoch,
                passed=self.channel.passed,
                step=self._steps_done,
                at_border=self.at_border,
                began=self._began,
                has_state=self._has_state,
            )
        )
        return self.channel.learn(self._line.next_view(self.channel.epoch))

    def _open(self) -> None:
        """Collective: close the previous epoch and enter the next; a donor passes its state on."""
        self.close()
        self.follow()
        view = self.channel.view
        assert view is not None, "the launcher has announced it"
        self._paused = False
        self._opened = self._epochs.open(view, self._line)
        self._is_fresh = view.seats[self.rank].fresh and not self._has_state
        if view.has_fresh and not self._is_fresh:
            state = None
            if view.donor == self._line.member:
                state = state_tree(*self._trained, self._steps_done, dict(self._joining_state()))
            self._opened.hand_over(state)

    def _lay_out(self) -> None:
        assert self._opened is not None, "the epoch is open"
        summed, confirm = self._opened.collective(self._strategy)
        collective = ElasticCollective(summed, confirm, self.leave, self.channel.passes)
        self._inner = AllReduceExchange(collective, self._strategy.buckets)
        self.hooks = self._inner.lay_out(*self._trained)
        self.wire = self._inner.wire
        self._line.tell(
            ArrivedInEpoch(member=self._line.member, epoch=self.channel.epoch, step=self._steps_done)
        )

    @property
    def _current(self) -> AllReduceExchange:
        assert self._inner is not None, "attach comes first"
        return self._inner

    def compute(self, computer: Computer, model: nn.Module, step: int) -> Computed:
        with torch.no_grad():
            for kept, buffer in zip(self._buffers, model.buffers(), strict=True):
                kept.copy_(buffer)
        self._began = True
        return super().compute(computer, model, step)

    def agree(self, local: LocalStep) -> SharedStep:
        """Collective: after it, every member of the epoch takes the step."""
        view = self.channel.view
        assert view is not None, "a step is taken in an epoch"
        shared = self._current.agree(replace(local, pause=self._line.gather == view.epoch))
        self._paused, self._began = shared.pause, False
        return replace(shared, bad_workers=tuple(view.seats[rank].slot for rank in shared.bad_workers))

    def apply(self) -> None:
        self._current.apply()

    def optimizer_state(self) -> dict[str, Any] | None:
        return self._trained[1].state_dict() if self.rank == 0 else None

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return self._current.total(values)

    def _take_times(self) -> Times:
        if self._inner is None or self.channel.view is None:
            return Times()
        times, seats = self._inner.meter.take_times(), self.channel.view.seats
        return replace(
            times,
            wait_ns={seats[rank].slot: waited for rank, waited in times.wait_ns.items()},
            posts={seats[rank].slot: post for rank, post in times.posts.items()},
        )

    def close(self) -> None:
        """Leave the epoch; what it has sent is kept."""
        self._sent = self.meter.traffic()
        if self._inner is not None:
            self._inner.close()
            self._inner = None
        if self._opened is not None:
            self._opened.close()
            self._opened = None
