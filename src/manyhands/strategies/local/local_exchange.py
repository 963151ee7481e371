"""One worker's end of local SGD (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019).

Between averages nothing is sent: every worker steps with the gradient of its part of each batch. At an average the
parameters and the optimizer's state of all workers become their mean, each weighted by the samples it has seen since
the last one. All replicas are equal afterwards, so a checkpoint taken there is consistent. One vector travels with it:

    stop · one flag per worker whose loss is not finite · the loss of each step since the last average
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.engine.computing import Computer
from manyhands.engine.exchange import (
    Exchange,
    ExchangeState,
    LocalStep,
    Meter,
    PeerTraffic,
    SharedStep,
    Times,
    WorkerPart,
)
from manyhands.engine.fusing import take_step
from manyhands.errors import UserError
from manyhands.strategies.common.collectives.collective import (
    Collective,
    broadcast,
    kept_by_codecs,
    remember_kept,
    room_for_buffers,
    total,
)
from manyhands.strategies.common.grid.grid_group import LinkGroup
from manyhands.strategies.common.sharding.optimizers import kept_by
from manyhands.strategies.local.fragments import cut
from manyhands.strategies.local.outer import Mean, OuterStep
from manyhands.strategies.local.strategy import Local
from manyhands.transport.link.interface import Link
from manyhands.wire.flat_layout import BucketLayout, bucket_of, trainable
from manyhands.wire.names import rounds_hops
from manyhands.wire.parcels import Parcel
from manyhands.wire.tap import GradientTap

_STOP, _FLAGS = 0, 1


class LocalExchange(Exchange):
    """Averages replicas over the given collective after every `steps` steps, and at the end of the run.

    Each of the `first` steps ends with an average. `outer` is applied to a mean; `gossip` runs between two averages.
    """

    hooks: Replica | None = None
    _optimizer: Optimizer
    when_broken = "the others continued to the next average, and no replica was averaged with this one"

    def __init__(
        self,
        collective: Collective,
        steps: float,
        *,
        first: int = 0,
        outer: OuterStep | None = None,
        gossip: Gossip | None = None,
    ) -> None:
        self.rank, self.world = collective.rank, collective.world
        # Copies are equal after each average; where replicas keep apart, no two are.
        copies = () if outer is not None and outer.keeps_apart else (range(self.world),)
        self.part = WorkerPart(index=self.rank, count=self.world, copies=copies)
        self.meter = Meter(take_times=collective.take_times, traffic=collective.traffic)
        if gossip is not None:
            sent = gossip.group.traffic
            self.meter = Meter(take_times=self._take_times, traffic=lambda: collective.traffic() + sent())
        self.kept = ExchangeState(gather=self._memory, load=self._load)
        self.average = self._average
        self._collective, self._gossip, self._outer = collective, gossip, outer or Mean()
        self._steps, self._first = steps, first
        self._step, self._weight = 0, 0.0
        self._losses: list[float] = []
        self._meets = self._broken = self._due = False

    @property
    def wire(self) -> int:  # type: ignore[override]
        return self._collective.wire

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.hooks = Replica(self._collective, model, optimizer, self._outer)

    def backward(self, loss: Tensor, _share: float) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def agree(self, local: LocalStep) -> SharedStep:
        """Collective if an average is due: combine the reports since the last one; `average` averages parameters."""
        if not self._losses:
            self._replica.begin()
        self._collective.step = local.step
        self._broken = self._broken or not local.is_finite
        self._weight += local.share
        self._losses.append(local.loss * local.share if local.is_finite and local.share else 0.0)
        self._step, self._meets = local.step + 1, True
        self._due = local.last or self._step <= self._first or self._step % self._steps == 0
        if not self._due:
            return SharedStep(loss=math.nan, settled=False)
        mine = torch.zeros(_FLAGS + self.world + len(self._losses), dtype=torch.float64)
        mine[_STOP] = float(local.stop)
        mine[_FLAGS + self.rank] = float(self._broken)
        mine[_FLAGS + self.world :] = torch.tensor(self._losses, dtype=torch.float64)
        sums = self.total(mine).tolist()
        bad = tuple(rank for rank in range(self.world) if sums[_FLAGS + rank])
        *earlier, loss = sums[_FLAGS + self.world :]
        return SharedStep(loss=loss, bad_workers=bad, stop=bool(sums[_STOP]), earlier=tuple(earlier))

    def apply(self) -> None:
        if not self._broken:
            take_step(self._optimizer)
        self._optimizer.zero_grad()

    def _average(self, end: bool) -> bool:
        """Collective if an average is due: every replica becomes the weighted mean."""
        if not self._due and not (end and self._losses):
            if self._gossip is None or not self._meets:
                return False
            self._meets = False
            self._gossip.meet(self._step, self._replica.parameters)
            return True
        self._replica.average(self._weight / len(self._losses), plainly=self._step <= self._first)
        self._weight, self._losses, self._due = 0.0, [], False
        return True

    def evaluate(
        self, computer: Computer, model: nn.Module, *, alike: bool = False
    ) -> tuple[dict[str, float], int] | None:
        if alike:  # before the first step, when each replica is the centre
            return super().evaluate(computer, model, alike=True)
        with self._outer.shown(self._replica.parameters):
            return super().evaluate(computer, model)

    def model_state(self, model: nn.Module) -> Mapping[str, Tensor] | None:
        with self._outer.shown(self._replica.parameters):
            state = super().model_state(model)
            if state is None or not self._outer.keeps_apart:
                return state
            return {name: value.clone() for name, value in state.items()}

    def optimizer_state(self) -> dict[str, Any] | None:
        return self._optimizer.state_dict() if self.rank == 0 else None

    def _memory(self) -> Mapping[str, Any]:
        """Collective: the outer step's state, equal on all workers, and all workers' codec residuals."""
        remembered = self._outer.memory() if self.rank == 0 else {}
        return {**({"outer": remembered} if remembered else {}), **self._replica.residuals()}

    def _load(self, memory: Mapping[str, Any]) -> None:
        self._outer.load_state(memory.get("outer", {}))
        remember_kept(self._collective, memory)

    def total(self, values: Tensor) -> Tensor:
        return self._replica.total(values)

    def _take_times(self) -> Times:
        assert self._gossip is not None, "or the collective's alone are taken"
        times = self._collective.take_times()
        waits = Counter(times.wait_ns)
        waits.update(self._gossip.group.take_waits())
        posts = {**self._gossip.group.take_traffic()}
        for worker, post in times.posts.items():
            posts.setdefault(worker, PeerTraffic()).add(post)
        return replace(times, wait_ns=waits, posts=posts)

    def summary(self) -> Mapping[str, Any]:
        return self._collective.summary()

    def close(self) -> None:
        if self.hooks is not None:
            self.hooks.close()
        if self._gossip is not None:
            self._gossip.close()
        self._collective.close()

    @property
    def _replica(self) -> Replica:
        assert self.hooks is not None, "attach comes first"
        return self.hooks


_KIND = 61  # of messages; the averages over the same links have other ones


# Gossip between averages: after a step each worker and one partner take the mean of the two.
# Partners follow a round-robin tournament in which every two workers are paired once: in each round all are in pairs,
# except one worker that rests if their number is odd.
def partner(rank: int, world: int, number: int) -> int | None:
    """Return the partner of worker `rank` of `world` in round `number`, counted from 0; None: it rests."""
    places = world + world % 2
    if places < 2:
        return None
    last, at = places - 1, number % (places - 1)
    other = {last: at, at: last}.get(rank, (2 * at - rank) % last)
    return other if other < world else None


class Gossip:
    """One worker's end, over links to all others; `close` closes them and is idempotent."""

    def __init__(self, rank: int, world: int, links: Mapping[int, Link], timeout_s: float) -> None:
        self._rank, self._world, self._links = rank, world, links
        self.group = LinkGroup(rank, range(world), links, timeout_s, kind=_KIND, name="gossip")

    @torch.no_grad()
    def meet(self, step: int, parameters: Sequence[Tensor]) -> None:
        """Called on every worker after `step`: parameters become the mean of this worker's and its partner's."""
        other = partner(self._rank, self._world, step)
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in parameters:
            by_type.setdefault(parameter.dtype, []).append(parameter)
        for tensors in by_type.values():
            if other is None:
                self.group.exchange({}, {})
                continue
            mine = torch.cat([tensor.detach().reshape(-1) for tensor in tensors]).cpu()
            theirs = torch.empty_like(mine)
            self.group.exchange({other: mine}, {other: theirs})
            theirs.add_(mine).mul_(0.5)  # a sum of two has one order: both have the same bits
            sizes = [tensor.numel() for tensor in tensors]
            for tensor, mean in zip(tensors, torch.split(theirs, sizes), strict=True):
                tensor.copy_(mean.view(tensor.shape))

    def close(self) -> None:
        for link in self._links.values():
            link.close()


