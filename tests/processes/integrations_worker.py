"""The workers of the integration tests: `python -m processes.integrations_worker WORLD FOLDER PROGRAMS` starts them.

A program is a check of `processes.integrations`, or a page whose snippets are run as one script. Each has the
environment that torchrun sets; what became of it is written to a file in FOLDER.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import manyhands.c10d  # noqa: F401 - registers the backend
from manyhands.places.local.forking import die_with_parent
from processes import integrations

PATIENCE_S = 350.0


class TorchrunWorkers:
    """The variables of torchrun, with a port of its own for every process group; see `integrations.Workers`."""

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        self.rank, self.world, self.folder = rank, world, folder
        self._rendezvous = dist.FileStore(str(folder / "meeting"), world)
        self._rendezvous.set_timeout(timedelta(seconds=60))
        self._groups = 0
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RUN_ID": "test",
            "GLOO_SOCKET_IFNAME": "lo",
        }

    @contextlib.contextmanager
    def using(self, backend: str) -> Iterator[None]:
        self._groups += 1
        name = f"port {self._groups}"
        if self.rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as server:
                self._rendezvous.set(name, str(server.getsockname()[1]))
        os.environ["MASTER_PORT"] = self._rendezvous.get(name).decode()
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _forget()


def _forget() -> None:
    """Accelerate keeps what it found about its processes for the life of the process."""
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()
    gc.collect()


def run_page(workers: TorchrunWorkers, page: Path) -> None:
    """The snippets of a page, in one namespace, as a script that torchrun has started."""
    from unit.test_docs import BLOCK

    folder = workers.folder / f"{page.stem}-{workers.rank}"
    folder.mkdir()
    text = page.read_text()
    namespace: dict[str, object] = {"__name__": "__main__"}
    with workers.using(page.stem), contextlib.chdir(folder):
        for match in BLOCK.finditer(text):
            line = text[: match.start()].count("\n") + 1
            exec(compile("\n" * line + match.group(1), str(page), "exec"), namespace)


def work(rank: int, world: int, folder: Path, given: Sequence[str]) -> None:
    torch.set_num_threads(1)
    workers = TorchrunWorkers(rank, world, folder)
    outcomes: dict[str, str] = {}
    for name in given:
        began = time.monotonic()
        try:
            run_page(workers, Path(name)) if name.endswith(".md") else getattr(integrations, name)(workers)
            outcomes[Path(name).name] = ""
        except Exception:
            outcomes[Path(name).name] = traceback.format_exc()
            break  # the others may now be anywhere
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
    (workers.folder / f"{rank}.json").write_text(json.dumps(outcomes))


def main() -> None:
    world, folder, *given = sys.argv[1:]
    if "RANK" in os.environ:
        die_with_parent(os.getppid(), signal.SIGKILL)
        work(int(os.environ["RANK"]), int(world), Path(folder), given)
        return
    command = [sys.executable, "-m", "processes.integrations_worker", *sys.argv[1:]]
    processes = []
    try:
        for rank in range(int(world)):
            processes.append(subprocess.Popen(command, env={**os.environ, "RANK": str(rank)}))
        statuses = [process.wait(PATIENCE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait(240)
    if any(statuses):
        sys.exit(f"the workers ended with {statuses}")


if __name__ == "__main__":
    main()
