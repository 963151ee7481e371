"""Perplexity is exp(total loss / total tokens), not a mean of perplexities."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from manyhands.task import StatefulMetric
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.next_token import Perplexity, token_losses

METRIC = StatefulMetric.of("perplexity", (Perplexity(), token_losses))
ROWS = torch.randint(0, 50, (7, 9), generator=torch.Generator().manual_seed(0))


def model(spread: float) -> GPT:
    torch.manual_seed(0)
    made = GPT(context=8, layers=1, width=16, heads=2, vocabulary=50)
    with torch.no_grad():
        made.transformer.wte.weight.mul_(spread)
    return made


def of_parts(one: GPT, *sizes: int) -> float:
    assert METRIC is not None
    return METRIC.value([METRIC.arguments(one, part) for part in ROWS.split(sizes)])


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary() -> None:
    assert of_parts(model(0.0), 7) == pytest.approx(50, rel=1e-6)


def test_it_does_not_depend_on_how_rows_are_batched() -> None:
    surprised = model(60.0)  # its losses differ from row to row
    each = F.cross_entropy(
        surprised(ROWS[:, :-1]).detach().transpose(1, 2), ROWS[:, 1:], reduction="none"
    ).double()
    wanted = math.exp(each.sum() / each.numel())
    assert of_parts(surprised, 7) == pytest.approx(wanted, rel=1e-5)
    assert of_parts(surprised, 4, 2, 1) == pytest.approx(wanted, rel=1e-5)
    assert each.mean(1).exp().mean() > 1.2 * wanted  # what a mean of perplexities gives