# What the workers of local SGD average: parameters and optimizer state, in one bucket per type.
#
# Only parameters that some worker's backward has reached since the last average take part: any other is equal on all
# workers, and an average would change its last bits. State without dimensions, such as Adam's count of steps, is
# averaged in double precision and sent unencoded, so that equal counts stay exact.
#
# If a codec rounds, or one that rounds may be chosen, each worker sends its change since the last average: a change is
# small, and so is what is lost of it, while parameters themselves would never leave the codec's coarse grid. A codec
# that sends parts of a change and keeps the rest as a residual encodes parameters only. The optimizer's state is then
# sent unencoded, because a second moment with a residual could become negative.


_SMALLEST_STATUS = 64


class _Layout(NamedTuple):
    bucket: BucketLayout
    exact: bool  # it is sent unencoded
    fragment: int


class _Held(NamedTuple):
    """One tensor: a parameter, or, if `state` is set, a tensor that the optimizer keeps for it."""

    number: int  # the parameter's number among the trainable ones
    state: str | None
    shape: torch.Size
    dtype: torch.dtype

    @property
    def exact(self) -> bool:  # sent unencoded, in double precision
        return self.state is not None and not self.shape


class _Place(NamedTuple):
    """Where one tensor lies in a bucket, flat; and its value at the last average, if changes are sent."""

    held: _Held
    room: Tensor
    before: Tensor | None
    fragment: int

    def mean(self) -> Tensor:
        """The mean over replicas, once the bucket is summed; call it once for each sum."""
        mean = self.room if self.before is None else self.room.add_(self.before)
        return mean.view(self.held.shape)


