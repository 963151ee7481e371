"""The predictor of `bert`: the label of each text, or the tokens of a text that are masked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from manyhands.data.file_reader import read_text
from manyhands.errors import UserError
from manyhands.serving.text_coding import masked_coding_of, tokenizer_of
from manyhands.serving.torch_predictors import MaskFiller
from manyhands.workloads.exporting import load
from manyhands.workloads.language.bert import BERT
from manyhands.workloads.language.classification import BertClassifier, TextRows
from manyhands.workloads.predictor import ModulePredictor, ReadAs
from manyhands.workloads.text.json_text import utf8

_AT_ONCE = 64
_DIGITS = 6  # of a probability


class TextLabels(ModulePredictor[list[str]]):
    """The label of each text and its probability."""

    takes: ClassVar[str] = "a text"
    model: BertClassifier

    def __init__(self, model: BertClassifier, rows: TextRows) -> None:
        super().__init__(model)
        self.rows, self.labels, self.vocabulary = rows, model.labels, model.sizes.vocabulary

    def blocks(self, source: str, read_as: ReadAs) -> Iterator[list[str]]:
        """A text on each line of a file."""
        self.check_read_as(read_as)
        lines = read_text(source).splitlines()
        for begin in range(0, len(lines), _AT_ONCE):
            yield self.inputs(lines[begin : begin + _AT_ONCE])

    def inputs(self, values: Sequence[Any]) -> list[str]:
        for number, text in enumerate(values):
            if not isinstance(text, str) or not text.strip():
                raise UserError(f"input {number} has no text; it must be {self.takes}")
            utf8(text, f"input {number}")
        return list(values)

    def together(self, parts: Sequence[list[str]]) -> list[str]:
        return [text for part in parts for text in part]

    def answers(self, inputs: list[str]) -> list[Any]:
        with torch.inference_mode():
            chances, found = self.model(self.rows.of(inputs)).double().softmax(1).max(1)
        return [
            {"label": self.labels[label], "probability": round(chance, _DIGITS)}
            for label, chance in zip(found.tolist(), chances.tolist(), strict=True)
        ]

    @property
    def example(self) -> Any:
        return "Many hands make light work."

    def example_batch(self, count: int, seed: int = 0) -> tuple[Tensor]:
        drawn = torch.Generator().manual_seed(seed)
        return (torch.randint(0, self.vocabulary, (count, self.rows.context), generator=drawn),)


def open_bert(path: Path) -> TextLabels | MaskFiller:
    """For what the run learned."""
    model = load(path)
    if isinstance(model, BertClassifier):
        return TextLabels(model, TextRows(model.sizes.context, tokenizer_of(path)))
    assert isinstance(model, BERT), "the task of this predictor has such models"
    return MaskFiller(model, masked_coding_of(path))
