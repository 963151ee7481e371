"""Tensors as safetensors bytes, a chunk at a time.

The safetensors format is a length, a JSON header and the raw bytes of each tensor; it holds no code. The library's own
writer wants every tensor contiguous, in memory of its own, and copies all of them into one block first. Ours reads any
layout where it lies (views into one shared bucket, two names for one weight), and needs no more memory than one chunk.
Reading is the library's, with its checks of the header.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from manyhands.data.store.atomic import write_atomically
from manyhands.errors import UserError, nearest
from manyhands.native.dtypes import STORED

CHUNK_BYTES = 4 << 20
_METADATA = "__metadata__"


def require_storable(tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if name == _METADATA:
            raise UserError(f"a tensor cannot be named {name!r}: the safetensors header uses that name")
        if not _is_dense(tensor) or tensor.dtype not in STORED:
            kind = "meta tensor" if tensor.is_meta else f"{tensor.layout} tensor of {tensor.dtype}"
            raise UserError(
                f"tensor {name!r} is a {kind}, which a checkpoint does not hold; allowed: dense tensors of "
                f"{', '.join(map(str, STORED))}"
            )


def encode_tensors(tensors: Mapping[str, Tensor], about: Mapping[str, str] | None = None) -> Iterator[bytes]:
    """The bytes of a safetensors file with `about` in its header; UserError names a tensor it cannot hold."""
    require_storable(tensors)
    # The widest items first, as the library does: every tensor is then aligned to its item.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, object] = {_METADATA: {"format": "pt", **(about or {})}}
    offset = 0
    for name in ordered:
        tensor, span = tensors[name], [offset, offset + tensors[name].numel() * tensors[name].element_size()]
        header[name] = {"dtype": STORED[tensor.dtype], "shape": list(tensor.shape), "data_offsets": span}
        offset = span[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield struct.pack("<Q", len(text)) + text
    for name in ordered:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        memory = flat.view(torch.uint8).numpy() if flat.numel() else b""
        for start in range(0, len(memory), CHUNK_BYTES):
            # A copy, because the tensor may lie in memory that other processes write to: the bytes that are hashed
            # must be the bytes that reach the disk.
            yield bytes(memory[start : start + CHUNK_BYTES])


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, each in memory of its own; ValueError says what is wrong with it.

    The library's tensors are views into one mapping of the file; a copy is aligned as a fresh tensor is (so that
    resumed arithmetic takes the same vector paths) and is safe from whatever happens to the file later.
    """
    try:
        mapped = safetensors.torch.load_file(path)
    except (safetensors.SafetensorError, OSError, KeyError) as error:
        raise ValueError(f"is not a safetensors file: {error}") from error
    return {name: tensor.clone() for name, tensor in mapped.items()}


def view_key(tensor: Tensor) -> Hashable | None:
    """Equal for two tensors exactly if they are one piece of memory seen the same way; None without any."""
    if not _is_dense(tensor) or tensor.numel() == 0:
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def without_aliases(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Each tensor once, and for every further name of one (a tied weight) the name it is kept under."""
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[Hashable, str] = {}
    for name, tensor in tensors.items():
        key = view_key(tensor)
        if key is not None and names.setdefault(key, name) != name:
            aliases[name] = names[key]
        else:
            kept[name] = tensor
    return kept, aliases


def first_non_finite(tensors: Mapping[str, Tensor], may_hold_infinity: frozenset[str]) -> str | None:
    """The first name whose tensor holds NaN, or an infinity where it may not, and None where all are good."""
    for name, tensor in tensors.items():
        if tensor.numel() == 0 or not tensor.dtype.is_floating_point:
            continue
        values = tensor.detach()
        if values.element_size() == 1:  # no comparisons for 8-bit floats
            values = values.float()
        # The extremes carry a NaN through, read the memory once and allocate nothing.
        extremes = torch.stack(torch.aminmax(values))
        bad = extremes.isnan() if name in may_hold_infinity else ~extremes.isfinite()
        if bool(bad.any()):
            return name
    return None


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


PRECISIONS: Final = ("fp32", "bf16", "int8")
FORMAT: Final = "export.1"
_FORMAT_KEY: Final = "manyhands"
_BLOCK, _SMALLEST = 64, 256
_SCALES, _LARGEST = "::scales", 127.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exported:
    """The contents of an exported file: weights in single precision again, and their metadata."""

    weights: dict[str, Tensor]
    about: dict[str, str]  # its header: `precision`, `task`, `options`, and what `write_exported` was given


def check_precision(precision: str) -> None:
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
            flat = value.to(torch.float32).reshape(-1)
            blocks = nn.functional.pad(flat, (0, -flat.numel() % _BLOCK)).view(-1, _BLOCK)
            scales = blocks.abs().amax(1) / _LARGEST
            divisors = torch.where(scales > 0, scales, 1.0)
            rounded = torch.round(blocks / divisors[:, None]).clamp_(-_LARGEST, _LARGEST).to(torch.int8)
            written[name] = rounded.view(-1)[: flat.numel()].view(value.shape).clone()
            written[name + _SCALES] = scales
    return written


def widen(written: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `narrow` was given, as far as it was kept; ValueError for what it never wrote."""
    weights: dict[str, Tensor] = {}
    for name, tensor in written.items():
        if name.endswith(_SCALES):
            if name.removesuffix(_SCALES) not in written:
                raise ValueError(f"{name} are scales without a tensor")
            continue
        scales = written.get(name + _SCALES)
        if scales is None:
            weights[name] = tensor.to(torch.float32) if tensor.dtype.is_floating_point else tensor.clone()
            continue
        count = tensor.numel()
        fits = scales.shape == (-(-count // _BLOCK),) and scales.dtype == torch.float32
        if tensor.dtype != torch.int8 or not fits or not bool(torch.isfinite(scales).all()):
            raise ValueError(f"{name} does not match its scales")
        flat = tensor.reshape(-1).to(torch.float32) * scales.repeat_interleave(_BLOCK)[:count]
        weights[name] = flat.view(tensor.shape)
    return weights


def write_exported(
    path: Path, weights: Mapping[str, Tensor], precision: str, about: Mapping[str, str]
) -> None:
    once, tied = without_aliases(weights)
    header = {_FORMAT_KEY: FORMAT, "precision": precision, "tied": json.dumps(tied), **about}
    write_atomically(path, encode_tensors(narrow(once, precision), header))


def read_exported(path: Path) -> Exported:
    try:
        with safe_open(path, framework="pt") as opened:
            header: dict[str, str] = opened.metadata() or {}
            written = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
    except OSError as error:
        raise UserError(f"model {path} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise UserError(f"model {path} is not a safetensors file: {error}") from error
    try:
        if header.get(_FORMAT_KEY) != FORMAT:
            raise ValueError(f"its format is {header.get(_FORMAT_KEY, 'not named')!r}, not {FORMAT!r}")
        weights = widen(written)
        for name, other in json.loads(header.get("tied", "{}")).items():
            weights[name] = weights[other]
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        raise UserError(f"model {path} was not written by `manyhands export`: {error}") from error
    return Exported(weights=weights, about=header)
