"""BERT with a classification head: one label for a text, as Devlin et al. 2018 fine-tune it.

The head reads the first position, [CLS]: a linear layer with tanh (the pooler), then one score for each label. Modules
have the names of `BertForSequenceClassification` in Hugging Face's transformers. A row is [CLS], the tokens of a text,
[SEP], and padding, which attention does not see; a text that is longer than the context is cut at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.data.file_reader import VOCABULARY, encode
from manyhands.errors import UserError
from manyhands.workloads.language.bert import BEGIN, BERT_LAYOUT, END, FIRST_BYTE, PADDING, BertBody, Pooler
from manyhands.workloads.language.huggingface import CheckpointLayout
from manyhands.workloads.language.presets import ModelSizes
from manyhands.workloads.text.tokenizer import TextTokenizer

CLASSIFIER_LAYOUT = replace(
    BERT_LAYOUT,
    ignored=r"^cls\.|\.position_ids$",
    peft_config={"task_type": "SEQ_CLS"},
    optional=r"^bert\.pooler\.|^classifier\.",
)


class BertClassifier(nn.Module):
    """Scores of the labels of each text."""

    layout: ClassVar[CheckpointLayout] = CLASSIFIER_LAYOUT

    def __init__(self, sizes: ModelSizes, labels: Sequence[str], dropout: float = 0.0) -> None:
        super().__init__()
        self.sizes, self.labels, self.dropout = sizes, tuple(labels), dropout
        self.bert = _PooledBody(sizes, dropout)
        self.drop = nn.Dropout(dropout)
        self.classifier = nn.Linear(sizes.width, len(self.labels))
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        with torch.no_grad():
            self.bert.embeddings.word_embeddings.weight[PADDING] = 0

    def config(self) -> Mapping[str, Any]:
        """What its checkpoint's config.json says besides the layout's own settings."""
        dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), self.dropout)
        return {
            "architectures": ["BertForSequenceClassification"],
            **asdict(self.sizes),
            **dropouts,
            "id2label": {str(number): label for number, label in enumerate(self.labels)},
            "label2id": {label: number for number, label in enumerate(self.labels)},
        }

    def tensor_plan(self) -> dict[str, str]:
        """How `tensor` slices it: the vocabulary here, the rest as each block says."""
        return {"bert.embeddings.word_embeddings": "vocabulary"}

    def chain(self) -> Sequence[nn.Module]:
        body, after = self.bert, [self.drop] if self.dropout else []
        return [body.embeddings, *body.encoder.layer, body.pooler, *after, self.classifier]

    def forward(self, tokens: Tensor, seen: Tensor | None = None) -> Tensor:
        """(batch, time) tokens to (batch, labels) scores; `seen` is where attention looks: not at padding."""
        seen = attended(tokens) if seen is None else seen
        x = self.bert.embeddings(tokens)
        for layer in self.bert.encoder.layer:
            x = layer(x, seen)
        scores: Tensor = self.classifier(self.drop(self.bert.pooler(x)))
        return scores


class _PooledBody(BertBody):
    def __init__(self, sizes: ModelSizes, dropout: float) -> None:
        super().__init__(sizes, dropout)
        self.pooler = Pooler(sizes.width)


def attended(tokens: Tensor) -> Tensor:
    """Where attention looks in rows of different lengths: everywhere but at padding."""
    return (tokens != PADDING)[:, None, None, :]


def label_scores(model: nn.Module, tokens: Tensor) -> Tensor:
    """With what attention looks at as an input by name, which the stages of a pipeline pass on."""
    scores: Tensor = model(tokens, seen=attended(tokens))
    return scores


def label_loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean cross entropy of the labels of a batch."""
    return F.cross_entropy(label_scores(model, batch["tokens"]), batch["labels"])


def accuracy(model: nn.Module, batch: Any) -> Tensor:
    """The share of the texts whose label is found."""
    share: Tensor = (label_scores(model, batch["tokens"]).argmax(1) == batch["labels"]).double().mean()
    return share


def labels_found(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The label that is found for each text of a batch, and its own."""
    return label_scores(model, batch["tokens"]).argmax(1), batch["labels"]


class MacroF1:
    """The mean over labels of F1 = 2·hits / (found + own), over those that any text has or is given."""

    def __init__(self, labels: int) -> None:
        self._labels = labels
        self.reset()

    def reset(self) -> None:
        self._hits, self._found, self._own = (
            torch.zeros(self._labels, dtype=torch.float64) for _ in range(3)
        )

    def update(self, found: Tensor, own: Tensor) -> None:
        for count, seen in ((self._hits, found[found == own]), (self._found, found), (self._own, own)):
            count += torch.bincount(seen, minlength=self._labels)

    def compute(self) -> float:
        either = self._found + self._own
        return float((2 * self._hits[either > 0] / either[either > 0]).mean())


@dataclass(frozen=True, slots=True)
class TextRows:
    """How texts become rows of tokens: by a tokenizer with BERT's special tokens, or byte by byte."""

    context: int
    tokenizer: TextTokenizer | None = None

    def __post_init__(self) -> None:
        if self.context < 3:
            raise UserError(f"context is {self.context}; it must be at least 3, for [CLS], a token and [SEP]")
        if self.tokenizer is not None and self.tokenizer.require_id("[PAD]") != PADDING:
            raise UserError(
                f"the tokenizer has [PAD] as token {self.tokenizer.id_of('[PAD]')}; it must be {PADDING}"
            )

    @property
    def vocabulary(self) -> int:
        return FIRST_BYTE + VOCABULARY if self.tokenizer is None else self.tokenizer.vocabulary_size

    def of(self, texts: Sequence[str]) -> Tensor:
        """One row for each, as long as the longest needs."""
        first, last, room = BEGIN, END, self.context - 2
        if self.tokenizer is None:
            found = [[FIRST_BYTE + byte for byte in encode(text)[:room].tolist()] for text in texts]
        else:
            first, last = self.tokenizer.require_id("[CLS]"), self.tokenizer.require_id("[SEP]")
            found = [ids[:room] for ids in self.tokenizer.encode(texts)]
        rows = torch.full((len(texts), 2 + max(map(len, found))), PADDING, dtype=torch.int32)
        for row, ids in zip(rows, found, strict=True):
            row[: len(ids) + 2] = torch.tensor([first, *ids, last])
        return rows
