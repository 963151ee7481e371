"""Strategy `tensor` in the common loop: layers are sliced over some workers, and the data over replicas of them.

data 0:  worker 0 = slice 0, worker 1 = slice 1     forward and backward pass activations between slices
data 1:  worker 2 = slice 0, worker 3 = slice 1     gradients of slice 0 are summed over workers 0 and 2
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.engine.computing import Computed, Computer
from manyhands.engine.exchange import (
    Exchange,
    GradientParts,
    LocalStep,
    Meter,
    PeerTraffic,
    Resources,
    SharedStep,
    SingleExchange,
    Times,
    Traffic,
    WorkerPart,
)
from manyhands.engine.request import Request
from manyhands.engine.worker_processes import ExchangeTraining
from manyhands.native.heap import keep_freed_memory
from manyhands.strategies.common.grid.grid_group import LinkGroup, agree_on, sum_gradients, waits_of
from manyhands.strategies.common.grid.grid_layout import Grid, GridAxis
from manyhands.strategies.common.grid.held import Held, HeldModel, Outline
from manyhands.strategies.common.sharding.optimizers import stepping_for
from manyhands.strategies.tensor.moves import layer_traffic, sum_layer_traffic
from manyhands.strategies.tensor.slicing import check_plan, slice_modules
from manyhands.strategies.tensor.strategy import Tensor
from manyhands.transport.link.interface import Link
from manyhands.transport.link.wire import Wire, wire_of

__all__ = ["TensorExchange", "TensorTraining"]

_EVERYONE, _SLICES, _DATA = 41, 42, 43
"""Message kinds that keep the traffic of the three groups apart, since they share links."""


class TensorExchange(Exchange):
    """One worker's endpoint: its slice of one replica of the model."""

    builds_on_host = True

    def __init__(
        self,
        rank: int,
        grid: Grid,
        links: Mapping[int, Link],
        timeout_s: float,
        device: torch.device | None = None,
    ) -> None:
        self.rank, self.world = rank, grid.workers
        self._grid, self._place, self._links = grid, grid.place(rank), links
        wires = {link.wire for link in links.values()}
        self.wire = wire_of(wires.pop()) if wires else Wire.NONE

        def group(members: Any, kind: int, name: str) -> LinkGroup:
            return LinkGroup(rank, members, links, timeout_s, kind=kind, name=name)

        self._everyone = group(range(grid.workers), _EVERYONE, "all workers")
        self._slices = group(grid.along(GridAxis.SLICE, rank), _SLICES, "the slices of a layer")
        self._data = group(grid.along(GridAxis.DATA, rank), _DATA, "the replicas of a slice")
        self.part = WorkerPart(
            index=self._place.data,  # all slices of a replica compute on the same samples
            count=grid.data,
            copies=grid.copies,
            parameters=lambda _: self._held.named(),
            total_of_copies=lambda values: self._data.all_reduce(values.clone()),
        )
        self.parts = GradientParts(
            held=lambda: self._held.gradients(),
            # Cut parameters count on every slice, whole ones on the first.
            counted=lambda: self._held.gradients(lambda one: one.cut is not None or self._place.slice == 0),
            total=self._slices.all_reduce,
        )
        self._groups = self._everyone, self._slices, self._data
        self.meter = Meter(
            take_times=self._take_times,
            traffic=lambda: sum((group.traffic() for group in self._groups), Traffic()),
        )
        self._device = device if device is not None else torch.device("cpu")
        self._posts: dict[int, PeerTraffic] = {}
        self._counted_ns = 0
        self._steps = 0

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            self._everyone.broadcast(tensor.detach())
        outline = Outline.of(model)
        whole = {id(one): one for one in outline.parameters.values()}
        self._sliced = slice_modules(model, self._slices)
        model.to(self._device)  # moves the slices only: the whole parameters are no longer the model's
        first = self._place.data == 0
        held = []
        for identity, parameter in whole.items():
            mine = self._sliced.cut.get(identity)
            local, cut = (parameter, None) if mine is None else (mine.local, mine.cut)
            reports = first and (cut is not None or self._place.slice == 0)
            held.append(Held(whole=parameter, local=local, shape=parameter.shape, cut=cut, reports=reports))
        buffers = {
            key: value
            for key, value in model.named_buffers()
            if key in outline.shapes and first and (self.rank == 0 or key in self._sliced.buffers)
        }
        if self._sliced.cut:
            stepping_for(optimizer, Tensor().facts.stepping, Tensor.word)
        self._held = HeldModel(outline, optimizer, held, buffers, self._sliced.buffers)
        self._held.drop_rest()
        self._optimizer = optimizer
        keep_freed_memory()  # every step frees what the next one allocates

    def compute(self, computer: Computer, model: nn.Module, step: int) -> Computed:
        for group in self._groups:
            group.take_traffic()  # drop what was counted between steps
        waits_of(self._groups)
        return super().compute(computer, model, step)

    def evaluate(
        self, computer: Computer, model: nn.Module, *, alike: bool = False
    ) -> tuple[dict[str, float], int] | None:
        """Collective: each replica evaluates its part of the evaluation data."""
        if alike:
            return computer.evaluate(model)
        return computer.evaluate(model, self.part.index, self.part.count, self._data.all_reduce)

    def agree(self, local: LocalStep) -> SharedStep:
        """Collective: agree on the step; unless a worker reports bad values, sum gradients over the replicas."""
        shared = agree_on(self._everyone, local, counts=self._place.slice == 0)
        if not shared.bad_workers:
            sum_gradients(self._data, [one.local for one in self._held.held])
        self._steps += 1
        for group in self._groups:
            for peer, post in group.take_traffic().items():
                self._posts.setdefault(peer, PeerTraffic()).add(post)
        return shared

    def apply(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()

    def optimizer_state(self) -> dict[str, Any] | None:
        return self._held.optimizer_state(self._everyone)

    def model_state(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        return self._held.model_state(self._everyone, model)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return self._everyone.all_reduce(values.clone())

    def _take_times(self) -> Times:
        """Time of communication between slices in forward and backward, and the traffic of agreed steps by peer.

        Waiting for late peers is reported as waiting, not as exchange time.
        """
        total_ns = self._sliced.state.spent_ns
        spent_ns, self._counted_ns = total_ns - self._counted_ns, total_ns
        posts, self._posts = self._posts, {}
        waits = waits_of(self._groups)
        return Times(exchange_ns=max(0, spent_ns - sum(waits.values())), wait_ns=waits, posts=posts)

    def summary(self) -> Mapping[str, Any]:
        return {"layers": layer_traffic(self._sliced.traffic, self._steps)}

    def close(self) -> None:
        for link in self._links.values():
            link.close()


class TensorTraining(ExchangeTraining):
    """Training in which every worker holds a slice of every layer; a bad plan fails in the constructor."""

    def __init__(self, request: Request, model: nn.Module) -> None:
        super().__init__(request, model)
        assert isinstance(request.strategy, Tensor), "the registry leads here from its own value"
        check_plan(model, request.strategy.grid(request.workers).slices)

    @classmethod
    def exchange(cls, strategy: Tensor, resources: Resources) -> Exchange:
        if resources.world == 1:
            return SingleExchange()  # a single worker has no peers
        grid, links = strategy.grid(resources.world), resources.links()
        return TensorExchange(resources.rank, grid, links, resources.timeout_s, resources.device)

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        samples, besides = super().gather(finished)
        return samples, {**besides, **sum_layer_traffic(finished)}
