"""Sizes of the models of text, by the names under which they are known, and the options that choose them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from manyhands.errors import UserError
from manyhands.task import TextWork
from manyhands.workloads.language.huggingface import (
    CheckpointLayout,
    HasLayout,
    fill,
    read_sizes,
    require_sizes,
)
from manyhands.workloads.language.lora import Lora, add_adapters, read_adapter, read_lora
from manyhands.workloads.language.next_token import TextOptions
from manyhands.workloads.task_options import check_options, option
from manyhands.workloads.text.token_files import TokenFiles
from manyhands.workloads.text.tokenizer import TextTokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSizes:
    """What the number of parameters of a transformer follows from; its feed-forward layers are 4·width wide."""

    layers: int
    width: int
    heads: int
    context: int
    vocabulary: int

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise UserError(f"heads is {self.heads}; it must divide width, which is {self.width}")


def require_positions(length: int, context: int) -> None:
    """UserError where a row of `length` tokens is longer than the positions that a model has."""
    if length > context:
        raise UserError(f"a row of {length} tokens is longer than context={context}; give shorter rows")


def _sizes(layers: int, width: int, heads: int, context: int, vocabulary: int) -> ModelSizes:
    return ModelSizes(layers=layers, width=width, heads=heads, context=context, vocabulary=vocabulary)


# Radford et al. 2019, table 2; tiny is for bytes.
GPT_PRESETS = {
    "tiny": _sizes(2, 128, 4, 64, 256),
    "gpt2": _sizes(12, 768, 12, 1024, 50257),
    "gpt2-medium": _sizes(24, 1024, 16, 1024, 50257),
    "gpt2-large": _sizes(36, 1280, 20, 1024, 50257),
    "gpt2-xl": _sizes(48, 1600, 25, 1024, 50257),
}
# Devlin et al. 2018, section 3; tiny is for bytes and the four special tokens of `bert`.
BERT_PRESETS = {
    "tiny": _sizes(2, 128, 4, 64, 260),
    "bert-base": _sizes(12, 768, 12, 512, 30522),
    "bert-large": _sizes(24, 1024, 16, 512, 30522),
}


class UsualRate(NamedTuple):
    """AdamW's rate for a batch of some ten thousand tokens, and the steps in which it rises to that."""

    learning_rate: float
    warm_up: int


# Brown et al. 2020, table 2.1, by size. Twelve layers of BERT stayed at the frequencies of the tokens with 3e-4 and 94
# steps of warm-up; measured by benchmarks/curves.py.
GPT_RATES = {
    "tiny": UsualRate(1e-3, 0),
    "gpt2": UsualRate(6e-4, 300),
    "gpt2-medium": UsualRate(3e-4, 300),
    "gpt2-large": UsualRate(2.5e-4, 300),
    "gpt2-xl": UsualRate(2e-4, 300),
}
BERT_RATES = {
    "tiny": UsualRate(1e-3, 0),
    "bert-base": UsualRate(2e-4, 300),
    "bert-large": UsualRate(1e-4, 300),
}
_OF_CHECKPOINT = UsualRate(5e-5, 0)  # Devlin et al. 2018, appendix A.3: of all weights

Model = TypeVar("Model", bound=nn.Module)
_PRESET = "the preset's"
_MULTIPLE = 64  # of rows in an embedding: what the matrix units of GPUs take at once
_COUNTED = "6 FLOP a token for each parameter but the positions, and 12·layers·width·tokens of a row"
_LAYERS = "c_attn for gpt; query, value for bert"


