"""Text for language models: a user's file or the Python standard library, as bytes, in windows.

Tokens are the bytes of the UTF-8 text: 256 of them, nothing to fit, every text can be encoded, and the loss
in bits per byte compares between any two models.
"""

from __future__ import annotations

import os
import sysconfig
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyhands.data.file_reader import DataFile
from manyhands.errors import DataError, UserError

__all__ = [
    "VOCABULARY",
    "decode",
    "encode",
    "python_source_text",
    "read_text",
    "standard_library_text",
    "windows",
]

VOCABULARY = 256
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def read_text(path: Path | str, *, limit_bytes: int = 2**30) -> str:
    """The text of a UTF-8 file, plain or gzip; DataError names the offset of the first byte that is none."""
    with DataFile(path) as file:
        content = file.rest(limit_bytes)
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            found = f"not UTF-8 text: {error.reason} (0x{content[error.start]:02x})"
            raise file.error(error.start, found) from error


def standard_library_text(max_bytes: int = 4 * 2**20) -> str:
    """The text of this Python's standard library: the same every time, at most `max_bytes` of UTF-8."""
    return python_source_text(Path(sysconfig.get_path("stdlib")), max_bytes)


def python_source_text(root: Path, max_bytes: int) -> str:
    """The text of the Python files under `root`, at most `max_bytes` of UTF-8.

    Modules come first, then packages folder by folder, each sorted by name; tests and installed packages are
    left out, and so is a file that is not UTF-8.
    """
    if max_bytes < 1:
        raise UserError(f"max_bytes is {max_bytes}; it must be at least 1")
    collected = bytearray()
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        for name in sorted(files):
            with suppress(OSError, UnicodeDecodeError):  # what cannot be read, or is not UTF-8, is left out
                if name.endswith(".py") and len(collected) < max_bytes:
                    collected += Path(folder, name).read_bytes().decode("utf-8").encode()
        if len(collected) >= max_bytes:
            break
    if not collected:
        raise DataError(f"{root} holds no Python source to learn from; give a text file instead")
    # a character cut in two at the bound is dropped
    return collected[:max_bytes].decode("utf-8", errors="ignore")


def encode(text: str) -> NDArray[np.uint8]:
    return np.frombuffer(bytearray(text, "utf-8"), np.uint8)


def decode(tokens: NDArray[np.uint8]) -> str:
    """Tokens as text; bytes that are no UTF-8, as a half-trained model writes them, become U+FFFD."""
    return tokens.astype(np.uint8).tobytes().decode("utf-8", errors="replace")


def windows(tokens: NDArray[np.uint8], context: int) -> NDArray[np.uint8]:
    """Consecutive windows over a text, one sample per row: `context` tokens and the one that follows them.

    Neighbouring rows share one token, so that each token but the first is predicted exactly once in an epoch;
    a tail that does not fill a row is left out. The rows are a view: nothing is copied.
    """
    if context < 1:
        raise UserError(f"context is {context}; it must be at least 1")
    if len(tokens) <= context:
        raise UserError(
            f"a text of {len(tokens)} bytes is too short: context={context} needs at least {context + 1}"
        )
    return np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[::context]
