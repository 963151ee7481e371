"""Modules that compute in fewer bits choose what the whole ones do, nearly always."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhands.bench.inference import format_table, run_bench
from manyhands.errors import UserError
from manyhands.inference.precision import in_precision
from manyhands.inference.text import TextGenerator
from manyhands.tasks.language import Transformer
from manyhands.tasks.recurrent import RecurrentNetwork
from manyhands.tasks.vision import ImageClassifier

MODELS: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "digits": (ImageClassifier(side=8, white=16, width=8), torch.rand(32, 1, 8, 8) * 16),
    "language": (Transformer(context=8, layers=1, width=32, heads=2), torch.randint(0, 256, (8, 8))),
    "recurrent": (RecurrentNetwork(layers=1, width=32), torch.randint(0, 256, (8, 8))),
}


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("name", MODELS)
def test_scores_are_off_by_little(name: str, precision: str) -> None:
    model, inputs = MODELS[name]
    with torch.inference_mode():
        whole = model(inputs)
        scores = in_precision(model, precision)(inputs).float()
        assert in_precision(model, "fp32") is model
    assert not torch.equal(scores, whole), "it does compute in fewer bits"
    assert (scores - whole).abs().max() <= 0.05 * whole.abs().max()
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters()), "a copy was changed"


def test_a_predictor_takes_on_the_precision_it_was_asked_for() -> None:
    generator = TextGenerator(Transformer(context=8, layers=1, width=32, heads=2), context=8)
    generator.check_precision("bf16")
    generator.precision = "bf16"
    generator.prepare()
    assert {parameter.dtype for parameter in generator.model.parameters()} == {torch.bfloat16}
    assert len(generator.continued(generator.inputs([{"prompt": "a", "length": 3}]))[0]) == 3
    with pytest.raises(UserError, match="precision='fp8'"):
        generator.check_precision("fp8")


@pytest.mark.parametrize(
    "bad", [(["cats"], ["fp32"], [1], [1]), (["digits"], ["fp8"], [1], [1]), (["digits"], ["fp32"], [0], [1])]
)
def test_what_cannot_be_measured_is_said_before_anything_is_trained(bad: tuple[list[str], ...]) -> None:
    with pytest.raises(UserError):
        run_bench(*bad, seconds=0.1)  # type: ignore[arg-type]


def test_the_table_has_a_line_for_each_combination() -> None:
    row = {"model": "digits", "precision": "bf16", "batch": 8, "workers": 2, "threads": 1, "agreement": 0.998}
    row |= {"inputs_per_s": 12345.6, "p50_ms": 1.25, "p95_ms": 2.5}
    result = {"cores": 2, "machine": "m", "torch": "2", "seconds": 1.0, "rows": [row]}
    assert format_table(result).splitlines()[-1].split() == [
        "digits", "2", "8", "bf16", "12,346", "1.25", "2.50", "99.8%",
    ]  # fmt: skip
