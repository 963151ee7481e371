"""`pipeline` as text, and what it refuses before anything starts."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.errors import UserError
from manyhands.strategies.pipeline.ends import NamesGiven, StandIn, call_of
from manyhands.strategies.pipeline.strategy import Pipeline
from manyhands.strategies.pipeline.training import check_model
from manyhands.strategy import Strategy


@pytest.mark.parametrize(
    "text",
    [
        "pipeline",
        "pipeline stages=4 microbatches=8",
        "pipeline stages=3 schedule=zb-h1 data=2 tensor=2 recompute=yes",
        "pipeline stages=3 cuts=3,7 link=tcp",
        "pipeline memory=2GiB",
    ],
)
def test_text_parses_and_prints_back(text: str) -> None:
    assert str(Strategy.parse(text)) == text


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("pipeline stages=0", "stages=0 must be an integer of at least 1"),
        ("pipeline schedule=1f1", "unknown schedule '1f1'; allowed: naive, gpipe, 1f1b"),
        ("pipeline schedule=1f1", "did you mean '1f1b'?"),
        (
            "pipeline stages=4 microbatches=6 schedule=interleaved",
            "microbatches=6 does not fit stages=4: `interleaved` takes micro-batches in rounds of one per stage; the "
            "nearest that fit: 4 and 8",
        ),
        ("pipeline stages=3 cuts=3", "cuts=3: 3 parts need 2 cuts, not 1"),
        ("pipeline cuts=3 memory=1GiB", "cuts and memory cannot both be given"),
        ("pipeline cuts=x", "'x' is not an integer"),
        ("pipeline recompute=maybe", "unknown value 'maybe'; allowed: yes, no, true, false"),
        ("pipeline schedule=wavefront recompute=yes", "recompute=yes: schedule=wavefront cannot"),
        ("pipeline stage=2", "pipeline has no setting 'stage'"),
        ("pipeline codec=bf16", "stages send outputs and gradients uncompressed"),
    ],
)
def test_settings_that_make_no_sense_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        Strategy.parse(text)


def layers(count: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(count)))


class NoChain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize(
    ("text", "model", "sentence"),
    [
        (
            "pipeline stages=4",
            layers(3),
            "stages=4: Sequential is a chain of 3 layers, which cannot be cut into 4 parts; use at most stages=3",
        ),
        (
            "pipeline stages=2 schedule=interleaved",
            layers(3),
            "stages=2 of 2 parts each: Sequential is a chain of 3 layers, which cannot be cut into 4 parts; use at "
            "most stages=1",
        ),
        ("pipeline stages=2 cuts=4", layers(4), "cuts=4: must ascend between 1 and 3"),
        ("pipeline", NoChain(), "NoChain is not a chain"),
        (
            "pipeline schedule=wavefront",
            nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1)),
            "schedule=wavefront: layer 1, a Conv1d, may not support slices of a sequence; give it a method "
            "over_time(x, state)",
        ),
    ],
)
def test_models_that_cannot_be_cut_so_are_refused(text: str, model: nn.Module, sentence: str) -> None:
    strategy = Strategy.parse(text)
    assert isinstance(strategy, Pipeline)
    with pytest.raises(UserError, match=re.escape(sentence)):
        check_model(strategy, model)


def test_fit_refuses_before_a_worker_is_started() -> None:
    data = torch.zeros(4, 2)
    task = mh.Task(
        model=lambda: layers(3),
        loss=lambda model, batch: model(batch).sum(),
        data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    with pytest.raises(UserError, match="stages=4: Sequential is a chain of 3 layers"):
        mh.fit(task, "pipeline stages=4", workers=4, steps=1)
    with pytest.raises(
        UserError,
        match=re.escape("workers=3: must be a multiple of 2 (2 stages); use workers=2 or workers=4"),
    ):
        mh.fit(task, "pipeline stages=2", workers=3, steps=1)
    with pytest.raises(UserError, match="workers=4: 2 stages would use 2; use workers=2"):
        mh.fit(task, "pipeline stages=2 data=1", workers=4, steps=1)
    with pytest.raises(UserError, match="compile: torch"):
        mh.fit(task, "pipeline", workers=2, steps=1, options=mh.Options(compile=True))


def test_stages_of_layers_are_reported() -> None:
    strategy = Strategy.parse("pipeline stages=2 schedule=interleaved")
    assert isinstance(strategy, Pipeline)
    assert strategy.assignment((1, 3, 4), 6) == (0, 1, 1, 0, 1, 1)


def test_first_stage_takes_the_input_and_leaves_the_loss() -> None:
    went_on = []

    def loss(model: nn.Module, batch: Any) -> Any:
        try:
            output = model(batch + 1)
        except Exception:
            went_on.append("here")
            raise
        went_on.append("there")
        return output.sum()

    assert call_of(loss, torch.tensor(1.0)).x == 2.0
    assert went_on == []


def test_last_stage_goes_on_from_the_output() -> None:
    model = StandIn(output=torch.tensor([3.0]))
    assert float(model("whatever") * 2) == 6.0
    model.require_call()
    with pytest.raises(UserError, match=r"task\.loss calls the model twice"):
        model("again")


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (lambda model, batch: batch, "task.loss never calls the model"),
        (
            lambda model, batch: model(batch, batch),
            "task.loss calls the model with 2 inputs without a name",
        ),
        (
            lambda model, batch: model(x=batch),
            "task.loss calls the model with 0 inputs without a name",
        ),
        (
            lambda model, batch: sum(p.sum() for p in model.parameters()),
            "task.loss reads 'parameters' of the model",
        ),
        (lambda model, batch: model.head(batch), "task.loss reads 'head' of the model"),
        (lambda model, batch: model.eval()(batch), "task.loss reads 'eval' of the model"),
    ],
)
def test_losses_that_need_the_whole_model_are_refused(loss: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        call_of(loss, torch.zeros(1))
    assert isinstance(StandIn(output=torch.zeros(1)), nn.Module)


def test_names_that_a_loss_gives_are_those_that_the_chain_takes_in_every_batch() -> None:
    names = NamesGiven([nn.Linear(1, 1), nn.MultiheadAttention(2, 1)])
    names.check("task.loss", frozenset({"key"}))
    assert not names.has_none("task.loss")
    with pytest.raises(
        UserError, match="gives the model 'key' for some batches only; give it for all of them"
    ):
        names.check("task.loss", frozenset())
    with pytest.raises(UserError, match="gives the model 'mask', which no module of its chain takes"):
        names.check("task.metrics['right']", frozenset({"mask"}))
