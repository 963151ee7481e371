"""How a shard's range travels encoded, between a worker and a server, and what of it is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from manyhands.strategies.ps.live.payloads import Gradients
from manyhands.strategies.ps.live.shard_encoding import RangeCoding, as_tensor
from manyhands.strategies.ps.ps_messages import Push
from manyhands.strategies.ps.shard_layout import FlatLayout, ShardRange
from manyhands.transport.messages import ProtocolError
from manyhands.wire.names import RAW

PUSH = Push(shard=1, slot=0, member=5, clock=3, read_version=0, batch=3, part=0, parts=1, weight=1.0)


def mixed_layout() -> FlatLayout:
    """Three types, so that a range has several runs; the second shard begins in the middle of a parameter."""
    model = nn.ParameterList(
        [
            nn.Parameter(torch.zeros(50, 7)),
            nn.Parameter(torch.zeros(90, dtype=torch.bfloat16)),
            nn.Parameter(torch.zeros(33, dtype=torch.float64)),
            nn.Parameter(torch.zeros(5)),
        ]
    )
    return FlatLayout.of(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)


def filled(layout: FlatLayout, shard: int) -> ShardRange:
    given = layout.range_in(torch.zeros(layout.range_bytes(shard), dtype=torch.uint8), shard)
    generator = torch.Generator().manual_seed(shard)
    for run in given.runs:
        run.copy_(torch.randn(run.shape, generator=generator))
    return given


def empty(layout: FlatLayout, shard: int) -> ShardRange:
    return layout.range_in(torch.full((layout.range_bytes(shard),), 99, dtype=torch.uint8), shard)


@pytest.mark.parametrize("word", ["bf16", "fp16"])
@pytest.mark.parametrize("shard", [0, 1])
def test_each_run_is_rounded_in_its_own_type_and_halves_travel_as_they_are(word: str, shard: int) -> None:
    layout = mixed_layout()
    coding, given, read = RangeCoding(layout, word), filled(layout, shard), empty(layout, shard)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[word]
    expected = [run.clone() if run.dtype.itemsize == 2 else run.to(half).to(run.dtype) for run in given.runs]
    encoded = coding.round(shard, given)
    assert coding.least_bytes(shard) < encoded.nbytes <= coding.most_bytes(shard) < layout.range_bytes(shard)
    coding.decode(shard, encoded, read)
    assert torch.equal(read.memory, given.memory), "the sender has what the receiver reads"
    assert all(map(torch.equal, read.runs, expected))
    assert len(expected) == (1, 4)[shard]


def test_values_that_are_sent_stay_whole_where_they_are() -> None:
    layout = mixed_layout()
    given = filled(layout, 0)
    before = given.memory.clone()
    RangeCoding(layout, "bf16").encode(0, given)
    assert torch.equal(given.memory, before)


def test_raw_encodes_nothing() -> None:
    coding = RangeCoding(mixed_layout(), RAW)
    assert not coding.codes_gradients
    assert not coding.codes_values


def test_a_server_reads_what_a_worker_rounded() -> None:
    layout = mixed_layout()
    worker, given = RangeCoding(layout, "bf16"), filled(layout, 1)
    flags = layout.flags(1, [layout.entries[piece.parameter].name for piece in layout.pieces[1]])
    payload = memoryview(np.concatenate([flags.numpy(), worker.round(1, given).numpy()]))
    server = Gradients(layout, inline=True, coding=RangeCoding(layout, "bf16"))
    assert server.room_for(PUSH, len(payload)) is None
    contribution = server.of(PUSH, payload)
    assert contribution is not None
    assert torch.equal(contribution.gradient.memory, given.memory)
    assert torch.equal(contribution.present, flags)
    whole = memoryview(np.concatenate([flags.numpy(), given.memory.numpy()]))  # from a primary, as it is
    room = server.room_for(PUSH, len(whole), by_worker=False)
    assert room is not None
    room[:] = whole
    forwarded = server.of(PUSH, room, by_worker=False)
    assert forwarded is not None
    assert torch.equal(forwarded.gradient.memory, given.memory)


def test_what_is_too_short_or_lies_about_its_lengths_is_refused() -> None:
    layout = mixed_layout()
    coding = RangeCoding(layout, "bf16")
    server = Gradients(layout, inline=True, coding=coding)
    with pytest.raises(ProtocolError, match="at least"):
        server.room_for(PUSH, layout.flag_bytes(1))
    with pytest.raises(ProtocolError, match="at most"):
        server.room_for(PUSH, 1 << 20)
    encoded = coding.encode(1, filled(layout, 1))
    into = empty(layout, 1)
    with pytest.raises(ProtocolError, match="payload_bytes"):
        coding.decode(1, encoded[:-64], into)
    with pytest.raises(ProtocolError, match="payload_bytes"):
        coding.decode(1, encoded[:8], into)
    for length in (-1, 1 << 40, 3):
        lying = encoded.clone()
        lying[:8].view(torch.int64)[0] = length
        with pytest.raises(ProtocolError, match="payload_bytes"):
            coding.decode(1, lying, into)


def test_a_payload_at_an_odd_address_is_read_too() -> None:
    memory = np.arange(100, dtype=np.uint8)
    for begin in (0, 3):
        assert as_tensor(memoryview(memory)[begin:]).tolist() == memory[begin:].tolist()
