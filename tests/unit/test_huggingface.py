"""Checkpoints of transformers: its models and ours compute the same, from the same files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import manyhands as mh
from manyhands.cli.main import app
from manyhands.errors import UserError
from manyhands.workloads.language.bert import BERT, PairBERT, masked_loss, pair_loss
from manyhands.workloads.language.gpt import GPT, GPTOptions
from manyhands.workloads.language.huggingface import fill, write_checkpoint
from manyhands.workloads.language.presets import GPT_PRESETS
from manyhands.workloads.tasks import build

transformers = pytest.importorskip("transformers", reason="transformers is in the extra `integrations`")

SIZES = {"context": 16, "layers": 2, "width": 32, "heads": 4, "vocabulary": 50}
IDS = torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(1))


def gpt2(**changes: Any) -> nn.Module:
    torch.manual_seed(3)
    sizes = {"n_positions": 16, "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 50}
    dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(**{**sizes, **dropouts, **ends, **changes})
    return transformers.GPT2LMHeadModel(config)


def ours(folder: Path, **changes: Any) -> GPT:
    model = GPT(**{**SIZES, **changes})
    fill(model, folder, model.layout, asdict(model.sizes))
    return model


def mean_loss(scores: Tensor) -> Tensor:
    return F.cross_entropy(scores[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())


@pytest.mark.parametrize("body_alone", [False, True])
def test_gpt_computes_and_learns_what_gpt2_does(tmp_path: Path, body_alone: bool) -> None:
    """Its own loss with its own labels; a file without the head has names without `transformer`."""
    theirs = gpt2()
    (theirs.transformer if body_alone else theirs).save_pretrained(tmp_path)
    model = ours(tmp_path)
    torch.testing.assert_close(model(IDS), theirs(IDS).logits, rtol=0, atol=1e-5)
    for one in (theirs, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        loss = mean_loss(model(IDS)) if one is model else theirs(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), theirs(IDS).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForPreTraining"])
def test_bert_computes_and_learns_what_theirs_does(tmp_path: Path, kind: str) -> None:
    """Its own loss with its own labels; what else a checkpoint for pre-training has is left out."""
    torch.manual_seed(3)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 128}
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.BertConfig(**sizes, **dropouts, vocab_size=50, max_position_embeddings=16)
    written = getattr(transformers, kind)(config)
    written.save_pretrained(tmp_path)
    theirs = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    model = BERT(**SIZES)
    fill(model, tmp_path, model.layout, asdict(model.sizes))
    torch.testing.assert_close(model(IDS), theirs(IDS).logits, rtol=0, atol=1e-5)
    labels = IDS.where(IDS % 3 == 0, -100)
    for one in (theirs, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        places = torch.arange(16).expand(3, 16)
        batch = {"tokens": IDS, "places": places, "labels": labels}
        loss = masked_loss(model, batch) if one is model else theirs(IDS, labels=labels).loss
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(model(IDS), theirs(IDS).logits, rtol=0, atol=1e-5)


def test_both_heads_of_pre_training_are_theirs(tmp_path: Path) -> None:
    """Scores, loss and a step, read from their directory; and theirs again, read from ours."""
    torch.manual_seed(4)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 128}
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.BertConfig(**sizes, **dropouts, vocab_size=50, max_position_embeddings=16)
    theirs = transformers.BertForPreTraining(config)
    theirs.save_pretrained(tmp_path / "theirs")
    model = PairBERT(**SIZES)
    fill(model, tmp_path / "theirs", model.layout, asdict(model.sizes))
    labels, segments = IDS.where(IDS % 3 == 0, -100), (torch.arange(16) > 7).long().expand(3, 16)
    batch = {"tokens": IDS, "places": torch.arange(16).expand(3, 16), "labels": labels}
    batch |= {"segments": segments, "apart": torch.tensor([0, 1, 1])}
    loss = pair_loss(model, batch)
    expected = theirs(IDS, token_type_ids=segments, labels=labels, next_sentence_label=batch["apart"])
    torch.testing.assert_close(loss, expected.loss, rtol=0, atol=1e-5)
    for one, its in ((model, loss), (theirs, expected.loss)):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        its.backward()
        optimizer.step()
    write_checkpoint(model, tmp_path / "ours")
    read = transformers.BertForPreTraining.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        found = model(IDS, segments=segments)
        for other in (theirs, read):
            wanted = other(IDS, token_type_ids=segments)
            torch.testing.assert_close(found[0], wanted.prediction_logits, rtol=0, atol=1e-5)
            torch.testing.assert_close(found[1], wanted.seq_relationship_logits, rtol=0, atol=1e-5)


def test_both_begin_with_weights_of_the_same_spread() -> None:
    torch.manual_seed(0)
    wide = {"n_embd": 256, "n_inner": None}
    theirs, model = gpt2(**wide), GPT(**{**SIZES, "width": 256})
    found = {name: value.std() for name, value in model.state_dict().items() if "weight" in name}
    for name, value in theirs.state_dict().items():
        if name in found:
            assert found[name] == pytest.approx(float(value.std()), rel=0.05, abs=1e-3), name


def test_a_run_is_written_as_transformers_reads_it_and_begun_from_it_again(tmp_path: Path) -> None:
    sizes = {"context": 16, "layers": 1, "width": 16, "heads": 2, "evaluation_bytes": 200}
    run = mh.fit(build("gpt", **sizes), "single", steps=2, out=tmp_path / "run")
    folder = tmp_path / "exported"
    words = ["export", str(tmp_path / "run"), "--format", "huggingface", "--out", str(folder)]
    shown = CliRunner().invoke(app, words, catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert type(theirs).__name__ == "GPT2LMHeadModel"
    ids = torch.randint(0, 256, (2, 16))
    torch.testing.assert_close(run.model(ids), theirs(ids).logits, rtol=0, atol=1e-5)
    again = build("gpt", init=folder, evaluation_bytes=200)
    assert torch.equal(again.model()(ids), run.model(ids))
    gone_on = mh.fit(again, "single", steps=1, out=tmp_path / "more")
    folder.rename(tmp_path / "elsewhere")
    loaded = mh.load(tmp_path / "more")
    assert torch.equal(loaded(ids), gone_on.model.eval()(ids)), "a trained run needs no other checkpoint"


def test_what_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    gpt2().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"layers is 3, but the checkpoint .* has 2; leave layers out"):
        GPTOptions(init=tmp_path, layers=3)
    config = json.loads((tmp_path / "config.json").read_text())

    def changed(**changes: Any) -> Path:
        (tmp_path / "config.json").write_text(json.dumps(config | changes))
        return tmp_path

    model = GPT(**{**SIZES, "vocabulary": 51})
    wanted = r"tensor transformer.wte.weight has shape \(50, 32\), but the model needs \(51, 32\)"
    with pytest.raises(UserError, match=wanted):
        fill(model, changed(vocab_size=51), model.layout, asdict(model.sizes))
    with pytest.raises(
        UserError, match="activation_function is 'relu', but this task's model has 'gelu_new'"
    ):
        GPTOptions(init=changed(activation_function="relu"))
    with pytest.raises(UserError, match="model_type is 'bert', but this task's model has 'gpt2'"):
        GPTOptions(init=changed(model_type="bert"))
    with pytest.raises(UserError, match="n_layer is '2'; it must be an integer above 0"):
        GPTOptions(init=changed(n_layer="2"))
    with pytest.raises(UserError, match="n_inner is 64, but this task's model has four times the width, 128"):
        GPTOptions(init=changed(n_inner=64))
    with pytest.raises(UserError, match="heads is 5; it must divide width, which is 32"):
        GPTOptions(init=changed(n_head=5))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match=r"config\.json is not a JSON object"):
        GPTOptions(init=tmp_path)
    with pytest.raises(UserError, match=r"nowhere/config.json cannot be read: No such file"):
        GPTOptions(init=tmp_path / "nowhere")
    model = GPT(**SIZES)
    changed()
    for content, sentence in ((b"text", "is not a safetensors file"), (None, "has no model.safetensors")):
        (tmp_path / "model.safetensors").unlink(missing_ok=True)
        if content is not None:
            (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(UserError, match=sentence):
            fill(model, tmp_path, model.layout, asdict(model.sizes))


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        (1, "has a tensor transformer.h.1.* which this task's model does not have"),
        (3, "has no tensor transformer.h.2.ln_1"),
    ],
)
def test_a_tensor_too_many_and_one_too_few_are_named(tmp_path: Path, layers: int, sentence: str) -> None:
    write_checkpoint(GPT(**SIZES), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_layer": layers}))
    with pytest.raises(UserError, match=sentence):
        ours(tmp_path, layers=layers)


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_presets_have_the_parameters_of_the_published_models(preset: str, parameters: int) -> None:
    with torch.device("meta"):
        model = GPT(**asdict(GPT_PRESETS[preset]))
    assert sum(one.numel() for one in model.parameters()) == parameters
