"""Checkpoints as Hugging Face's transformers reads and writes them: a directory of config.json and model.safetensors.

Our modules have the names of theirs. What differs is said by a `CheckpointLayout`: GPT-2 keeps the weights of its
linear layers transposed, and old files have other names. Nothing in the files is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from manyhands.data.store.atomic import write_atomically
from manyhands.data.store.tensorfile import encode_tensors, without_aliases
from manyhands.errors import UserError
from manyhands.workloads.exporting import (
    Export,
    ExportAsked,
    kept_file,
    load,
    recorded_options,
    trained_steps,
)
from manyhands.workloads.language.checkpoint_files import read_json, read_weights
from manyhands.workloads.language.lora import adapted_layers, is_adapter, merged, write_adapter
from manyhands.workloads.text.tokenizer import TOKENIZER_FILE, TextTokenizer, tokenizer_of_json

_CONFIG, _WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointLayout:
    """How the checkpoints of one architecture say what ours says otherwise."""

    model_type: str
    sizes: Mapping[str, str]
    """The name in config.json of each of our sizes."""
    feed_forward: str
    """The name in config.json of the width of the feed-forward layers."""
    fixed: Mapping[str, Any]
    """Settings that our model has in one way only; a config that leaves one out means this."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Names of tensors in older files: (pattern, replacement)."""
    ignored: str = "$."
    """A pattern of tensors that are left out: buffers, and heads that the model does not have."""
    optional: str = "$."
    """A pattern of tensors that a file may lack: those of a head that is trained anew."""
    adapted: tuple[str, ...] = ()
    """The layers to which LoRA gives adapters by default, as peft does."""
    peft_config: Mapping[str, Any] = field(default_factory=dict)
    """What the files of adapters say of the model."""
    transposed: str = "$."
    """A pattern of matrices that the files have transposed."""

    def name(self, written: str) -> str:
        for pattern, replacement in self.renamed:
            written = re.sub(pattern, replacement, written)
        return written

    def as_written(self, name: str, value: Tensor) -> Tensor:
        """Our tensor as the files have it, and theirs as ours."""
        return value.T if value.ndim == 2 and re.search(self.transposed, name) else value


@runtime_checkable
class HasLayout(Protocol):
    """A model that can be written as a checkpoint."""

    layout: CheckpointLayout

    def config(self) -> Mapping[str, Any]:
        """What its config.json says besides the layout's own settings: architectures, sizes by our names."""


def read_sizes(folder: Path, layout: CheckpointLayout) -> dict[str, int]:
    """Our sizes of the model whose checkpoint `folder` is; UserError where it is of another architecture."""
    file = folder / _CONFIG
    config = read_config(folder)
    for key, wanted in {"model_type": layout.model_type, **layout.fixed}.items():
        if config.get(key, wanted) != wanted:
            raise UserError(
                f"{file}: {key} is {config[key]!r}, but this task's model has {wanted!r}; give another"
            )
    found: dict[str, int] = {}
    for name, key in layout.sizes.items():
        value = config.get(key)
        if type(value) is not int or not 0 < value < 1 << 31:
            raise UserError(f"{file}: {key} is {value!r}; it must be an integer above 0")
        found[name] = value
    wide = 4 * found["width"]
    if config.get(layout.feed_forward) not in (None, wide):
        raise UserError(
            f"{file}: {layout.feed_forward} is {config[layout.feed_forward]!r}, but this task's model has four times "
            f"the width, {wide}; give another"
        )
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """The content of its config.json; UserError where there is none."""
    return read_json(folder / _CONFIG, f"a directory with {_CONFIG} and {_WEIGHTS}")


def require_sizes(folder: Path, found: Mapping[str, int], wanted: Mapping[str, int]) -> None:
    """UserError where the checkpoint in `folder` has another size than is wanted."""
    for name, value in wanted.items():
        if found[name] != value:
            raise UserError(
                f"{name} is {value}, but the checkpoint {folder} has {found[name]}; leave {name} out"
            )


