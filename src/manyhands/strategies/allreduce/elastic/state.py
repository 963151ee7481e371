"""Transfer of the run's state from a donor to a new member: through memory or over a link, never a disk.

It has the form of a checkpoint: raw tensors (safetensors), and JSON for the rest. A new member continues from it as a
resumed run continues from a checkpoint.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.data.store.checkpoint import Loaded
from manyhands.data.store.state_tree import flatten, unflatten
from manyhands.data.store.tensorfile import encode_tensors, read_tensors
from manyhands.errors import ManyhandsError

__all__ = ["read_state", "restore_buffers", "state_tree", "write_file", "write_state"]

_BUFFERS = "buffers that no checkpoint has"


def state_tree(model: nn.Module, optimizer: Optimizer, step: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state after `step` steps; its tensors are those of the model and the optimizer, not copies."""
    state = model.state_dict()
    passing = {name: buffer for name, buffer in model.named_buffers() if name not in state}
    return {
        "step": step,
        "model": dict(state),
        "optimizer": optimizer.state_dict(),
        "extra": {**extra, _BUFFERS: passing},
    }


def write_state(tensors: int, tree: int, state: Mapping[str, Any]) -> None:
    """Write a `state_tree` into two memory files."""
    flat, meta = flatten(dict(state))
    write_file(tensors, encode_tensors(flat))
    write_file(tree, [json.dumps(meta, allow_nan=False).encode()])


def read_state(tensors: int, tree: int) -> Loaded:
    """Read what `write_state` wrote, in the form that a checkpoint is loaded in."""
    try:
        meta = json.loads(_opened_again(tree).read_bytes())
        return Loaded.of(unflatten(read_tensors(_opened_again(tensors)), meta))
    except (ValueError, KeyError, TypeError) as error:
        raise ManyhandsError(f"the state that another worker left cannot be read: {error}") from error


def _opened_again(descriptor: int) -> Path:
    """Open the same memory with a separate file offset: members that read at once share the descriptor's."""
    return Path(f"/proc/self/fd/{descriptor}")


@torch.no_grad()
def restore_buffers(model: nn.Module, loaded: Loaded) -> None:
    """Load the buffers that a model keeps out of its `state_dict`."""
    buffers = dict(model.named_buffers())
    for name, value in loaded.extra.get(_BUFFERS, {}).items():
        buffers[name].copy_(value)


def write_file(descriptor: int, chunks: Iterable[bytes]) -> None:
    """Overwrite a memory file from its beginning."""
    os.ftruncate(descriptor, 0)
    offset = 0
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            written = os.pwrite(descriptor, rest, offset)
            rest, offset = rest[written:], offset + written
