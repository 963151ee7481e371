"""Arrays of a training in files of a temporary folder, which all of its processes map."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import ManyhandsError


def mapped_arrays(folder: str, kinds: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """The arrays by name, each of the type in `kinds`; what is written to them is lost."""
    return {
        name: np.asarray(np.memmap(path, kind, mode="c")) if path.stat().st_size else np.empty(0, kind)
        for name, kind in kinds.items()
        for path in [Path(folder, name)]
    }


def unload(array: NDArray[Any], begin: int, end: int) -> None:
    """Drop these items of a mapped array from memory; they are read from the file again where they are needed."""
    owner: Any = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    first = begin * array.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
    if isinstance(owner, mmap.mmap) and first < end * array.itemsize:
        owner.madvise(mmap.MADV_DONTNEED, first, end * array.itemsize - first)


@contextmanager
def disk_errors(what: str, folder: object) -> Iterator[None]:
    """Turns an OSError of the body, as of a full disk, into a sentence."""
    try:
        yield
    except OSError as error:
        hint = "; free some space, or set TMPDIR to another disk" if error.errno == errno.ENOSPC else ""
        raise ManyhandsError(f"{what} could not be kept in {folder}: {error.strerror}{hint}") from error
