"""GPT-2 (Radford et al. 2019), a decoder-only transformer that predicts the next token; by default of bytes.

Blocks are pre-norm: x + attention(norm(x)), then x + feed-forward(norm(x)). Positions are learned, and the output
layer shares the weights of the embedding. Modules have the names of `GPT2LMHeadModel` in Hugging Face's transformers,
whose checkpoints are read and written; see huggingface.py. Options reach from the default, which learns visibly in a
minute on two cores, to preset=gpt2-xl: 1.6 billion parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.data.file_reader import VOCABULARY
from manyhands.engine.chain import ChainFunction
from manyhands.task import Task
from manyhands.workloads.builtin_task import BuiltinTask
from manyhands.workloads.language.huggingface import CheckpointLayout
from manyhands.workloads.language.key_values import CacheStep, LayerCache
from manyhands.workloads.language.next_token import Perplexity, next_byte_loss, text_task, token_losses
from manyhands.workloads.language.presets import (
    GPT_PRESETS,
    GPT_RATES,
    ModelSizes,
    SizedOptions,
    UsualRate,
    require_positions,
)
from manyhands.workloads.language.residual import residual_stream
from manyhands.workloads.language.token_data import token_parts
from manyhands.workloads.task_options import option
from manyhands.workloads.text.masking import IGNORED
from manyhands.workloads.text.packing import TokenWindows, document_mask, losses_of_rows, next_tokens

GPT2_LAYOUT = CheckpointLayout(
    model_type="gpt2",
    sizes={
        "layers": "n_layer",
        "width": "n_embd",
        "heads": "n_head",
        "context": "n_positions",
        "vocabulary": "vocab_size",
    },
    feed_forward="n_inner",
    fixed={
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
    },
    renamed=((r"^(?=(wte|wpe|h|ln_f)\.)", "transformer."),),  # of a file without the head
    ignored=r"\.attn\.(bias|masked_bias)$",
    adapted=("c_attn",),
    peft_config={"task_type": "CAUSAL_LM", "fan_in_fan_out": True},
    transposed=r"\.(c_attn|c_proj|c_fc)\.weight$",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class GPTOptions(SizedOptions):
    """What may be chosen about `gpt`."""

    presets: ClassVar[Mapping[str, ModelSizes]] = GPT_PRESETS
    rates: ClassVar[Mapping[str, UsualRate]] = GPT_RATES
    layout: ClassVar[CheckpointLayout] = GPT2_LAYOUT

    preset: str = option("tiny", "sizes by name; each may be given instead", choices=tuple(GPT_PRESETS))
    tied: bool = option(True, "share the weights of embedding and output layer")
    rows: str = option(
        "packed",
        "of --data: packed, attention reaches over the ends of documents; or documents: it stays within each",
        choices=("packed", "documents"),
    )


def gpt(options: GPTOptions | None = None) -> Task:
    """Predict the next token of `data`, or the next byte of a text file or of the Python standard library."""
    options = options or GPTOptions()
    if options.data is not None:
        within = options.rows == "documents"
        parts = token_parts(options, partial(TokenWindows, within_documents=within))
        task = Task(
            name="gpt",
            model=partial(_started, options),
            loss=next_byte_loss,
            data=parts.training,
            optimizer=partial(torch.optim.AdamW, lr=options.learning_rate),
            scheduler=options.schedule,
            batch_size=options.batch_size,
            evaluation=parts.evaluation,
            metrics={"perplexity": (Perplexity(), token_losses)},
            files=parts.files,
            text_work=partial(options.text_work, partial(_model, options)),
        )
        if not within:
            return task
        rows: Any = parts.training.dataset
        weights = rows.num_targets[: len(parts.training)]
        metrics = {"perplexity": (Perplexity(), document_token_losses)}
        return replace(task, loss=document_losses, weights=weights, metrics=metrics)
    task = text_task("gpt", partial(_started, options), options, options.sizes.context)
    return replace(
        task, scheduler=options.schedule, text_work=partial(options.text_work, partial(_model, options))
    )


def document_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Mean cross entropy of each row; a document's first token is predicted by nothing."""
    return losses_of_rows(*_document_scores(model, batch))


