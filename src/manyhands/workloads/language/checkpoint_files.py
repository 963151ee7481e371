"""The files of checkpoints that others wrote: a configuration as JSON, and tensors. Nothing in them is executed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from manyhands.data.store.tensorfile import read_tensors
from manyhands.errors import UserError

_MOST_CONFIG_BYTES = 1 << 20


def read_json(file: Path, instead: str) -> dict[str, Any]:
    """The JSON object in a file; UserError says what to give `instead` of one that has none."""
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_CONFIG_BYTES + 1)
        config = json.loads(content) if len(content) <= _MOST_CONFIG_BYTES else None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}; give {instead}") from error
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise UserError(f"{file} is not a JSON object; give {instead}")
    return config


def read_weights(file: Path, instead: str) -> dict[str, Tensor]:
    if not file.is_file():
        raise UserError(f"{file.parent} has no {file.name}; give {instead}")
    try:
        with _disable_current_modes():  # a file has values also where a model is made without, to estimate it
            return read_tensors(file)
    except ValueError as error:
        raise UserError(f"{file} {error}; give {instead}") from error
