"""`bert` with a classification head: what it computes, how a table is read and split, and what is rejected."""

from __future__ import annotations

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.metrics import f1_score
from typer.testing import CliRunner

import manyhands as mh
from manyhands.cli.main import app
from manyhands.errors import UserError
from manyhands.serving.opening import open_predictor
from manyhands.workloads.language.bert import BEGIN, END, FIRST_BYTE, PADDING
from manyhands.workloads.language.classification import (
    BertClassifier,
    MacroF1,
    TextRows,
    label_loss,
)
from manyhands.workloads.language.huggingface import fill, write_checkpoint
from manyhands.workloads.language.presets import ModelSizes
from manyhands.workloads.tasks import build
from manyhands.workloads.text.labeled_texts import LabeledTexts
from manyhands.workloads.text.tokenizer import train_tokenizer

SIZES = ModelSizes(context=16, layers=2, width=32, heads=4, vocabulary=50)
SMALL = {"task": "classification", "layers": 1, "width": 16, "heads": 2, "context": 24}
WORDS = {"hamlet": "to be or not", "juliet": "romeo art thou"}


def table(path: Path, count: int = 200) -> Path:
    """Lines of two roles that share no word, with commas and quotes in them."""
    drawn = torch.Generator().manual_seed(0)
    lines = ["said,who"]
    for number in range(count):
        role = list(WORDS)[number % 2]
        order = torch.randperm(3, generator=drawn).tolist()
        said = " ".join(WORDS[role].split()[at] for at in order)
        lines.append(f'"{said}, ""{number}""",{role}')
    path.write_text("\n".join(lines) + "\n")
    return path


def padded_ids() -> torch.Tensor:
    ids = torch.randint(1, 50, (5, 16), generator=torch.Generator().manual_seed(1))
    return ids.masked_fill(torch.arange(16) >= torch.tensor([16, 3, 9, 12, 5])[:, None], PADDING)


@pytest.mark.parametrize("of", ["BertForSequenceClassification", "BertForMaskedLM", "BertModel"])
def test_it_computes_and_learns_what_theirs_does(tmp_path: Path, of: str) -> None:
    """Its own loss with its own mask; a file without a pooler or a classifier leaves that as it is here."""
    transformers = pytest.importorskip("transformers", reason="transformers is in the extra `integrations`")
    torch.manual_seed(3)
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 128}
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    config = transformers.BertConfig(
        **sizes, **dropouts, vocab_size=50, max_position_embeddings=16, num_labels=3
    )
    getattr(transformers, of)(config).save_pretrained(tmp_path / "given")
    model = BertClassifier(SIZES, ("a", "b", "c"))
    fill(model, tmp_path / "given", model.layout, asdict(SIZES))
    write_checkpoint(model, tmp_path / "written")
    theirs = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "written")
    assert theirs.config.id2label == {0: "a", 1: "b", 2: "c"}
    ids, labels = padded_ids(), torch.tensor([0, 2, 1, 1, 0])
    given = {"input_ids": ids, "attention_mask": ids != PADDING}
    if of == "BertForSequenceClassification":  # not through a file of ours
        as_given = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "given")
        torch.testing.assert_close(model(ids), as_given(**given).logits, rtol=0, atol=1e-5)
    for one in (theirs, model):
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        batch = {"tokens": ids, "labels": labels}
        loss = label_loss(model, batch) if one is model else theirs(**given, labels=labels).loss
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(**given).logits, rtol=0, atol=1e-5)


def test_padding_changes_no_score() -> None:
    torch.manual_seed(0)
    model, ids = BertClassifier(SIZES, ("a", "b")), padded_ids()
    alone = torch.cat([model(row[row != PADDING][None]) for row in ids])
    torch.testing.assert_close(model(ids), alone, rtol=0, atol=1e-6)


def test_macro_f1_is_that_of_scikit_learn() -> None:
    drawn = torch.Generator().manual_seed(0)
    own, found = (torch.randint(0, top, (200,), generator=drawn) for top in (4, 5))
    metric = MacroF1(7)  # labels 5 and 6 never occur
    for part in range(0, 200, 64):
        metric.update(found[part : part + 64], own[part : part + 64])
    assert metric.compute() == pytest.approx(f1_score(own, found, average="macro"), abs=1e-12)


