"""A control group that lets its processes have a share of one core and no more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_PERIOD_US = 100_000


@contextmanager
def cpu_quota(share: float) -> Iterator[Path]:
    """A fresh group, for process ids to be written to its `cgroup.procs`; all are let go at the end."""
    root = Path("/sys/fs/cgroup")
    unified = not (root / "cpu").is_dir()
    top = root if unified else root / "cpu"
    folder = top / f"manyhands-test-{os.getpid()}"
    try:
        if unified and "cpu" not in (root / "cgroup.subtree_control").read_text().split():
            (root / "cgroup.subtree_control").write_text("+cpu")
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"control groups cannot be made here: {error}")
    try:
        quota_us = round(share * _PERIOD_US)
        try:
            if unified:
                (folder / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
            else:
                (folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        except OSError as error:
            pytest.skip(f"this kernel has no processor quotas: {error}")
        yield folder
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            (top / "cgroup.procs").write_text(pid)
        folder.rmdir()
