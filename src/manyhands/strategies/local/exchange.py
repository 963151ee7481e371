"""One worker's end of local SGD (Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019).

Between averages nothing is sent: every worker steps with the gradient of its part of each batch. At an average the
parameters and the optimizer's state of all workers become their mean, each weighted by the samples it has seen since
the last one. All replicas are equal afterwards, so a checkpoint taken there is consistent. One vector travels with it:

    stop · one flag per worker whose loss is not finite · the loss of each step since the last average
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from manyhands.native.heap import keep_freed_memory
from manyhands.strategies.common.collectives.collective import Collective, remember_kept
from manyhands.strategies.common.grid.grid_group import LinkGroup
from manyhands.strategies.local.averaged_replica import Replica
from manyhands.strategies.local.outer import Mean, OuterStep
from manyhands.transport.link.interface import Link

__all__ = ["Gossip", "LocalExchange", "partner"]

_STOP, _FLAGS = 0, 1


class LocalExchange(Exchange):
    """Averages replicas over the given collective after every `steps` steps, and at the end of the run.

    Each of the `first` steps ends with an average. `outer` is applied to a mean; `gossip` runs between two averages.
    """

    hooks: Replica | None = None
    _optimizer: Optimizer
    when_broken = "the others went on to the next average, and no replica was averaged with its"

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
        self.hooks.broadcast()
        keep_freed_memory()  # every step frees what the next one takes

    def backward(self, loss: Tensor, share: float) -> None:
        del share
        loss.backward()  # type: ignore[no-untyped-call]

    def agree(self, local: LocalStep) -> SharedStep:
        """Collective if an average is due: combine the reports since the last one.

        `average` averages the parameters.
        """
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
            self._optimizer.step()
        self._optimizer.zero_grad()

    def _average(self, end: bool) -> bool:
        """Collective if an average is due: every replica becomes the weighted mean."""
        if not self._due and not (end and self._losses):
            if self._gossip is None or not self._meets:
                return False
            self._meets = False
            self._gossip.meet(self._step, self._replica.parameters)
            return True
        plainly = self._step <= self._first
        self._replica.average(self._weight / len(self._losses), plainly=plainly)
        self._weight, self._losses, self._due = 0.0, [], False
        return True

    def evaluate(
        self, computer: Computer, model: nn.Module, *, alike: bool = False
    ) -> tuple[dict[str, float], int] | None:
        """Evaluate what the run results in: the replica, or the centre of replicas that keep apart."""
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
        waits = dict(times.wait_ns)
        for worker, waited_ns in self._gossip.group.take_waits().items():
            waits[worker] = waits.get(worker, 0) + waited_ns
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
def partner(rank: int, world: int, rendezvous: int) -> int | None:
    """Return the partner of worker `rank` of `world` in round `rendezvous`, counted from 0; None: it rests."""
    places = world + world % 2
    if places < 2:
        return None
    last, at = places - 1, rendezvous % (places - 1)
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
