"""One worker's end of `sharded` (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models", SC 2020, stage 3; Zhao et al., "PyTorch FSDP", VLDB 2023).

Of every layer's parameters, gradients and optimizer state a worker keeps 1/N. A step, for one layer after another:

    forward     the layer is gathered from all workers, the next one meanwhile; it is dropped when it has computed
    backward    gathered again; its gradient goes to the owners of its pieces, who sum; gradient and values are dropped
    agree       all workers have arrived: loss, which parameters were reached, whether any worker wants to stop
    apply       each worker steps its pieces, with its pieces of the optimizer's state

All exchanges are done by one thread, in the order in which the worker asks for them, while it computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.engine.computing import Computed, Computer
from manyhands.engine.exchange import Exchange, GradientParts, LocalStep, Meter, SharedStep, Times, WorkerPart
from manyhands.engine.worker_resources import Resources
from manyhands.errors import UserError
from manyhands.facts import Stepping
from manyhands.native.heap import keep_freed_memory
from manyhands.strategies.common.grid.grid_group import LinkGroup
from manyhands.strategies.common.grid.held import Held, HeldModel, Outline
from manyhands.strategies.common.sharding.layer_units import UnitMemory, move_buffers, units_of
from manyhands.strategies.common.sharding.optimizers import stepping_for
from manyhands.strategies.common.sharding.visits import (
    Action,
    Await,
    Fetch,
    Hand,
    Release,
    UnitFlow,
    UnitVisits,
)
from manyhands.strategies.sharded.sharded_units import KeptPieces, UnitRequest, UnitRounds, Want
from manyhands.strategies.sharded.strategy import Sharded
from manyhands.transport.link.wire import Wire
from manyhands.wire.tap import GradientTap

__all__ = ["ShardedExchange"]

_KIND = 0x5A3  # of this strategy's messages
_LOSS, _STOP, _FLAGS = 0, 1, 2

Result = TypeVar("Result")


class ShardedExchange(Exchange):
    """One worker's end; takes ownership of the links of `resources`. Values and gradients are on its device."""

    steps_itself = True
    builds_on_host = True

    def __init__(self, resources: Resources) -> None:
        self.rank, self.world = resources.rank, resources.world
        self._links = resources.links()
        self.wire = next((link.wire for link in self._links.values()), Wire.NONE)
        self._group = LinkGroup(
            self.rank, range(self.world), self._links, resources.timeout_s, kind=_KIND, name="sharded"
        )
        self.part = WorkerPart(index=self.rank, count=self.world, total_in_step=self._sum)
        self.parts = GradientParts(held=self._reached_sums, counted=self._reached_sums, total=self.total)
        self.meter = Meter(take_times=self._take_times, traffic=self._group.traffic)
        self._unit_rounds = UnitRounds(self._group, lambda grant: self._pieces[grant.request.unit].act(grant))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="manyhands sharded")
        self._device = resources.device
        self._optimizer: Optimizer | None = None
        self._whole: HeldModel | None = None
        self._held: list[tuple[KeptPieces, Held]] = []
        self._pieces: list[KeptPieces] = []
        self._places: list[tuple[KeptPieces, int]] = []
        self._visits: UnitVisits | None = None
        self._tap: GradientTap | None = None
        self._flow = UnitFlow(0)
        self._pending: dict[int, Future[None]] = {}
        self._handed: dict[int, Future[None]] = {}
        self._reached: list[bool] = []
        self._waited_ns = 0

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Collective: every worker keeps its pieces of worker 0's parameters, and frees the rest.

        A UserError names an optimizer that cannot be sharded.
        """
        whole = stepping_for(optimizer, Sharded().facts.stepping, Sharded.word) is Stepping.APART
        outline = Outline.of(model)
        for unit in units_of(model):
            memory = UnitMemory(unit, self._device)
            pieces = KeptPieces(memory, self._group, whole=whole)
            self._run(pieces.deal_out)
            memory.adopt()
            memory.let_go()
            self._pieces.append(pieces)
        move_buffers(model, self._device)
        for buffer in model.buffers():
            self._run(partial(self._group.broadcast, buffer))
        self._held = [(pieces, held) for pieces in self._pieces for held in pieces.held()]
        reduced = dict(model.named_buffers(remove_duplicate=False)) if self.rank == 0 else {}
        reduced = {name: buffer for name, buffer in reduced.items() if name in outline.keys}
        self._whole = HeldModel(outline, optimizer, [held for _, held in self._held], reduced)
        self._optimizer = optimizer
        lasting = [one.unit.number for one in self._pieces if one.unit.module is None]
        self._flow = UnitFlow(len(self._pieces), lasting)
        memories = [pieces.memory for pieces in self._pieces]
        self._visits = UnitVisits(model, memories, self._flow, self._carry_out)
        self._places = [(pieces, number) for pieces in self._pieces for number in pieces.unit.trained]
        parameters = [pieces.unit.parameters[number] for pieces, number in self._places]
        self._tap = GradientTap(parameters, self._on_gradient)
        keep_freed_memory()  # every step frees what the next one takes

    def compute(self, computer: Computer, model: nn.Module, step: int) -> Computed:
        self._flow.begin("training")
        with self._need_visits().watching():
            return super().compute(computer, model, step)

    def evaluate(
        self, computer: Computer, model: nn.Module, *, alike: bool = False
    ) -> tuple[dict[str, float], int] | None:
        self._flow.begin("evaluation")
        with self._need_visits().watching():
            return super().evaluate(computer, model, alike=alike)

    def backward(self, loss: Tensor, share: float) -> None:
        self._flow.backward()
        (loss * share).backward()  # type: ignore[no-untyped-call]
        for pieces in self._pieces:
            if pieces.is_pending:  # some of its parameters were not reached
                self._carry_out(self._flow.complete(pieces.unit.number))
        self._carry_out(self._flow.end())
        self._flow.begin("training")

    def agree(self, local: LocalStep) -> SharedStep:
        """Collective: wait until all gradients are summed, and combine what all workers report."""
        self._meet()
        status = torch.zeros(_FLAGS + self.world + len(self._places), dtype=torch.float64)
        status[_LOSS] = local.loss * local.share if local.is_finite and local.share else 0.0
        status[_STOP] = float(local.stop)
        status[_FLAGS + self.rank] = float(not local.is_finite)
        reached = [number in pieces.reached for pieces, number in self._places]
        status[_FLAGS + self.world :] = torch.tensor(reached, dtype=torch.float64)
        reduced = self._run(lambda: self._group.all_reduce(status)).tolist()
        self._reached = [flag > 0 for flag in reduced[_FLAGS + self.world :]]
        bad = tuple(rank for rank in range(self.world) if reduced[_FLAGS + rank])
        if bad:
            self._show_pieces()
        loss = float("nan") if bad else reduced[_LOSS]
        return SharedStep(loss=loss, bad_workers=bad, stop=reduced[_STOP] > 0)

    def apply(self) -> None:
        """Step this worker's pieces; no worker reads them before it requests their units again."""
        assert self._optimizer is not None, "attach comes first"
        for (_, held), gradient in zip(self._held, self._summed(), strict=True):
            held.local.grad = None if gradient is None else gradient.view(held.local.shape)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for pieces in self._pieces:
            pieces.forget_gradients()

    def optimizer_state(self) -> dict[str, Any] | None:
        assert self._whole is not None, "attach comes first"
        return self._run(partial(self._whole.optimizer_state, self._group))

    def model_state(self, model: nn.Module) -> Mapping[str, Tensor] | None:
        """Collective: assemble the model in host memory on worker 0, which must have the capacity for all of it."""
        assert self._whole is not None, "attach comes first"
        return self._run(partial(self._whole.model_state, self._group, model))

    def total(self, values: Tensor) -> Tensor:
        self._carry_out(self._flow.end())
        return self._sum(values)

    def _sum(self, values: Tensor) -> Tensor:
        self._meet()
        return self._run(lambda: self._group.all_reduce(values))

    def _take_times(self) -> Times:
        waited, self._waited_ns = self._waited_ns, 0
        waits, self._unit_rounds.waits = self._unit_rounds.waits, {}
        return Times(exchange_ns=waited, wait_ns=waits, posts=self._group.take_traffic())

    def close(self) -> None:
        for link in self._links.values():
            link.close()
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._visits is not None and self._tap is not None:
            self._visits.close()
            self._tap.close()
            self._show_pieces()
        self._visits = self._tap = None

    def _carry_out(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Fetch(unit):
                    self._pieces[unit].memory.make_room()
                    self._pending[unit] = self._ask(UnitRequest(Want.VALUES, unit))
                case Await(unit):
                    if unit in self._pending:
                        self._wait_for(self._pending.pop(unit))
                case Hand(unit):
                    self._await_sums()  # one sum may be in flight while the next layer computes
                    self._pieces[unit].hand_on()
                    self._handed[unit] = self._ask(UnitRequest(Want.SUM, unit))
                case Release(unit):
                    self._pieces[unit].memory.let_go()

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        pieces, number = self._places[index]
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if gradient.is_sparse:
            raise UserError(
                f"a parameter of {pieces.unit.name!r} has a sparse gradient; sharded sums dense ones, so build it "
                "with sparse=False"
            )
        if pieces.add_gradient(number, gradient):
            self._carry_out(self._flow.complete(pieces.unit.number))

    def _ask(self, request: UnitRequest) -> Future[None]:
        return self._thread.submit(self._unit_rounds.take, request)

    def _wait_for(self, future: Future[Result]) -> Result:
        begin = time.monotonic_ns()
        try:
            return future.result()
        finally:
            self._waited_ns += time.monotonic_ns() - begin

    def _run(self, work: Callable[[], Result]) -> Result:
        return self._wait_for(self._thread.submit(work))

    def _meet(self) -> None:
        """Collective: take part in the others' requests until every worker has arrived here."""
        self._await_sums()
        self._wait_for(self._ask(UnitRequest(Want.RENDEZVOUS)))

    def _await_sums(self) -> None:
        while self._handed:
            self._wait_for(self._handed.pop(next(iter(self._handed))))

    def _summed(self) -> list[Tensor | None]:
        """By piece, in the order of `held`: the sum if any worker reached the parameter, else None."""
        reached = dict(zip(self._places, self._reached, strict=True))
        return [
            gradient if reached.get((pieces, number)) else None
            for pieces in self._pieces
            for number, gradient in pieces.gradients()
        ]

    def _reached_sums(self) -> list[Tensor]:
        return [gradient for gradient in self._summed() if gradient is not None]

    def _show_pieces(self) -> None:
        """Point the model's parameters to this worker's pieces, so that a reader finds valid memory."""
        of_whole: dict[nn.Parameter, Tensor] = {held.whole: held.local.detach() for _, held in self._held}
        for pieces in self._pieces:
            for parameter in pieces.unit.parameters:
                parameter.data = of_whole.get(parameter, parameter.new_empty(0))

    def _need_visits(self) -> UnitVisits:
        assert self._visits is not None, "attach comes first"
        return self._visits
