"""LoRA: what adapters compute, which weights stay, and the files of peft."""

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
from manyhands.data.batches import BatchSource
from manyhands.errors import UserError
from manyhands.foresight.estimate import estimate
from manyhands.workloads.language.bert import PADDING
from manyhands.workloads.language.bert_tasks import BertTaskOptions
from manyhands.workloads.language.classification import BertClassifier, label_loss
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.huggingface import fill, write_checkpoint
from manyhands.workloads.language.lora import (
    Lora,
    LoraLinear,
    add_adapters,
    merged,
    read_adapter,
    write_adapter,
)
from manyhands.workloads.language.presets import ModelSizes
from manyhands.workloads.tasks import build

SIZES = ModelSizes(context=16, layers=2, width=32, heads=4, vocabulary=50)
TINY = {"context": 16, "layers": 2, "width": 16, "heads": 2, "vocabulary": 256}
IDS = torch.randint(1, 50, (3, 16), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    write_checkpoint(GPT(**TINY), tmp_path / "base")
    return tmp_path / "base"


def with_values(model: nn.Module) -> nn.Module:
    """Adapters that change something: B begins as zeros."""
    drawn = torch.Generator().manual_seed(2)
    for one in model.parameters():
        if one.requires_grad:
            one.data = torch.randn(one.shape, generator=drawn) * 0.1
    return model


def test_a_layer_computes_and_learns_the_formula_of_the_paper() -> None:
    """y = W·x + b + alpha/r · B·A·x, by autograd of plain tensors, after three steps of SGD."""
    torch.manual_seed(0)
    layer = LoraLinear(nn.Linear(6, 4).double(), Lora(rank=2, alpha=3.0, layers=("any",)))
    w, b = layer.weight.detach().clone(), layer.bias.detach().clone()
    one, other = (p.detach().clone().requires_grad_() for p in (layer.lora_A, layer.lora_B))
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad_(False)
    mine = torch.optim.SGD([p for p in layer.parameters() if p.requires_grad], lr=0.5)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 4, dtype=torch.float64)
    assert torch.equal(layer(x), F.linear(x, w, b))  # B is zeros
    for _ in range(3):
        (layer(x) - y).square().mean().backward()
        mine.step()
        mine.zero_grad()
        loss = (x @ w.T + b + 3.0 / 2 * x @ one.T @ other.T - y).square().mean()
        gradients = torch.autograd.grad(loss, (one, other))
        with torch.no_grad():
            one -= 0.5 * gradients[0]
            other -= 0.5 * gradients[1]
    torch.testing.assert_close(layer.lora_A, one, rtol=0, atol=1e-12)
    torch.testing.assert_close(layer.lora_B, other, rtol=0, atol=1e-12)
    assert torch.equal(layer.weight, w)


def test_a_merged_model_computes_the_same_without_adapters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = GPT(**asdict(SIZES))
    model = GPT(**asdict(SIZES))
    model.load_state_dict(plain.state_dict())
    add_adapters(model, Lora(rank=4, alpha=8.0, layers=("c_attn", "mlp.c_proj")))
    assert torch.equal(model(IDS), plain(IDS))
    with_values(model)
    assert (model(IDS) - plain(IDS)).abs().max() > 1e-3
    again = GPT(**asdict(SIZES))
    again.load_state_dict(merged(model))
    torch.testing.assert_close(again(IDS), model(IDS), rtol=0, atol=1e-5)
    write_checkpoint(model, tmp_path)  # a whole checkpoint is merged as well
    filled = GPT(**asdict(SIZES))
    fill(filled, tmp_path, filled.layout, asdict(SIZES))
    assert torch.equal(filled(IDS), again(IDS))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for what has a new name
@pytest.mark.parametrize("kind", ["gpt", "bert"])
def test_peft_reads_trains_and_writes_the_same_adapters(tmp_path: Path, kind: str) -> None:
    """Both directions: our adapters give the same scores and the same step in peft; so do those that it wrote."""
    peft = pytest.importorskip("peft", reason="pip install peft")
    import transformers

    lora = Lora(rank=4, alpha=6.0, layers=("c_attn", "c_proj") if kind == "gpt" else ("query", "value"))
    torch.manual_seed(0)
    model = GPT(**asdict(SIZES)) if kind == "gpt" else BertClassifier(SIZES, ("a", "b"))
    write_checkpoint(model, tmp_path / "base")
    add_adapters(model, lora, model.layout.optional)
    with_values(model)
    about = model.layout.peft_config
    write_adapter(model, tmp_path / "adapter", about)
    of = transformers.GPT2LMHeadModel if kind == "gpt" else transformers.BertForSequenceClassification

    def opened(folder: Path) -> nn.Module:
        torch.manual_seed(1)  # base weights are those of the file
        return peft.PeftModel.from_pretrained(
            of.from_pretrained(tmp_path / "base"), folder, is_trainable=True
        )

    theirs = opened(tmp_path / "adapter").eval()  # no dropout
    ids = IDS if kind == "gpt" else IDS.masked_fill(torch.arange(16) > 11, PADDING)
    given = {"input_ids": ids, "attention_mask": ids != PADDING}

    def loss_of(scores: Tensor) -> Tensor:
        return F.cross_entropy(scores.flatten(0, -2), (torch.arange(scores[..., 0].numel()) % 2))

    for step in range(2):
        scores = model(ids), theirs(**given).logits
        torch.testing.assert_close(*scores, rtol=0, atol=1e-5)
        for one, found in zip((model, theirs), scores, strict=True):
            if not step:
                optimizer = torch.optim.AdamW([p for p in one.parameters() if p.requires_grad], lr=1e-2)
                loss_of(found).backward()
                optimizer.step()
    theirs.save_pretrained(tmp_path / "theirs")
    torch.manual_seed(0)
    again = GPT(**asdict(SIZES)) if kind == "gpt" else BertClassifier(SIZES, ("a", "b"))
    fill(again, tmp_path / "base", again.layout, asdict(SIZES))
    add_adapters(again, lora, again.layout.optional)
    read_adapter(again, tmp_path / "theirs")
    torch.testing.assert_close(again(ids), theirs(**given).logits, rtol=0, atol=1e-5)


