"""GPT-2 (Radford et al. 2019), a decoder-only transformer that predicts the next token; by default of bytes.

Blocks are pre-norm: x + attention(norm(x)), then x + feed-forward(norm(x)). Positions are learned, and the output
layer shares the weights of the embedding. Modules have the names of `GPT2LMHeadModel` in Hugging Face's transformers,
whose checkpoints are read and written; see huggingface.py. Options reach from the default, which learns visibly in a
minute on two cores, to preset=gpt2-xl: 1.6 billion parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
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
from manyhands.workloads.language.presets import GPT_PRESETS, ModelSizes, SizedOptions, require_positions
from manyhands.workloads.language.residual import residual_stream
from manyhands.workloads.language.token_data import token_parts
from manyhands.workloads.task_options import option
from manyhands.workloads.text.packing import TokenWindows

__all__ = ["GPT", "GPT_TASK", "GPTBlock", "GPTOptions", "gpt"]

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
    layout: ClassVar[CheckpointLayout] = GPT2_LAYOUT

    preset: str = option("tiny", "sizes by name; each may be given instead", choices=tuple(GPT_PRESETS))
    tied: bool = option(True, "share the weights of embedding and output layer")


def gpt(options: GPTOptions | None = None) -> Task:
    """Predict the next token of `data`, or the next byte of a text file or of the Python standard library."""
    options = options or GPTOptions()
    if options.data is not None:
        parts = token_parts(options, TokenWindows)
        return Task(
            name="gpt",
            model=partial(_started, options),
            loss=next_byte_loss,
            data=parts.training,
            optimizer=partial(torch.optim.AdamW, lr=options.learning_rate),
            batch_size=options.batch_size,
            evaluation=parts.evaluation,
            metrics={"perplexity": (Perplexity(), token_losses)},
            files=parts.files,
        )
    return text_task("gpt", partial(_started, options), options, options.sizes.context)


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
        embedding = ChainFunction(_embedded, wte=body.wte, wpe=body.wpe)
        after = [body.drop] if self.dropout else []
        return [embedding, *after, *body.h, body.ln_f, self.lm_head]

    def tensor_plan(self) -> dict[str, str]:
        """How `tensor` slices it: the vocabulary here, the rest as each block says."""
        return {"transformer.wte": "vocabulary", "lm_head": "vocabulary"}

    def forward(self, tokens: Tensor, step: CacheStep | None = None) -> Tensor:
        """(batch, time) tokens to (batch, time, vocabulary) scores; in a cache's step, those of the last tokens."""
        x = self.transformer(tokens, step)
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

    def forward(self, tokens: Tensor, step: CacheStep | None = None) -> Tensor:
        if step is None:
            x: Tensor = self.drop(_embedded(tokens, self.wte, self.wpe))
            for block in self.h:
                x = block(x)
        else:
            x = residual_stream(self.wte(tokens) + self.wpe(step.places))
            for number, block in enumerate(self.h):
                x = block(x, step.layer(number))
        normed: Tensor = self.ln_f(x)
        return normed


def _embedded(x: Tensor, wte: nn.Embedding, wpe: nn.Embedding) -> Tensor:
    require_positions(x.shape[1], wpe.num_embeddings)
    return residual_stream(wte(x) + wpe.weight[: x.shape[1]])


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

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        x = x + self.attn(self.ln_1(x), cache)
        fed: Tensor = x + self.mlp(self.ln_2(x))
        return fed


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: LayerCache | None = None) -> Tensor:
        batch, length, _ = x.shape
        by_head = self.c_attn(x).view(batch, length, 3, -1, self.head_width)  # a slice has some of the heads
        query, key, value = by_head.permute(2, 0, 3, 1, 4)
        if cache is None:
            dropped = self.dropout.p if self.training else 0.0
            seen = F.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
        else:
            seen = cache.attend(query, key, value)
        mixed: Tensor = self.dropout(self.c_proj(seen.transpose(1, 2).reshape(batch, length, -1)))
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
