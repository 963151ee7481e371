"""The user's own loop on many workers ends with what plain PyTorch ends with, written without manyhands."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from equality import distance, same_bits
from manyhands.interop.own_loop.worker_group import WorkerGroup
from own_loop import (
    Loop,
    Nobody,
    mlp,
    on_workers,
    plain_loop,
    regression,
    require_equal,
    rich_loop,
    shuffled,
    weights,
)

WORLDS = (2, 3, 8)  # with 8 workers the last batch of 6 samples leaves two of them without
LONG = ("mirrored", 3)
"""With whom every loop goes on for all of its epochs; with others, for the samples twice."""
STRATEGIES = (
    *(
        "mirrored",
        "central",
        "sharded",
        "allreduce algorithm=ring",
        "allreduce algorithm=hierarchical group=2",
    ),
)


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


def two_backwards_loop(group: Any, epochs: int = 4) -> dict[str, torch.Tensor]:
    """Two backwards per step, both exchanged; gradients are zeroed in place, and before the backward."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad(set_to_none=False)
            nn.functional.mse_loss(model(x), y).backward()
            (0.1 * nn.functional.l1_loss(model[:1](x), torch.zeros_like(model[0](x)))).backward()
            optimizer.step()
    return weights(model)


def penalty_loop(group: Any, epochs: int = 4) -> dict[str, torch.Tensor]:
    """A loss with a term of the parameters alone, and with the whole gradient looked at."""
    model = mlp()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
    for _ in range(epochs):
        for x, y in loader:
            penalty = sum(parameter.square().sum() for parameter in model.parameters())
            (nn.functional.mse_loss(model(x), y) + 0.01 * penalty).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


LOOPS: dict[str, Callable[..., dict[str, torch.Tensor]]] = {
    "plain": plain_loop,
    "rich": rich_loop,
    "two-backwards": two_backwards_loop,
    "penalty": penalty_loop,
}


@cache
def reference(loop: str, long: bool) -> dict[str, torch.Tensor]:
    return of_length(loop, long)(Nobody())


def of_length(loop: str, long: bool) -> Loop:
    return LOOPS[loop] if long else partial(LOOPS[loop], epochs=2)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("loop", LOOPS)
def test_weights_equal_plain_pytorch(loop: str, strategy: str, world: int) -> None:
    long = (strategy, world) == LONG
    require_equal(of_length(loop, long), world, strategy, reference(loop, long))


def test_weights_equal_plain_pytorch_over_tcp() -> None:
    require_equal(plain_loop, 3, "allreduce algorithm=ring link=tcp")


@pytest.mark.parametrize("strategy", ["allreduce link=tcp codec=bf16", "local steps=2 link=tcp codec=fp16"])
def test_workers_have_the_same_bits_where_a_codec_rounds(strategy: str) -> None:
    found = on_workers(3, plain_loop, strategy=strategy)
    assert all(same_bits(one, found[0]) for one in found)
    assert not same_bits(found[0], on_workers(3, plain_loop, strategy=strategy.split(" codec")[0])[0])


@pytest.mark.parametrize("loop", LOOPS)
def test_alone_the_bits_are_those_of_plain_pytorch(loop: str) -> None:
    assert same_bits(on_workers(1, LOOPS[loop])[0], LOOPS[loop](Nobody()))


@pytest.mark.parametrize("strategy", ["mirrored", "allreduce algorithm=ring"])
def test_two_models_with_an_optimizer_each(strategy: str) -> None:
    def loop(group: Any) -> dict[str, torch.Tensor]:
        maker, judge = mlp(), mlp()
        makes = torch.optim.Adam(maker.parameters(), lr=0.01)
        judges = torch.optim.SGD(judge.parameters(), lr=0.1)
        maker, judge, makes, judges, loader = group.prepare(
            maker, judge, makes, judges, shuffled(regression())
        )
        for x, y in loader:
            judges.zero_grad()
            wide = maker(x).detach() * torch.ones(6).double()
            (judge(wide).square().mean() - judge(x).mean()).backward()
            judges.step()
            makes.zero_grad()
            (judge(maker(x) * torch.ones(6).double()) - y).square().mean().backward()
            makes.step()
        return {
            f"{name}.{key}": v for name, m in (("m", maker), ("j", judge)) for key, v in weights(m).items()
        }

    require_equal(loop, 3, strategy)


