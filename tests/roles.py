"""Roles of a cluster specification as processes of a test: started in any order, killed, started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import warm

PATIENCE_S = 240.0
"""Of a machine that does much else; how soon something is noticed is measured apart."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody has at the moment; held together, so that they differ."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in held:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in held]


class RoleProcess:
    """One process; what it says is in a file, so that nobody has to read while it runs."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self._log = process, log

    @property
    def said(self) -> str:
        return self._log.read_text()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(240)

    def ended(self, within_s: float = PATIENCE_S) -> int:
        """The exit status."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self._log.name} goes on; it said:\n{self.said}")


class Cluster:
    """The specification, and whom of it there is; `start` runs `command` as a role, by TF_CONFIG."""

    def __init__(
        self, folder: Path, counts: Mapping[str, int], addresses: Sequence[str] | None = None
    ) -> None:
        self.folder = folder
        listed = iter(addresses or [f"127.0.0.1:{port}" for port in free_ports(sum(counts.values()))])
        self.spec = {kind: [next(listed) for _ in range(count)] for kind, count in counts.items()}
        self.roles: dict[tuple[str, int], RoleProcess] = {}
        self._started = 0

    def tf_config(self, kind: str, index: int) -> str:
        return json.dumps({"cluster": self.spec, "task": {"type": kind, "index": index}})

    def start(
        self,
        kind: str,
        index: int,
        command: Sequence[str | Path],
        *,
        before: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> RoleProcess:
        """A process of Python with these words; `before` goes before them, to run it on another host.

        `variables` say which role it is; None: TF_CONFIG does.
        """
        self._started += 1
        log = self.folder / f"{kind}-{index}.{self._started}.log"
        if variables is None:
            variables = {"TF_CONFIG": self.tf_config(kind, index)}
        options: dict[str, Any] = {
            "stderr": subprocess.STDOUT,
            "env": {**os.environ, "OMP_NUM_THREADS": "1", **variables},
            "cwd": self.folder,
        }
        words = [*before, sys.executable, *map(str, command)]
        start: Callable[..., Any] = subprocess.Popen if before else warm.Popen
        with log.open("wb") as file:
            process = start(words, stdout=file, **options)
        made = self.roles[kind, index] = RoleProcess(process, log)
        return made

    def wait_for(self, found: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> float:
        """Seconds until it is so."""
        began = time.monotonic()
        while not found():
            if time.monotonic() - began > within_s:
                pytest.fail(f"no {what}; {self.report()}")
            time.sleep(0.05)
        return time.monotonic() - began

    def report(self) -> str:
        return "\n".join(f"{kind} {index} said:\n{one.said}" for (kind, index), one in self.roles.items())

    def close(self) -> None:
        for role in self.roles.values():
            if role.process.poll() is None:
                role.kill()


@contextmanager
def cluster(
    folder: Path, counts: Mapping[str, int], addresses: Sequence[str] | None = None
) -> Iterator[Cluster]:
    """Nobody is left when this is."""
    made = Cluster(folder, counts, addresses)
    try:
        yield made
    finally:
        made.close()
