"""A disk that is really full: a small file system in memory, mounted for one test."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A file system of so many bytes at `folder`; skips where this machine does not let us mount one."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    except FileNotFoundError:
        pytest.skip("the program mount is not there")
    if mounted.returncode:
        pytest.skip(f"this machine does not let us mount a small file system: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        # Lazily, so that a test which failed with a file open does not leave the mount behind.
        subprocess.run(["umount", "--lazy", str(folder)], timeout=240, check=True)


def fill(folder: Path) -> Path:
    """Leave no page free on the file system of `folder`; returns the file to remove for room."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        while os.statvfs(folder).f_bavail:
            try:
                file.write(b"\0" * 4096)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    assert os.statvfs(folder).f_bavail == 0
    return ballast