class Replica:
    """One worker's replica, from construction (collective: all get worker 0's) to `close`; its gradients' hooks."""

    weight = 1.0  # of no effect: each worker steps with the mean over its own part

    def __init__(
        self,
        collective: Collective,
        model: nn.Module,
        optimizer: Optimizer,
        outer: OuterStep | None = None,
        fragments: int = 1,
    ) -> None:
        self._collective, self._outer = collective, outer or Mean()
        self._model, self._optimizer = model, optimizer
        self.parameters = list(trainable(model))
        self._reached = [False] * len(self.parameters)
        held = held_by(self.parameters, optimizer, keeps_apart=self._outer.keeps_apart)
        layouts = _laid_out(held, fragments, state_as_is=not rounds_hops(collective.codec))
        *parcels, status = _parcels(layouts, len(self.parameters))
        rooms = collective.allocate([*parcels, status, *room_for_buffers(model, status, collective.world)])
        self._buckets, self._status = rooms[: len(parcels)], rooms[len(parcels)]
        self._totals, self._totals_index = rooms[-1], len(rooms) - 1  # for what is too long for the status
        self._places: list[_Place] = []
        self._fragment_of = [layout.fragment for layout in layouts]  # by bucket
        for parcel, (layout, _, fragment) in zip(parcels, layouts, strict=True):
            rooms_here = layout.views(self._buckets[parcel.number])
            saves = collective.rounds(parcel) and not self._outer.keeps_apart
            self._places += [
                _Place(held[index], room, torch.zeros_like(room) if saves else None, fragment)
                for index, room in rooms_here
            ]
        self.on_next_gradient: Callable[[], None] | None = None  # called once, at the next gradient
        self._tap = GradientTap(self.parameters, self._note)
        self.close = self._tap.close
        tensors = [*model.parameters(), *model.buffers()]
        broadcast(collective, *self.carrier, tensors)  # worker 0's

    @torch.no_grad()
    def begin(self) -> None:
        """Before the first step since the last average: save the common values, if changes are sent."""
        self._outer.begin(self.parameters)
        for place in self._places:
            tensor = self._tensor(place.held)
            if place.before is not None and tensor is not None:
                place.before.copy_(tensor.reshape(-1))

    @torch.no_grad()
    def average(self, weight: float, *, plainly: bool = False) -> None:
        """Collective: give the sum of `weight` times each replica to the outer step; `plainly`: to every replica."""
        take = self._outer.plainly if plainly else self._outer.take
        has_state = [bool(self._optimizer.state.get(parameter)) for parameter in self.parameters]
        # Which parameters any worker has reached, and which have state on any worker.
        flags = self.total(torch.tensor([*self._reached, *has_state], dtype=torch.float64)).bool().tolist()
        reached, kept = flags[: len(has_state)], flags[len(has_state) :]
        for place in self._places:
            self._fill(place, weight)
        for number in range(len(self._buckets)):
            self._collective.launch(number)
        self._collective.finish()
        for place in self._places:
            held, mean = place.held, place.mean()
            parameter, tensor = self.parameters[held.number], self._tensor(held)
            if not reached[held.number]:
                continue
            if held.state is None:
                take(held.number, parameter, mean)
            elif kept[held.number] and tensor is not None:
                tensor.copy_(mean)
            elif kept[held.number]:  # this worker has no such state yet
                device = parameter.device if held.shape else torch.device("cpu")
                self._optimizer.state[parameter][held.state] = mean.to(device, held.dtype, copy=True)
        self._reached = [False] * len(self.parameters)

    def _fill(self, place: _Place, weight: float) -> None:
        """Put this worker's part of the mean, or of how far that is from what was before, into the bucket."""
        tensor = self._tensor(place.held)
        if tensor is None:
            place.room.zero_()  # this worker has no such state yet
            return
        place.room.copy_(tensor.reshape(-1))
        if place.before is not None:
            place.room.sub_(place.before)
        place.room.mul_(weight)

    def total(self, values: Tensor) -> Tensor:
        if len(values) > len(self._status):
            return total(self._collective, self._totals_index, self._totals, values)
        return total(self._collective, len(self._buckets), self._status, values)

    @property
    def carrier(self) -> tuple[int, Tensor]:
        """The largest bucket and its number: what is long takes few messages then; free while no sum is under way."""
        return max(enumerate([*self._buckets, self._status]), key=lambda one: one[1].nbytes)

    def begin_step(self, step: int) -> None:
        """Nothing is sent before an average."""

    def holding(self) -> AbstractContextManager[None]:
        return nullcontext()

    def residuals(self) -> Mapping[str, Any]:
        return kept_by_codecs(self._collective, *self.carrier)

    def _note(self, number: int, _parameter: Tensor) -> None:
        self._reached[number] = True
        if self.on_next_gradient is not None:
            listener, self.on_next_gradient = self.on_next_gradient, None
            listener()

    def _tensor(self, held: _Held) -> Tensor | None:
        parameter = self.parameters[held.number]
        if held.state is None:
            return parameter
        value = self._optimizer.state.get(parameter, {}).get(held.state)
        return value if isinstance(value, Tensor) else None


