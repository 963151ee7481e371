"""A digest of everything that compiled code of a module was made from.

numba's own cache looks at the file of a function alone, and not at the files whose functions were compiled into it or
whose constants it holds. A module can only reach those that it imports, and they what they import.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from pathlib import Path

__all__ = ["digest_of", "imported_files", "module_file"]

ROOT = Path(__file__).resolve().parent.parent
"""The folder of the package."""

_COMPILERS = ("numba", "llvmlite", "numpy")
_IMPORT = re.compile(rb"^(?:from|import)[ \t]+([\w.]+)", re.MULTILINE)


def module_file(module: str, root: Path = ROOT) -> Path | None:
    """The file of a module of the package at `root`, given by its whole name; None where it is of another."""
    package, *parts = module.split(".")
    if package != root.name:
        return None
    path = root.joinpath(*parts)
    for file in (path.with_name(f"{path.name}.py"), path / "__init__.py"):
        if file.is_file():
            return file
    return None


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
            package = (
                target.parent.glob("*.py") if target.name == "__init__.py" and target.parent != root else ()
            )
            for one in (target, *package):
                if one not in found:
                    found.add(one)
                    new.append(one)
    return sorted(found)


def digest_of(files: Iterable[Path], root: Path = ROOT) -> str:
    """Of what is written in these files and what they import, and of the versions of Python and what compiles them."""
    every = sorted({one for file in files for one in imported_files(file, root)})
    digest = hashlib.sha256(_versions())
    for one in every:
        digest.update(f"\n{one.relative_to(root)}\n".encode())
        digest.update(_content(one))
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
