"""`central`: one copy of the parameters per host; each worker reduces, owns and updates its slice of them.

A step, for P workers and S bytes of parameters:

    backward    fills this worker's gradient buckets; slices that all workers have filled are reduced meanwhile
    agree       the last slices are reduced: P·S bytes read, and only S written, where an all-reduce writes P·S
    (barrier)   agreeing needs every worker, so every backward has ended: from here on no worker reads the parameters
    apply       each worker updates its slice of the shared copy, with its slice of the optimizer's state
    (barrier)   all slices are written: the next forward may begin

With several hosts (`across.py`) each has such a copy, and the reduced gradients are summed over hosts before they are
applied: all copies take the same step, bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.engine.exchange import Exchange, GradientParts, LocalStep, Meter, SharedStep, WorkerPart
from manyhands.errors import UserError
from manyhands.native.group.shared_group import SharedGroup
from manyhands.strategies.central.across import BetweenHosts, HostsCollective
from manyhands.strategies.central.shared_parameters import CentralParameters, gather_state, ownership_of
from manyhands.strategies.central.strategy import Central
from manyhands.strategies.common.collectives.collective import Reducer, SharedCollective
from manyhands.strategies.common.sharding.sliced_optimizer import SlicedOptimizer
from manyhands.transport.link.wire import Wire


class CentralExchange(Exchange):
    """One worker's end: gradients per worker, parameters per host. Takes ownership of `group` and `between`.

    `group` has the workers of this host; `between` is given if there are several hosts.
    """

    steps_itself = True
    hooks: Reducer | None = None
    _reducer: Reducer
    _optimizer: Optimizer
    _values: CentralParameters
    _inside: SharedCollective  # the collective among the workers of this host
    _slices: SlicedOptimizer

    def __init__(self, group: SharedGroup, bucket_bytes: int, between: BetweenHosts | None = None) -> None:
        self.rank, self.world = (one := between or group).rank, one.world
        self.wire = Wire.MEMORY if between is None else between.wire
        self._group, self._between, self._bucket_bytes = group, between, bucket_bytes
        self.part = WorkerPart(
            index=self.rank,
            count=self.world,
            # One copy on each host, represented by its leader.
            copies=() if between is None else (between.leaders,),
            parameters=lambda model: (
                (name, one if between is None or between.leads else None)
                for name, one in model.named_parameters()
            ),
        )

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collective: move worker 0's parameters into shared memory and partition their ownership.

        A UserError names an optimizer that cannot be partitioned. Each worker keeps its buffers, initialized from
        worker 0's.
        """
        world = self._group.world
        most = world if self._between is None else max(map(len, self._between.hosts))
        alone = world == 1 and self._between is None
        ways = () if alone else Central().facts.stepping
        owned = ownership_of(model, optimizer, self._bucket_bytes, ways, world, most)
        # The model's own memory goes before that of the gradients comes: the two never need room at the same time.
        values = CentralParameters(self._group, model, owned.layouts)
        collective: SharedCollective | HostsCollective
        if self._between is None:
            collective = inside = SharedCollective(self._group, owned.ranges)
        else:
            collective = HostsCollective(self._group, owned.ranges, self._between)
            inside = collective.inside
        reducer = Reducer(model, collective, owned.layouts, bring_back=False)
        if self._between is not None:  # only host leaders write their host's copy
            leads = self._between.leads
            reducer.broadcast(values.shared if leads else map(torch.empty_like, values.shared))
            self._group.barrier()
            values.refresh()
        reducer.broadcast(model.buffers())
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._slices = SlicedOptimizer(
            optimizer, owned.pieces[self._group.rank], trainable, values.values, reducer.gradients
        )
        self._optimizer, self._values, self._inside = optimizer, values, inside
        self.hooks = self._reducer = reducer
        # Every host has the whole gradient: the mean of their squares is the same on all, however each cuts it.
        hosts = 1 if self._between is None else len(self._between.hosts)
        held = self._slices.reached
        self.parts = GradientParts(held=held, counted=held, total=reducer.total, holders=hosts)
        self.meter = Meter(take_times=collective.take_times, traffic=collective.traffic)
        collective.take_times()  # setup time is not part of the first step

    def agree(self, local: LocalStep) -> SharedStep:
        return self._reducer.finish(local)

    def apply(self) -> None:
        self._slices.step()
        self._optimizer.zero_grad()
        self._group.barrier()
        self._values.refresh()

    def optimizer_state(self) -> dict[str, Any] | None:
        """Collective: gather the state on worker 0, through the memory of a gradient bucket of its host."""
        reducer = self._reducer
        if not reducer.is_idle:
            raise UserError(
                "the optimizer's state can only be read between steps; call optimizer.step() first"
            )
        if self._between is not None and self._between.number != 0:
            return None  # worker 0's host has all of it
        parts = [part.view(torch.uint8) for part in self._inside.parts(reducer.carrier)]
        shapes = [p.shape for group in self._optimizer.param_groups for p in group["params"]]
        state = gather_state(self._group, parts, self._slices.state(), shapes)
        if state is None:
            return None
        settings = self._slices.settings()
        return {**settings, "state": {**settings["state"], **state}}

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return self._reducer.total(values)

    def close(self) -> None:
        """Release gradients, memory and links; the model keeps the shared parameters as long as it lives."""
        if self._between is not None:
            self._between.close()  # its thread reads the gradients
        if self.hooks is not None:
            self._slices.close()
            self.hooks.close()
            self._values.close()
        self._group.close()
