"""`Options(recompute=True)`: less is kept for backward, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import manyhands as mh
from manyhands.engine.compiled_loss import compiled_loss
from manyhands.engine.recomputing import blocks_of, recomputing
from manyhands.errors import UserError


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8)) for _ in range(3)
        )
        self.head = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        scores: torch.Tensor = self.head(x)
        return scores


def _loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def _task() -> mh.Task:
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(48, 8, generator=draw)
    return mh.Task(
        model=Blocks,
        loss=_loss,
        data=(x, (x.sum(1) > 0).long()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        batch_size=12,
        microbatches=2,
    )


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("mirrored", 2)])
def test_losses_and_weights_are_the_same_bits(strategy: str, workers: int) -> None:
    kept = mh.fit(_task(), strategy, workers=workers, steps=8)
    again = mh.fit(_task(), strategy, workers=workers, steps=8, options=mh.Options(recompute=True))
    assert [row["loss"] for row in again.history] == [row["loss"] for row in kept.history]
    for name, value in kept.model.state_dict().items():
        assert torch.equal(again.model.state_dict()[name], value)
    assert all("forward" not in vars(one) for one in again.model.modules())


def _kept_bytes(model: nn.Module, batch: list[torch.Tensor]) -> int:
    sizes: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        _loss(model, batch).backward()  # type: ignore[no-untyped-call]
    return sum(sizes.values())


def test_only_the_inputs_of_blocks_are_kept() -> None:
    model, batch = Blocks(), [torch.randn(64, 8), torch.zeros(64, dtype=torch.long)]
    assert len(blocks_of(model)) == 3
    everything = _kept_bytes(model, batch)
    with recomputing(model):
        assert _kept_bytes(model, batch) < everything / 3


def test_a_compiled_program_recomputes_as_well() -> None:
    model, batch = Blocks().eval(), [torch.randn(5, 8), torch.zeros(5, dtype=torch.long)]
    plain = _loss(model, batch)
    counters.clear()
    with recomputing(model):
        torch.testing.assert_close(compiled_loss(_loss, backend="aot_eager")(model, batch), plain)
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 1


def test_where_it_cannot_be_is_said() -> None:
    task = _task()
    options = mh.Options(recompute=True)
    with pytest.raises(UserError, match=r"recompute: strategy sharded .*leave it out, or use mirrored"):
        mh.fit(task, "sharded", workers=2, steps=1, options=options)
    bare = replace(task, model=lambda: nn.Sequential(nn.Linear(8, 2)))
    with pytest.raises(
        UserError, match=r"recompute: the model has no nn.ModuleList or nn.Sequential of blocks"
    ):
        mh.fit(bare, "single", steps=1, options=options)
