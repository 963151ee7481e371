"""The built-in task `bert`: filling in masked tokens of a text, or finding the label of each text of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from manyhands.errors import UserError
from manyhands.task import Task
from manyhands.workloads.builtin_task import BuiltinTask
from manyhands.workloads.language.bert import BertOptions, bert, masked_model
from manyhands.workloads.language.classification import (
    BertClassifier,
    MacroF1,
    TextRows,
    accuracy,
    label_loss,
    labels_found,
)
from manyhands.workloads.language.presets import padded_vocabulary
from manyhands.workloads.task_options import option
from manyhands.workloads.text.labeled_texts import LabeledRow, LabeledTexts, labels_of
from manyhands.workloads.text.tokenizer import TOKENIZER_FILE, read_tokenizer

_TOKENIZERS = (TOKENIZER_FILE, "vocab.txt")


@dataclass(frozen=True, kw_only=True, slots=True)
class BertTaskOptions(BertOptions):
    """What may be chosen about `bert`, whatever it learns."""

    task: str = option(
        "masked",
        "masked: fill in tokens; classification: the label of each text of --data",
        choices=("masked", "classification"),
    )
    data: Path | None = option(
        None, "a folder of tokens; for classification, CSV, TSV or JSON lines, plain or gzip"
    )
    text: str = option("text", "for classification: the column of texts")
    label: str = option("label", "for classification: the column of labels")
    evaluation_share: float = option(
        0.1, "for classification: the share of rows held out for evaluation", above=0, below=1
    )
    tokenizer: Path | None = option(
        None, "for classification: tokenizer.json or vocab.txt", shown="that of --init; without it, bytes"
    )
    labels: tuple[str, ...] = option((), "those of the rows to learn from, which a run records", hidden=True)

    def __post_init__(self) -> None:
        """Fill in what follows from the files, so that a run records it: the sizes, the tokenizer and the labels."""
        BertOptions.__post_init__(self)
        if self.task == "masked":
            return
        if self.init is not None and self.tokenizer is None:
            found = next((self.init / name for name in _TOKENIZERS if (self.init / name).is_file()), None)
            object.__setattr__(self, "tokenizer", found)
        if not self.labels:
            learned, _ = _texts(self).split(self.evaluation_share)
            object.__setattr__(self, "labels", tuple(sorted({row.label for row in learned})))
        if len(self.labels) < 2:
            raise UserError(
                f"{self.data}: all rows to learn from have the label {self.labels[0]!r}; give two or more"
            )

    @property
    def reads_tokens(self) -> bool:
        return self.task == "masked" and self.data is not None

    def _vocabulary_of_data(self) -> int | None:
        if self.task == "masked":
            return BertOptions._vocabulary_of_data(self)
        return None if self.tokenizer is None else padded_vocabulary(read_tokenizer(self.tokenizer))


def _texts(options: BertTaskOptions) -> LabeledTexts:
    if options.data is None:
        raise UserError("data is not given; task=classification needs a table of texts and labels")
    return LabeledTexts(path=options.data, text=options.text, label=options.label)


def _rows(options: BertTaskOptions) -> TextRows:
    """How the texts become rows; UserError where the model does not know every token."""
    tokenizer = None if options.tokenizer is None else read_tokenizer(options.tokenizer)
    rows = TextRows(options.sizes.context, tokenizer)
    if rows.vocabulary > options.sizes.vocabulary:
        whose = "bytes have" if tokenizer is None else f"{options.tokenizer} has"
        raise UserError(
            f"{whose} {rows.vocabulary} tokens, but the model knows {options.sizes.vocabulary}; give the tokenizer of "
            "the model"
        )
    return rows


def _task(options: BertTaskOptions) -> Task:
    return _classification(options) if options.task == "classification" else bert(options)


def _classification(options: BertTaskOptions) -> Task:
    texts, rows = _texts(options), _rows(options)
    learned, held_out = texts.split(options.evaluation_share)

    def tensors(part: list[LabeledRow]) -> dict[str, torch.Tensor]:
        labels = torch.tensor(labels_of(part, options.labels, texts.path))
        return {"tokens": rows.of([row.text for row in part]), "labels": labels}

    return Task(
        name="bert",
        model=partial(_started, options),
        loss=label_loss,
        data=tensors(learned),
        optimizer=partial(torch.optim.AdamW, lr=options.learning_rate),
        scheduler=options.schedule,
        batch_size=options.batch_size,
        evaluation=tensors(held_out),
        metrics={"accuracy": accuracy, "macro_f1": (MacroF1(len(options.labels)), labels_found)},
        files={} if rows.tokenizer is None else {TOKENIZER_FILE: rows.tokenizer.json},
    )


def _classifier(options: BertTaskOptions) -> BertClassifier:
    return options.adapted(BertClassifier(options.sizes, options.labels, options.dropout))


_MODELS: dict[str, Callable[[BertTaskOptions], nn.Module]] = {
    "masked": masked_model,
    "classification": _classifier,
}


def _model(options: BertTaskOptions) -> nn.Module:
    return _MODELS[options.task](options)


def _started(options: BertTaskOptions) -> BertClassifier:
    return options.started(_classifier(options))


BERT_TASK = BuiltinTask(
    name="bert",
    help="masked tokens or labels of texts, a transformer with the architecture of BERT",
    options_type=BertTaskOptions,
    make=_task,
    model=_model,
    steps=500,
)
