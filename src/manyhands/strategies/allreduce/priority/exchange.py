"""`allreduce order=priority`: an all-reduce that continues while the next step is computed.

    backward k     slices leave as they are full, the most urgent of those that all workers have first
    agree k        all know the loss; slices that are left continue to be sent
    forward k + 1  each layer waits until its parameters are stepped, and steps whatever has arrived meanwhile
    backward k + 1 begins when all of step k has arrived

Parameters are written by the worker's main thread, never while a backward runs. Code that reads the model or the
optimizer between two steps (evaluation, checkpoint, comparison of workers) finds step k finished.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from manyhands.engine import exchange as base
from manyhands.engine.computing import Computed, Computer
from manyhands.facts import Stepping
from manyhands.strategies.allreduce.priority.sender import Agreed, SlicedGradients, SliceSender, cut
from manyhands.strategies.common.collectives import collective as sums
from manyhands.strategies.common.collectives.schedule_collective import ScheduleCollective
from manyhands.strategies.common.sharding.optimizers import stepping_for
from manyhands.wire.codec import check_optimizer
from manyhands.wire.flat_layout import trainable
from manyhands.wire.parcels import Parcel

__all__ = ["LateOptimizer", "ParameterGuard", "PriorityExchange", "exposed"]

_CARRIER_ITEMS = 1 << 17  # of float64: a megabyte at a time for weights, totals and what codecs keep


class PriorityExchange(base.Exchange):
    """One worker's end; at most `credit_bytes` are in flight at once, in slices of at most that size."""

    _gradients: SlicedGradients
    _sender: SliceSender
    _model: nn.Module
    _optimizer: Optimizer

    def __init__(self, collective: ScheduleCollective, bucket_bytes: int, credit_bytes: int) -> None:
        self.rank, self.world, self.wire = collective.rank, collective.world, collective.wire

        def stepped(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
            self.finish()
            return model.named_parameters()

        def residuals() -> Mapping[str, Any]:
            self.finish()
            return sums.kept_by_codecs(collective, self._carrier_index, self._carrier)

        self.part = base.WorkerPart(
            index=self.rank, count=self.world, copies=(range(self.world),), parameters=stepped
        )
        self.meter = base.Meter(take_times=self._take_times, traffic=collective.traffic)
        self.kept = base.ExchangeState(gather=residuals, load=partial(sums.remember_kept, collective))
        self._collective, self._bucket_bytes, self._credit_bytes = collective, bucket_bytes, credit_bytes
        self._is_open = False  # whether its slices are being filled
        self._agreed: Agreed | None = None
        self._unarrived: list[int] = []  # by parameter: its slices that are still to come
        self._is_applied = True  # all of the last step that was agreed on
        self._blocked: list[tuple[int, int]] = []  # intervals (begin, end) in nanoseconds
        self._posts: Mapping[int, base.PeerTraffic] = {}

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        check_optimizer(self._collective.codec, optimizer)
        self._model, self._optimizer, self._late = model, optimizer, LateOptimizer(optimizer)
        layouts = sums.gradient_layouts(model, self._bucket_bytes)
        slices = cut(layouts, self._credit_bytes)
        parcels = [layout.parcel(number) for number, layout in enumerate(layouts)]
        carrier = Parcel.whole(len(parcels), _CARRIER_ITEMS, torch.float64, exact=True)
        *buckets, self._carrier = self._collective.allocate([*parcels, carrier])
        self._carrier_index = len(parcels)
        weights = [*model.parameters(), *model.buffers()]
        sums.broadcast(self._collective, self._carrier_index, self._carrier, weights)
        parameters = list(trainable(model))
        self._slices = slices
        self._sender = SliceSender(self._collective, slices, len(parameters), self._credit_bytes)
        self.hooks = self._gradients = SlicedGradients(model, layouts, slices, buckets, self._sender.fill)
        self._guard = ParameterGuard(model, parameters, self._wait_for)

    def compute(self, computer: Computer, model: nn.Module, step: int) -> Computed:
        """Each layer waits for its parameters; a compiled model cannot say what it reads, and waits for all."""
        if model is not self._model:
            self.finish()
            return super().compute(computer, model, step)
        with self._guard:
            return super().compute(computer, model, step)

    def backward(self, loss: Tensor, share: float) -> None:
        """Backward of this worker's weighted loss, once the last step has arrived; full slices are sent meanwhile."""
        self._begin()
        (loss * share).backward()  # type: ignore[no-untyped-call]

    def agree(self, local: base.LocalStep) -> base.SharedStep:
        self._begin()
        self._gradients.fill_rest()
        with self._waiting():
            self._agreed = self._sender.agree(local, self._gradients.reached)
        self._posts = self._sender.take_traffic()
        self._is_open = False
        return self._agreed.shared

    def apply(self) -> None:
        """Step what has arrived; the rest is stepped on arrival, with the settings of this step."""
        assert self._agreed is not None, "agree comes before apply"
        self._late.allow()
        self._unarrived = [len(numbers) for numbers in self._gradients.slices_of]
        self._guard.pending.update(number for number, reached in enumerate(self._agreed.reached) if reached)
        self._is_applied = False
        self._take_step([number for number, slices in enumerate(self._unarrived) if not slices])
        self._step_arrived(wait=False)

    def finish(self) -> None:
        if not self._is_applied:
            self._wait_for(self._guard.pending)
            while not self._sender.is_over:  # what no worker's backward reached is sent, and not stepped
                self._step_arrived(wait=True)
            self._step_arrived(wait=False)
            self._is_applied = True

    def evaluate(
        self, computer: Computer, model: nn.Module, *, alike: bool = False
    ) -> tuple[dict[str, float], int] | None:
        self.finish()
        return super().evaluate(computer, model, alike=alike)

    def model_state(self, model: nn.Module) -> Mapping[str, Tensor] | None:
        self.finish()
        return super().model_state(model)

    def optimizer_state(self) -> dict[str, Any] | None:
        self.finish()
        return self._optimizer.state_dict() if self.rank == 0 else None

    def total(self, values: Tensor) -> Tensor:
        self.finish()
        return sums.total(self._collective, self._carrier_index, self._carrier, values)

    def _take_times(self) -> base.Times:
        blocked, self._blocked = self._blocked, []
        posts, self._posts = self._posts, {}
        late = self._sender.take_late() if self.hooks is not None else []
        exchange_ns, wait_ns = exposed(blocked, late)
        return base.Times(exchange_ns=exchange_ns, wait_ns=wait_ns, posts=posts)

    def close(self) -> None:
        if self.hooks is None:
            self._collective.close()
            return
        self._sender.close()
        self._guard.close()
        self._gradients.close()

    def _begin(self) -> None:
        """Finish the last step, and open the next unless it is open: by its first backward, or `agree`."""
        self.finish()
        if not self._is_open:
            self._is_open = True
            self._gradients.begin()
            self._sender.begin(self._gradients.step)

    def _wait_for(self, numbers: Iterable[int]) -> None:
        awaited = frozenset(numbers)
        self._step_arrived(wait=False)
        while awaited & self._guard.pending:
            if not self._step_arrived(wait=True):
                raise RuntimeError("every slice has arrived, but a parameter is still missing")

    def _step_arrived(self, *, wait: bool) -> bool:
        """Step the parameters all of whose slices have arrived; return whether any slice has since the last call."""
        with self._waiting() if wait else nullcontext():
            arrived = self._sender.arrivals(wait=wait)
        touched = [parameter for number in arrived for parameter in self._slices[number].parameters]
        for parameter in touched:
            self._unarrived[parameter] -= 1
        self._take_step([parameter for parameter in dict.fromkeys(touched) if not self._unarrived[parameter]])
        return bool(arrived)

    def _take_step(self, numbers: Sequence[int]) -> None:
        due = [number for number in numbers if number in self._guard.pending]
        if due:
            gradients = self._gradients
            self._guard.pending -= set(due)  # or the optimizer would wait for what it is about to write
            self._late.step({gradients.parameters[number]: gradients.views[number] for number in due})

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        begin_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._blocked.append((begin_ns, time.monotonic_ns()))


def exposed(
    blocked: Sequence[tuple[int, int]], late: Sequence[tuple[int, tuple[int, int]]]
) -> tuple[int, dict[int, int]]:
    """Return exposed communication, and the wait for each late worker, of a worker in nanoseconds.

    `blocked` are the intervals in which it was blocked, `late` those in which its sender could only wait, by worker.
    What the sender waited while the worker computed was hidden, and counts as neither.
    """
    waits: Counter[int] = Counter()
    for peer, (begin_ns, end_ns) in late:
        waits[peer] += sum(max(0, min(end_ns, end) - max(begin_ns, begin)) for begin, end in blocked)
    whole = sum(end - begin for begin, end in blocked)
    return max(0, whole - waits.total()), +waits


# The optimizer, parameter by parameter: each is stepped when its sum arrives, with the settings of its step.
# A schedule may have advanced to the next step by then, so the settings of each group are saved when the step is
# allowed. The optimizer is given a few parameters at a time. For an optimizer that treats parameters one by one this
# gives the same bits as all at once.
class LateOptimizer:
    """Steps some parameters of `optimizer` at a time; UserError for one that needs all gradients at once."""

    def __init__(self, optimizer: Optimizer) -> None:
        stepping_for(optimizer, (Stepping.IN_TURN,), "allreduce order=priority")
        self._optimizer = optimizer
        self._settings: list[dict[str, Any]] = []

    def allow(self) -> None:
        # Copies of the settings as they are now: a schedule writes in place if one is a tensor.
        self._settings = [
            {
                name: value.detach().clone() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if name != "params"
            }
            for group in self._optimizer.param_groups
        ]

    def step(self, sums: Mapping[Tensor, Tensor]) -> None:
        groups = self._optimizer.param_groups
        now = [dict(group) for group in groups]
        try:
            for group, settings in zip(groups, self._settings, strict=True):
                group.update(settings, params=[one for one in group["params"] if one in sums])
            for parameter, gradient in sums.items():
                parameter.grad = gradient
            self._optimizer.step()
        finally:
            for group, before in zip(groups, now, strict=True):
                group.update(before)
            for parameter in sums:
                parameter.grad = None


# A guard that makes every read of a parameter that is still to be stepped wait for that parameter, and no other.
# A module's forward waits for its parameters. Parameters are also read elsewhere (tied weights, a penalty in the loss,
# an exponential average): while a step is computed, every torch function that is given a tensor in a parameter's memory
# waits for it as well. So nothing reads a value of the previous step.
class ParameterGuard(TorchFunctionMode):
    """While entered, calls `wait(numbers)` before `pending` parameters of these numbers are read.

    `wait` returns when they are stepped and pending no more. `close` removes the hooks from the modules.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], wait: Callable[[Iterable[int]], None]
    ) -> None:
        super().__init__()
        self._wait = wait
        self.pending: set[int] = set()
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._in_memory: dict[int, list[int]] = {}
        for number, parameter in enumerate(parameters):
            self._in_memory.setdefault(parameter.untyped_storage().data_ptr(), []).append(number)
        self._hooks = [
            module.register_forward_pre_hook(self._before_forward)
            for module in model.modules()
            if any(id(one) in self._numbers for one in module.parameters(recurse=False))
        ]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        del types
        if self.pending:
            self._look_at(args)
            self._look_at((kwargs or {}).values())
        return func(*args, **(kwargs or {}))

    def _look_at(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, (list, tuple)):
                self._look_at(value)
            elif isinstance(value, Tensor):
                try:
                    memory = value.untyped_storage().data_ptr()
                except RuntimeError:  # a wrapper tensor does not say whose memory it reads
                    self._wait(self.pending)
                    continue
                if awaited := self.pending.intersection(self._in_memory.get(memory, ())):
                    self._wait(awaited)

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        if self.pending:
            own = {self._numbers.get(id(one), -1) for one in module.parameters(recurse=False)}
            if awaited := self.pending & own:
                self._wait(awaited)
