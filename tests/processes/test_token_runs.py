"""`train gpt|bert --data`: what a run of tokens keeps, exact resume, what transformers reads, and what is rejected."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import manyhands as mh
from manyhands.cli.main import app
from manyhands.data.batches import BatchPlan, BatchSource
from manyhands.errors import UserError
from manyhands.serving.opening import open_predictor
from manyhands.workloads.tasks import build
from manyhands.workloads.text.documents import Documents
from manyhands.workloads.text.masking import IGNORED, Masking
from manyhands.workloads.text.packing import MaskedDocuments
from manyhands.workloads.text.span_pairs import SpanPairs
from manyhands.workloads.text.token_files import TokenFiles, shard_name
from manyhands.workloads.text.tokenizing import TokenizerChoice, tokenize

pytest.importorskip("tokenizers", reason="the extra manyhands[text] is not installed")

SIZES: dict[str, Any] = {"context": 16, "layers": 1, "width": 16, "heads": 2, "batch_size": 8}
KINDS = [("gpt", "bpe"), ("bert", "wordpiece")]


def folder_of(folder: Path, kind: str, lines: int = 400, vocabulary: int = 300) -> Path:
    draw = np.random.default_rng(0)
    words = ["many", "hands", "make", "light", "work", "and", "too", "cooks", "spoil", "the", "broth"]
    (folder / f"{kind}.txt").write_text("\n".join(" ".join(draw.choice(words, 9)) for _ in range(lines)))
    choice = TokenizerChoice(train=kind, vocabulary=vocabulary)
    tokenize(Documents(paths=[folder / f"{kind}.txt"], split="line"), choice, folder / kind, workers=1)
    return folder / kind


def command(*words: Any) -> str:
    shown = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    return shown.output


def losses(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


@pytest.mark.parametrize("kind", ["next", "order"])
def test_two_spans_of_a_row_are_in_order_or_apart(kind: str, tmp_path: Path) -> None:
    files = TokenFiles(folder_of(tmp_path, "wordpiece"))
    text, rows = np.asarray(files.shard(0).tokens), SpanPairs(files, 16, Masking.of(files.tokenizer), kind)
    indices = np.arange(len(rows))
    seen = []
    for epoch in (0, 1):
        batch = rows.batch(indices, epoch)
        whole = batch["tokens"].scatter(1, batch["places"], batch["labels"]).numpy()
        assert (batch["segments"] == torch.tensor([0] * 8 + [1] * 7)).all()
        for number, (row, apart) in enumerate(zip(whole, batch["apart"].tolist(), strict=True)):
            first, second = text[number * 12 :][:6].tolist(), text[number * 12 + 6 :][:6].tolist()
            ends = [files.tokenizer.require_id(token) for token in ("[CLS]", "[SEP]")]
            if not apart:
                assert row.tolist() == [ends[0], *first, ends[1], *second, ends[1]]
            elif kind == "order":
                assert row.tolist() == [ends[0], *second, ends[1], *first, ends[1]]
            else:
                assert row[1:7].tolist() == first
        parts = [rows.batch(part, epoch)["tokens"] for part in np.array_split(indices, 3)]
        assert torch.equal(torch.cat(parts), batch["tokens"]), "however a batch is split"
        seen.append(batch["apart"])
        assert 0.4 < seen[-1].double().mean() < 0.6
    assert not torch.equal(*seen), "drawn anew in each epoch"


def test_spans_that_cannot_be_had_are_one_sentence(tmp_path: Path) -> None:
    data = folder_of(tmp_path, "wordpiece")
    with pytest.raises(UserError, match=r"sentences is order and rows is documents; leave one out"):
        build("bert", sentences="order", data=data, rows="documents", **SIZES)
    with pytest.raises(UserError, match="length is 4; two spans need at least 5"):
        build("bert", sentences="order", data=data, length=4, **SIZES)


@pytest.mark.parametrize(("strategy", "workers"), [("mirrored", 3), ("pipeline stages=2", 2), ("sharded", 2)])
def test_both_heads_train_as_in_one_process(strategy: str, workers: int, tmp_path: Path) -> None:
    task = build("bert", data=folder_of(tmp_path, "wordpiece"), sentences="next", **SIZES)
    model = task.model().double()
    task = replace(task, model=lambda: copy.deepcopy(model))
    alone = mh.fit(task, "single", steps=6, seed=0)
    run = mh.fit(task, strategy, workers=workers, steps=6, seed=0)
    assert run.history.loss == pytest.approx(alone.history.loss, rel=1e-9)
    measured = "sentence_accuracy", "masked_accuracy"
    assert all(run.summary["final"][one] == alone.summary["final"][one] for one in measured)


@pytest.mark.parametrize(("task", "kind"), KINDS)
def test_a_run_that_is_resumed_in_mid_epoch_with_other_workers_has_the_same_losses(
    task: str, kind: str, tmp_path: Path
) -> None:
    words = ["train", task, "--data", folder_of(tmp_path, kind), "--seed", 3]
    words += [part for name, value in SIZES.items() for part in (f"--{name.replace('_', '-')}", value)]
    samples = len(build(task, data=tmp_path / kind, **SIZES).data)
    stop, end = samples // 8 + 3, 2 * samples // 8  # the first in the second epoch
    command(*words, "--workers", 2, "--steps", end, "--out", tmp_path / "whole")
    command(*words, "--workers", 2, "--steps", stop, "--out", tmp_path / "parts")
    command(*words, "--workers", 3, "--steps", end, "--out", tmp_path / "parts", "--resume")
    whole, parts = losses(tmp_path / "whole"), losses(tmp_path / "parts")
    assert len(whole) == end
    assert parts == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(("task", "kind"), KINDS)
def test_a_run_keeps_its_tokenizer_and_a_vocabulary_that_is_padded(
    task: str, kind: str, tmp_path: Path
) -> None:
    data = folder_of(tmp_path, kind)
    tokenizer = TokenFiles(data).tokenizer
    run = mh.fit(build(task, data=data, **SIZES), "single", steps=3, out=tmp_path / "run")
    known = run.model.sizes.vocabulary  # type: ignore[union-attr]
    assert known % 64 == 0
    assert 0 < known - tokenizer.vocabulary_size < 64
    shutil.rmtree(data)
    command("export", tmp_path / "run", "--format", "huggingface", "--out", tmp_path / "hf")
    predictor = open_predictor(tmp_path / "run")
    with torch.no_grad():  # the likeliest tokens are now those of the padding, and, for bert, special ones
        for name, parameter in predictor.model.named_parameters():
            if name == "cls.predictions.decoder.bias":
                parameter[tokenizer.vocabulary_size :] = parameter[:5] = 1e3
    given = "many [MASK] make" if task == "bert" else {"prompt": "many", "tokens": 30, "temperature": 100.0}
    (answer,) = predictor.answers(predictor.inputs([given]))
    ids = tokenizer.encode([answer["text"]])[0]
    assert ids, "text of the tokenizer"
    assert "[" not in answer["text"]


@pytest.mark.parametrize(("task", "kind"), KINDS)
def test_transformers_reads_model_and_tokenizer(task: str, kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    data = folder_of(tmp_path, kind)
    run = mh.fit(build(task, data=data, **SIZES), "single", steps=1, out=tmp_path / "run")
    command("export", tmp_path / "run", "--format", "huggingface", "--out", tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ours = TokenFiles(data).tokenizer
    ids = ours.encode(["many hands make broth"])[0]
    ends = ours.id_of("[CLS]"), ours.id_of("[SEP]")
    expected = [ends[0], *ids, ends[1]] if task == "bert" else ids
    assert theirs("many hands make broth")["input_ids"] == expected
    kinds = {"gpt": transformers.AutoModelForCausalLM, "bert": transformers.AutoModelForMaskedLM}
    model = kinds[task].from_pretrained(tmp_path / "hf").eval()
    row = torch.tensor([expected])
    torch.testing.assert_close(model(row).logits, run.model.eval()(row), rtol=0, atol=1e-5)
    again = build(task, data=data, init=tmp_path / "hf", length=8, batch_size=8)
    assert torch.equal(again.model()(row), run.model(row))
    shutil.rmtree(data)
    other = folder_of(tmp_path, kind, vocabulary=258 if task == "gpt" else 40)
    with pytest.raises(UserError, match=r"the tokenizer of .* is not that of the checkpoint"):
        build(task, data=other, init=tmp_path / "hf", length=8)


def scores_of_documents_in_rows(model: nn.Module, batch: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores and labels of each document, given to bert without its padding."""
    lengths = batch["seen"].sum((1, 2, 3))
    assert len(set(lengths.tolist())) > 1
    for row, length in enumerate(lengths):
        found = model(batch["tokens"][row : row + 1, :length])
        is_target = batch["labels"][row] != IGNORED
        yield found[0, batch["places"][row, is_target]], batch["labels"][row, is_target]


