"""Gradient clipping as a task requests it, with the results of torch's functions in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from manyhands.engine.exchange import Exchange
from manyhands.engine.kernel_task import AnyTask
from manyhands.engine.row_gradients import clippable
from manyhands.errors import UserError
from manyhands.strategy import Strategy
from manyhands.task import Task

__all__ = ["check_clipping", "clip", "clip_own", "scale_down", "squares_of"]

_EPSILON: Final = 1e-6  # as in torch.nn.utils.clip_grad_norm_


def check_clipping(task: AnyTask, strategy: Strategy) -> None:
    """UserError where this strategy cannot clip as the task asks."""
    if not isinstance(task, Task) or not task.clips:
        return
    what = (
        f"clip_norm={task.clip_norm:g}" if task.clip_norm is not None else f"clip_value={task.clip_value:g}"
    )
    if strategy.cannot_clip:
        raise UserError(f"task.{what}: {strategy.cannot_clip}; use another strategy, or leave it out")
    if task.sparse and strategy.moves_rows:
        raise UserError(
            f"task.{what}: strategy {strategy} moves rows of task.sparse apart from the rest, so that nobody sees the "
            "whole gradient; leave one of the two out"
        )


def clip(task: Task, exchange: Exchange, model: nn.Module) -> None:
    """Collective, between `agree` and `apply`: clip the gradient of the whole batch, wherever its parts are held."""
    if task.clip_norm is not None:
        exchange.clip(task.clip_norm)
    elif task.clip_value is not None and exchange.steps_itself:
        for part in exchange.held_gradients():
            part.clamp_(-task.clip_value, task.clip_value)
    else:
        clip_own(task, model)


def squares_of(gradients: Sequence[Tensor]) -> float:
    """The sum of the squares of `gradients`, accumulated in more than 16 bits."""
    total = 0.0
    for gradient in gradients:
        wide = torch.float64 if gradient.dtype == torch.float64 else torch.float32
        total += float(torch.linalg.vector_norm(gradient, dtype=wide)) ** 2
    return total


def scale_down(gradients: Sequence[Tensor], norm: float, max_norm: float) -> None:
    """Scale parts of a gradient whose norm is known, as torch does; a norm of NaN propagates."""
    scale = max_norm / (norm + _EPSILON)
    if not scale >= 1:
        for gradient in gradients:
            gradient.mul_(scale)


def clip_own(task: Task, model: nn.Module) -> None:
    """Clip the gradient that this worker's model holds, without communication."""
    if task.clip_norm is not None:
        nn.utils.clip_grad_norm_(clippable(model.parameters()), task.clip_norm)
    elif task.clip_value is not None:
        nn.utils.clip_grad_value_(clippable(model.parameters()), task.clip_value)
