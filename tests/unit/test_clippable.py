"""Clipping gradients of some rows: what torch does with the same gradients, dense."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.engine.clipping import clippable

CLIPS: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "a norm that is exceeded": lambda given: nn.utils.clip_grad_norm_(given, 0.3),
    "a norm that is not": lambda given: nn.utils.clip_grad_norm_(given, 1e3),
    "a value": lambda given: nn.utils.clip_grad_value_(given, 0.05) or 0.0,
}


def bag(*, sparse: bool) -> nn.Sequential:
    torch.manual_seed(3)
    table = nn.Embedding(20, 4, sparse=sparse, dtype=torch.float64)
    return nn.Sequential(table, nn.Linear(4, 1, dtype=torch.float64))


@pytest.mark.parametrize("way", CLIPS)
def test_rows_are_clipped_as_a_dense_gradient_is(way: str) -> None:
    found = []
    for sparse in (False, True):
        model = bag(sparse=sparse)
        for words in ([1, 7, 7, 7], [1, 19, 2, 2]):  # added up, and so not coalesced
            model(torch.tensor(words)).square().sum().backward()
        parameters = list(model.parameters())
        norm = CLIPS[way](clippable(parameters) if sparse else parameters)
        gradients = [one.grad for one in parameters if one.grad is not None]
        found.append([torch.as_tensor(norm), *(one.to_dense() for one in gradients)])
    for dense, rows in zip(*found, strict=True):
        torch.testing.assert_close(rows, dense, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("clip", [{"clip_norm": 0.05}, {"clip_value": 0.01}])
def test_a_task_with_rows_is_clipped_in_training(clip: dict[str, float]) -> None:
    words = torch.randint(0, 20, (40, 3), generator=torch.Generator().manual_seed(1))
    found = []
    for sparse in (False, True):
        task = mh.Task(
            model=lambda sparse=sparse: bag(sparse=sparse),
            loss=lambda model, batch: (model(batch[0]) - 1).square().mean(),
            data=(words,),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
            batch_size=10,
            **clip,
        )
        found.append(dict(mh.fit(task, "single", steps=5).model.state_dict()))
    dense, rows = found
    for name, value in dense.items():
        torch.testing.assert_close(rows[name], value, rtol=1e-12, atol=1e-14)
    assert not torch.equal(dense["0.weight"], bag(sparse=False).state_dict()["0.weight"])
