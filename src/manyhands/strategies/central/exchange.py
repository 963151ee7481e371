"""`central`: one copy of the parameters per host; each worker reduces, owns and updates its slice of them.

A step, for P workers and S bytes of parameters:

    backward    fills this worker's gradient buckets; slices that all workers have filled are reduced meanwhile
    agree       the last slices are reduced: P·S bytes read, and only S written, where an all-reduce writes P·S
    (barrier)   agreeing needs every worker, so every backward has ended: from here on no worker reads the parameters
    apply       each worker updates its slice of the shared copy, with its slice of the optimizer's state
    (barrier)   all slices are written: the next forward may begin

So a host has one copy of the parameters and one of the optimizer's state, whatever the number of workers, and each
optimizer does 1/P of the work. Gradients are still one copy per worker. With several hosts (`across.py`) each has
such copies, and the reduced gradients are summed over hosts before they are applied: all copies take the same step,
bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.engine.clipping import scale_down, squares_of
from manyhands.engine.exchange import Exchange, LocalStep, SharedStep, Times, Traffic
from manyhands.errors import UserError
from manyhands.facts import Stepping
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.heap import keep_freed_memory
from manyhands.strategies.central.across import BetweenHosts, HostsCollective
from manyhands.strategies.central.gather_state import Carrier, gather_state
from manyhands.strategies.central.ownership import Ownership, cut, keep_whole
from manyhands.strategies.central.shared_parameters import CentralParameters
from manyhands.strategies.central.strategy import Central
from manyhands.strategies.common.collectives.collective import SharedCollective
from manyhands.strategies.common.collectives.reducer import Reducer, gradient_layouts
from manyhands.strategies.common.sharding.optimizers import stepping_for
from manyhands.strategies.common.sharding.sliced_optimizer import SlicedOptimizer
from manyhands.transport.link.wire import Wire
from manyhands.wire.flat_layout import BucketLayout

__all__ = ["CentralExchange"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Attached:
    """A worker's working objects, once the model is attached."""

    optimizer: Optimizer
    home: CentralParameters
    collective: SharedCollective | HostsCollective
    inside: SharedCollective
    """The collective among the workers of this host."""

    reducer: Reducer
    slices: SlicedOptimizer


