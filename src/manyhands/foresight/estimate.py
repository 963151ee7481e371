"""Estimates the memory that a task's model needs in training, without allocating it.

The model is built, and one batch goes through it, with torch's fake tensors, which have a shape and a type and no
memory; what autograd would save for backward is counted. Where the task depends on values, so that this fails, a few
samples are computed with real tensors and scaled.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from manyhands.data.batches import BatchSource
from manyhands.data.randomness import seed_all
from manyhands.engine.dynamo import optimizer_of
from manyhands.engine.kernel_task import AnyTask
from manyhands.engine.options import Options
from manyhands.engine.request import Length, Request
from manyhands.engine.training import training_class
from manyhands.errors import UserError
from manyhands.facts import Growth, LayerFootprint, ModelFootprint, Stepping, TracedModel
from manyhands.strategies.common.peak_memory import StepPeaks, new_memory, peaks_of_step
from manyhands.strategies.common.sharding.layer_units import Unit, units_of
from manyhands.strategies.common.sharding.optimizers import cannot_step, kept_by
from manyhands.strategy import Strategy
from manyhands.task import Task

__all__ = ["Estimate", "estimate", "refusal", "require_trainable"]

_FEW = 4  # samples that are computed with real tensors, where shapes alone are not enough
_DOES = {True: "tracing", False: "computing"}
_HOW = {True: "traced without allocating memory", False: f"measured on {_FEW} samples and scaled"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The memory that a model needs, and how it was determined."""

    footprint: ModelFootprint
    how: str  # where the number of bytes of activations comes from, as a part of a sentence
    model: nn.Module  # the task's, whose tensors may have no memory


def estimate(task: Task, report: Callable[[str], None] = lambda _: None) -> Estimate:
    """Estimate the memory that `task` needs; `report` gets each stage. UserError says why a task cannot be computed."""
    try:
        report("starting torch's tracer")
        return _estimate(task, FakeTensorMode(allow_non_fake_inputs=True), report)
    except UserError:
        raise
    except Exception:  # any failure that shapes alone may cause: real tensors are tried next
        return _estimate(task, None, report)


def require_trainable(task: AnyTask, strategy: Strategy, workers: int, found: Estimate) -> None:
    """UserError with the sentence of `train`, where that would reject the task before it begins."""
    shortest = Length(rounds=1) if strategy.facts.counts_rounds else Length(steps=1)
    request = Request.make(task, strategy, workers, shortest, 0, Options(), "cpu")
    training_class(strategy, compiled=request.plan.task.compiled)(request, found.model)


