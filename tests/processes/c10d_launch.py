"""Starts the ranks of a process group under test, and never leaves one behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import warm

TESTS = Path(__file__).parent.parent
PATIENCE_S = 280.0


@contextmanager
def started(
    commands: Sequence[Sequence[str]],
    warnings: str = "error,ignore::FutureWarning",
    *,
    compiler: bool = False,
) -> Iterator[list[subprocess.Popen[str]]]:
    """One process for each command; they are killed at the end of the block, if they still run.

    Warnings are errors, but for those of torch, which renames functions between the releases we support, and warns of
    the names that all of them have.
    """
    environment = {**os.environ, "PYTHONWARNINGS": warnings, "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            processes.append(
                warm.Popen(
                    [sys.executable, *command],
                    compiler=compiler,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env=environment,
                    cwd=TESTS,
                )
            )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=240)


def run_checks(module: str, world: int, folder: Path, *, compiler: bool = False) -> list[dict[str, str]]:
    """What became of each check of a module of this folder on each of `world` ranks, which have the compiler or not."""
    files = [folder / f"{module}-{world}-{rank}.json" for rank in range(world)]
    store = folder / f"store-{module}-{world}"
    commands = [
        ["-m", "processes.c10d_worker", f"processes.{module}", *map(str, (rank, world, store, files[rank]))]
        for rank in range(world)
    ]
    with started(commands, compiler=compiler) as processes:
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 0, f"rank {rank} of {world}:\n{output}"
    return [json.loads(file.read_text()) for file in files]
