"""Where compiled code is cached: in a folder that only this user can write, as loading code is running it.

The folder of a module's code is named by a digest of all that the code was made from. numba's own cache looks at the
file of a function alone, and not at the files whose functions were compiled into it or whose constants it holds. A
module can only reach those that it imports, and they what they import.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the folder of the package

_COMPILERS = ("numba", "llvmlite", "numpy")
_IMPORT = re.compile(rb"^(?:from|import)[ \t]+([\w.]+)", re.MULTILINE)
_OLD_S = 60 * 24 * 3600.0  # how long the code of sources that nobody runs is kept


@cache
def cache_folder() -> Path | None:
    """The first place that works: NUMBA_CACHE_DIR, the user's folder for caches, the folder for temporary files.

    None where nothing can be written: kernels are then compiled in every process.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [Path(tempfile.gettempdir()) / f"manyhands-kernels-{os.geteuid()}"]
    if os.path.isabs(caches):
        places.insert(0, Path(caches) / "manyhands" / "kernels")
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        places.insert(0, Path(given).absolute() / "manyhands")
    return next((place for place in places if own_folder(place)), None)


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


def _remove_old(root: Path) -> None:
    """Delete code of sources that were replaced long ago; a process that still runs them compiles again."""
    before = time.time() - _OLD_S
    for one in root.iterdir():
        with suppress(OSError):  # another process was first
            if one.stat().st_mtime < before:
                shutil.rmtree(one) if one.is_dir() else one.unlink()


def module_file(module: str, root: Path = ROOT) -> Path | None:
    """The file of a module of the package at `root`, given by its whole name; None where it is of another."""
    package, *parts = module.split(".")
    if package != root.name:
        return None
    path = root.joinpath(*parts)
    files = path.with_name(f"{path.name}.py"), path / "__init__.py"
    return next((file for file in files if file.is_file()), None)


def imported_files(file: Path, root: Path = ROOT) -> list[Path]:
    """The file and, of the package at `root`, all that it imports at its top level, directly or not; sorted.

    Where it imports names from a package, all modules of that package count, whichever were meant.
    """
    found, new = {file}, [file]
    while new:
        for name in _imports(new.pop()):
            target = module_file(name, root)
            if target is None:
                continue
            is_package = target.name == "__init__.py" and target.parent != root
            more = {target, *(target.parent.glob("*.py") if is_package else ())} - found
            found |= more
            new += more
    return sorted(found)


def digest_of(files: Iterable[Path], root: Path = ROOT) -> str:
    """Of what is written in these files and what they import, and of the versions of Python and what compiles them."""
    digest = hashlib.sha256(_versions())
    for one in sorted({one for file in files for one in imported_files(file, root)}):
        digest.update(f"\n{one.relative_to(root)}\n".encode() + _content(one))
    return digest.hexdigest()[:16]


@cache
def _versions() -> bytes:
    return " ".join([sys.version, *(f"{name} {version(name)}" for name in _COMPILERS)]).encode()


@cache
def _content(file: Path) -> bytes:
    return file.read_bytes()


@cache
def _imports(file: Path) -> tuple[str, ...]:
    return tuple(name.decode() for name in _IMPORT.findall(_content(file)))