class CentralExchange(Exchange):
    """One worker's end: gradients per worker, parameters per host. Takes ownership of `group` and `between`.

    `group` has the workers of this host; `between` is given if there are several hosts.
    """

    steps_itself = True

    def __init__(self, group: SharedGroup, bucket_bytes: int, between: BetweenHosts | None = None) -> None:
        self.rank = group.rank if between is None else between.rank
        self.world = group.world if between is None else between.world
        self._group = group
        self._between = between
        self._bucket_bytes = bucket_bytes
        self._attached: _Attached | None = None

    @property
    def wire(self) -> int:  # type: ignore[override]
        """A host's leader sends over the network; all other exchange is memory."""
        return Wire.MEMORY if self._between is None else self._between.wire

    @property
    def copies(self) -> Sequence[Sequence[int]]:
        """One copy on each host, represented by its leader."""
        return () if self._between is None else (self._between.leaders,)

    def held_parameters(self, model: nn.Module) -> Iterable[tuple[str, torch.Tensor | None]]:
        """Yield every parameter by name; with several hosts, None in its place except on a host's leader."""
        tells = self._between is None or self._between.leads
        return ((name, one if tells else None) for name, one in model.named_parameters())

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collective: move worker 0's parameters into shared memory and partition their ownership.

        A UserError names an optimizer that cannot be partitioned. Each worker keeps its buffers, initialized from
        worker 0's.
        """
        owned = self._share_out(gradient_layouts(model, self._bucket_bytes), optimizer)
        # The model's own memory goes before that of the gradients comes: the two never need room at the same time.
        home = CentralParameters(self._group, model, owned.layouts)
        collective: SharedCollective | HostsCollective
        if self._between is None:
            collective = inside = SharedCollective(self._group, owned.ranges)
        else:
            collective = HostsCollective(self._group, owned.ranges, self._between)
            inside = collective.inside
        reducer = Reducer(model, collective, owned.layouts, bring_back=False)
        if self._between is not None:
            self._spread(home, reducer, self._between)
        reducer.broadcast(model.buffers())
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        slices = SlicedOptimizer(
            optimizer, owned.pieces[self._group.rank], trainable, home.values, reducer.gradients
        )
        self._attached = _Attached(
            optimizer=optimizer,
            home=home,
            collective=collective,
            inside=inside,
            reducer=reducer,
            slices=slices,
        )
        collective.take_times()  # setup time is not part of the first step
        keep_freed_memory()  # every step frees what the next one takes

    def _share_out(self, layouts: Sequence[BucketLayout], optimizer: Optimizer) -> Ownership:
        """Return which worker of this host updates which parameters."""
        alone = self._group.world == 1 and self._between is None
        ways = Central().stepping
        if alone or stepping_for(optimizer, ways, Central.word) is Stepping.IN_PIECES:
            return cut(layouts, self._group.world)
        most = None if self._between is None else self._between.most_workers
        return keep_whole(layouts, self._group.world, most)

    def _spread(self, home: CentralParameters, reducer: Reducer, between: BetweenHosts) -> None:
        """Collective: write worker 0's values to every host's copy; only host leaders write."""
        reducer.broadcast(home.shared if between.leads else map(torch.empty_like, home.shared))
        self._group.barrier()
        home.refresh()

    def backward(self, loss: torch.Tensor, share: float) -> None:
        """Backward of this worker's weighted loss; slices are reduced while it runs."""
        (loss * share).backward()  # type: ignore[no-untyped-call]

    def weigh(self, share: float) -> None:
        """Set the factor by which gradients are multiplied as they are copied into their buckets."""
        self._need().reducer.weight = share

    def on_next_gradient(self, listener: Callable[[], None]) -> None:
        """Call `listener` once, from the hook that sees the next gradient."""
        self._need().reducer.on_next_gradient = listener

    def accumulate(self) -> AbstractContextManager[None]:
        """Return a context in which gradients add up in their buckets and nothing is reduced."""
        return self._need().reducer.holding()

    def agree(self, local: LocalStep) -> SharedStep:
        """Collective: this worker's slices of the gradient are now the sum; every backward has ended."""
        return self._need().reducer.finish(local)

    def clip(self, max_norm: float) -> float:
        """Collective: compute the norm from every worker's slices; each worker scales its slices.

        Every host has the whole gradient: the mean of their squares is the same number on all, however each cuts it.
        """
        attached = self._need()
        hosts = 1 if self._between is None else len(self._between.hosts)
        gradients = self.held_gradients()
        squares = squares_of(gradients)
        total = attached.reducer.total(torch.tensor([squares], dtype=torch.float64))
        norm = math.sqrt(total.item() / hosts)
        scale_down(gradients, norm, max_norm)
        return norm

    def held_gradients(self) -> Sequence[torch.Tensor]:
        """Return the summed gradient of this worker's slices."""
        return self._need().slices.reached()

    def apply(self) -> None:
        """Collective: update this worker's slices of the shared copy, and wait until all are written."""
        attached = self._need()
        attached.slices.step()
        attached.optimizer.zero_grad()
        self._group.barrier()
        attached.home.refresh()

    def optimizer_state(self) -> dict[str, Any] | None:
        """Collective: gather the state on worker 0, through the memory of a gradient bucket of its host."""
        attached = self._need()
        if not attached.reducer.is_idle:
            raise UserError(
                "the optimizer's state can be had between steps; a gradient waits for its step here"
            )
        if self._between is not None and self._between.number != 0:
            return None  # worker 0's host has all of it
        carrier = Carrier(
            rank=self._group.rank,
            parts=[part.view(torch.uint8) for part in attached.inside.parts(attached.reducer.carrier)],
            barrier=self._group.barrier,
        )
        shapes = [p.shape for group in attached.optimizer.param_groups for p in group["params"]]
        state = gather_state(carrier, attached.slices.state(), shapes)
        if state is None:
            return None
        settings = attached.slices.settings()
        return {**settings, "state": {**settings["state"], **state}}

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Collective: the sum over workers."""
        return self._need().reducer.total(values)

    def take_times(self) -> Times:
        """Return the times measured inside the compiled code."""
        return self._attached.collective.take_times() if self._attached is not None else Times()

    def traffic(self) -> Traffic:
        """Return the bytes of gradients read from other workers, and what a host's leader sent to others."""
        return self._attached.collective.traffic() if self._attached is not None else Traffic()

    def close(self) -> None:
        """Release gradients, memory and links; the model keeps the shared parameters as long as it lives."""
        if self._between is not None:
            self._between.close()  # its thread reads the gradients
        if self._attached is not None:
            self._attached.slices.close()
            self._attached.reducer.close()
            self._attached.home.close()
        self._group.close()

    def _need(self) -> _Attached:
        assert self._attached is not None, "attach comes first"
        return self._attached
