"""Modules that compute in fewer bits choose what the whole ones do, nearly always."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Self

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from manyhands.cli.main import app
from manyhands.errors import ManyhandsError, UserError
from manyhands.lab.bench import inference
from manyhands.lab.bench.inference import format_table, measured_together, run_bench
from manyhands.places.local.supervisor import Ended, Event, Said
from manyhands.serving.text_generator import TextGenerator
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.recurrent import RecurrentNetwork
from manyhands.workloads.predictor import in_precision
from manyhands.workloads.tasks.digits import ImageClassifier

MODELS: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "digits": (ImageClassifier(side=8, white=16, width=8), torch.rand(32, 1, 8, 8) * 16),
    "gpt": (GPT(context=8, layers=1, width=32, heads=2), torch.randint(0, 256, (8, 8))),
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
    generator = TextGenerator(GPT(context=8, layers=1, width=32, heads=2), context=8)
    generator.check_precision("bf16")
    generator.precision = "bf16"
    generator.prepare()
    assert {parameter.dtype for parameter in generator.model.parameters()} == {torch.bfloat16}
    assert len(generator.continued(generator.inputs([{"prompt": "a", "tokens": 3}]))[0]) == 3
    with pytest.raises(UserError, match="precision='fp8'"):
        generator.check_precision("fp8")


@pytest.mark.parametrize(
    "bad", [(["cats"], ["fp32"], [1], [1]), (["digits"], ["fp8"], [1], [1]), (["digits"], ["fp32"], [0], [1])]
)
def test_what_cannot_be_measured_is_said_before_anything_is_trained(bad: tuple[list[str], ...]) -> None:
    with pytest.raises(UserError):
        run_bench(*bad, seconds=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--models", "digits, nothing"], "there is no model 'nothing' to measure"),
        (["--models", ","], "',' lists no value"),
        (["--batches", "1, many"], "'1, many' must be integers"),
    ],
)
def test_lists_of_the_command_may_have_room_between_their_values(words: list[str], sentence: str) -> None:
    done = CliRunner().invoke(app, ["bench", "inference", *words])
    assert isinstance(done.exception, UserError), done.exception
    assert sentence in str(done.exception)


class Hours:
    """Stands for the supervisor and the clock: workers are ready after `start_s` and end `work_s` later."""

    def __init__(self, start_s: float, work_s: float) -> None:
        self.now, self._naps = 0.0, [start_s, work_s]
        self._events: list[list[Event]] = [[Said(0, {})], [ENDED]]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def start(self, _role: object) -> int:
        return 0

    def tell(self, *_: object) -> None: ...

    def poll(self, timeout_s: float) -> list[Event]:
        self.now += timeout_s
        self._naps[0] -= timeout_s
        if self._naps[0] > 0:
            return []
        del self._naps[0]
        return self._events.pop(0)


ENDED = Ended(
    member=0,
    name="worker 0",
    status=0,
    last_words="",
    payload={"inputs_per_s": 1.0, "took_us": [[5, 1]]},
    failure=None,
)


def measured_in(hours: Hours, seconds: float, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    monkeypatch.setattr(inference, "Supervisor", lambda **_: hours)
    monkeypatch.setattr(inference, "time", SimpleNamespace(monotonic=lambda: hours.now))
    return inference._measured(1, lambda _context: {}, seconds)


def test_measuring_may_take_as_long_as_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_in(Hours(100.0, 320.0), 300.0, monkeypatch)["inputs_per_s"] == 1.0
    with pytest.raises(ManyhandsError, match="1 worker did not start within 120 s"):
        measured_in(Hours(130.0, 1.0), 300.0, monkeypatch)
    with pytest.raises(ManyhandsError, match="1 worker did not answer within 120 s"):
        measured_in(Hours(1.0, 430.0), 300.0, monkeypatch)


def test_percentiles_are_those_of_all_batches_and_not_of_each_worker() -> None:
    fast = {"inputs_per_s": 90.0, "took_us": [[1000, 97]]}
    slow = {"inputs_per_s": 3.0, "took_us": [[9000, 3]]}
    assert measured_together([fast, slow]) == {"inputs_per_s": 93.0, "p50_ms": 1.0, "p95_ms": 1.0}
    assert measured_together([slow])["p95_ms"] == 9.0


def test_the_table_has_a_line_for_each_combination() -> None:
    row = {"model": "digits", "precision": "bf16", "batch": 8, "workers": 2, "threads": 1, "agreement": 0.998}
    row |= {"inputs_per_s": 12345.6, "p50_ms": 1.25, "p95_ms": 2.5}
    result = {"cores": 2, "machine": "m", "torch": "2", "seconds": 1.0, "rows": [row]}
    assert format_table(result).splitlines()[-1].split() == [
        "digits", "2", "8", "bf16", "12,346", "1.25", "2.50", "99.8%",
    ]  # fmt: skip
