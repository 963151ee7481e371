"""Tensors cut into rounds come out again, byte for byte."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhands.strategies.central.shared_parameters import rounds


@given(sizes=st.lists(st.integers(0, 50), max_size=8), room=st.integers(1, 40))
def test_rounds_hold_every_byte_once_in_order(sizes: list[int], room: int) -> None:
    everything = torch.arange(sum(sizes), dtype=torch.int64).to(torch.uint8)
    tensors = list(torch.split(everything, sizes))
    all_rounds = list(rounds(tensors, room))
    assert len(all_rounds) == -(-sum(sizes) // room)
    read = []
    for number, pieces in enumerate(all_rounds):
        offset = 0
        for begin, piece in pieces:
            assert begin == offset
            assert piece.numel() > 0
            read.append(piece)
            offset += piece.numel()
        assert offset == room or number == len(all_rounds) - 1
    assert torch.equal(torch.cat([everything[:0], *read]), everything)
    for piece in read:  # views, into which bytes can be written
        piece.fill_(7)
    assert bool((everything == 7).all())
