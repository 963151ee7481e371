"""What the workers of a group exchange besides gradients: a status word each, small sums, tensors, buffers.

Every collective begins with one word from each worker, which says what that worker is doing. So workers that diverge
are reported by name, instead of exchanging the wrong data or waiting for each other for ever:

    word of a worker   | call | stop | last | mark of its batch | news of its buffers | a number |

All words lie side by side in one small bucket in which each worker fills its own row; the sum is the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum, unique
from typing import Final, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from manyhands.engine.exchange import Times, Traffic, WorkerPart
from manyhands.errors import UserError, nearest
from manyhands.native.dtypes import BY_CODE, CODES, LINKED
from manyhands.strategies.common.collectives.collective import Collective, total
from manyhands.wire.parcels import Parcel

_FIELDS: Final = 6
_SMALLEST_TABLE: Final = 64
_CARRIERS: Final = (512, 32 * 1024)  # items of 8 bytes that travel in one piece: the smallest that suffices
_MAX_DIMS: Final = 8
_DTYPES: Final = tuple(dtype for dtype in CODES if dtype in LINKED or dtype.is_complex)


@unique
class Call(IntEnum):
    """What a worker is doing when it synchronizes with the others."""

    BACKWARD = 1
    STEP = 2
    CLIP = 3
    GATHER = 4
    MEAN = 5
    BARRIER = 6
    EPOCH = 7
    PREPARE = 8
    SAVE = 9
    LOAD = 10
    LEAVE = 11
    UNSCALE = 12
    ALIGN = 13
    STATE = 14


_SENTENCES: Final = {
    Call.STEP: "is in optimizer.step()",
    Call.CLIP: "is in clip_grad_norm_()",
    Call.UNSCALE: "is in GradScaler's unscale_()",
    Call.ALIGN: "joins with out=",
    Call.EPOCH: "starts to read a loader",
    Call.STATE: "is in state_dict()",
    Call.LEAVE: "has left the group",
}


class Word(NamedTuple):
    """One worker's status word, in the order of its fields in the table."""

    call: Call
    stop: bool = False  # it wants all to stop
    last: bool = False  # its stream of batches has no other after this one
    mark: int = 0  # a checksum of the global batch it reads; 0 where batches are not split
    news: int = 0  # which buffers changed; see `BufferKeeper`
    value: float = 0.0  # a number that belongs to the call


def require_same(words: Sequence[Word]) -> None:
    """Raise UserError naming what each worker does, unless all workers are in the same call."""
    if len({word.call for word in words}) > 1:
        found = (_SENTENCES.get(word.call, f"is in {word.call.name.lower()}()") for word in words)
        each = ", ".join(f"worker {rank} {sentence}" for rank, sentence in enumerate(found))
        raise UserError(
            f"the workers made different calls: {each}; every worker must make the same calls in the same order, so "
            "look for a call that depends on the rank or on one worker's data"
        )


