"""BERT (Devlin et al. 2018), a bidirectional transformer that fills in masked tokens; by default of bytes.

Layers are post-norm: norm(x + attention(x)), then norm(x + feed-forward(x)). The output layer shares the weights of the
embedding. Modules have the names of `BertForMaskedLM` in Hugging Face's transformers, whose checkpoints are read and
written; see huggingface.py.

A row of bytes is [CLS] bytes [SEP]. As in the paper, 15 % of its bytes are targets, of which 80 % become [MASK], 10 %
another byte, and 10 % stay. Masks follow from (seed, epoch, row), so they are new in every epoch and the same for any
workers. Every row has as many targets, so the mean over rows is the mean over tokens, however a batch is split.

With `sentences` a row holds two spans of a text, and a second head says whether they belong together: `PairBERT`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from manyhands.data.batches import BatchedDataset
from manyhands.data.file_reader import VOCABULARY
from manyhands.errors import UserError
from manyhands.task import Task
from manyhands.workloads.language.huggingface import CheckpointLayout
from manyhands.workloads.language.next_token import held_out_text
from manyhands.workloads.language.presets import (
    BERT_PRESETS,
    BERT_RATES,
    ModelSizes,
    SizedOptions,
    UsualRate,
    require_positions,
)
from manyhands.workloads.language.residual import residual_stream
from manyhands.workloads.language.token_data import token_parts
from manyhands.workloads.task_options import option
from manyhands.workloads.text.masking import IGNORED, Masking
from manyhands.workloads.text.packing import MaskedDocuments, MaskedWindows, losses_of_rows, tensors
from manyhands.workloads.text.span_pairs import SpanPairs

BERT_LAYOUT = CheckpointLayout(
    model_type="bert",
    sizes={
        "layers": "num_hidden_layers",
        "width": "hidden_size",
        "heads": "num_attention_heads",
        "context": "max_position_embeddings",
        "vocabulary": "vocab_size",
    },
    feed_forward="intermediate_size",
    fixed={
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "is_decoder": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    renamed=(
        (r"^(?=(embeddings|encoder|pooler)\.)", "bert."),  # of a file without heads
        (r"LayerNorm\.gamma$", "LayerNorm.weight"),  # of files from TensorFlow
        (r"LayerNorm\.beta$", "LayerNorm.bias"),
        (r"^cls\.predictions\.bias$", "cls.predictions.decoder.bias"),
    ),
    adapted=("query", "value"),
    ignored=r"^bert\.pooler\.|^cls\.seq_relationship\.|\.position_ids$",
)

PAIR_LAYOUT = replace(
    BERT_LAYOUT, ignored=r"\.position_ids$", optional=r"^bert\.pooler\.|^cls\.seq_relationship\."
)

PADDING, BEGIN, END, MASK = range(4)  # [PAD], [CLS], [SEP], [MASK]; byte b is token FIRST_BYTE + b
FIRST_BYTE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class BertOptions(SizedOptions):
    """What may be chosen about `bert`."""

    presets: ClassVar[Mapping[str, ModelSizes]] = BERT_PRESETS
    rates: ClassVar[Mapping[str, UsualRate]] = BERT_RATES
    layout: ClassVar[CheckpointLayout] = BERT_LAYOUT

    preset: str = option("tiny", "sizes by name; each may be given instead", choices=tuple(BERT_PRESETS))
    mask_seed: int = option(0, "seed of the masks", at_least=0)
    rows: str = option(
        "packed",
        "of --data: packed, or documents: each alone in its rows, which padding fills",
        choices=("packed", "documents"),
    )
    sentences: str = option(
        "none",
        "of --data: next or order: rows have two spans; is the second the next one, or are they in order?",
        choices=("none", "next", "order"),
    )

    def __post_init__(self) -> None:
        SizedOptions.__post_init__(self)
        if self.sentences != "none" and self.rows != "packed":
            raise UserError(f"sentences is {self.sentences} and rows is {self.rows}; leave one out")


def bert(options: BertOptions | None = None) -> Task:
    """Fill in the masked tokens of `data`, or the masked bytes of a text file or of the Python standard library."""
    options = options or BertOptions()
    sizes, seed = options.sizes, options.mask_seed
    if options.data is not None and options.sentences != "none":
        parts = token_parts(
            options,
            lambda tokens, length: SpanPairs(
                tokens, length, Masking.of(tokens.tokenizer, seed=seed), options.sentences
            ),
            PADDING,
        )
        task = _task(options, *parts)
        return replace(task, loss=pair_loss, metrics={**task.metrics, "sentence_accuracy": sentence_accuracy})
    if options.data is not None:
        kind = MaskedDocuments if options.rows == "documents" else MaskedWindows
        parts = token_parts(
            options,
            lambda tokens, length: kind(tokens, length, Masking.of(tokens.tokenizer, seed=seed)),
            PADDING,
        )
        task, rows = _task(options, *parts), parts.training.dataset
        if isinstance(rows, MaskedDocuments):
            weights = rows.num_targets[: len(parts.training)]
            return replace(task, loss=masked_losses, weights=weights)
        return replace(task, text_work=partial(options.text_work, partial(masked_model, options)))
    if sizes.context < 3 or sizes.vocabulary < FIRST_BYTE + VOCABULARY:
        raise UserError(
            f"context is {sizes.context} and vocabulary {sizes.vocabulary}; rows of bytes need a context of at least "
            f"3 and a vocabulary of at least {FIRST_BYTE + VOCABULARY}"
        )
    training, evaluation = (
        MaskedBytes(text, sizes.context, seed) for text in held_out_text(options, sizes.context)
    )
    task = _task(options, training, evaluation)
    return replace(task, text_work=partial(options.text_work, partial(masked_model, options)))


def _task(
    options: BertOptions, training: Any, evaluation: Any, files: Mapping[str, str] | None = None
) -> Task:
    return Task(
        name="bert",
        model=partial(_started, options),
        loss=masked_loss,
        data=training,
        optimizer=partial(torch.optim.AdamW, lr=options.learning_rate),
        scheduler=options.schedule,
        batch_size=options.batch_size,
        evaluation=evaluation,
        metrics={"masked_accuracy": masked_accuracy},
        files=files or {},
    )


def masked_model(options: BertOptions) -> BERT:
    kind = BERT if options.sentences == "none" else PairBERT
    return options.adapted(kind(**asdict(options.sizes), dropout=options.dropout))


def _started(options: BertOptions) -> BERT:
    return options.started(masked_model(options))


class MaskedBytes(BatchedDataset):
    """Rows of a text, [CLS] bytes [SEP], masked anew in each epoch: as those of `MaskedWindows`."""

    def __init__(self, text: NDArray[np.uint8], length: int, seed: int = 0) -> None:
        count = length - 2
        self._rows = text[: len(text) // count * count].reshape(-1, count)
        self._masking = Masking(
            mask_id=MASK, vocabulary=FIRST_BYTE + VOCABULARY, special_ids=(PADDING, BEGIN, END), seed=seed
        )

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, indices: NDArray[np.int64], epoch: int) -> dict[str, Tensor]:
        rows = np.pad(self._rows[indices].astype(np.int64) + FIRST_BYTE, ((0, 0), (1, 1)))
        rows[:, 0], rows[:, -1] = BEGIN, END
        return tensors(self._masking.mask(rows, indices, epoch)._asdict())


def masked_loss(model: nn.Module, batch: Any) -> Tensor:
    """Mean cross entropy of the targets of a batch."""
    scores = _scores(model, batch)
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def masked_losses(model: nn.Module, batch: Any) -> Tensor:
    """The same for each row of a batch, which weighs as many as it has targets."""
    return losses_of_rows(_scores(model, batch), batch["labels"])


def _scores(model: nn.Module, batch: Any) -> Tensor:
    if "segments" in batch:
        return _both_scores(model, batch)[0]
    masks = {"seen": batch["seen"]} if "seen" in batch else {}
    scores: Tensor = model(batch["tokens"], places=batch["places"], **masks)
    return scores


def _both_scores(model: nn.Module, batch: Any) -> Sequence[Tensor]:
    both: Sequence[Tensor] = model(batch["tokens"], places=batch["places"], segments=batch["segments"])
    return both


def pair_loss(model: nn.Module, batch: Any) -> Tensor:
    """The loss of the targets, and the mean cross entropy of whether the spans of each row are apart."""
    scores, apart = _both_scores(model, batch)
    masked = F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
    return masked + F.cross_entropy(apart, batch["apart"])


def sentence_accuracy(model: nn.Module, batch: Any) -> Tensor:
    """The share of the rows of which it is found whether their spans are apart."""
    share: Tensor = (_both_scores(model, batch)[1].argmax(1) == batch["apart"]).double().mean()
    return share


def masked_accuracy(model: nn.Module, batch: Any) -> Tensor:
    """The share of the targets that are found."""
    found, labels = _scores(model, batch).argmax(-1), batch["labels"]
    share: Tensor = (found == labels).sum().double() / (labels != IGNORED).sum()
    return share


class BERT(nn.Module):
    """Scores of the token at every position, which sees all others."""

    layout: ClassVar[CheckpointLayout] = BERT_LAYOUT

    def __init__(
        self, *, context: int, layers: int, width: int, heads: int, vocabulary: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.sizes = ModelSizes(
            layers=layers, width=width, heads=heads, context=context, vocabulary=vocabulary
        )
        self.dropout = dropout
        self.bert = BertBody(self.sizes, dropout)
        self.cls = _Heads(width, vocabulary)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        words = self.bert.embeddings.word_embeddings
        with torch.no_grad():
            words.weight[PADDING] = 0
        self.cls.predictions.decoder.weight = words.weight

    def config(self) -> Mapping[str, Any]:
        """What its checkpoint's config.json says besides the layout's own settings."""
        dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), self.dropout)
        return {"architectures": ["BertForMaskedLM"], **asdict(self.sizes), **dropouts}

    def chain(self) -> Sequence[nn.Module]:
        return [self.bert.embeddings, *self.bert.encoder.layer, self.cls.predictions]

    def tensor_plan(self) -> dict[str, str]:
        """How `tensor` slices it: the vocabulary here, the rest as each block says."""
        return {"bert.embeddings.word_embeddings": "vocabulary", "cls.predictions.decoder": "vocabulary"}

    def forward(self, tokens: Tensor, places: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        """(batch, time) tokens to scores of the vocabulary at every position, or at some `places` of each row.

        `seen` says which positions attention may look at, as `attn_mask` of `scaled_dot_product_attention`.
        """
        x = self.bert.embeddings(tokens)
        for layer in self.bert.encoder.layer:
            x = layer(x, seen)
        scores: Tensor = self.cls.predictions(x, places)
        return scores


class PairBERT(BERT):
    """The same with the second head of `BertForPreTraining`: whether the spans of a row belong together."""

    layout: ClassVar[CheckpointLayout] = PAIR_LAYOUT

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.bert.pooler = Pooler(self.sizes.width)
        self.cls.seq_relationship = nn.Linear(self.sizes.width, 2)
        for layer in (self.bert.pooler.dense, self.cls.seq_relationship):
            nn.init.normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)

    def config(self) -> Mapping[str, Any]:
        return {**super().config(), "architectures": ["BertForPreTraining"]}

    def chain(self) -> Sequence[nn.Module]:
        heads = _BothHeads(self.cls.predictions, self.bert.pooler, self.cls.seq_relationship)
        return [self.bert.embeddings, *self.bert.encoder.layer, heads]

    def forward(
        self,
        tokens: Tensor,
        places: Tensor | None = None,
        seen: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Any:
        """As above; with `segments`, 0 or 1 for each token, also (batch, 2) scores: together, apart."""
        x = self.bert.embeddings(tokens, segments)
        for layer in self.bert.encoder.layer:
            x = layer(x, seen)
        scores: Tensor = self.cls.predictions(x, places)
        return scores if segments is None else (scores, self.cls.seq_relationship(self.bert.pooler(x)))


class _BothHeads(nn.Module):
    """The end of the chain; its modules stay the model's own."""

    def __init__(self, predictions: nn.Module, pooler: nn.Module, relationship: nn.Module) -> None:
        super().__init__()
        self.predictions, self.pooler, self.relationship = predictions, pooler, relationship

    def forward(self, x: Tensor, places: Tensor | None = None, segments: Tensor | None = None) -> Any:
        scores = self.predictions(x, places)
        return scores if segments is None else (scores, self.relationship(self.pooler(x)))


