"""Coordinates of rows, written as they come: as lines of text, or as npy whose length is known at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.lib import format as npy

from manyhands.svd.krylov import Array

__all__ = ["write_lines", "write_npy"]


def write_lines(blocks: Iterator[Array], stream: TextIO) -> None:
    """One line for each row, its numbers with blanks between them."""
    for block in blocks:
        stream.write("".join(" ".join(f"{value:.9g}" for value in row) + "\n" for row in block.tolist()))


def write_npy(blocks: Iterator[Array], path: Path, width: int) -> None:
    """A table of double precision; numpy leaves room in the head for rows to come."""

    def head(rows: int) -> None:
        file.seek(0)
        about = {"descr": "<f8", "fortran_order": False, "shape": (rows, width)}
        npy.write_array_header_1_0(file, about)

    rows = 0
    with path.open("wb") as file:
        head(0)
        begin = file.tell()
        for block in blocks:
            file.write(np.ascontiguousarray(block, "<f8").data)
            rows += len(block)
        head(rows)
        assert file.tell() == begin, "the head has room for any number"