def test_only_adapters_and_a_new_head_are_trained() -> None:
    model = BertClassifier(SIZES, ("a", "b"))
    add_adapters(model, Lora(rank=2, alpha=2.0, layers=("query",)), model.layout.optional)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    adapters = {f"bert.encoder.layer.{at}.attention.self.query.lora_{m}" for at in range(2) for m in "AB"}
    heads = {f"{name}.{part}" for name in ("bert.pooler.dense", "classifier") for part in ("weight", "bias")}
    assert trained == adapters | heads
    label_loss(model, {"tokens": IDS, "labels": torch.tensor([0, 1, 0])}).backward()
    assert {name for name, one in model.named_parameters() if one.grad is not None} == trained


def test_a_run_keeps_its_base_and_exports_its_adapters(tmp_path: Path, checkpoint: Path) -> None:
    options = {"init": checkpoint, "lora": 2, "evaluation_bytes": 400, "learning_rate": 1e-2}
    run = mh.fit(build("gpt", **options), "single", steps=3, seed=0, out=tmp_path / "run")
    before, after = GPT(**TINY), mh.load(tmp_path / "run")
    fill(before, checkpoint, before.layout, TINY)
    assert all(torch.equal(value, after.state_dict()[name]) for name, value in before.state_dict().items())
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--format", "peft"])
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["task_type"]) == (2, 4.0, "CAUSAL_LM")
    task = build("gpt", init=checkpoint, adapter=tmp_path / "run" / "adapter")
    assert (task.options["lora"], task.options["lora_alpha"]) == (2, 4.0)
    tokens = BatchSource(task.evaluation).fetch([0]).long()[:, :-1]
    assert torch.equal(task.model().eval()(tokens), run.model.eval()(tokens))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lora": 17}, "lora is 17; it must be at most the width, 16"),
        ({"lora": 0}, "lora is 0; it must be an integer of at least 1"),
        ({"lora": 2, "lora_layers": ("c_atn",)}, "lora_layers has 'c_atn'; .*did you mean 'c_attn'"),
        ({"lora_alpha": 2.0}, "give their rank as well, such as lora=8"),
        ({"lora": 2, "init": None}, "lora is 2, but init is not given"),
        ({"adapter": Path("nowhere")}, r"adapter_config\.json cannot be read: .*; give .* that peft wrote"),
    ],
)  # fmt: skip
def test_what_adapters_cannot_be_is_one_sentence(
    checkpoint: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        build("gpt", **{"init": checkpoint} | options).model()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', but only 'LORA' is supported"),
        ({"use_dora": True}, "use_dora is True, but only False is supported"),
        ({"r": 0}, "r is 0; it must be an integer above 0"),
        ({"lora_alpha": "a"}, "lora_alpha is 'a'; it must be a number above 0"),
        ({"target_modules": "all-linear"}, "target_modules is 'all-linear'; it must be a list"),
        ({"r": 3}, r"lora_A.weight has shape \(2, 16\), but the model needs \(3, 16\)"),
        ({"target_modules": ["c_fc"]}, "has a tensor .*c_attn.*, which this task does not train"),
        ({"target_modules": ["c_attn", "c_fc"]}, "has no tensor .*c_fc.*, which this task trains"),
    ],
)
def test_a_file_of_other_adapters_is_one_sentence(
    tmp_path: Path, checkpoint: Path, change: dict[str, Any], sentence: str
) -> None:
    model = GPT(**TINY)
    add_adapters(model, Lora(rank=2, alpha=2.0, layers=("c_attn",)))
    write_adapter(model, tmp_path / "adapter", {**model.layout.peft_config, **change})
    with pytest.raises(UserError, match=sentence):
        build("gpt", init=checkpoint, adapter=tmp_path / "adapter").model()


def test_bert_fills_in_with_adapters_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = {"context": 16, "layers": 1, "width": 16, "heads": 2, "vocabulary": 260}
    task = build("bert", **small, evaluation_bytes=400)
    write_checkpoint(task.model(), tmp_path / "base")
    options = BertTaskOptions(init=tmp_path / "base", lora=2, lora_layers=("dense",))
    assert options.lora_alpha == 4.0
    model = build("bert", init=tmp_path / "base", lora=2, lora_layers=("dense",)).model()
    names = [name for name, one in model.named_modules() if isinstance(one, LoraLinear)]
    assert [name.removeprefix("bert.encoder.layer.0.") for name in names] == [
        "attention.output.dense", "intermediate.dense", "output.dense",
    ]  # fmt: skip


def test_memory_is_estimated_with_gradients_of_adapters_alone(checkpoint: Path) -> None:
    """The file is read where tensors have no storage, too, so that what does not fit is said there."""
    task = build("gpt", init=checkpoint, lora=2)
    model, footprint = task.model(), estimate(task).footprint
    sizes = {name: 4 * one.numel() for name, one in model.named_parameters()}
    trained = sum(size for name, size in sizes.items() if "lora" in name)
    assert (footprint.parameters, footprint.gradients) == (sum(sizes.values()), trained)
    assert footprint.state < 2 * trained + 100
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"has no model\.safetensors; give a directory that transformers wrote"
    ):
        estimate(task)
