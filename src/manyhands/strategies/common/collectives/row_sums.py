"""Sums of row-sparse gradients: workers exchange the rows that they have, and end with the union of all.

By a butterfly (recursive doubling, as in Zhao and Canny's sparse all-reduce, 2013): in each of ⌈log₂ P⌉ rounds two
ranks swap all that they have so far, and both add it up, the lower rank's on the left; so all end with the same bits.
Ranks beyond the largest power of two give theirs to another one first, and get the result from it.

Each exchange is two messages: how many rows (i64), then their numbers (i64 each, ascending) and their items.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from manyhands.strategies.common.collectives.mailbox import Mailbox

_NUMBER_BYTES = 8


@dataclass(frozen=True, slots=True, eq=False)
class GradientRows:
    """Some rows of a table: their numbers, ascending, and their items, one row each."""

    numbers: Tensor
    items: Tensor

    @classmethod
    def of(cls, gradient: Tensor) -> GradientRows:
        gradient = gradient.detach().coalesce()
        items = gradient.values().cpu()
        return cls(gradient.indices()[0].cpu(), items.reshape(len(items), -1).contiguous())

    @classmethod
    def none(cls, parameter: Tensor) -> GradientRows:
        width = parameter.numel() // max(1, parameter.shape[0])
        return cls(torch.empty(0, dtype=torch.int64), torch.empty(0, width, dtype=parameter.dtype))

    def plus(self, other: GradientRows) -> GradientRows:
        numbers, places = torch.unique(torch.cat([self.numbers, other.numbers]), return_inverse=True)
        items = torch.zeros(len(numbers), self.items.shape[1], dtype=self.items.dtype)
        items[places[: len(self.numbers)]] = self.items
        items[places[len(self.numbers) :]] += other.items
        return GradientRows(numbers, items)

    def times(self, weight: float) -> GradientRows:
        """All items times `weight`; of 0 nothing is left, not even a NaN."""
        if weight == 0:
            return GradientRows(self.numbers[:0], self.items[:0])
        return self if weight == 1 else GradientRows(self.numbers, self.items * weight)

    def as_gradient(self, parameter: Tensor) -> Tensor:
        numbers, items = self.numbers.unsqueeze(0), self.items.view(len(self.numbers), *parameter.shape[1:])
        return torch.sparse_coo_tensor(
            numbers, items, parameter.shape, is_coalesced=True, check_invariants=False
        ).to(parameter.device)


def row_sparse(model: nn.Module) -> set[nn.Parameter]:
    """The parameters of a model whose gradients have some rows only: embeddings that were built with sparse=True."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = (module.weight for module in model.modules() if isinstance(module, kinds) and module.sparse)
    return {parameter for parameter in found if isinstance(parameter, nn.Parameter)}


def sum_rows(
    mine: GradientRows, below: int, rank: int, world: int, mailbox: Mailbox, enter: Callable[[int], None]
) -> GradientRows:
    """Collective: the sum over ranks of rows of a table that has `below`; `enter` says which round begins.

    Every number of a round stands for two messages.
    """
    power, last = 1 << world.bit_length() - 1, 2 * world.bit_length() + 2
    width, dtype = mine.items.shape[1], mine.items.dtype

    def payloads(rows: GradientRows) -> tuple[Tensor, Tensor]:
        items = rows.items.contiguous().view(-1)
        body = torch.cat([rows.numbers.view(torch.uint8), items.view(torch.uint8)])
        return torch.tensor([len(rows.numbers)]).view(torch.uint8), body

    def send(number: int, peer: int, rows: GradientRows) -> None:
        for step, payload in enumerate(payloads(rows)):
            enter(number + step)
            mailbox.flush(mailbox.post([(peer, payload)]), [peer])

    def receive(number: int, peer: int, rows: GradientRows | None = None) -> GradientRows:
        room = count = torch.empty(1, dtype=torch.int64)
        for step, payload in enumerate(payloads(rows) if rows is not None else (None, None)):
            enter(number + step)
            refused = mailbox.post([(peer, payload)]) if payload is not None else []
            if step:
                if not 0 <= int(count) <= below:
                    mailbox.refuse(peer, f"{int(count)} rows for a table of {below}")
                room = torch.empty(int(count) * (_NUMBER_BYTES + width * dtype.itemsize), dtype=torch.uint8)
            refused, _ = mailbox.receive(peer, room.view(torch.uint8), refused)
            if payload is not None:
                mailbox.flush(refused, [peer])
        end = _NUMBER_BYTES * int(count)
        numbers = room[:end].view(torch.int64)
        ascends = bool((numbers[1:] > numbers[:-1]).all())
        if int(count) and not (ascends and int(numbers[0]) >= 0 and int(numbers[-1]) < below):
            mailbox.refuse(peer, f"row numbers must ascend and be below {below}")
        return GradientRows(numbers, room[end:].view(dtype).view(int(count), width))

    if rank >= power:
        send(1, rank - power, mine)
        return receive(last, rank - power)
    if rank + power < world:
        mine = mine.plus(receive(1, rank + power))
    for level in range(power.bit_length() - 1):
        peer = rank ^ 1 << level
        theirs = receive(3 + 2 * level, peer, mine)
        mine = mine.plus(theirs) if rank < peer else theirs.plus(mine)
    if rank + power < world:
        send(last, rank + power, mine)
    return mine
