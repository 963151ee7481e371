"""`allreduce elastic=yes`, one worker's end: the all-reduce of each epoch, and the way from one to the next.

    atomically(step) ──► exchanges ──► MembersChanged ──► tell how far, wait for the next view ──► enter it ──► again
                       │
                       └► complete: the step is taken, by all

Parameters and optimizer change only after the last exchange of a step, so what a worker holds when a step is cut is
what it held before it; buffers, which a forward may change, are copied before each step and put back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.data.store.checkpoint import Loaded
from manyhands.engine.computing import Computed, Computer
from manyhands.engine.exchange import Exchange, LocalStep, Meter, SharedStep, Times, Traffic, WorkerPart
from manyhands.strategies.allreduce.elastic.elastic_messages import ArrivedInEpoch, EpochView, LeftEpoch
from manyhands.strategies.allreduce.elastic.epoch_collective import (
    LOST,
    ElasticCollective,
    MembersChanged,
    StepChannel,
)
from manyhands.strategies.allreduce.elastic.epochs import Epoch, Epochs, restore_buffers, state_tree
from manyhands.strategies.allreduce.elastic.member_control import MemberLine
from manyhands.strategies.allreduce.exchange import AllReduceExchange
from manyhands.strategies.allreduce.strategy import AllReduce

__all__ = ["ElasticExchange"]

_T = TypeVar("_T")


class ElasticExchange(Exchange):
    """One worker's end across epochs; `receive` is called first, then the calls of any exchange."""

    def __init__(self, strategy: AllReduce, line: MemberLine, slot: int, epochs: Epochs) -> None:
        self._sent = Traffic()  # in epochs that are over
        self.meter = Meter(take_times=self._take_times, traffic=self._traffic)
        self.members = self
        self.slot = slot
        self._set_ranks(0, 1)
        self._strategy = strategy
        self._line = line
        self._epochs = epochs
        self.channel = StepChannel(line.member)
        self._opened: Epoch | None = None
        self._inner: AllReduceExchange | None = None
        self._model: nn.Module | None = None
        self._optimizer: Optimizer | None = None
        self._loaded: Loaded | None = None
        self._tell: Callable[[], Mapping[str, Any]] = dict
        self._buffers: list[torch.Tensor] = []
        self._steps_done = 0
        self._at_border = True
        self._began = self._settled = self._paused = False

    def _set_ranks(self, rank: int, world: int) -> None:
        """Every worker of the epoch holds the model."""
        self.rank, self.world = rank, world
        self.part = WorkerPart(index=rank, count=world, copies=(range(world),))

    # ── joining ─────────────────────────────────────────────────────────────────────────────────────────────────────

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
                self._settled = True
                return self._loaded
            except LOST:
                self._leave()

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        if self._loaded is not None:
            restore_buffers(model, self._loaded)
            extra = dict(self._loaded.extra)
            self._tell = lambda: extra  # until the loop has begun, the next member gets what this one got
            self._steps_done, self._loaded = self._loaded.step, None
        self._buffers = [torch.empty_like(buffer) for buffer in model.buffers()]
        while True:
            try:
                if self.channel.next is not None:
                    self._open()
                self._lay_out()
                if not self._settled:
                    assert self._current.hooks is not None, "it is laid out"
                    self._current.hooks.broadcast([*model.parameters(), *model.buffers()])
                    self._settled = True
                return
            except LOST:
                self._leave()

    def on_join(self, state: Callable[[], Mapping[str, Any]]) -> None:
        """Set the callback that returns this worker's state when it is a donor."""
        self._tell = state

    # ── from epoch to epoch ───────────────────────────────────────────────────────────────────────────────────────────

    def atomically(self, work: Callable[[], _T], *, steps_done: int, at_border: bool) -> _T:
        """Run `work` with the current members, and repeat it if one is lost before it is complete."""
        self._steps_done, self._at_border = steps_done, at_border
        while True:
            if at_border and self._paused and self.channel.next is None:
                self._leave()
            while self.channel.next is not None:  # enter the newest epoch
                try:
                    self._open()
                    self._lay_out()
                except LOST:
                    self._leave()
            try:
                return work()
            except MembersChanged:
                self._leave()
                model, optimizer = self._trained
                if self._began:  # the step was interrupted: restore the state before it
                    with torch.no_grad():
                        for kept, buffer in zip(self._buffers, model.buffers(), strict=True):
                            buffer.copy_(kept)
                optimizer.zero_grad()
            finally:
                self._began = False

    def follow(self, view: EpochView) -> None:
        """After the last step: enter an epoch in which nothing more is exchanged."""
        self.channel.begin(view)
        self._set_ranks(view.rank_of(self._line.member), len(view.seats))

    def end(self) -> EpochView | None:
        """After the last step: return the view that was announced when the last exchange was cut, if any."""
        self._at_border = False  # no member needs to join any more
        return self.channel.next

    def leave(self) -> EpochView:
        """After the last step: a member is lost; report progress and return the next view."""
        self._leave()
        assert self.channel.next is not None, "to leave is to have learnt of the next"
        return self.channel.next

    def _leave(self) -> bool:
        """Report progress and wait for the next view; return whether the interrupted exchange is complete."""
        if self.channel.next is not None:
            return False  # it has been told already
        self._line.tell(
            LeftEpoch(
                member=self._line.member,
                epoch=self.channel.epoch,
                passed=self.channel.passed,
                step=self._steps_done,
                at_border=self._at_border,
                began=self._began,
                settled=self._settled,
            )
        )
        return self.channel.learn(self._line.next_view(self.channel.epoch))

    def _open(self) -> None:
        """Collective: close the previous epoch and enter the next; a donor passes its state on."""
        view = self.channel.next
        assert view is not None, "somebody has told of it"
        self.close()
        self.channel.begin(view)
        self._paused = False
        self._set_ranks(view.rank_of(self._line.member), len(view.seats))
        self._opened = self._epochs.open(view, self._line)
        if view.has_fresh and not self._is_fresh:
            donates = view.donor == self._line.member
            self._opened.hand_over(
                (lambda: state_tree(*self._trained, self._steps_done, dict(self._tell())))
                if donates
                else None
            )

    def _lay_out(self) -> None:
        """Collective: lay out the buckets of this epoch."""
        assert self._opened is not None, "the epoch is open"
        summed, confirm = self._opened.collective(self._strategy)
        collective = ElasticCollective(summed, confirm, self._leave, self.channel.passes)
        self._inner = AllReduceExchange(collective, self._strategy.buckets)
        self.hooks = self._inner.lay_out(*self._trained)
        self.wire = self._inner.wire
        self._line.tell(
            ArrivedInEpoch(member=self._line.member, epoch=self.channel.epoch, step=self._steps_done)
        )

    @property
    def _trained(self) -> tuple[nn.Module, Optimizer]:
        assert self._model is not None, "attach comes first"
        assert self._optimizer is not None, "attach comes first"
        return self._model, self._optimizer

    @property
    def _is_fresh(self) -> bool:
        view = self.channel.view
        assert view is not None, "an epoch is open"
        return view.seats[self.rank].fresh and not self._settled

    # ── a step ────────────────────────────────────────────────────────────────────────────────────────────────────────

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
        pause = self._line.is_asked(view.epoch)
        shared = self._current.agree(replace(local, pause=pause))
        self._paused = shared.pause
        self._began = False
        return replace(shared, bad_workers=tuple(view.seats[rank].slot for rank in shared.bad_workers))

    def apply(self) -> None:
        self._current.apply()

    def optimizer_state(self) -> dict[str, Any] | None:
        return self._trained[1].state_dict() if self.rank == 0 else None

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return self._current.total(values)

    def _take_times(self) -> Times:
        """Return the times of this epoch, by worker."""
        if self._inner is None or self.channel.view is None:
            return Times()
        times, seats = self._inner.meter.take_times(), self.channel.view.seats
        return replace(
            times,
            wait_ns={seats[rank].slot: waited for rank, waited in times.wait_ns.items()},
            posts={seats[rank].slot: post for rank, post in times.posts.items()},
        )

    def _traffic(self) -> Traffic:
        return self._sent if self._inner is None else self._sent + self._inner.meter.traffic()

    def close(self) -> None:
        """Leave the epoch; what it has sent is kept."""
        if self._inner is not None:
            self._sent = self._sent + self._inner.meter.traffic()
            self._inner.close()
            self._inner = None
        if self._opened is not None:
            self._opened.close()
            self._opened = None
