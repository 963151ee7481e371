"""The command line in the process of the test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from manyhands.cli.main import main


def run_command(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """The exit status of `manyhands ARGUMENTS`, in this process."""
    monkeypatch.setattr(sys, "argv", ["manyhands", *map(str, arguments)])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0
