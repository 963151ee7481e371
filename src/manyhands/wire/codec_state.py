"""Serializes codec state, so that one worker can write that of all into a checkpoint.

bytes of the names (u64) · names, types and counts as JSON, filled up to 8 · the tensors, one after the other
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from manyhands.native.dtypes import NAMED
from manyhands.wire.codec import BadBytes

__all__ = ["as_memory", "as_one"]

_WORD = 8


def as_one(memory: Mapping[str, Tensor]) -> Tensor:
    rows = [[name, str(one.dtype).removeprefix("torch."), one.numel()] for name, one in memory.items()]
    head = json.dumps(rows).encode()
    head += b" " * (-len(head) % _WORD)
    parts = [
        torch.tensor([len(head)]).view(torch.uint8),
        torch.frombuffer(bytearray(head), dtype=torch.uint8),
    ]
    for one in memory.values():
        flat = one.contiguous().view(torch.uint8)
        parts += [flat, torch.zeros(-flat.numel() % _WORD, dtype=torch.uint8)]
    return torch.cat(parts)


def as_memory(given: Tensor) -> dict[str, Tensor]:
    """The tensors from the bytes of `as_one`; BadBytes for malformed ones."""
    try:
        end = _WORD + int(given[:_WORD].view(torch.int64).item())
        memory: dict[str, Tensor] = {}
        for name, dtype, count in json.loads(given[_WORD:end].numpy().tobytes()):
            num_bytes = NAMED[dtype].itemsize * count
            memory[name] = given[end : end + num_bytes].clone().view(NAMED[dtype])
            if len(memory[name]) != count:
                raise ValueError(f"{name} is cut short")
            end += num_bytes + -num_bytes % _WORD
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise BadBytes(f"what a codec has kept cannot be read: {error}") from error
    return memory