def scores_of_packed_documents(model: nn.Module, batch: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The same of gpt, of each document that a row holds a part of."""
    for tokens, documents in zip(batch["tokens"], batch["documents"], strict=True):
        parts = [tokens[documents == one] for one in documents.unique()]
        assert len(parts) > 1
        for part in parts:
            if len(part) > 1:
                yield model(part[None, :-1])[0], part[1:]


@pytest.mark.parametrize(
    ("name", "kind", "alone"),
    [("bert", "wordpiece", scores_of_documents_in_rows), ("gpt", "bpe", scores_of_packed_documents)],
)
def test_documents_train_on_the_mean_over_tokens(
    name: str, kind: str, alone: Callable[..., Iterator[tuple[Tensor, Tensor]]], tmp_path: Path
) -> None:
    """A plain loop gives each document to the model alone, without padding or mask."""
    context = {"bert": 8, "gpt": 24}[name]
    task = build(name, data=folder_of(tmp_path, kind), rows="documents", **SIZES | {"context": context})
    torch.manual_seed(0)
    template = task.model().double()
    task = replace(
        task,
        model=lambda: copy.deepcopy(template),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    plan, source = BatchPlan(len(task.data), task.batch_size, 0), BatchSource(task.data)
    for step in range(3):
        optimizer.zero_grad()
        scores, labels = zip(*alone(model, source.fetch(plan.indices(step))), strict=True)
        F.cross_entropy(torch.cat(scores), torch.cat(labels)).backward()
        optimizer.step()
    wanted = model.state_dict()
    if name == "gpt":
        held_out = BatchSource(task.evaluation)
        scores, labels = zip(*alone(model, held_out.fetch(range(len(held_out)))), strict=True)
        perplexity = F.cross_entropy(torch.cat(scores), torch.cat(labels)).exp().item()
        run = mh.fit(task, "single", steps=3, seed=0)
        assert run.summary["final"]["perplexity"] == pytest.approx(perplexity, rel=1e-9)
    task = replace(task, evaluation=None, metrics={})
    for strategy, workers in (
        ("single", 1),
        ("mirrored", 3),
        ("sharded", 2),
        ("pipeline stages=3 microbatches=2", 3),
        ("tensor slices=2", 2),
    ):
        run = mh.fit(task, strategy, workers=workers, steps=3, seed=0)
        for name, value in run.model.state_dict().items():
            torch.testing.assert_close(value, wanted[name], rtol=0, atol=1e-12, msg=f"{strategy}: {name}")


def test_rows_of_documents_by_hand(tmp_path: Path) -> None:
    files = TokenFiles(folder_of(tmp_path, "wordpiece", lines=30))
    rows = MaskedDocuments(files, 8, Masking.of(files.tokenizer))
    cls, sep, pad = (files.tokenizer.require_id(token) for token in ("[CLS]", "[SEP]", "[PAD]"))
    batch, expected = rows.batch(np.arange(len(rows)), 0), []
    for number in range(files.num_documents):
        tokens = files.document(number).tolist()
        for begin in range(0, len(tokens), 6):
            piece = [cls, *tokens[begin : begin + 6], sep]
            expected.append(piece + [pad] * (8 - len(piece)))
    targets = batch["labels"] != IGNORED
    known = batch["labels"].where(targets, batch["tokens"].gather(1, batch["places"]))
    assert batch["tokens"].scatter(1, batch["places"], known).tolist() == expected
    assert (batch["seen"][:, 0, 0] == (torch.tensor(expected) != pad)).all()
    assert targets.sum(1).tolist() == rows.num_targets.tolist()


def test_what_does_not_fit_is_one_sentence_before_anything_is_computed(tmp_path: Path) -> None:
    data = folder_of(tmp_path, "bpe")
    for changes, said in [
        ({"length": 17}, "length is 17, but the model has 16 positions; give at most 16"),
        ({"vocabulary": 100}, r"has 2\d\d tokens, but the model knows 100; leave vocabulary out"),
        ({"path": tmp_path / "bpe.txt"}, "leave one out"),
        ({"evaluation_bytes": 2}, "are held out for evaluation: none; give more text or a shorter length"),
    ]:
        with pytest.raises(UserError, match=said):
            build("gpt", data=data, **SIZES | changes)
    with pytest.raises(UserError, match=r"the tokenizer has no token \[PAD\]; give one that has"):
        build("bert", data=data, **SIZES)
    words = ["train", "gpt", "--data", str(data), "--context", "16", "--out", str(tmp_path / "run")]
    (data / shard_name(0)).write_bytes((data / shard_name(0)).read_bytes()[:-8])
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code != 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("task", "asked"),
    [
        ("gpt", {"rows": "documents"}),
        ("gpt", {"length": 8}),
        ("bert", {"rows": "documents"}),
        ("bert", {"sentences": "next"}),
        ("bert", {"sentences": "next", "task": "classification", "data": Path("table.csv")}),
    ],
)
def test_how_tokens_are_read_is_said_of_tokens_alone(task: str, asked: dict[str, Any]) -> None:
    name = next(iter(asked))
    said = f"{name} is {asked[name]}, which says how tokens are read; give a folder of `manyhands tokenize` as data"
    with pytest.raises(UserError, match=re.escape(said)):
        build(task, **SIZES | asked)


def test_a_run_is_not_resumed_with_another_tokenizer(tmp_path: Path) -> None:
    data = folder_of(tmp_path, "bpe")
    mh.fit(build("gpt", data=data, **SIZES), "single", steps=2, out=tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "tokenizer.json").read_text())
    assert kept == json.loads(TokenFiles(data).tokenizer.json)
    shutil.rmtree(data)
    folder_of(tmp_path, "bpe", vocabulary=290)
    sizes = {**SIZES, "vocabulary": 320}
    with pytest.raises(UserError, match=r"cannot be resumed: "):
        mh.fit(build("gpt", data=data, **sizes), "single", steps=4, out=tmp_path / "run", resume=True)