def test_rows_are_texts_between_their_marks_cut_and_padded() -> None:
    rows = TextRows(6).of(["ab", "abcdef"])
    a = FIRST_BYTE + ord("a")
    assert rows.tolist() == [[BEGIN, a, a + 1, END, PADDING, PADDING], [BEGIN, a, a + 1, a + 2, a + 3, END]]


def test_a_tokenizer_gives_the_rows_that_the_library_does() -> None:
    texts = ["to be or not to be", "be"]
    tokenizer = train_tokenizer("wordpiece", texts, 60)
    ids = TextRows(8, tokenizer).of(texts)
    first, last = (tokenizer.library.token_to_id(name) for name in ("[CLS]", "[SEP]"))
    for row, text in zip(ids.tolist(), texts, strict=True):
        wanted = [first, *tokenizer.library.encode(text).ids[:6], last]
        assert row == wanted + [PADDING] * (len(row) - len(wanted))


def test_a_row_stays_on_its_side_whatever_is_beside_it(tmp_path: Path) -> None:
    path = table(tmp_path / "lines.csv")
    learned, held_out = LabeledTexts(path=path, text="said", label="who").split(0.2)
    assert 20 <= len(held_out) <= 60
    head, *lines = path.read_text().splitlines()
    path.write_text("\n".join([head, *reversed(lines[50:]), *lines[50:60]]) + "\n")
    fewer, fewer_out = LabeledTexts(path=path, text="said", label="who").split(0.2)
    texts, texts_out = ({row.text for row in part} for part in (learned, held_out))
    assert {row.text for row in fewer} < texts
    assert {row.text for row in fewer_out} < texts_out


def test_tables_and_json_lines_hold_the_same_rows(tmp_path: Path) -> None:
    texts = LabeledTexts(path=table(tmp_path / "lines.csv", 20), text="said", label="who")
    rows = texts.rows()
    assert rows[3].text.endswith(', "3"')
    lines = [json.dumps({"said": row.text, "who": row.label}) for row in rows]
    packed = tmp_path / "lines.jsonl.gz"
    packed.write_bytes(gzip.compress("\n".join(lines).encode()))
    again = LabeledTexts(path=packed, text="said", label="who").rows()
    assert [row[:2] for row in again] == [row[:2] for row in rows]
    for line, said in (
        ("{", "is not JSON"),
        ("[]", "is not a JSON object"),
        (
            r'{"said": "a", "who": "\ud800"}',
            "'who' is not text: it has half of a surrogate pair at character 0",
        ),
    ):
        (tmp_path / "bad.jsonl").write_text(f"{lines[0]}\n\n{line}")
        with pytest.raises(UserError, match=f"line 3:? {said}"):
            LabeledTexts(path=tmp_path / "bad.jsonl", text="said", label="who").rows()


def test_a_run_finds_labels_and_keeps_them(tmp_path: Path) -> None:
    path = table(tmp_path / "lines.csv")
    options = {**SMALL, "data": path, "text": "said", "label": "who", "learning_rate": 1e-2}
    run = mh.fit(build("bert", **options), "single", steps=60, seed=0, out=tmp_path / "run")
    assert run.summary["final"]["accuracy"] == run.summary["final"]["macro_f1"] == 1
    path.unlink()  # a trained model needs no data
    predictor = open_predictor(tmp_path / "run")
    answers = predictor.answers(predictor.inputs(['not or be, "7"', 'thou romeo art, "8"']))
    assert [one["label"] for one in answers] == ["hamlet", "juliet"]
    for text, said in ((" ", "has no text; it must be a text"), ("\udfff", "is not text: it has half of a")):
        with pytest.raises(UserError, match=f"input 1 {said}"):
            predictor.inputs(["a", text])


