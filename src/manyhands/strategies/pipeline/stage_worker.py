"""Execution of one pipeline stage: runs its work items in order and waits for what they need.

    forward    input (from the stage before, or from the task) ─► the part's modules ─► output (to the stage after)
    backward   gradient of the output ─► gradients of the parameters, and of the input (to the stage before)

What a micro-batch's forward leaves is kept until its backward, or until its weight gradient where the schedule splits
that off: backward then computes the gradient of the input alone. With `recompute` only the input is kept, and forward
is run again before backward, with the same random numbers. The last part continues into the task's loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyhands.strategies.pipeline.borders import ChainPart, Ends, StageBorders
from manyhands.strategies.pipeline.schedule_table import Pass, StageWork
from manyhands.strategies.pipeline.weights import PutOff

__all__ = ["PipelineStage"]


@dataclass(slots=True)
class _Kept:
    """What the forward pass of one micro-batch keeps for its backward pass."""

    input: Any
    root: Tensor | None = None
    """The part's output, or the loss; None where it will be recomputed."""

    shape: torch.Size | None = None
    """Shape of an output for which a gradient comes back; None where none does."""

    put_off: PutOff | None = None


class PipelineStage:
    """One worker's parts of a pipeline, and what it keeps of micro-batches in flight."""

    def __init__(self, borders: StageBorders, *, recompute: bool = False) -> None:
        self._borders = borders
        self._schedule = schedule = borders.schedule
        self._recompute = recompute
        self._kept: dict[tuple[int, int], _Kept] = {}
        self._turns = schedule.of_stage(borders.stage)
        self._works = {
            Pass.FORWARD: self._forward,
            Pass.BACKWARD: self._backward,
            Pass.WEIGHTS: self._weights,
        }
        self.most_kept = 0
        """Peak number of (part, micro-batch) pairs that were kept at once in the last pass."""

    def run(self, ends: Ends, count: int, mark: Callable[[int], None]) -> None:
        """Run forward and backward of the first `count` micro-batches; gradients accumulate in the parameters.

        `mark` is called before each work item with the number of its micro-batch.
        """
        self._borders.post.begin()
        self._kept, self.most_kept = {}, 0
        for turn in self._turns:
            if turn.microbatch < count:
                mark(turn.microbatch)
                self._works[turn.work](turn, ends)
                self.most_kept = max(self.most_kept, len(self._kept))
        self._borders.post.settle()
        assert not self._kept, "every forward has its backward"

    def _forward(self, turn: StageWork, ends: Ends) -> None:
        part, microbatch, borders = self._part(turn), turn.microbatch, self._borders
        x = borders.input(part, microbatch) if part.number else ends.input(microbatch)
        kept = self._kept[part.number, microbatch] = _Kept(x)
        is_last = borders.is_last(part)
        if is_last:
            ends.prepare(microbatch)
        with borders.timed(turn):
            if is_last and self._recompute:
                return  # its backward computes the forward as well
            with torch.no_grad() if self._recompute else nullcontext():
                output = self._compute(part, kept, microbatch, ends)
            if not is_last:
                borders.send_output(part, microbatch, output)
                kept.shape = output.shape if output.is_floating_point() else None
            if not self._recompute:
                kept.root = output

    def _backward(self, turn: StageWork, ends: Ends) -> None:
        part, microbatch, borders = self._part(turn), turn.microbatch, self._borders
        kept = self._kept[part.number, microbatch]
        gradient = borders.gradient(part, microbatch, kept.shape) if kept.shape is not None else None
        with borders.timed(turn):
            root = kept.root
            if root is None:
                # Recomputing must not move buffers twice. The last part's forward was skipped, so there this is the
                # first run.
                with nullcontext() if borders.is_last(part) else _unmoved(part.buffers()):
                    root = self._compute(part, kept, microbatch, ends)
            if root.requires_grad and (gradient is not None or borders.is_last(part)):
                if self._schedule.splits_backward:
                    kept.put_off = PutOff(root, gradient, _leaf(kept.input), [*part.parameters(), *part.own])
                    kept.put_off.input_gradient()
                else:
                    torch.autograd.backward(root, gradient)
            borders.send_gradient(part, microbatch, kept.input)
            kept.root = None
        if not self._schedule.splits_backward:
            del self._kept[part.number, microbatch]

    def _weights(self, turn: StageWork, ends: Ends) -> None:
        del ends
        with self._borders.timed(turn):
            kept = self._kept.pop((self._schedule.part(turn), turn.microbatch))
            if kept.put_off is not None:
                kept.put_off.weight_gradients()

    def _compute(self, part: ChainPart, kept: _Kept, microbatch: int, ends: Ends) -> Tensor:
        """The part's output, or the loss where it is the last part."""
        with ends.computing():
            output = part.forward(kept.input, lambda place: ends.begin(microbatch, place))
        if self._borders.is_last(part):
            return ends.loss(microbatch, output)
        return self._borders.tensor(output, part, microbatch)

    def _part(self, turn: StageWork) -> ChainPart:
        return self._borders.parts[self._schedule.part(turn)]


def _leaf(x: Any) -> Tensor | None:
    """The input, where it is a tensor that has a gradient; else None."""
    return x if isinstance(x, Tensor) and x.requires_grad else None


@contextmanager
def _unmoved(buffers: Sequence[Tensor]) -> Iterator[None]:
    """Restore buffers after the block, so that running statistics are updated once although forward runs twice."""
    before = [buffer.clone() for buffer in buffers]
    yield
    for buffer, value in zip(buffers, before, strict=True):
        buffer.data.copy_(value)  # `data`: the graph may hold the buffer, but does not need its value
