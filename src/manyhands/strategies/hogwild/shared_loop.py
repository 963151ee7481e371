"""`hogwild` in a loop of the user's own: model and optimizer in shared memory, on which each worker takes its steps."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Self

from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.optim import Optimizer

from manyhands.data.store.checkpoint import Loaded
from manyhands.engine.loop_end import GroupStore, LoopEnd
from manyhands.engine.reporting import WorkerContext
from manyhands.errors import UserError
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.group.step_order import ORDERS, Order
from manyhands.places.external.links import share_group
from manyhands.places.external.process_place import ProcessPlace
from manyhands.places.local.rendezvous import meet
from manyhands.places.local.status import State
from manyhands.strategies.hogwild.shared_model import SharedStepper
from manyhands.strategies.hogwild.strategy import Hogwild
from manyhands.strategy import Strategy

_NO_END: Final = 1 << 50  # a loop of the user's own has as many steps as it takes


class SharedLoop(LoopEnd):
    """One worker's end: which batch is its next, and its steps on the shared memory."""

    synchronous = False
    _stepper: SharedStepper | None = None
    _order: Order
    _model: nn.Module
    _optimizer: Optimizer
    _worker_context: WorkerContext

    def __init__(self, group: SharedGroup, store: GroupStore, order: str, stack: ExitStack) -> None:
        super().__init__(group.rank, group.world, store)
        self._group, self._kind, self._stack = group, ORDERS[order], stack
        self._inside = False  # whether this worker was let in to read and write

    @classmethod
    def open(cls, place: ProcessPlace, name: str, strategy: Strategy, timeout_s: float) -> Self:
        assert isinstance(strategy, Hogwild), "the registry leads here from hogwild alone"
        store = PrefixStore(f"manyhands/{name}", place.open_store(timeout_s))
        with ExitStack() as stack:
            where = PrefixStore("rendezvous", store)
            met = meet(where, rank=place.rank, world=place.world, name=name, timeout_s=timeout_s)
            rendezvous = stack.enter_context(met)
            if len(rendezvous.hosts) > 1:
                raise UserError(f"strategy={strategy}: {strategy.facts.cannot_cross_hosts}")
            group = stack.enter_context(share_group(rendezvous, "gradients", timeout_s))
            rendezvous.watch(lambda rank, in_peace: None if in_peace else group.abort(rank))
            stack.callback(rendezvous.close)  # before the group: the liveness monitor must not find it closed
            values = GroupStore(PrefixStore("values", store), timeout_s)
            return cls(group, values, strategy.order, stack.pop_all())

    def begin(self, model: nn.Module, optimizer: Optimizer, worker_context: WorkerContext) -> None:
        self._model, self._optimizer, self._worker_context = model, optimizer, worker_context
        self._stepper = SharedStepper(self._group, model, optimizer, {}, Order.NUM_BYTES)
        self._order = self._kind(self._stepper.shared.segment, 0, self._group)
        self._group.barrier()
        self._order.begin(0, _NO_END)
        self._group.barrier()
        self._claim()

    def enter(self) -> None:
        if not self._inside:
            self._order.enter(self.batch)
            self._inside = True

    def stop_requested(self) -> bool:
        return self._worker_context.stop_requested()

    def push(self, weight: float, settings: Mapping[str, Any]) -> None:
        """Take this worker's own step, by its own optimizer, whose settings are those of the loop."""
        del weight, settings
        assert self._stepper is not None, "prepare comes first"
        self.enter()
        self._stepper.step()
        self._order.applied()
        self.skip()

    def skip(self) -> None:
        self.enter()
        self._order.leave(self.batch)
        self._inside = False
        self.clock += 1
        self._claim()

    def save(self, folder: Path, model: nn.Module) -> Mapping[str, Any]:
        del folder, model
        assert self._stepper is not None, "prepare comes first"
        return self._stepper.optimizer_state() if self.rank == 0 else {}

    def load(self, folder: Path, loaded: Loaded, *, again: bool) -> None:
        """Every worker has written the same values to the model; worker 0's optimizer has the state for all."""
        del folder, loaded, again
        assert self._stepper is not None, "prepare comes first"
        shared = self._stepper.shared
        for first in (True, False):
            self._group.barrier()
            for slot in shared.slots.values() if (self.rank == 0) == first else ():
                slot.adopted = False
                if first and self._optimizer.state.get(slot.parameter):
                    shared.publish(slot, self._optimizer.state[slot.parameter])
                shared.adopt(slot)
        self._group.barrier()

    def leave(self) -> None:
        if self._inside:
            self.skip()
        self._group.barrier()

    def close(self) -> None:
        """Release everything; the model keeps what it has, in memory of its own."""
        if self._stepper is not None:
            for tensor in (*self._model.parameters(), *self._model.buffers()):
                tensor.data = tensor.data.clone()
            for slot in self._stepper.shared.slots.values():
                if slot.adopted and slot.views:
                    state = self._optimizer.state[slot.parameter]
                    self._optimizer.state[slot.parameter] = {
                        name: value.clone() if isinstance(value, Tensor) else value
                        for name, value in state.items()
                    }
            self._stepper.close()
            self._stepper = None
        self._stack.close()

    def _claim(self) -> None:
        step = self._order.claim()
        assert step is not None, "there is no end"
        self.batch = step
        self._worker_context.mark(step + 1, State.COMPUTING)
