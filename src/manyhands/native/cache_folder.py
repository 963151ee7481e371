"""Where compiled code is cached: in a folder that only this user can write, as loading code is running it."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from manyhands.native.sources import digest_of

__all__ = ["cache_folder", "folder_of"]

_OLD_S = 60 * 24 * 3600.0  # how long the code of sources that nobody runs is kept


@cache
def cache_folder() -> Path | None:
    """The first place that works: NUMBA_CACHE_DIR, the user's folder for caches, the folder for temporary files.

    None where nothing can be written: kernels are then compiled in every process.
    """
    for place in _places():
        if own_folder(place):
            return place
    return None


def own_folder(path: Path) -> bool:
    """Make a folder that is this user's alone to write to; whether it is there now, and can be written to."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.lstat()
    except OSError:
        return False
    others = stat.S_IWGRP | stat.S_IWOTH
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & others
    return mine and os.access(path, os.W_OK | os.X_OK)


def folder_of(file: Path) -> Path | None:
    """The folder for the compiled code of the module in `file`, as its sources are now."""
    root = cache_folder()
    if root is None:
        return None
    module = file.stem if file.stem != "__init__" else file.parent.name
    folder = root / f"{file.parent.name}.{module}-{digest_of([file])}"
    if not folder.is_dir():
        _remove_old(root)
        folder.mkdir(mode=0o700, exist_ok=True)
    os.utime(folder)  # it is in use
    return folder


def _places() -> Iterator[Path]:
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        yield Path(given).absolute() / "manyhands"
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(caches):
        yield Path(caches) / "manyhands" / "kernels"
    yield Path(tempfile.gettempdir()) / f"manyhands-kernels-{os.geteuid()}"


def _remove_old(root: Path) -> None:
    """Delete code of sources that were replaced long ago; a process that still runs them compiles again."""
    before = time.time() - _OLD_S
    for one in root.iterdir():
        try:
            if one.stat().st_mtime >= before:
                continue
            if one.is_dir():
                shutil.rmtree(one)
            else:
                one.unlink()
        except OSError:  # another process was first
            continue
