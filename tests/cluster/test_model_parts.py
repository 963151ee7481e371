"""The parts of a served model as threads: whole answers, failures with a sentence, and no reply left over."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands.serving.model_parts import PartedModel, PartLost, compute_for
from manyhands.strategies.common.served_parts import ServedParts
from manyhands.strategies.pipeline.served_stages import ServedStages
from manyhands.strategy import Strategy


@contextmanager
def connected(cut: ServedParts) -> Iterator[tuple[PartedModel, list[socket.socket]]]:
    """A cut model whose other parts are threads, and their ends."""
    model = PartedModel(cut, "fp32")
    ends, threads = [], []
    for rank, module in enumerate(cut.modules[1:], 1):
        ours, theirs = socket.socketpair()
        ours.settimeout(20)
        work = {"target": compute_for, "args": (theirs, module, f"part {rank}")}
        threads.append(threading.Thread(**work, kwargs={"answers": cut.chained}))
        threads[-1].start()
        ends.append((ours, theirs))
    model.connect(cut.modules[0], [ours for ours, _ in ends])
    try:
        with torch.inference_mode():
            yield model, [theirs for _, theirs in ends]
    finally:
        for ours, _ in ends:
            ours.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        for ours, theirs in ends:
            ours.close()
            theirs.close()


def test_stages_give_what_the_chain_gives_and_continue_after_a_failure() -> None:
    torch.manual_seed(0)
    layers = [
        nn.Embedding(50, 8),
        nn.Linear(8, 8),
        nn.Tanh(),
        nn.Linear(8, 4),
        nn.Flatten(),
        nn.Linear(12, 2),
    ]
    model, x = nn.Sequential(*layers).eval(), torch.randint(0, 50, (5, 3))
    cut = ServedStages(Strategy.parse("pipeline stages=3"), model, (x,))
    assert [len(part) for part in cut.modules] == [1, 1, 4], "the embedding, the widest layer, the rest"
    with connected(cut) as (parted, _):
        assert torch.equal(parted(x), model(x))
        with pytest.raises(RuntimeError, match=r"part 2: RuntimeError: mat1 and mat2 shapes"):
            parted(torch.zeros(5, 4, dtype=torch.int64))
        assert torch.equal(parted(x), model(x)), "no reply is left over"


def test_weights_are_not_sent_with_the_first_part() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)).eval()
    parted = PartedModel(
        ServedStages(Strategy.parse("pipeline stages=2"), model, (torch.ones(1, 100),)), "fp32"
    )
    assert len(pickle.dumps(parted)) < 5000
    assert not list(parted.parameters())


class Refuses(nn.Module):
    """A part that fails for its own number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        if self.number in x:
            raise ArithmeticError(f"not {self.number}")
        return 10 * x


class Alike(ServedParts):
    """Parts that take the same input, as slices do."""

    part, chained, precisions = "slice", False, ("fp32",)

    def __init__(self, *_: Any) -> None:
        self.modules = tuple(Refuses(number) for number in range(4))


def test_slices_are_all_heard_before_one_of_them_is_believed() -> None:
    with connected(Alike()) as (parted, ends):
        for number in (1, 2, 3):
            with pytest.raises(RuntimeError, match=f"part {number}: ArithmeticError: not {number}"):
                parted(torch.tensor([number]))
            assert parted(torch.tensor([7])).item() == 70
        ends[1].shutdown(socket.SHUT_RDWR)
        with pytest.raises(PartLost):
            parted(torch.tensor([7]))
