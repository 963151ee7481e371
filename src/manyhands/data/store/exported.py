"""Weights to deploy, in one safetensors file of fewer bits: written and read back.

    fp32   as they are, in single precision
    bf16   two bytes an item: 8 significant bits
    int8   a byte an item, and one scale (float32) for each block of 64: scale = largest magnitude / 127

Numbers that are no floats, and tensors of fewer than 256 items under int8, stay as they are. A weight that has two
names is written once. The header says what the file is; it holds no code.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from manyhands.data.store.atomic import write_atomically
from manyhands.data.store.tensorfile import encode_tensors, without_aliases
from manyhands.errors import UserError, nearest

__all__ = ["PRECISIONS", "Exported", "check_precision", "narrow", "read_exported", "widen", "write_exported"]

PRECISIONS: Final = ("fp32", "bf16", "int8")
FORMAT: Final = "export.1"
_FORMAT_KEY: Final = "manyhands"
_BLOCK: Final = 64
_SMALLEST: Final = 256
_SCALES: Final = "::scales"
_LARGEST: Final = 127.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exported:
    """The contents of an exported file: weights in single precision again, and their metadata."""

    weights: dict[str, Tensor]
    about: dict[str, str]  # its header: `precision`, `task`, `options`, and what `write_exported` was given


def check_precision(precision: str) -> None:
    """Raise the UserError that lists what a precision may be, unless it is one."""
    if precision not in PRECISIONS:
        raise UserError(f"precision={precision!r}: {nearest(precision, PRECISIONS)}")


def narrow(weights: Mapping[str, Tensor], precision: str) -> dict[str, Tensor]:
    check_precision(precision)
    written: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        value = tensor.detach().cpu()
        if not value.dtype.is_floating_point:
            written[name] = value
        elif precision == "bf16":
            written[name] = value.to(torch.bfloat16)
        elif precision == "fp32" or value.numel() < _SMALLEST:
            written[name] = value.to(torch.float32)
        else:
            if not bool(torch.isfinite(value.to(torch.float32)).all()):
                raise UserError(f"{name} is not finite; use fp32")
            written[name], written[name + _SCALES] = _to_int8(value)
    return written


def widen(written: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `narrow` was given, as far as it was kept; ValueError for what it never wrote."""
    weights: dict[str, Tensor] = {}
    for name, tensor in written.items():
        if name.endswith(_SCALES):
            if name.removesuffix(_SCALES) not in written:
                raise ValueError(f"{name} are the scales of nothing")
            continue
        scales = written.get(name + _SCALES)
        if scales is not None:
            weights[name] = _from_int8(name, tensor, scales)
        else:
            weights[name] = tensor.to(torch.float32) if tensor.dtype.is_floating_point else tensor.clone()
    return weights


def write_exported(
    path: Path, weights: Mapping[str, Tensor], precision: str, about: Mapping[str, str]
) -> None:
    once, tied = without_aliases(weights)
    header = {_FORMAT_KEY: FORMAT, "precision": precision, "tied": json.dumps(tied), **about}
    write_atomically(path, encode_tensors(narrow(once, precision), header))


def read_exported(path: Path) -> Exported:
    """Read what `write_exported` wrote; UserError says what is wrong with the file."""
    try:
        with safe_open(path, framework="pt") as opened:
            header: dict[str, str] = opened.metadata() or {}
            written = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except OSError as error:
        raise UserError(f"model {path} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise UserError(f"model {path} is no safetensors file: {error}") from error
    try:
        if header.get(_FORMAT_KEY) != FORMAT:
            raise ValueError(f"its format is {header.get(_FORMAT_KEY, 'not named')!r}, not {FORMAT!r}")
        weights = widen(written)
        for name, other in json.loads(header.get("tied", "{}")).items():
            weights[name] = weights[other]
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"model {path} was not written by `manyhands export`: {error}") from error
    return Exported(weights=weights, about=header)


def _to_int8(value: Tensor) -> tuple[Tensor, Tensor]:
    flat = value.to(torch.float32).reshape(-1)
    blocks = nn.functional.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)
    scales = blocks.abs().amax(1) / _LARGEST
    divisors = torch.where(scales > 0, scales, 1.0)
    whole = torch.round(blocks / divisors[:, None]).clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return whole.view(-1)[: flat.numel()].view(value.shape).clone(), scales


def _from_int8(name: str, whole: Tensor, scales: Tensor) -> Tensor:
    count = whole.numel()
    fits = scales.shape == (-(-count // _BLOCK),) and scales.dtype == torch.float32
    if whole.dtype != torch.int8 or not fits or not bool(torch.isfinite(scales).all()):
        raise ValueError(f"{name} and its scales do not fit each other")
    return (whole.reshape(-1).to(torch.float32) * scales.repeat_interleave(_BLOCK)[:count]).view(whole.shape)
