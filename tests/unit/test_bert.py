"""`bert`: rows of bytes and their masks, a trained model that fills them in, and what it rejects."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import manyhands as mh
from manyhands.data.batches import BatchSource
from manyhands.errors import UserError
from manyhands.serving.opening import open_predictor
from manyhands.workloads.language.bert import BEGIN, BERT, END, FIRST_BYTE, MASK, MaskedBytes
from manyhands.workloads.language.presets import BERT_PRESETS
from manyhands.workloads.tasks import build
from manyhands.workloads.text.masking import IGNORED

SMALL = {"context": 22, "layers": 1, "width": 16, "heads": 2, "evaluation_bytes": 400}


def test_a_row_is_its_bytes_with_as_many_targets_in_each_epoch() -> None:
    text = np.frombuffer(bytes(range(97, 117)) * 3, np.uint8)
    data = MaskedBytes(text, 22)
    first, again, later = (BatchSource(data).fetch([0, 1, 2], epoch) for epoch in (0, 0, 1))
    assert torch.equal(first["tokens"], again["tokens"])
    assert not torch.equal(first["labels"], later["labels"])
    assert (first["tokens"][:, 0] == BEGIN).all()
    assert (first["tokens"][:, -1] == END).all()
    for batch in (first, later):
        targets = batch["labels"] != IGNORED
        assert targets.sum(1).tolist() == [3, 3, 3]
        read = batch["tokens"].where(~targets, batch["labels"])[:, 1:-1] - FIRST_BYTE
        assert bytes(read.flatten().tolist()) == text.tobytes()
        assert (batch["tokens"] == MASK).any()


def test_a_trained_model_fills_in_what_is_masked(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abcdefghij" * 600)
    task = build("bert", **SMALL | {"path": tmp_path / "text", "learning_rate": 1e-2})
    run = mh.fit(task, "single", steps=60, seed=0, out=tmp_path / "run")
    assert run.summary["final"]["masked_accuracy"] > 0.9
    filler = open_predictor(tmp_path / "run")
    assert filler.answers(filler.inputs(["abcdefghij[MASK]bcdefghij"])) == [{"text": 2 * "abcdefghij"}]
    with pytest.raises(UserError, match=r"input 0 is 'abc'; it must be text with \[MASK\] for each byte"):
        filler.inputs(["abc"])
    with pytest.raises(UserError, match="input 0 has 21 bytes; the model takes at most 20 at once"):
        filler.inputs(["[MASK]" + 20 * "a"])


def test_what_bert_cannot_have_is_one_sentence() -> None:
    with pytest.raises(
        UserError, match=r"vocabulary 100; rows of bytes need .* a vocabulary of at least 260"
    ):
        build("bert", **SMALL | {"vocabulary": 100})
    with pytest.raises(UserError, match="heads is 5; it must divide width, which is 16"):
        build("bert", **SMALL | {"heads": 5})
    model = BERT(context=4, layers=1, width=8, heads=2, vocabulary=9)
    with pytest.raises(UserError, match="a row of 5 tokens is longer than context=4"):
        model(torch.zeros(1, 5, dtype=torch.long))


@pytest.mark.parametrize(("preset", "parameters"), [("bert-base", 109_514_298), ("bert-large", 335_174_458)])
def test_presets_have_the_parameters_of_the_published_models(preset: str, parameters: int) -> None:
    with torch.device("meta"):
        model = BERT(**asdict(BERT_PRESETS[preset]))
    assert sum(one.numel() for one in model.parameters()) == parameters
