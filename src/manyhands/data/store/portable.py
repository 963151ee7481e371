"""Nested state with tensors as one byte stream for another process, built on `state_tree`.

    length of the JSON, 8 bytes · JSON · safetensors

Nothing of it is executed when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import safetensors
import safetensors.torch

from manyhands.data.store.state_tree import flatten, unflatten
from manyhands.data.store.tensorfile import encode_tensors
from manyhands.errors import ManyhandsError

__all__ = ["pack_tree", "unpack_tree"]

_LENGTH_BYTES: Final = 8


def pack_tree(tree: Any) -> Iterator[bytes]:
    """The bytes, in chunks that are made as they are asked for; UserError names what cannot be stored."""
    tensors, meta = flatten(tree)
    head = json.dumps(meta, allow_nan=False).encode()
    yield len(head).to_bytes(_LENGTH_BYTES, "little") + head
    yield from encode_tensors(tensors)


def unpack_tree(data: bytes | bytearray) -> Any:
    """What `pack_tree` packed; ManyhandsError for other bytes. Each tensor has memory of its own."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        if not _LENGTH_BYTES <= end <= len(data):
            raise ValueError(f"{end} bytes announced, {len(data)} came")
        meta = json.loads(data[_LENGTH_BYTES:end])
        viewed = safetensors.torch.load(bytes(memoryview(data)[end:]))
        return unflatten({name: tensor.clone() for name, tensor in viewed.items()}, meta)
    except (ValueError, KeyError, TypeError, RecursionError, safetensors.SafetensorError) as error:
        raise ManyhandsError(f"what came is no state of a run: {error}") from error
