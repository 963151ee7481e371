"""`bert`: rows of bytes and their masks, a trained model that fills them in, and what it rejects."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import manyhands as mh
from manyhands.data.batches import BatchSource
from manyhands.errors import UserError
from manyhands.serving.opening import open_predictor
from manyhands.workloads.language.bert import BEGIN, BERT, END, FIRST_BYTE, MASK, MaskedBytes, masked_loss
from manyhands.workloads.language.huggingface import write_checkpoint
from manyhands.workloads.language.presets import BERT_PRESETS
from manyhands.workloads.tasks import build
from manyhands.workloads.text.masking import IGNORED

SMALL = {"context": 22, "layers": 1, "width": 16, "heads": 2, "evaluation_bytes": 400}


def test_a_row_is_its_bytes_with_as_many_targets_in_each_epoch() -> None:
    text = np.frombuffer(bytes(range(97, 117)) * 3, np.uint8)
    data = MaskedBytes(text, 22)
    first, again, later = (BatchSource(data).fetch([0, 1, 2], epoch) for epoch in (0, 0, 1))
    assert torch.equal(first["tokens"], again["tokens"])
    assert not torch.equal(first["places"], later["places"])
    assert (first["tokens"][:, 0] == BEGIN).all()
    assert (first["tokens"][:, -1] == END).all()
    for batch in (first, later):
        assert batch["places"].shape == batch["labels"].shape == (3, 3)
        assert (batch["labels"] != IGNORED).all()
        read = batch["tokens"].scatter(1, batch["places"], batch["labels"])[:, 1:-1] - FIRST_BYTE
        assert bytes(read.flatten().tolist()) == text.tobytes()
        assert (batch["tokens"] == MASK).any()


def test_scores_of_the_targets_alone_have_the_loss_and_gradients_of_scores_everywhere() -> None:
    torch.manual_seed(0)
    model = BERT(context=20, layers=2, width=16, heads=2, vocabulary=30).double()
    tokens = torch.randint(4, 30, (5, 20))
    places = torch.stack([torch.randperm(20)[:4].sort().values for _ in range(5)])
    labels = tokens.gather(1, places)
    labels[2, 1:] = IGNORED  # a row with fewer targets
    everywhere = torch.full_like(tokens, IGNORED).scatter(1, places, labels)
    wanted = F.cross_entropy(model(tokens).transpose(1, 2), everywhere, ignore_index=IGNORED)
    gradients = torch.autograd.grad(wanted, list(model.parameters()))
    found = masked_loss(model, {"tokens": tokens, "places": places, "labels": labels})
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(found, list(model.parameters())), gradients, rtol=0, atol=1e-12
    )


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


def test_the_learning_rate_is_that_of_the_preset_and_rises(tmp_path: Path) -> None:
    def rates(steps: int, **options: Any) -> list[float]:
        task = build("bert", **options)
        optimizer = task.optimizer([torch.nn.Parameter(torch.zeros(1))])
        scheduler = task.scheduler(optimizer) if task.scheduler is not None else None
        found = []
        for _ in range(steps):
            found.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        return found

    large = {"preset": "bert-large", "context": 22}
    assert rates(302, **large) == pytest.approx([min(1, step / 300) * 1e-4 for step in range(1, 303)])
    assert rates(3, **large, warm_up=2, learning_rate=1e-2) == pytest.approx([5e-3, 1e-2, 1e-2])
    assert rates(2, **SMALL) == [1e-3, 1e-3]
    write_checkpoint(BERT(context=22, layers=1, width=16, heads=2, vocabulary=260), tmp_path / "base")
    assert rates(2, init=tmp_path / "base") == [5e-5, 5e-5]
    assert rates(2, init=tmp_path / "base", lora=2) == [1e-3, 1e-3]


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
