"""Gradient clipping as a task requests it, with the results of torch's functions in one process."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.engine.exchange import Exchange
from manyhands.engine.kernel_task import AnyTask
from manyhands.errors import UserError
from manyhands.strategy import Strategy
from manyhands.task import Task

_EPSILON: Final = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def check_clipping(task: AnyTask, strategy: Strategy) -> None:
    if not isinstance(task, Task) or not task.clips:
        return
    name = "clip_norm" if task.clip_norm is not None else "clip_value"
    what = f"{name}={getattr(task, name):g}"
    if strategy.facts.cannot_clip:
        raise UserError(
            f"task.{what}: {strategy.facts.cannot_clip}; use another strategy, or leave it out (of `train rl` by "
            "--clip-norm 0)"
        )
    if task.sparse and strategy.facts.moves_rows:
        raise UserError(
            f"task.{what}: strategy {strategy} sends rows of task.sparse separately, so no worker has the complete "
            "gradient; leave one of the two out"
        )


def clip(task: Task, exchange: Exchange, model: nn.Module) -> None:
    """Collective, between `agree` and `apply`: clip the gradient of the whole batch, wherever its parts are held."""
    if task.clip_norm is not None and exchange.parts is not None:
        clip_norm(exchange, model, task.clip_norm)
    elif task.clip_value is not None and exchange.steps_itself and exchange.parts is not None:
        for part in exchange.parts.held():
            part.clamp_(-task.clip_value, task.clip_value)
    else:
        clip_own(task, model)


def logged(
    names: Sequence[str], exchange: Exchange, model: nn.Module, optimizer: Optimizer
) -> dict[str, float]:
    """Collective, between `agree` and `apply`: what `Options.log` names, of this step."""
    found: dict[str, float] = {}
    if "lr" in names:
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        found |= {f"lr_{place}" if place else "lr": rate for place, rate in enumerate(rates)}
    if "grad_norm" in names:
        found["grad_norm"] = gradient_norm(exchange, model)
    return found


def gradient_norm(exchange: Exchange, model: nn.Module) -> float:
    """Collective, between `agree` and `apply`: the norm of the gradient of the whole batch."""
    parts = exchange.parts
    if parts is None:
        held = (one.grad for one in clippable(model.parameters()))
        return float(nn.utils.get_total_norm([one for one in held if one is not None]))
    squares = 0.0
    for gradient in parts.counted():  # accumulated in more than 16 bits
        wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        squares += float(torch.linalg.vector_norm(gradient, dtype=wide)) ** 2
    return math.sqrt(float(parts.total(torch.tensor([squares], dtype=torch.float64))) / parts.holders)


def clip_norm(exchange: Exchange, model: nn.Module, max_norm: float) -> float:
    """Collective, between `agree` and `apply`: scale the gradient down to `max_norm`; returns the norm that it had.

    As `torch.nn.utils.clip_grad_norm_` on all parameters of the model in one process; a norm of NaN propagates.
    """
    parts = exchange.parts
    if parts is None:
        return float(nn.utils.clip_grad_norm_(clippable(model.parameters()), max_norm))
    norm = gradient_norm(exchange, model)
    scale = max_norm / (norm + _EPSILON)
    if not scale >= 1:
        for gradient in parts.held():
            gradient.mul_(scale)
    return norm


def clip_own(task: Task, model: nn.Module) -> None:
    if task.clip_norm is not None:
        nn.utils.clip_grad_norm_(clippable(model.parameters()), task.clip_norm)
    elif task.clip_value is not None:
        nn.utils.clip_grad_value_(clippable(model.parameters()), task.clip_value)


def clippable(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Parameters for torch's clipping; a row-sparse gradient becomes its rows: an absent one is 0, which is fine."""
    return [_rows_of(one) if one.grad is not None and one.grad.is_sparse else one for one in parameters]


@torch.no_grad()
def _rows_of(parameter: Tensor) -> Tensor:
    """A stand-in parameter whose gradient is the memory of the coalesced rows."""
    assert parameter.grad is not None, "only of those that have one"
    parameter.grad = parameter.grad.coalesce()
    rows = parameter.grad._values()
    stand_in = torch.empty_like(rows)
    stand_in.grad = rows
    return stand_in