def document_token_losses(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The total loss of a batch, and how many tokens it is of."""
    scores, targets = _document_scores(model, batch)
    total = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return total.double(), (targets != IGNORED).sum()


def _document_scores(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    tokens, documents, positions = (batch[name][:, :-1] for name in ("tokens", "documents", "positions"))
    seen = document_mask(documents)
    return model(tokens, seen=seen, positions=positions), next_tokens(batch)


def _model(options: GPTOptions) -> GPT:
    return options.adapted(GPT(**asdict(options.sizes), tied=options.tied, dropout=options.dropout))


def _started(options: GPTOptions) -> GPT:
    return options.started(_model(options))


GPT_TASK = BuiltinTask(
    name="gpt",
    help="the next byte of a text, a transformer with the architecture of GPT-2",
    options_type=GPTOptions,
    make=gpt,
    model=_model,
    steps=500,
)


class GPT(nn.Module):
    """Scores of the next token at every position; position t sees tokens 0..t only."""

    layout: ClassVar[CheckpointLayout] = GPT2_LAYOUT

    def __init__(
        self,
        *,
        context: int,
        layers: int,
        width: int,
        heads: int,
        tied: bool = True,
        vocabulary: int = VOCABULARY,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.sizes = ModelSizes(
            layers=layers, width=width, heads=heads, context=context, vocabulary=vocabulary
        )
        self.tied, self.dropout = tied, dropout
        self.transformer = _Body(self.sizes, dropout)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)
        # Normal weights of 0.02, as in GPT-2; those that write into the residual stream over √(2·layers).
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                writes_residual = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * layers) if writes_residual else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
        if tied:
            self.lm_head.weight = self.transformer.wte.weight

    def config(self) -> Mapping[str, Any]:
        """What its checkpoint's config.json says besides the layout's own settings."""
        dropouts = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), self.dropout)
        return {
            "architectures": ["GPT2LMHeadModel"],
            **asdict(self.sizes),
            **dropouts,
            "tie_word_embeddings": self.tied,
        }

    def chain(self) -> Sequence[nn.Module]:
        body = self.transformer
        embedding = _Embedding(_embedded, wte=body.wte, wpe=body.wpe)
        after = [body.drop] if self.dropout else []
        return [embedding, *after, *body.h, body.ln_f, self.lm_head]

    def tensor_plan(self) -> dict[str, str]:
        """How `tensor` slices it: the vocabulary here, the rest as each block says."""
        return {"transformer.wte": "vocabulary", "lm_head": "vocabulary"}

    def forward(
        self,
        tokens: Tensor,
        step: CacheStep | None = None,
        seen: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """(batch, time) tokens to (batch, time, vocabulary) scores; in a cache's step, those of the last tokens.

        Where rows hold several documents, `seen` says which tokens attention may look at, as `attn_mask` of
        `scaled_dot_product_attention`, and `positions` (batch, time) where each token is in its document.
        """
        x = self.transformer(tokens, step, seen, positions)
        if step is not None:
            x = x[torch.arange(len(x), device=x.device), step.last]
        scores: Tensor = self.lm_head(x)
        return scores


class _Body(nn.Module):
    """All of it but the output layer."""

    def __init__(self, sizes: ModelSizes, dropout: float) -> None:
        super().__init__()
        self.wte = nn.Embedding(sizes.vocabulary, sizes.width)
        self.wpe = nn.Embedding(sizes.context, sizes.width)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(
            GPTBlock(width=sizes.width, heads=sizes.heads, dropout=dropout) for _ in range(sizes.layers)
        )
        self.ln_f = nn.LayerNorm(sizes.width)

    def forward(
        self, tokens: Tensor, step: CacheStep | None, seen: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        if step is None:
            x: Tensor = self.drop(_embedded(tokens, positions, wte=self.wte, wpe=self.wpe))
            for block in self.h:
                x = block(x, seen=seen)
        else:
            x = residual_stream(self.wte(tokens) + self.wpe(step.places))
            for number, block in enumerate(self.h):
                x = block(x, step.layer(number))
        normed: Tensor = self.ln_f(x)
        return normed


class _Embedding(ChainFunction):
    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        return self.function(x, positions, **self._modules)


def _embedded(x: Tensor, positions: Tensor | None, wte: nn.Embedding, wpe: nn.Embedding) -> Tensor:
    require_positions(x.shape[1], wpe.num_embeddings)
    return residual_stream(wte(x) + (wpe.weight[: x.shape[1]] if positions is None else wpe(positions)))


class GPTBlock(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to the residual stream."""

    def __init__(self, *, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = _Attention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = _FeedForward(width, dropout)

    def tensor_plan(self) -> dict[str, str]:
        """How `tensor` slices it: some heads, and some features of the feed-forward layer, for each worker."""
        return {
            "attn.c_attn": f"heads={self.attn.heads} fused=3",
            "attn.c_proj": f"row heads={self.attn.heads}",
            "mlp.c_fc": "column",
            "mlp.c_proj": "row",
        }

    def forward(self, x: Tensor, cache: LayerCache | None = None, seen: Tensor | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache, seen)
        fed: Tensor = x + self.mlp(self.ln_2(x))
        return fed


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: LayerCache | None, seen: Tensor | None) -> Tensor:
        batch, length, _ = x.shape
        by_head = self.c_attn(x).view(batch, length, 3, -1, self.head_width)  # a slice has some of the heads
        query, key, value = by_head.permute(2, 0, 3, 1, 4)
        if cache is None:
            dropped = self.dropout.p if self.training else 0.0
            heads = F.scaled_dot_product_attention(
                query, key, value, attn_mask=seen, dropout_p=dropped, is_causal=seen is None
            )
        else:
            heads = cache.attend(query, key, value)
        mixed: Tensor = self.dropout(self.c_proj(heads.transpose(1, 2).reshape(batch, length, -1)))
        return mixed


class _FeedForward(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        fed: Tensor = self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))
        return fed
