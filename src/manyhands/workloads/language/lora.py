"""LoRA (Hu et al. 2021): the weights of a model stay as they are, and learn a low-rank difference beside some matrices.

    y = W·x + b + alpha/rank · B·(A·x)        A is (rank, in), drawn; B is (out, rank), zeros at first

Only A, B and the parameters of a head that begins anew require gradients: those of no other are exchanged, and no
optimizer keeps a state for the rest. Adapters are read and written as Hugging Face's peft has them: a directory of
adapter_config.json and adapter_model.safetensors. Nothing in the files is executed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.data.store.atomic import write_atomically
from manyhands.data.store.tensorfile import encode_tensors
from manyhands.errors import UserError, nearest
from manyhands.workloads.language.checkpoint_files import read_json, read_weights

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_INSTEAD = "a directory that peft wrote"
_PREFIX = "base_model.model."
_IN_BLOCK = re.compile(r"\.(h|layer)\.\d+\.")
_ADAPTER = re.compile(r"\.lora_[AB]$")
_FIXED = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "lora_bias": False,
    "rank_pattern": {},
    "alpha_pattern": {},
}
"""Settings of which there is one way here; a config that leaves one out means this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    """The adapters of a model."""

    rank: int
    alpha: float
    layers: tuple[str, ...]
    """The last parts of the names of the linear layers that have one."""


class LoraLinear(nn.Linear):
    """A linear layer with an adapter beside it; it takes the parameters of the layer that it stands for."""

    def __init__(self, layer: nn.Linear, lora: Lora) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.scale = lora.alpha / lora.rank
        self.lora_A = nn.Parameter(self.weight.new_empty(lora.rank, self.in_features))
        self.lora_B = nn.Parameter(self.weight.new_zeros(self.out_features, lora.rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def forward(self, input: Tensor) -> Tensor:
        change = F.linear(F.linear(input, self.lora_A), self.lora_B)
        return F.linear(input, self.weight, self.bias) + self.scale * change


def add_adapters(model: nn.Module, lora: Lora, head: str = "$.") -> None:
    """Give the layers of each block their adapters, in place; of the rest, what `head` matches is trained alone."""
    linear = [
        name for name, one in model.named_modules() if isinstance(one, nn.Linear) and _IN_BLOCK.search(name)
    ]
    for layer in lora.layers:
        if not any(_is(name, layer) for name in linear):
            allowed = sorted({name.rpartition(".")[2] for name in linear})
            raise UserError(f"lora_layers has {layer!r}; {nearest(layer, allowed)}")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(re.search(head, name) is not None)
    for name in linear:
        if any(_is(name, layer) for layer in lora.layers):
            parent, _, own = name.rpartition(".")
            found = model.get_submodule(name)
            assert isinstance(found, nn.Linear)
            setattr(model.get_submodule(parent), own, LoraLinear(found, lora))


def _is(name: str, layer: str) -> bool:
    return f".{name}".endswith(f".{layer}")


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is one of an adapter."""
    return _ADAPTER.search(name) is not None


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    return ((name, one) for name, one in model.named_modules() if isinstance(one, LoraLinear))


def merged(model: nn.Module) -> dict[str, Tensor]:
    """The state of the model without adapters that computes the same."""
    state = {name: value for name, value in model.state_dict().items() if not is_adapter(name)}
    for name, layer in adapted_layers(model):
        with torch.no_grad():
            state[f"{name}.weight"] = layer.weight + layer.scale * layer.lora_B @ layer.lora_A
    return state


def write_adapter(model: nn.Module, folder: Path, about: Mapping[str, Any]) -> Path:
    """Write what peft reads with `PeftModel.from_pretrained(base, folder)`; `about` is what its config says besides."""
    layers = dict(adapted_layers(model))
    first = next(iter(layers.values()))
    rank = len(first.lora_A)
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    heads = {name.rpartition(".")[0] for name in trained if not is_adapter(name)}
    config = {
        **_FIXED,
        "r": rank,
        "lora_alpha": first.scale * rank,
        "lora_dropout": 0.0,
        "target_modules": sorted(layers),
        "modules_to_save": sorted(heads) or None,
        "inference_mode": True,
        **about,
    }
    tensors = {_written(name): one.detach().float() for name, one in trained.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / _WEIGHTS, encode_tensors(tensors, {"format": "pt"}))
    write_atomically(folder / _CONFIG, [json.dumps(config, indent=2).encode() + b"\n"])
    return folder / _WEIGHTS


def read_lora(folder: Path) -> Lora:
    """What adapters a directory of peft holds; UserError where they are of another kind."""
    file = folder / _CONFIG
    config = read_json(file, _INSTEAD)
    for key, wanted in _FIXED.items():
        if config.get(key, wanted) not in (wanted, None):
            raise UserError(
                f"{file}: {key} is {config[key]!r}, but only {wanted!r} is supported; give another adapter"
            )
    rank, alpha, layers = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if type(rank) is not int or rank < 1:
        raise UserError(f"{file}: r is {rank!r}; it must be an integer above 0")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha < math.inf:
        raise UserError(f"{file}: lora_alpha is {alpha!r}; it must be a number above 0")
    if not isinstance(layers, list) or not layers or not all(isinstance(one, str) for one in layers):
        raise UserError(f"{file}: target_modules is {layers!r}; it must be a list of names of layers")
    return Lora(rank=rank, alpha=float(alpha), layers=tuple(sorted(layers)))


def read_adapter(model: nn.Module, folder: Path) -> None:
    """Copy the adapters of a directory, and what else it trained, into the model; UserError names what does not fit."""
    file = folder / _WEIGHTS
    tensors, lora = read_weights(file, _INSTEAD), read_lora(folder)
    wanted = {_written(name): one for name, one in model.named_parameters() if one.requires_grad}
    for name, value in tensors.items():
        if name not in wanted:
            raise UserError(
                f"{file} has a tensor {name}, which this task does not train; give another adapter"
            )
        mine, theirs = tuple(wanted[name].shape), tuple(value.shape)
        if mine != theirs:
            raise UserError(
                f"{file}: tensor {name} has shape {theirs}, but the model needs {mine}; give another"
            )
    lacking = next((name for name in wanted if name not in tensors), None)
    if lacking is not None:
        raise UserError(f"{file} has no tensor {lacking}, which this task trains; give another adapter")
    if any(layer.scale != lora.alpha / lora.rank for _, layer in adapted_layers(model)):
        raise UserError(f"{folder}: lora_alpha is {lora.alpha:g} there; leave lora_alpha out")
    with torch.no_grad():
        for name, value in tensors.items():
            wanted[name].copy_(value)


def _written(name: str) -> str:
    return _PREFIX + (f"{name}.weight" if is_adapter(name) else name)
