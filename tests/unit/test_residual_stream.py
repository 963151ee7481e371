"""Under autocast to bfloat16 what the layers add up stays in bfloat16; nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands.workloads.language.bert import BERT
from manyhands.workloads.language.gpt import GPT

SIZES = {"context": 16, "layers": 3, "width": 32, "heads": 4, "vocabulary": 40}


def scores_and_dtypes(
    model: nn.Module, blocks: nn.ModuleList, dtype: torch.dtype | None
) -> tuple[torch.Tensor, list[torch.dtype]]:
    seen: list[torch.dtype] = []
    hooks = [
        one.register_forward_hook(lambda _, given, out: seen.extend((given[0].dtype, out.dtype)))
        for one in blocks
    ]
    tokens = torch.randint(0, 40, (4, 16), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        scores = model(tokens)
    for one in hooks:
        one.remove()
    return scores, seen


@pytest.mark.parametrize("kind", [GPT, BERT])
def test_sums_of_layers_are_in_bfloat16_under_its_autocast(kind: type[GPT] | type[BERT]) -> None:
    torch.manual_seed(0)
    model = kind(**SIZES)
    blocks = model.transformer.h if isinstance(model, GPT) else model.bert.encoder.layer
    exact, seen = scores_and_dtypes(model, blocks, None)
    assert set(seen) == {torch.float32}
    scores, seen = scores_and_dtypes(model, blocks, torch.bfloat16)
    assert set(seen) == {torch.bfloat16}
    torch.testing.assert_close(scores.float(), exact, rtol=0, atol=0.03 * exact.abs().max().item())
    scores.float().square().mean().backward()
    assert {one.grad.dtype for one in model.parameters() if one.grad is not None} == {torch.float32}


def test_float16_sums_stay_in_float32_for_they_could_overflow() -> None:
    torch.manual_seed(0)
    model = GPT(**SIZES)
    assert set(scores_and_dtypes(model, model.transformer.h, torch.float16)[1]) == {torch.float32}