def test_the_tokenizer_goes_with_the_run_and_to_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is in the extra `integrations`")
    path, file = table(tmp_path / "lines.csv"), tmp_path / "tokenizer.json"
    file.write_text(train_tokenizer("wordpiece", list(WORDS.values()), 60).json)
    options = {**SMALL, "data": path, "text": "said", "label": "who", "tokenizer": file}
    run = mh.fit(build("bert", **options), "single", steps=2, seed=0, out=tmp_path / "run")
    assert run.model.sizes.vocabulary == 64
    file.unlink()
    predictor = open_predictor(tmp_path / "run")
    text = "romeo thou or not"
    (answer,) = predictor.answers(predictor.inputs([text]))
    result = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--format", "huggingface"])
    assert result.exit_code == 0, result.output
    opened = tmp_path / "run" / "huggingface"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(opened).eval()
    given = transformers.AutoTokenizer.from_pretrained(opened)(text, return_tensors="pt")
    chances = theirs(**given).logits.softmax(1)[0].detach()
    assert theirs.config.id2label[int(chances.argmax())] == answer["label"]
    assert float(chances.max()) == pytest.approx(answer["probability"], abs=2e-6)
    (tmp_path / "run" / "tokenizer.json").unlink()
    with pytest.raises(
        UserError, match=r"has lost its tokenizer\.json; copy it there from where it was trained"
    ):
        open_predictor(tmp_path / "run")


@pytest.mark.parametrize(
    ("content", "options", "sentence"),
    [
        (b"said,who\na,b\n", {}, r"line 1 has no column 'text'; allowed: said, who"),
        (b"said,who\na,b\n", {"text": "said", "label": "whom"}, "'whom'; .*did you mean 'who'"),
        (b"text,label\na,b\n ,c\n", {}, "line 3: 'text' has no text; fill it in or remove the row"),
        (b"text,label\na,b\nd\n", {}, "line 3: 'label' has no label; fill it in or remove the row"),
        (b"text,label\na,b\nd\xff,c\n", {}, r"byte 16: not UTF-8 text: invalid start byte \(0xff\)"),
        (b'text,label\n"a,b\n', {}, "after line 1: unexpected end of data"),
        (b"text,label\n", {}, "has no rows; give texts with a label each"),
        (b"text,label\na,b\n", {}, "of 1 rows [01] are held out for evaluation"),
        (b"text,label\n" + b"".join(b"%d,b\n" % n for n in range(99)), {}, "have the label 'b'; give two or more"),
        (b"text,label\n" + b"".join(b"%d,%d\n" % (n, n) for n in range(99)), {}, "training never saw the label"),
    ],
)  # fmt: skip
def test_what_a_table_lacks_is_one_sentence(
    tmp_path: Path, content: bytes, options: dict[str, Any], sentence: str
) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    with pytest.raises(UserError, match=rf"rows\.csv.*{sentence}"):
        build("bert", **SMALL | {"data": tmp_path / "rows.csv"} | options)


def test_what_a_checkpoint_or_tokenizer_lacks_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data is not given; task=classification needs a table"):
        build("bert", **SMALL)
    path = table(tmp_path / "lines.csv")
    chosen = {"task": "classification", "data": path, "text": "said", "label": "who"}
    small = ModelSizes(context=24, layers=1, width=16, heads=2, vocabulary=100)
    write_checkpoint(BertClassifier(small, ("a", "b", "c")), tmp_path / "checkpoint")
    with pytest.raises(UserError, match="bytes have 260 tokens, but the model knows 100; give the tokenizer"):
        build("bert", **chosen, init=tmp_path / "checkpoint")
    tokenizer = train_tokenizer("wordpiece", list(WORDS.values()), 60)
    (tmp_path / "checkpoint" / "tokenizer.json").write_text(tokenizer.json)
    task = build("bert", **chosen, init=tmp_path / "checkpoint")
    with pytest.raises(UserError, match=r"classifier.bias has shape \(3,\), but the model needs \(2,\)"):
        task.model()
    with pytest.raises(UserError, match=r"width is 20, but the checkpoint .* has 16"):
        build("bert", **chosen, init=tmp_path / "checkpoint", width=20)
