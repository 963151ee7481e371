"""What encoded exchanges keep and take, against the codecs and the exchange that a run executes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from manyhands.facts import CodecRate, LinkRate, Machines
from manyhands.foresight.plan.codec_rates import codec_rates
from manyhands.strategies.common.coded_times import (
    coded_all_reduce_s,
    coded_memory,
    pushed_and_pulled_s,
    pushing_memory,
)
from manyhands.strategies.common.collectives.compressed import Compressor
from manyhands.strategies.common.collectives.mailbox import Mailbox
from manyhands.strategies.common.peak_memory import CountedMemory
from manyhands.wire.codec import codec_named
from manyhands.wire.parcels import Matrix, Parcel

ITEMS = 512 * 128


class Echo:
    """A mailbox by which every other rank has sent what this one sends to its first peer."""

    def __init__(self) -> None:
        self._sent: list[Tensor] = []

    def post(self, messages: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        self._sent = [payload for _, payload in messages]
        return []

    def receive(self, _rank: int, room: Tensor, refused: Any, *, or_less: bool) -> tuple[Any, int]:
        assert or_less
        came = self._sent[0]
        room[: came.numel()].copy_(came)
        return refused, came.numel()

    def flush(self, _refused: Any, _peers: Any) -> None:
        """Everything is there."""


@pytest.mark.parametrize("world", [2, 4, 8])
@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("codec", ["powersgd:2", "topk:0.01", "int8", "int4", "sign", "qsgd", "randomk:0.01"])
def test_an_encoded_all_reduce_takes_the_memory_that_is_foretold(
    codec: str, feedback: bool, world: int
) -> None:
    matrix = Matrix(begin=0, rows=512, columns=128)
    parcels = [
        Parcel(number=number, begin=0, end=4 * ITEMS, dtype=torch.float32, matrices=(matrix,))
        for number in range(3)
    ]
    made = Compressor(codec, feedback=feedback, seed=0, rank=0, world=world)
    values = [torch.randn(ITEMS) for _ in parcels]
    with CountedMemory(values) as counted:
        for step in range(3):
            made.at(step)
            for parcel, vector in zip(parcels, values, strict=True):
                made.all_reduce(vector, parcel, cast("Mailbox", Echo()), lambda _: None, lambda _: None)
    said = coded_memory(codec, 12 * ITEMS, 4 * ITEMS, world, feedback=feedback)
    assert said.kept == pytest.approx(counted.now, rel=0.05, abs=4 * ITEMS / 20)
    assert sum(said) == pytest.approx(counted.peak, rel=0.05, abs=4 * ITEMS / 10)


@pytest.mark.parametrize("codec", ["topk:0.01", "int8", "sign", "qsgd", "dgc:0.01,momentum=0.9", "bf16"])
def test_a_pusher_keeps_what_its_codec_remembers(codec: str) -> None:
    made, parcel = codec_named(codec), Parcel.whole(0, ITEMS, torch.float32)
    assert made is not None
    made.encode(parcel, torch.randn(ITEMS), torch.empty(made.size(parcel), dtype=torch.uint8))
    kept = sum(one.nbytes for one in made.memory().values())
    assert pushing_memory(codec, 4 * ITEMS, feedback=True) == kept


def test_coding_takes_the_time_of_what_is_encoded_and_decoded() -> None:
    fast = Machines(hosts=4, inside=LinkRate(), between=LinkRate())
    slow = replace(fast, codecs={"topk:0.01": CodecRate(encoded_per_s=1e6, decoded_per_s=2e6)})
    assert coded_all_reduce_s("topk:0.01", "ring", fast, 4e6) == 0
    # Gathered: all of it is encoded once, its error subtracted, and what each of four sends added up.
    assert coded_all_reduce_s("topk:0.01", "ring", slow, 4e6) == pytest.approx(4 + 5 * 2)
    assert coded_all_reduce_s("int8", "ring", slow, 4e6) == 0  # of which nothing is known
    one_way = replace(slow, codecs={"bf16": CodecRate(encoded_per_s=1e6, decoded_per_s=2e6)})
    assert coded_all_reduce_s("bf16", "ring", one_way, 4e6) == pytest.approx(4 + 2 * 3 / 4 * 2)
    # One worker encodes, and keeps no error; each of two servers decodes half of what four push, and answers.
    assert pushed_and_pulled_s("bf16", one_way, 4e6, 2, 4) == pytest.approx(4 + 2 + 4 * (4 + 2) / 2)


def test_rates_are_of_what_encodes() -> None:
    found = codec_rates(["raw", "bf16", "topk:0.01", "auto", "bf16"])
    assert set(found) == {"bf16", "topk:0.01"}
    assert all(0 < one.encoded_per_s < 1e15 and 0 < one.decoded_per_s < 1e15 for one in found.values())
    assert found["bf16"].times(2).seconds(1, 1) == pytest.approx(found["bf16"].seconds(1, 1) / 2)