def test_gradients_after_backward_are_those_of_the_global_batch_and_torch_clips_them() -> None:
    def loop(group: Any) -> dict[str, torch.Tensor]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
        found = {}
        for number, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            found[f"loss {number}"] = group.mean(loss)
            found[f"norm {number}"] = nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            found |= {f"{name} {number}": p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        return found

    require_equal(loop, 3, "mirrored")


def test_autocast_trains_alike_on_all_workers() -> None:
    def loop(group: Any) -> dict[str, torch.Tensor]:
        model = mlp().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = (column.float() for column in regression().tensors)
        model, optimizer, loader = group.prepare(model, optimizer, shuffled(TensorDataset(x, y)))
        for a, b in loader:
            with torch.autocast("cpu", torch.bfloat16):
                out = model(a)
            assert out.dtype == torch.bfloat16
            nn.functional.mse_loss(out.float(), b).backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    found = on_workers(2, loop)
    assert same_bits(found[0], found[1])
    assert distance(found[0], loop(Nobody())) < 2e-2  # bfloat16 has 8 bits


def normed() -> nn.Module:
    model = mlp()
    return nn.Sequential(model[0], nn.BatchNorm1d(8).double(), model[1], model[2])


def train_with_batch_norm(group: WorkerGroup) -> dict[str, torch.Tensor]:
    model = normed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = group.prepare(model, optimizer, DataLoader(regression(40), batch_size=11))
    for _ in range(2):
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(model)


def simulate_batch_norm(shares: list[list[slice]], buffers: str) -> list[dict[str, torch.Tensor]]:
    """What that must give, in one process and plain torch: every share is normalised by itself."""
    models = [normed() for _ in shares[0]]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    x, y = regression(40).tensors
    for part in shares * 2:
        sizes = [s.stop - s.start for s in part]
        for model, s in zip(models, part, strict=True):
            nn.functional.mse_loss(model(x[s]), y[s]).backward()
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            gradient = sum(p.grad * n for p, n in zip(parameters, sizes, strict=True)) / sum(sizes)
            for parameter in parameters:
                parameter.grad = gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for group in zip(*(model.buffers() for model in models), strict=True):
            mean = sum(b.double() * n for b, n in zip(group, sizes, strict=True)) / sum(sizes)
            chosen = {"broadcast": group[0].clone(), "mean": mean}
            for buffer in group if buffers != "local" else ():
                buffer.copy_(chosen[buffers])
    return [weights(model) for model in models]


@pytest.mark.parametrize("buffers", ["broadcast", "mean", "local"])
def test_batch_norm_statistics_are_kept_as_chosen(buffers: str) -> None:
    shares = [  # of 11, 11, 11 and 7 rows on three workers
        [slice(at, at + 4), slice(at + 4, at + 4 + second), slice(at + 4 + second, end)]
        for at, second, end in ((0, 4, 11), (11, 4, 22), (22, 4, 33))
    ]
    shares.append([slice(33, 36), slice(36, 38), slice(38, 40)])
    expected = simulate_batch_norm(shares, buffers)
    found = on_workers(3, train_with_batch_norm, buffers=buffers)
    for rank in range(3):
        assert distance(found[rank], expected[rank]) < 1e-9
    assert same_bits(found[1], found[2]) == (buffers != "local")


class Remembering(nn.Module):
    """Replaces a buffer in every forward, and has a large one that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 1).double()
        self.register_buffer("seen", torch.zeros(6).double())
        self.register_buffer("mask", torch.full((64,), -torch.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = self.seen * 0.5 + x.detach().mean(0)
        return self.linear(x) + self.seen.sum()


def test_a_buffer_that_is_replaced_comes_from_worker_0() -> None:
    def loop(group: WorkerGroup) -> torch.Tensor:
        model = Remembering()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = group.prepare(model, optimizer, DataLoader(regression(12), batch_size=4))
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        return model.seen.clone()

    x = regression(12).tensors[0]
    expected = x[8:10].mean(0) + 0.5 * (x[4:6].mean(0) + 0.5 * x[0:2].mean(0))
    for seen in on_workers(2, loop):
        assert torch.allclose(seen, expected, atol=1e-12)