class Words:
    """One worker's end; all methods are collective, called in the same order by all. Takes over `collective`."""

    def __init__(self, collective: Collective) -> None:
        self.collective, self.rank, self.world = collective, collective.rank, collective.world
        size = max(_SMALLEST_TABLE, _FIELDS * self.world)
        counts = enumerate((size, *_CARRIERS))
        parcels = [Parcel.whole(number, count, torch.float64, exact=True) for number, count in counts]
        self._table, *self._carriers = collective.allocate(parcels)
        # Before this worker waits for the words of the others, it serves what they still need to arrive
        self.arrive: Callable[[], None] = lambda: None

    def send(self, word: Word) -> None:
        self._table.zero_()
        begin = self.rank * _FIELDS
        self._table[begin : begin + _FIELDS] = torch.tensor(word, dtype=torch.float64)
        if word.call is Call.BACKWARD:
            self.collective.begin(0)  # it leaves before the gradients of this backward do
        self.collective.launch(0)

    def receive(self) -> tuple[Word, ...]:
        self.arrive()
        self.collective.finish()
        rows = self._table[: self.world * _FIELDS].view(self.world, _FIELDS).tolist()
        return tuple(
            Word(Call(int(call)), stop > 0, last > 0, int(mark), int(news), value)
            for call, stop, last, mark, news, value in rows
        )

    def meet(self, call: Call, value: float = 0.0) -> tuple[Word, ...]:
        """Synchronize all workers in the same call; UserError names those that are in another."""
        self.send(Word(call=call, value=value))
        words = self.receive()
        require_same(words)
        return words

    def total(self, values: torch.Tensor) -> torch.Tensor:
        return total(self.collective, *self._carrier(values), values)

    def broadcast(self, content: torch.Tensor, root: int = 0) -> None:
        """Make worker `root`'s bytes everyone's: a flat tensor of uint8, of one length on all."""
        for piece in torch.split(content, _CARRIERS[-1] * torch.float64.itemsize):
            index, carrier = self._carrier(piece)
            raw = carrier.view(torch.uint8)
            if self.rank == root:
                raw[: len(piece)] = piece
            self.collective.broadcast(index, root)
            piece.copy_(raw[: len(piece)])

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """Everyone's rows one after the other, in rank order; the first dimension may differ between workers."""
        shapes = self._shapes(rows)
        parts = []
        for root, count in enumerate(shape[0] for shape in shapes):
            part = rows.contiguous() if root == self.rank else rows.new_empty((count, *rows.shape[1:]))
            self.broadcast(part.view(-1).view(torch.uint8), root)
            parts.append(part)
        return torch.cat(parts)

    def _carrier(self, piece: torch.Tensor) -> tuple[int, torch.Tensor]:
        numbered = list(enumerate(self._carriers, start=1))
        return next((one for one in numbered if one[1].nbytes >= piece.nbytes), numbered[-1])

    def _shapes(self, rows: torch.Tensor) -> list[tuple[int, ...]]:
        if rows.dtype not in _DTYPES or rows.dim() > _MAX_DIMS:
            raise UserError(
                f"a tensor of {rows.dtype} with {rows.dim()} dimensions cannot be gathered; allowed: at most "
                f"{_MAX_DIMS} dimensions of {', '.join(str(dtype).removeprefix('torch.') for dtype in _DTYPES)}"
            )
        table = torch.zeros(self.world, 2 + _MAX_DIMS, dtype=torch.float64)
        mine = [CODES[rows.dtype], rows.dim(), *rows.shape]
        table[self.rank, : len(mine)] = torch.tensor(mine, dtype=torch.float64)
        found = self.total(table.view(-1)).view_as(table).to(torch.int64).tolist()
        kinds = [(BY_CODE[row[0]], tuple(row[3 : 2 + row[1]])) for row in found]
        odd = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), None)
        if odd is not None:
            theirs = (f"{found[rank][2]} × {kinds[rank][1]} of {kinds[rank][0]}" for rank in (0, odd))
            each = ", ".join(f"worker {rank} has {it}" for rank, it in zip((0, odd), theirs, strict=True))
            raise UserError(f"gathered tensors may differ only in their first dimension: {each}")
        return [tuple(row[2 : 2 + row[1]]) for row in found]


class CopyWords:
    """Sums among the workers that hold the same part of a model, which `part` describes."""

    def __init__(self, part: WorkerPart) -> None:
        assert part.total_of_copies is not None, "only where the model is split"
        self.rank, self.world, self.total = part.index, part.count, part.total_of_copies

    def broadcast(self, content: torch.Tensor, root: int = 0) -> None:
        own = content if self.rank == root else torch.zeros_like(content)
        content.copy_(self.total(own.double()))


class AloneCollective(Collective):
    """The collective of a single worker: its values are the sum."""

    rank = 0
    world = 1

    def allocate(self, parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        return [torch.zeros(parcel.count, dtype=parcel.dtype) for parcel in parcels]

    def launch(self, index: int) -> None:
        """Nothing to do: the values are the sum already."""

    def finish(self) -> None:
        """Return at once: there are no other workers."""

    def broadcast(self, index: int, root: int = 0) -> None:
        """Nothing to do: there are no other workers."""

    def take_times(self) -> Times:
        return Times()

    def traffic(self) -> Traffic:
        return Traffic()

    def close(self) -> None:
        """Nothing to release."""


# Synchronizes a model's buffers, such as running statistics of batch norm, after every exchange.
#
# Gradients are averaged, so parameters stay alike by themselves. Buffers are written by each worker's own forward and
# drift apart. What to do about that is the user's choice:
#
#     broadcast   everyone takes those of worker 0, as DistributedDataParallel does
#     mean        everyone takes the mean, each worker weighted by its share of the batch; numbers that are not
#                 floating-point come from worker 0
#     local       nothing; a checkpoint holds those of worker 0
#
# Only buffers that change travel, and only with an exchange of gradients, so no forward ever waits. Batch norm itself
# normalises each worker's share by that share's own statistics.

MODES: Final = ("broadcast", "mean", "local")

_NOTHING, _KNOWN, _UNKNOWN = range(3)  # of a word: whether buffers changed, and whether all were known to


def check_mode(mode: str) -> str:
    if mode not in MODES:
        raise UserError(f"buffers={mode!r} is unknown; {nearest(mode, MODES)}")
    return mode


class BufferKeeper:
    """Synchronizes the buffers of `model`, by `mode`."""

    def __init__(self, model: nn.Module, mode: str, words: Words | CopyWords) -> None:
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
            now, before = ([(id(one), version) for one, version in row] for row in (_state(module), seen))
            changed.append(silently or now != before)
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