def refusal(task: AnyTask, strategy: Strategy, workers: int, found: Estimate) -> str:
    """Why `train` would reject it; empty where it would not. What it would warn of, it says when it trains so."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            require_trainable(task, strategy, workers, found)
    except UserError as error:
        return str(error)
    return ""


def _estimate(task: Task, mode: FakeTensorMode | None, report: Callable[[str], None]) -> Estimate:
    seed_all(0)
    with mode if mode is not None else nullcontext():
        report("building the model" + (", without allocating its memory" if mode is not None else ""))
        model = task.model()
        optimizer = optimizer_of(task, model)
        units = units_of(model)
        if task.streams:
            raise UserError(
                f"memory: data is {task.stream_name}, and its samples cannot be inspected without drawing them"
            )
        source = BatchSource(task.data, task.collate)
        most = min(task.batch_size, len(source)) if mode is not None else min(_FEW, len(source))
        few = max(1, most // 2)
        numbers = sum(one.numel() for one in model.parameters())
        report(f"{_DOES[mode is not None]} a batch of {most} through {numbers:,} parameters")
        large = _saved(task, model, units, _batch(source, most, mode))
        small = large if few == most else _saved(task, model, units, _batch(source, few, mode))
        step_work = _step_work(task) if mode is not None else 0
    saved = Growth.through(few, small.saved, most, large.saved)
    footprint = ModelFootprint(
        parameters=_bytes_of(model.parameters()),
        gradients=_bytes_of(one for one in model.parameters() if one.requires_grad),
        state=_state_bytes(optimizer, mode),
        buffers=_bytes_of(model.buffers()),
        fixed=saved.fixed,
        per_sample=saved.per_sample,
        together=Growth.through(few, small.peaks.together, most, large.peaks.together),
        beside=Growth.through(few, small.peaks.beside, most, large.peaks.beside),
        step_work=step_work,
        batch_size=task.batch_size,
        microbatches=task.microbatches,
        layers=tuple(
            LayerFootprint(
                name=unit.name,
                parameters=_bytes_of(unit.parameters),
                activations=large.by_unit.get(unit.number, 0) / most,
                lasts=unit.module is None,
            )
            for unit in units
        ),
        traced=TracedModel(
            task=task,
            model=model,
            optimizer=optimizer,
            copy=lambda: _copied(model, mode),
            tracing=lambda: mode if mode is not None else nullcontext(),
            batch=lambda count: source.fetch(range(min(count, len(source)))),
        ),
    )
    return Estimate(footprint=footprint, how=_HOW[mode is not None], model=model)


def _copied(model: nn.Module, mode: FakeTensorMode | None) -> nn.Module:
    with mode if mode is not None else nullcontext():
        # A copy of a parameter without memory would not be a leaf of autograd's graph, as a new one is.
        made: dict[int, Any] = {
            id(one): nn.Parameter(torch.empty_like(one), one.requires_grad) for one in model.parameters()
        }
        return copy.deepcopy(model, made)


def _batch(source: BatchSource, count: int, mode: FakeTensorMode | None) -> Any:
    outside = torch.utils._python_dispatch._disable_current_modes() if mode is not None else nullcontext()
    with outside:  # the fake mode is suspended, so that tensors are real
        batch = source.fetch(range(count))
    return batch if mode is None else tree_map_only(Tensor, mode.from_tensor, batch)


class _Seen(NamedTuple):
    """The bytes of one step: what autograd keeps of its forward, all and by unit, and its peaks."""

    saved: int
    by_unit: dict[int, int]
    peaks: StepPeaks


def _saved(task: Task, model: nn.Module, units: Iterable[Unit], batch: Any) -> _Seen:
    """Of the step of one batch; parameters, buffers and the batch are not new."""
    known = {one.untyped_storage()._cdata for one in (*model.parameters(), *model.buffers())}
    tree_map_only(Tensor, lambda one: known.add(one.untyped_storage()._cdata), batch)
    kept: list[Tensor] = []  # otherwise a freed storage's address could be reused by another
    inside: list[int] = []
    by_unit: dict[int, int] = {}
    total = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal total
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            kept.append(tensor)
            total += storage.nbytes()
            if inside:
                by_unit[inside[-1]] = by_unit.get(inside[-1], 0) + storage.nbytes()
        return tensor

    def leave(*_: Any) -> None:  # a forward hook's result would replace the output
        inside.pop()

    def loss() -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            found = task.loss(model, batch)
        kept.clear()
        forwards.append(total)
        return found

    hooks = []
    for unit in units:
        if unit.module is not None:
            enter = partial(lambda number, *_: inside.append(number), unit.number)
            hooks.append(unit.module.register_forward_pre_hook(enter))
            hooks.append(unit.module.register_forward_hook(leave, always_call=True))
    forwards: list[int] = []
    try:
        peaks = peaks_of_step(model, batch, loss)
    except Exception:
        if not forwards:
            raise
        peaks = StepPeaks()  # what only backward cannot do without values
    finally:
        for hook in hooks:
            hook.remove()
    model.zero_grad(set_to_none=True)
    return _Seen(forwards[0], by_unit, peaks)


def _step_work(task: Task) -> int:
    """The bytes of temporary values of an optimizer's second step; 0 where it looks at values.

    In a fake mode of its own: torch 2.11 crashes where models are made later in one in which an optimizer has stepped.
    """
    with torch.utils._python_dispatch._disable_current_modes(), FakeTensorMode(allow_non_fake_inputs=True):
        model = task.model()
        optimizer = optimizer_of(task, model)
        trained = [one for one in model.parameters() if one.requires_grad]
        for one in trained:
            one.grad = torch.empty_like(one)
        try:
            optimizer.step()  # makes its state
            state = [value for kept in optimizer.state.values() for value in kept.values()]
            made = [*(one.grad for one in trained), *state]
            return new_memory([*trained, *(one for one in made if isinstance(one, Tensor))], optimizer.step)
        except Exception:  # an optimizer that needs more than gradients
            return 0


def _state_bytes(optimizer: Optimizer, mode: FakeTensorMode | None) -> int:
    """Return the bytes of the optimizer's state after its first step, from small stand-ins or from a real step."""
    try:
        if not cannot_step(optimizer, Stepping.IN_PIECES):
            return sum(one.nbytes for kept in kept_by(optimizer).values() for one in kept)
    except UserError:  # its state cannot be shared, which is irrelevant here
        pass
    with mode if mode is not None else nullcontext():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.empty_like(parameter)
        try:
            optimizer.step()
        except DataDependentOutputException:  # it reads a value, after it has made its state
            pass
    kept = (value for state in optimizer.state.values() for value in state.values())
    return _bytes_of(value for value in kept if isinstance(value, Tensor))


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    """Return the bytes, counting a shared storage once."""
    return sum({one.untyped_storage()._cdata: one.numel() * one.element_size() for one in tensors}.values())
