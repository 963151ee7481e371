"""Synchronizes a model's buffers, such as running statistics of batch norm, after every exchange.

Gradients are averaged, so parameters stay alike by themselves. Buffers are written by each worker's own forward and
drift apart. What to do about that is the user's choice:

    broadcast   everyone takes those of worker 0, as DistributedDataParallel does
    mean        everyone takes the mean, each worker weighted by its share of the batch; numbers that are not
                floating-point come from worker 0
    local       nothing; a checkpoint holds those of worker 0

Only buffers that change travel, and only with an exchange of gradients, so no forward ever waits. Batch norm itself
normalises each worker's share by that share's own statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from manyhands.errors import UserError, nearest
from manyhands.interop.own_loop.small_sums import Call, Word, Words

__all__ = ["BufferKeeper", "check_mode"]

MODES: Final = ("broadcast", "mean", "local")

_NOTHING, _KNOWN, _UNKNOWN = range(3)  # of a word: whether buffers changed, and whether all were known to


def check_mode(mode: str) -> str:
    if mode not in MODES:
        raise UserError(f"buffers={mode!r} is not known; {nearest(mode, MODES)}")
    return mode


class BufferKeeper:
    """Synchronizes the buffers of `model`, by `mode`."""

    def __init__(self, model: nn.Module, mode: str, words: Words) -> None:
        self._mode, self._words = mode, words
        holders = model.modules() if mode != "local" and words.world > 1 else ()
        self._holders = [module for module in holders if any(True for _ in module.buffers(recurse=False))]
        self._seen = [_state(module) for module in self._holders]
        # Modules whose buffers have been seen to change, on some worker: those travel
        self._moving = [False] * len(self._holders)

    def news(self) -> int:
        changed = self._changed()
        if any(new and not known for new, known in zip(changed, self._moving, strict=True)):
            return _UNKNOWN
        return _KNOWN if any(changed) else _NOTHING

    def exchange(self, words: Sequence[Word], share: float) -> None:
        """Collective, after an exchange of gradients that began with `words`: synchronize the buffers."""
        news = max(word.news for word in words)
        if news == _UNKNOWN:
            flags = self._words.total(torch.tensor(self._changed(), dtype=torch.float64)).tolist()
            self._moving = [known or flag > 0 for known, flag in zip(self._moving, flags, strict=True)]
        if news != _NOTHING:
            root = next(rank for rank, word in enumerate(words) if word.call is Call.BACKWARD)
            self._make_alike(root, share)
        self._seen = [_state(module) for module in self._holders]

    def _changed(self) -> list[bool]:
        changed = []
        for module, seen in zip(self._holders, self._seen, strict=True):
            # Running statistics are written by an operation that autograd's counter does not see.
            silently = isinstance(module, _NormBase) and module.training and module.running_mean is not None
            same = [(id(buffer), version) for buffer, version in _state(module)] == [
                (id(buffer), version) for buffer, version in seen
            ]
            changed.append(silently or not same)
        return changed

    def _make_alike(self, root: int, share: float) -> None:
        moving = (module for module, moves in zip(self._holders, self._moving, strict=True) if moves)
        buffers = [buffer for module in moving for buffer in module.buffers(recurse=False)]
        averaged = [b for b in buffers if self._mode == "mean" and b.is_floating_point()]
        copied = [b for b in buffers if self._mode != "mean" or not b.is_floating_point()]
        if averaged:
            flat = torch.cat([buffer.detach().double().flatten() for buffer in averaged])
            total = self._words.total(torch.cat([flat * share, torch.tensor([share], dtype=torch.float64)]))
            means = torch.split(total[:-1] / total[-1], [buffer.numel() for buffer in averaged])
            for buffer, mean in zip(averaged, means, strict=True):
                buffer.copy_(mean.view(buffer.shape))
        if copied:
            flat = torch.cat([buffer.detach().contiguous().view(-1).view(torch.uint8) for buffer in copied])
            self._words.broadcast(flat, root)
            pieces = torch.split(flat, [buffer.nbytes for buffer in copied])
            for buffer, piece in zip(copied, pieces, strict=True):
                buffer.copy_(piece.clone().view(buffer.dtype).view(buffer.shape))


def _state(module: nn.Module) -> list[tuple[torch.Tensor, int]]:
    """The buffers themselves, for a module may replace one, with autograd's count of changes in place."""
    return [(buffer, buffer._version) for buffer in module.buffers(recurse=False)]