@dataclass(frozen=True, kw_only=True, slots=True)
class SizedOptions(TextOptions):
    """Options of a model whose sizes are those of a preset or a checkpoint; each may be given instead."""

    presets: ClassVar[Mapping[str, ModelSizes]]
    rates: ClassVar[Mapping[str, UsualRate]]
    layout: ClassVar[CheckpointLayout]
    of_tokens: ClassVar[tuple[str, ...]] = ("length", "rows", "sentences")  # how a folder of tokens is read

    preset: str = option("tiny", "sizes by name; each may be given instead")
    learning_rate: float = option(
        None, "learning rate of AdamW", above=0, shown="the preset's; 5e-5 for all weights of --init"
    )
    warm_up: int = option(
        None, "steps in which the learning rate rises to its value", at_least=0, shown=_PRESET
    )
    context: int | None = option(None, "context length in tokens", at_least=1, shown=_PRESET)
    layers: int | None = option(None, "transformer blocks", at_least=1, at_most=1000, shown=_PRESET)
    width: int | None = option(None, "features per position", at_least=1, shown=_PRESET)
    heads: int | None = option(None, "attention heads; must divide the width", at_least=1, shown=_PRESET)
    vocabulary: int | None = option(
        None,
        "tokens that the model knows",
        at_least=1,
        shown="the preset's, or that of --data, rounded up to 64",
    )
    dropout: float = option(0.0, "probability of dropout", at_least=0, below=1)
    init: Path | None = option(
        None, "start from this directory: config.json and model.safetensors as Hugging Face writes them"
    )
    data: Path | None = option(None, "learn from this folder of tokens, written by `manyhands tokenize`")
    length: int | None = option(None, "tokens in a row of --data", at_least=1, shown="the context")
    lora: int | None = option(None, "keep the weights of --init, and learn adapters of this rank", at_least=1)
    lora_alpha: float | None = option(
        None, "adapters are scaled by alpha/rank", above=0, shown="twice the rank"
    )
    lora_layers: tuple[str, ...] = option((), "layers that get an adapter", shown=_LAYERS)
    adapter: Path | None = option(None, "start with the adapters in this directory, as peft writes them")

    def __post_init__(self) -> None:
        """Fill in the sizes that were not given, so that a run records all of them."""
        check_options(self)
        self._require_tokens()
        given = {name: value for name, value in self._given().items() if value is not None}
        if self.init is not None and len(given) < len(fields(ModelSizes)):
            found = read_sizes(self.init, self.layout)
            require_sizes(self.init, found, given)
        else:
            found = asdict(self.presets[self.preset])
            if "vocabulary" not in given:
                found["vocabulary"] = self._vocabulary_of_data() or found["vocabulary"]
        for name, value in {**found, **given}.items():
            object.__setattr__(self, name, value)
        ModelSizes(**{**found, **given})  # checked against each other
        self._fill_in_lora()
        usual = self.rates[self.preset] if self.init is None or self.lora is not None else _OF_CHECKPOINT
        for name, value in usual._asdict().items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def schedule(self) -> Callable[[Optimizer], LRScheduler] | None:
        """The learning rate's schedule: it rises from a part of its value, and stays."""
        return partial(_rising, steps=self.warm_up) if self.warm_up else None

    @property
    def reads_tokens(self) -> bool:
        return self.data is not None

    def _require_tokens(self) -> None:
        for one in () if self.reads_tokens else fields(self):
            value = getattr(self, one.name)
            if one.name in self.of_tokens and value != one.default:
                raise UserError(
                    f"{one.name} is {value}, which says how tokens are read; give a folder of `manyhands tokenize` as "
                    f"data, or leave {one.name} out"
                )

    def _fill_in_lora(self) -> None:
        if self.lora is None and self.adapter is not None:
            found = read_lora(self.adapter)
            for name, value in (
                ("lora", found.rank),
                ("lora_alpha", found.alpha),
                ("lora_layers", found.layers),
            ):
                object.__setattr__(self, name, value)
        if self.lora is None:
            if self.lora_alpha is not None or self.lora_layers:
                raise UserError(
                    "lora_alpha and lora_layers are of adapters; give their rank as well, such as lora=8"
                )
            return
        if self.init is None:
            raise UserError(
                f"lora is {self.lora}, but init is not given; give the checkpoint whose weights are kept"
            )
        if self.lora > self.sizes.width:
            raise UserError(f"lora is {self.lora}; it must be at most the width, {self.sizes.width}")
        object.__setattr__(self, "lora_alpha", self.lora_alpha or 2.0 * self.lora)
        object.__setattr__(self, "lora_layers", self.lora_layers or self.layout.adapted)

    def text_work(self, build: Callable[[], nn.Module]) -> TextWork | None:
        """What a row costs a model that learns all its weights, as PaLM counts (Chowdhery et al. 2022, appendix B)."""
        if self.lora is not None:
            return None
        with torch.device("meta"):
            parameters = sum(one.numel() for one in build().parameters())
        sizes, length = self.sizes, self.length or self.sizes.context
        each = 6 * (parameters - sizes.context * sizes.width) + 12 * sizes.layers * sizes.width * length
        return TextWork(tokens=length, flops=each * length, formula=_COUNTED)

    def adapted(self, model: Model) -> Model:
        """A model of these sizes, with the adapters that are asked for."""
        if self.lora is not None and self.lora_alpha is not None:
            lora = Lora(rank=self.lora, alpha=self.lora_alpha, layers=self.lora_layers)
            add_adapters(model, lora, _layout_of(model).optional)
        return model

    def started(self, model: Model) -> Model:
        """The same with the weights to begin with; UserError where a file does not fit."""
        if self.init is not None:
            fill(model, self.init, _layout_of(model), asdict(self.sizes))
        if self.adapter is not None:
            read_adapter(model, self.adapter)
        return model

    @property
    def sizes(self) -> ModelSizes:
        return ModelSizes(**self._given())  # type: ignore[arg-type] # all are given once this was made

    def _vocabulary_of_data(self) -> int | None:
        if self.data is None:
            return None
        return padded_vocabulary(TokenFiles(self.data).tokenizer)

    def _given(self) -> dict[str, int | None]:
        return {field.name: getattr(self, field.name) for field in fields(ModelSizes)}


def _rising(optimizer: Optimizer, steps: int) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / steps))


def padded_vocabulary(tokenizer: TextTokenizer) -> int:
    """How many tokens a model has for those of a tokenizer."""
    return -(-tokenizer.vocabulary_size // _MULTIPLE) * _MULTIPLE


def _layout_of(model: nn.Module) -> CheckpointLayout:
    assert isinstance(model, HasLayout), "the tasks with these options have such models"
    return model.layout
