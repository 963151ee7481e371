"""Limits of a process: each is one sentence that names it, and other errors are what they were."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from manyhands.errors import UserError, limits_named
from manyhands.native.segment import Segment


def lowered(which: int, limit: int, work: Callable[[], object]) -> str:
    """What `work` says where a limit of this process is so low; none, where it does not fail by it."""
    soft, hard = resource.getrlimit(which)
    resource.setrlimit(which, (limit, hard))
    try:
        with limits_named():
            work()
    except UserError as error:
        return str(error)
    finally:
        resource.setrlimit(which, (soft, hard))
    return ""


def test_too_many_open_files_names_the_limit(tmp_path: Path) -> None:
    (tmp_path / "one").touch()
    said = lowered(resource.RLIMIT_NOFILE, 0, lambda: os.open(tmp_path / "one", os.O_RDONLY))
    assert said.startswith("this process may open 0 files at once but needs more (")
    assert said.endswith(f"{tmp_path / 'one'}); raise the limit: ulimit -n 4096")


def test_a_file_that_is_too_large_names_the_limit(tmp_path: Path) -> None:
    said = lowered(resource.RLIMIT_FSIZE, 4096, lambda: (tmp_path / "one").write_bytes(bytes(8192)))
    assert "would exceed the limit of 4.0 KiB" in said
    assert said.endswith("raise the limit: ulimit -f unlimited")


def test_memory_that_processes_share_is_such_a_file() -> None:
    said = lowered(resource.RLIMIT_FSIZE, 4096, lambda: Segment.create(8192, "a test"))
    assert "would exceed the limit of 4.0 KiB" in said


def test_a_library_that_cannot_be_opened_is_the_same_limit() -> None:
    with pytest.raises(UserError, match=r"ulimit -n"), limits_named():
        raise ImportError(f"libtorch.so: cannot open shared object file: {os.strerror(errno.EMFILE)}")


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOENT, "no"), OSError("no number"), ImportError("no module"), ValueError("x")]
)
def test_other_errors_are_what_they_were(error: Exception) -> None:
    with pytest.raises(type(error)) as report, limits_named():
        raise error
    assert report.value is error


def test_a_host_with_too_many_open_files_is_told_apart() -> None:
    with pytest.raises(UserError, match=r"fs\.file-max"), limits_named():
        raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
