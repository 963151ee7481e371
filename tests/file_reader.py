"""What a row of the table of readers is (`file_readers.py`), and a sample of given bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

TEXT = "the cat sat on the mat; the dog, who was no cat, sat by it: éß — 猫 \n".encode() * 20


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One row of the table."""

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], object]
    files: tuple[str, ...] = ("sample",)
    """Patterns of the files to damage, one of which is drawn, and then a file of it."""
    allowed: tuple[type[Exception], ...] = field(default=())
    """Besides ManyhandsError."""
    live: bool = False
    """Whether making the sample takes a real run."""


def written(text: bytes, name: str = "sample") -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(text) and None
