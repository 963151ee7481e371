"""A disk that loses power: what a writer did, operation by operation, and every state that a cut may leave of it.

The rules are those of POSIX, read as badly as a file system may: what a file holds is safe once the file was synced,
and a name (made, renamed, removed) once its directory was. Of later operations on names any beginning may have
reached the disk; of later bytes none, half, all, or only the length (the blocks read as zeros).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass(eq=False)
class _File:
    """What is in a file, and how much of that is safe."""

    content: bytearray = field(default_factory=bytearray)
    safe: bytes = b""


@dataclass(frozen=True)
class _Name:
    """An operation on names in one directory: a file or a folder appears, moves or goes."""

    kind: str
    path: Path
    to: Path | None = None
    file: _File | None = None


@dataclass(frozen=True)
class State:
    """What may be there after a cut: files by path (None: a folder)."""

    moment: int
    files: dict[Path, bytes | None]

    def write(self, root: Path, folder: Path) -> Path:
        """Put the state of `folder` into a new directory."""
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for path, content in sorted(self.files.items()):
            target = root / path.relative_to(folder)
            if content is None:
                target.mkdir(exist_ok=True)
            else:
                target.write_bytes(content)
        return root


class Disk:
    """Remembers everything that happens below `folder`, whose present content is safe."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._before = {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}
        self._files: dict[Path, _File] = {}
        self._open: dict[int, Path] = {}
        self._names: list[_Name] = []
        self._pending: set[int] = set()  # of the names, those that are not safe
        self.states: list[State] = []
        for path, content in self._before.items():
            if content is not None:
                self._files[path] = _File(bytearray(content), content)
        self._first = dict(self._files)
        self._look()

    def is_here(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and Path(path).is_relative_to(self.folder)

    def opened(self, path: Path, descriptor: int, is_new: bool) -> None:
        self._open[descriptor] = path
        if is_new:
            self._files[path] = _File()
            self._name(_Name("make", path, file=self._files[path]))

    def wrote(self, descriptor: int, data: bytes) -> None:
        if descriptor in self._open:
            self._files[self._open[descriptor]].content += data
            self._look()

    def cut_to(self, descriptor: int, length: int) -> None:
        if descriptor in self._open:
            del self._files[self._open[descriptor]].content[length:]
            self._look()

    def synced(self, descriptor: int) -> None:
        path = self._open.get(descriptor)
        if path is None:
            return
        if path in self._files:
            self._files[path].safe = bytes(self._files[path].content)
        else:
            self._pending = {n for n in self._pending if self._names[n].path.parent != path}
        self._look()

    def closed(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)

    def made_folder(self, path: Path) -> None:
        self._name(_Name("folder", path))

    def moved(self, path: Path, to: Path) -> None:
        for old in [known for known in self._files if known.is_relative_to(path)]:
            self._files[to / old.relative_to(path) if old != path else to] = self._files.pop(old)
        self._name(_Name("move", path, to))

    def removed(self, path: Path) -> None:
        for old in [known for known in self._files if known.is_relative_to(path)]:
            del self._files[old]
        self._name(_Name("remove", path))

    def _name(self, name: _Name) -> None:
        self._pending.add(len(self._names))
        self._names.append(name)
        self._look()

    def _look(self) -> None:
        """Keep every state that a cut at this moment may leave."""
        moment = len(self.states)
        pending = sorted(self._pending)
        for count in range(len(pending) + 1):
            lost = set(pending[count:])
            for bytes_of in (_safe, _half, _zeros, _all):
                self.states.append(State(moment, self._replayed(lost, bytes_of)))

    def _replayed(self, lost: set[int], bytes_of: Callable[[_File], bytes]) -> dict[Path, bytes | None]:
        tree: dict[Path, _File | None] = {
            path: self._first.get(path) if content is not None else None
            for path, content in self._before.items()
        }
        for number, name in enumerate(self._names):
            is_reachable = name.path.parent == self.folder or name.path.parent in tree
            if number in lost or not is_reachable:
                continue
            below = [path for path in tree if path.is_relative_to(name.path)]
            match name.kind:
                case "make" | "folder":
                    tree[name.path] = name.file
                case "move" if name.to is not None:
                    moved = {
                        name.to / p.relative_to(name.path) if p != name.path else name.to: tree.pop(p)
                        for p in below
                    }
                    tree |= moved
                case "remove":
                    for path in below:
                        del tree[path]
        return {path: None if file is None else bytes_of(file) for path, file in tree.items()}


def _safe(file: _File) -> bytes:
    return file.safe


def _unsafe(file: _File) -> bytes:
    is_longer = file.content.startswith(file.safe)
    return bytes(file.content[len(file.safe) :]) if is_longer else b""


def _half(file: _File) -> bytes:
    tail = _unsafe(file)
    return file.safe + tail[: len(tail) // 2]


def _zeros(file: _File) -> bytes:
    return file.safe + b"\0" * len(_unsafe(file))


def _all(file: _File) -> bytes:
    return bytes(file.content)


@contextmanager
def watched(folder: Path) -> Iterator[Disk]:
    """Watch what this process does to `folder` in the body."""
    disk = Disk(folder)
    real: dict[str, Any] = {
        name: getattr(os, name)
        for name in ("open", "write", "fsync", "close", "ftruncate", "mkdir", "rename", "replace", "unlink")
    }
    remove_tree = shutil.rmtree

    def opens(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        is_new = disk.is_here(path) and bool(flags & os.O_CREAT) and not os.path.exists(path)
        descriptor: int = real["open"](path, flags, mode, **more)
        if disk.is_here(path):
            disk.opened(Path(path), descriptor, is_new)
        return descriptor

    def writes(descriptor: int, data: Any) -> int:
        count: int = real["write"](descriptor, data)
        disk.wrote(descriptor, bytes(data)[:count])
        return count

    def on_descriptor(name: str, then: Callable[..., None]) -> Callable[..., None]:
        def act(descriptor: int, *arguments: Any) -> None:
            real[name](descriptor, *arguments)
            then(descriptor, *arguments)

        return act

    def on_path(name: str, then: Callable[..., None]) -> Callable[..., None]:
        def act(path: Any, *arguments: Any, **more: Any) -> None:
            real[name](path, *arguments, **more)
            if disk.is_here(path):
                then(
                    Path(path), *(Path(other) for other in arguments if isinstance(other, str | os.PathLike))
                )

        return act

    def removes_tree(path: Any, *arguments: Any, **more: Any) -> None:
        remove_tree(path, *arguments, **more)
        if disk.is_here(path):
            disk.removed(Path(path))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", opens)
        patch.setattr(os, "write", writes)
        patch.setattr(os, "fsync", on_descriptor("fsync", disk.synced))
        patch.setattr(os, "close", on_descriptor("close", disk.closed))
        patch.setattr(os, "ftruncate", on_descriptor("ftruncate", disk.cut_to))
        patch.setattr(os, "mkdir", on_path("mkdir", disk.made_folder))
        patch.setattr(os, "rename", on_path("rename", disk.moved))
        patch.setattr(os, "replace", on_path("replace", disk.moved))
        patch.setattr(os, "unlink", on_path("unlink", disk.removed))
        patch.setattr(shutil, "rmtree", removes_tree)
        yield disk
