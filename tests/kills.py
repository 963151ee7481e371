"""Kill a run at a chosen moment and look for anything it left: a practice run, or real training.

A run is any command that launches a `LocalCluster`. All its processes, grandchildren included, inherit a mark
in their environment, by which they are found in /proc; its shared memory is remembered by inode before the
kill, so that a mapping or a descriptor of it is found in whatever process may still hold one.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import warm
from manyhands.places.local.forking import TEMPLATE_NAME

_PRACTICE = """
import subprocess, time
from manyhands.places.local.supervisor import LocalCluster, Role

def work(context):
    from manyhands.places.local.status import State
    if context.rank == 0:
        subprocess.Popen(["sleep", "600"])
    step = 0
    while not context.stop_requested():
        step += 1
        context.mark(step, State.COMPUTING)
        context.send({"step": step})
        time.sleep(0.005)

heard = set()

def note(rank, payload):
    heard.add(rank)
    if len(heard) == 3:
        print("at work", flush=True)

with LocalCluster([Role(name=f"worker {rank}", target=work) for rank in range(3)], on_note=note) as cluster:
    cluster.run()
"""

_TRAINING = """
import torch
import manyhands as mh

def loss(model, batch):
    if not hasattr(model, "reported"):
        model.reported = True
        print("at work", flush=True)
    return model(batch).square().mean()

task = mh.Task(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Linear(256, 1)),
    loss=loss,
    data=torch.ones(512, 64),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
)
mh.fit(task, "mirrored", workers=2, steps=10**9, out="run", options=mh.Options(checkpoint_every=50))
"""

_MARK = "MANYHANDS_TEST_RUN"
_MEMFD = "/memfd:manyhands:"


def await_that(condition: Callable[[], bool], what: str, within_s: float = 180.0) -> float:
    """Look until `condition` holds; the seconds it took."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > within_s:
            raise AssertionError(f"not within {within_s:g} s: {what}")
        time.sleep(0.005)
    return time.monotonic() - start


class Run:
    """A running command; `parent` is the process that launched the cluster."""

    def __init__(self, parent: subprocess.Popen[bytes], mark: str, output: Path) -> None:
        self.parent = parent
        self._output = output
        self._mark = f"{_MARK}={mark}".encode()

    @classmethod
    @contextmanager
    def of(
        cls, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None
    ) -> Iterator[Run]:
        """Start `command`; what is left of it at the end is killed, so that a failed test spoils no other."""
        mark = uuid.uuid4().hex
        output = folder / f"{mark}.out"
        with output.open("w") as file:
            parent = warm.Popen(
                command,
                trains=True,
                env={**os.environ, **(environment or {}), _MARK: mark},
                cwd=folder,
                stdout=file,
                stderr=file,
            )
        run = cls(parent, mark, output)
        try:
            yield run
        finally:
            for pid in [parent.pid, *run.processes()]:
                _kill(pid, signal.SIGKILL)
            parent.wait()

    @property
    def ended(self) -> bool:
        """Whether the launcher has ended."""
        return self.parent.poll() is not None

    def processes(self) -> list[int]:
        """Every process of the run that has not ended."""
        return [pid for pid in _pids() if self._mark in _read(pid, "environ").split(b"\0")]

    def roles(self) -> list[int]:
        """The direct children of the launcher but for the template that they are forked from."""
        threads = Path(f"/proc/{self.parent.pid}/task").glob("*/children")
        children = [int(pid) for found in threads for pid in found.read_text().split()]
        return [pid for pid in children if _read(pid, "comm").strip() != TEMPLATE_NAME]

    def segments(self) -> set[int]:
        """The inodes of all shared memory of the run."""
        return {inode for pid in self.processes() for inode in _segments(pid)}

    def text(self) -> str:
        """What the run has printed so far."""
        return self._output.read_text()

    def check_nothing_is_left(self, segments: set[int], within_s: float = 30.0) -> float:
        """Assert that all processes and all of `segments` are gone; the seconds until they were."""

        def gone() -> bool:
            return not self.processes() and not any(segments & set(_segments(pid)) for pid in _pids())

        try:
            return await_that(gone, "every process and all shared memory of the run are gone", within_s)
        except AssertionError as error:
            left = {pid: _read(pid, "stat").decode().split()[:4] for pid in self.processes()}
            error.add_note(
                f"there are {left}, and holders of memory: {[p for p in _pids() if segments & set(_segments(p))]}"
            )
            raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One kill to come: of the launcher or one of its roles, some time after roles exist or are at work."""

    seed: int
    of_parent: bool
    at_work: bool
    after_s: float


def strikes(count: int, seed: int, *, horizon_s: float) -> list[Strike]:
    """`count` kills at random moments up to `horizon_s`, by turns of a role and of the launcher."""
    chance = random.Random(seed)
    return [
        Strike(
            seed=seed + number,
            of_parent=number % 2 == 1,
            at_work=number % 4 < 2,
            after_s=chance.uniform(0.0, horizon_s),
        )
        for number in range(count)
    ]


def strike(command: Sequence[str], folder: Path, plan: Strike) -> float:
    """Run `command`, kill as planned, assert that it is told and that nothing is left; seconds until then.

    The command prints `at work` when its roles are.
    """
    with Run.of(command, folder) as run:
        await_that(lambda: bool(run.roles()) or run.ended, "a role exists", 60.0)
        if plan.at_work:
            await_that(lambda: "at work" in run.text() or run.ended, "the roles are at work", 60.0)
        time.sleep(plan.after_s)  # the random moment itself
        assert not run.ended, f"the run ended before the kill: {run.text()}"
        segments = run.segments()
        assert segments, "a run without shared memory would prove nothing"
        start = time.monotonic()
        if plan.of_parent:
            run.parent.kill()
        else:
            victim = random.Random(plan.seed).choice(run.roles())
            assert _kill(victim, signal.SIGKILL)
        await_that(lambda: run.ended, "the launcher has ended", 60.0)
        if not plan.of_parent:
            assert run.parent.returncode == 1
            assert f"(pid {victim}) was killed by SIGKILL" in run.text()
        run.check_nothing_is_left(segments)
        return time.monotonic() - start


def practice(folder: Path) -> list[str]:
    """The command of a run that does nothing but talk to its launcher; one of its roles has a child."""
    return _script(folder, _PRACTICE)


def training(folder: Path) -> list[str]:
    """The command of a run that trains, writes checkpoints and would go on for days."""
    return _script(folder, _TRAINING)


def _script(folder: Path, text: str) -> list[str]:
    path = folder / "script.py"
    path.write_text(text)
    return [sys.executable, str(path)]


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:  # it ended while we looked, or is not ours to read
        return b""


def _segments(pid: int) -> Iterator[int]:
    """The inodes of our shared memory that `pid` has mapped or open."""
    for line in _read(pid, "maps").decode(errors="replace").splitlines():
        if _MEMFD in line:
            yield int(line.split()[4])
    try:
        descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return
    for entry in descriptors:
        try:
            if str(entry.readlink()).startswith(_MEMFD):
                yield entry.stat().st_ino
        except OSError:
            continue


def _kill(pid: int, number: signal.Signals) -> bool:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
