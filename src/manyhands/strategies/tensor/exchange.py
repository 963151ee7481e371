"""One worker's end of `tensor`: layers are sliced over some workers, and the data over replicas of them.

data 0:  worker 0 = slice 0, worker 1 = slice 1     forward and backward pass activations between slices
data 1:  worker 2 = slice 0, worker 3 = slice 1     gradients of slice 0 are summed over workers 0 and 2
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    SharedStep,
    Times,
    Traffic,
    WorkerPart,
)
from manyhands.engine.fusing import take_step
from manyhands.facts import Stepping
from manyhands.optim import LAMB
from manyhands.strategies.common.grid.grid_group import LinkGroup, agree_on, sum_gradients, waits_of
from manyhands.strategies.common.grid.grid_layout import Grid, GridAxis
from manyhands.strategies.common.grid.held import Held, HeldModel, Outline
from manyhands.strategies.common.sharding.optimizers import stepping_for
from manyhands.strategies.tensor.moves import layer_traffic
from manyhands.strategies.tensor.slicing import Sliced, slice_modules
from manyhands.strategies.tensor.strategy import Tensor
from manyhands.transport.link.interface import Link

_ALL, _REPLICAS, _SLICES = 0x60, 0x61, 0x62
"""Message kinds that keep the traffic of the groups apart, since they share links."""


class GridExchange(Exchange):
    """One worker of a grid of replicas, stages and slices: its groups, what it holds of the model, its traffic."""

    builds_on_host = True
    _held: HeldModel
    _sliced: Sliced
    _optimizer: Optimizer

    def __init__(self, rank: int, grid: Grid, links: Mapping[int, Link], timeout_s: float) -> None:
        self.rank, self.world = rank, grid.workers
        self._grid, self._place = grid, grid.place(rank)
        self._links, self._timeout_s = links, timeout_s
        self.wire = next((link.wire for link in links.values()), self.wire)
        self._all = self._group(range(grid.workers), _ALL, "all workers")
        self._replicas = self._group(grid.along(GridAxis.DATA, rank), _REPLICAS, "the replicas of a slice")
        self._slices = self._group(grid.along(GridAxis.SLICE, rank), _SLICES, "the slices of a layer")
        self._groups = [self._all, self._replicas, self._slices]
        self._posts: dict[int, PeerTraffic] = {}
        self._steps = self._spent_ns = 0

    def apply(self) -> None:
        take_step(self._optimizer)
        self._optimizer.zero_grad()

    def optimizer_state(self) -> dict[str, Any] | None:
        return self._held.optimizer_state(self._all)

    def model_state(self, model: nn.Module) -> Mapping[str, torch.Tensor] | None:
        return self._held.model_state(self._all, model)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return self._all.all_reduce(values.clone())

    def summary(self) -> Mapping[str, Any]:
        return {"layers": layer_traffic(self._sliced.traffic, self._steps)}

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _fit(self, optimizer: Optimizer, ways: Sequence[Stepping], who: str) -> None:
        """UserError unless slices of the parameters are stepped as the whole is; LAMB gets the norms of the whole."""
        if isinstance(optimizer, LAMB) and Stepping.IN_PIECES in ways:
            optimizer.whole_squares = self._whole_squares
        else:
            stepping_for(optimizer, ways, who)

    def _whole_squares(self, parameters: Sequence[torch.Tensor], squares: torch.Tensor) -> torch.Tensor:
        """Collective among the slices of a layer: sums for what is cut; the rest every slice has whole."""
        cut = {id(one.local) for one in self._held.held if one.cut is not None}
        is_cut = torch.tensor([id(one) in cut for one in parameters])
        mine = squares.to("cpu", torch.float64)
        return torch.where(is_cut, self._slices.all_reduce(mine.clone()), mine).to(squares)

    def _group(self, members: Sequence[int], kind: int, name: str) -> LinkGroup:
        return LinkGroup(self.rank, members, self._links, self._timeout_s, kind=kind, name=name)

    def _holds(self, parameters: Iterable[nn.Parameter]) -> list[Held]:
        """What this worker has of each; of the first replica, all slices report cut ones and the first whole ones."""
        held, place = [], self._place
        for one in parameters:
            mine = self._sliced.cut.get(id(one))
            local, cut = (one, None) if mine is None else (mine.local, mine.cut)
            reports = place.data == 0 and (cut is not None or place.slice == 0)
            held.append(Held(whole=one, local=local, shape=one.shape, cut=cut, reports=reports))
        return held

    def _add_posts(self, *taken: Mapping[int, PeerTraffic]) -> None:
        for posts in taken:
            for worker, post in posts.items():
                self._posts.setdefault(worker, PeerTraffic()).add(post)

    def _take_spent_ns(self) -> int:
        """Nanoseconds of communication between slices, in forward and backward, since the last call."""
        before, self._spent_ns = self._spent_ns, self._sliced.state.spent_ns
        return self._spent_ns - before


class TensorExchange(GridExchange):
    """One worker's endpoint: its slice of one replica of the model."""

    def __init__(
        self, rank: int, grid: Grid, links: Mapping[int, Link], timeout_s: float, device: str = "cpu"
    ) -> None:
        super().__init__(rank, grid, links, timeout_s)
        self.part = WorkerPart(
            index=self._place.data,  # all slices of a replica compute on the same samples
            count=grid.data,
            speaks=self._place.slice == 0,
            copies=grid.copies,
            parameters=lambda _: self._held.named(),
            total_of_copies=lambda values: self._replicas.all_reduce(values.clone()),
        )
        self.parts = GradientParts(
            held=lambda: self._held.gradients(),
            # Cut parameters count on every slice, whole ones on the first.
            counted=lambda: self._held.gradients(lambda one: one.cut is not None or self._place.slice == 0),
            total=self._slices.all_reduce,
        )
        self.meter = Meter(
            take_times=self._take_times,
            traffic=lambda: sum((group.traffic() for group in self._groups), Traffic()),
        )
        self._device = torch.device(device)

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        for tensor in (*model.parameters(), *model.buffers()):
            self._all.broadcast(tensor.detach())
        outline = Outline.of(model)
        whole = dict.fromkeys(outline.parameters.values())
        self._sliced = slice_modules(model, self._slices)
        model.to(self._device)  # moves the slices only: the whole parameters are no longer the model's
        buffers = {
            key: value
            for key, value in (model.named_buffers() if self._place.data == 0 else ())
            if key in outline.shapes and (self.rank == 0 or key in self._sliced.buffers)
        }
        if self._sliced.cut:
            self._fit(optimizer, Tensor().facts.stepping, Tensor.word)
        self._held = HeldModel(outline, optimizer, self._holds(whole), buffers, self._sliced.buffers)
        self._held.drop_rest()
        self._optimizer = optimizer

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
        return computer.evaluate(model, self.part.index, self.part.count, self._replicas.all_reduce)

    def agree(self, local: LocalStep) -> SharedStep:
        """Collective: agree on the step; unless a worker reports bad values, sum gradients over the replicas."""
        shared = agree_on(self._all, local, counts=self._place.slice == 0)
        if not shared.bad_workers:
            sum_gradients(self._replicas, [one.local for one in self._held.held])
        self._steps += 1
        self._add_posts(*(group.take_traffic() for group in self._groups))
        return shared

    def _take_times(self) -> Times:
        """Waiting for late peers is reported as waiting, not as exchange time."""
        posts, self._posts = self._posts, {}
        waits = waits_of(self._groups)
        exchange_ns = max(0, self._take_spent_ns() - sum(waits.values()))
        return Times(exchange_ns=exchange_ns, wait_ns=waits, posts=posts)