def fill(model: nn.Module, folder: Path, layout: CheckpointLayout, sizes: Mapping[str, int]) -> None:
    """Copy the weights of a checkpoint into the model; UserError names what does not fit."""
    require_sizes(folder, read_sizes(folder, layout), sizes)
    file = folder / _WEIGHTS
    read = read_weights(file, "a directory that transformers wrote, in one file")
    tensors = {layout.name(name): value for name, value in read.items()}
    wanted = {
        name: one for name, one in model.named_parameters(remove_duplicate=False) if not is_adapter(name)
    }
    for name, value in tensors.items():
        if name not in wanted:
            if re.search(layout.ignored, name):
                continue
            raise UserError(
                f"{file} has a tensor {name}, which this task's model does not have; give another"
            )
        mine, theirs = tuple(layout.as_written(name, wanted[name]).shape), tuple(value.shape)
        if mine != theirs:
            raise UserError(
                f"{file}: tensor {name} has shape {theirs}, but the model needs {mine}; give another"
            )
    given = {id(wanted[name]) for name in tensors if name in wanted}
    needed = ((name, one) for name, one in wanted.items() if not re.search(layout.optional, name))
    lacking = next((name for name, parameter in needed if id(parameter) not in given), None)
    if lacking is not None:
        raise UserError(f"{file} has no tensor {lacking}, which this task's model needs; give another")
    with torch.no_grad():
        for name, value in tensors.items():
            if name in wanted:
                wanted[name].copy_(layout.as_written(name, value))


def write_checkpoint(model: nn.Module, folder: Path, tokenizer: TextTokenizer | None = None) -> Path:
    """Write the directory that `transformers` reads with `from_pretrained(folder)`; returns the file of the weights.

    With `tokenizer` it reads that, too.
    """
    assert isinstance(model, HasLayout)
    layout, config = model.layout, dict(model.config())
    sizes = {layout.sizes[name]: config.pop(name) for name in layout.sizes}
    wide = {layout.feed_forward: 4 * sizes[layout.sizes["width"]]}
    text = {"model_type": layout.model_type, **config, **sizes, **wide, **layout.fixed, "dtype": "float32"}
    files = {} if tokenizer is None else tokenizer.as_pretrained(sizes[layout.sizes["context"]])
    if tokenizer is not None and tokenizer.end_id is not None:
        text |= dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.end_id)
    kept, _ = without_aliases(merged(model))
    tensors = {name: layout.as_written(name, value).float() for name, value in kept.items()}
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / _WEIGHTS, encode_tensors(tensors))
    write_atomically(folder / _CONFIG, [json.dumps(text, indent=2).encode() + b"\n"])
    for name, content in files.items():
        write_atomically(folder / name, [content.encode()])
    return folder / _WEIGHTS


def export_huggingface(asked: ExportAsked) -> Export:
    """Write the newest weights of a run as such a directory, into `out` or RUN/huggingface."""
    model, _ = _trained(asked, "huggingface")
    definition = kept_file(asked.run, TOKENIZER_FILE)
    tokenizer = None if definition is None else tokenizer_of_json(definition)
    return _exported(asked, write_checkpoint(model, asked.target("huggingface"), tokenizer), model)


def export_adapter(asked: ExportAsked) -> Export:
    """Write the newest adapters of a run as peft has them, into `out` or RUN/adapter."""
    model, layout = _trained(asked, "peft")
    if not any(True for _ in adapted_layers(model)):
        raise UserError(
            f"--format peft: {asked.run} has no adapters; train with --lora, or leave --format out"
        )
    about = {**layout.peft_config, "base_model_name_or_path": recorded_options(asked.run).get("init")}
    return _exported(asked, write_adapter(model, asked.target("adapter"), about), model)


def _trained(asked: ExportAsked, form: str) -> tuple[nn.Module, CheckpointLayout]:
    if asked.precision != "fp32" or asked.test is not None:
        raise UserError(f"--format {form} writes single precision: leave --precision and --test out")
    model = load(asked.run, asked.task)
    if not isinstance(model, HasLayout):
        raise UserError(
            f"--format {form}: {type(model).__name__} is no model of transformers; train `gpt` or `bert`, or "
            "leave --format out"
        )
    return model, model.layout


def _exported(asked: ExportAsked, file: Path, model: nn.Module) -> Export:
    return Export(
        path=file.parent,
        precision="fp32",
        steps=trained_steps(asked.run, asked.task),
        num_bytes=file.stat().st_size,
        full_bytes=sum(4 * one.numel() for one in model.parameters()),
    )