class Pooler(nn.Module):
    """The first position, [CLS], by a linear layer and tanh: what a whole row is judged by."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        pooled: Tensor = self.dense(x[:, 0]).tanh()
        return pooled


class BertBody(nn.Module):
    """Embeddings and layers, without a head."""

    pooler: Pooler  # where a head reads it

    def __init__(self, sizes: ModelSizes, dropout: float) -> None:
        super().__init__()
        self.embeddings, self.encoder = _Embeddings(sizes, dropout), _Encoder(sizes, dropout)


class _Encoder(nn.Module):
    def __init__(self, sizes: ModelSizes, dropout: float) -> None:
        super().__init__()
        self.layer = nn.ModuleList(
            BertBlock(width=sizes.width, heads=sizes.heads, dropout=dropout) for _ in range(sizes.layers)
        )


class _Heads(nn.Module):
    seq_relationship: nn.Linear  # of PairBERT

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.predictions = _Predictions(width, vocabulary)


class _Embeddings(nn.Module):
    def __init__(self, sizes: ModelSizes, dropout: float) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(sizes.vocabulary, sizes.width, padding_idx=PADDING)
        self.position_embeddings = nn.Embedding(sizes.context, sizes.width)
        self.token_type_embeddings = nn.Embedding(2, sizes.width)
        self.LayerNorm = nn.LayerNorm(sizes.width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> Tensor:
        """Embed rows; without `segments` all of a row is in the first."""
        require_positions(tokens.shape[1], self.position_embeddings.num_embeddings)
        kinds = self.token_type_embeddings
        x = self.word_embeddings(tokens) + (kinds.weight[0] if segments is None else kinds(segments))
        x = x + self.position_embeddings.weight[: tokens.shape[1]]
        return residual_stream(self.dropout(self.LayerNorm(x)))


class BertBlock(nn.Module):
    """Self-attention and a feed-forward layer, each added to its input and then normed."""

    def __init__(self, *, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.attention = _AddedAttention(width, heads, dropout)
        self.intermediate = _Intermediate(width)
        self.output = _AddedOutput(4 * width, width, dropout)

    def tensor_plan(self) -> dict[str, str]:
        """How `tensor` slices it: some heads, and some features of the feed-forward layer, for each worker."""
        by_head = {f"attention.self.{name}": f"heads={self.heads}" for name in ("query", "key", "value")}
        return {
            **by_head,
            "attention.output.dense": f"row heads={self.heads}",
            "intermediate.dense": "column",
            "output.dense": "row",
        }

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """`seen` says which positions attention may look at, as `attn_mask` of `scaled_dot_product_attention`."""
        x = self.attention(x, seen)
        out: Tensor = self.output(self.intermediate(x), x)
        return out


class _AddedAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.self = _SelfAttention(width, heads, dropout)
        self.output = _AddedOutput(width, width, dropout)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        out: Tensor = self.output(self.self(x, seen), x)
        return out


class _Intermediate(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 4 * width)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.dense(x))


class _SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, seen: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            part(x).view(batch, length, -1, self.head_width).transpose(1, 2)  # a slice has some of the heads
            for part in (self.query, self.key, self.value)
        )
        dropped = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, dropout_p=dropped)
        return mixed.transpose(1, 2).reshape(batch, length, -1)


class _AddedOutput(nn.Module):
    def __init__(self, features: int, width: int, dropout: float) -> None:
        super().__init__()
        self.dense = nn.Linear(features, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual_stream(self.LayerNorm(self.dropout(self.dense(x)) + residual))


class _Predictions(nn.Module):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.transform = _Transform(width)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor, places: Tensor | None = None) -> Tensor:
        if places is not None:
            x = x.gather(1, places[..., None].expand(-1, -1, x.shape[-1]))
        scores: Tensor = self.decoder(self.transform(x))
        return scores


class _Transform(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.LayerNorm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(F.gelu(self.dense(x)))
        return normed