def held_by(parameters: Sequence[nn.Parameter], optimizer: Optimizer, *, keeps_apart: bool) -> list[_Held]:
    """Return everything that is averaged; UserError for state that cannot be."""
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    held = [_Held(number, None, one.shape, one.dtype) for one, number in numbers.items()]
    kept = {} if keeps_apart else kept_by(optimizer)
    for parameter, states in kept.items():
        held += [
            _Held(numbers[parameter], one.name, one.shape, one.dtype)
            for one in states
            if one.dtype is not None and parameter in numbers
        ]
    for one in held:
        if not one.dtype.is_floating_point:
            kind = type(optimizer).__name__
            raise UserError(
                f"local averages the optimizer's state, but {kind} keeps {one.state!r} as {one.dtype}; use an "
                "optimizer with floating-point state, or strategy=mirrored"
            )
    return held


def _parcels(layouts: Sequence[_Layout], parameters: int) -> list[Parcel]:
    """A parcel for each bucket, and the status."""
    parcels = [one.bucket.parcel(number, exact=one.exact) for number, one in enumerate(layouts)]
    count = max(_SMALLEST_STATUS, 2 * parameters)
    return [*parcels, Parcel.whole(len(parcels), count, torch.float64, exact=True)]


def launched_by_average(strategy: Local, model: nn.Module, optimizer: Optimizer, world: int) -> list[Parcel]:
    """What is summed for one average, with what is agreed on before it; all of it, in the order of `average`."""
    parameters = list(trainable(model))
    held = held_by(parameters, optimizer, keeps_apart=strategy.keeps_apart)
    layouts = _laid_out(held, strategy.fragments, state_as_is=not rounds_hops(strategy.codec))
    *parcels, status = _parcels(layouts, len(parameters))
    reported = _FLAGS + world + int(strategy.steps)
    room = status if reported <= status.count else [status, *room_for_buffers(model, status, world)][-1]
    agreed = [] if strategy.streams else [status]  # on which parameters take part
    return [*[room] * -(-reported // room.count), *agreed, *parcels]


def _laid_out(held: Sequence[_Held], fragments: int, *, state_as_is: bool) -> list[_Layout]:
    """Return a bucket for each fragment and type; slots are indices into `held`."""
    if fragments > len(held):
        raise UserError(
            f"local fragments={fragments}: the model has only {len(held)} tensors to train; give fewer"
        )
    kinds: dict[tuple[int, torch.dtype, bool], list[tuple[int, int]]] = {}
    sizes = [one.shape.numel() * one.dtype.itemsize for one in held]
    for fragment, piece in enumerate(cut(sizes, fragments) if held else ()):
        for index in piece:
            one = held[index]
            as_is = one.exact or (state_as_is and one.state is not None)
            kind = (fragment, torch.float64 if one.exact else one.dtype, as_is)
            kinds.setdefault(kind, []).append((index, one.shape.numel()))
    return [_Layout(bucket_of(kind[1], tensors), kind[2], kind[0]) for kind, tensors in kinds.items()]
