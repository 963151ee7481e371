"""A `manyhands train` run that is struck at a set step: its processes, its progress, its continuation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import ManyhandsError
from manyhands.lab.faults.blows import Blow, blow_of, small_disk
from manyhands.lab.faults.fault_costs import WHOLE_RUN, Fault, Kind, StepSeen, StruckRun
from manyhands.lab.sweep.run_sweep import end_processes, last_said
from manyhands.observe.record.checked_values import number, whole
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import read_run_events

Launch = Callable[[Sequence[str]], list[str]]
"""Words of a `manyhands` command -> the command line of a process that runs it."""

_LOOK_S = 0.01
_MARGIN_S = 120.0  # that a run may take beside what it is expected to


@dataclass(frozen=True, kw_only=True)
class RunAsked:
    """A run to be struck: its words but for directory and `--resume`, and how long it may take."""

    words: Sequence[str]
    out: Path
    launch: Launch
    steps: int
    expected_s: float = 60.0
    num_bytes: int = 0  # that its directory takes


def undisturbed(asked: RunAsked) -> StruckRun:
    """The run that nothing happens to; ManyhandsError where it fails."""
    run = _Run(asked)
    status = run.watch(lambda: None)
    if status:
        raise ManyhandsError(run.said())
    return StruckRun(struck_s=0.0, seen=run.seen, final=_final(asked.out))


def strike(asked: RunAsked, fault: Fault, step: int) -> StruckRun:
    """Strike the run once `step` is done, and continue it with `--resume` if it ends."""
    with small_disk(asked.out, asked.num_bytes) if fault.kind is Kind.FULL else nullcontext():
        return _strike(asked, fault, step)


def _strike(asked: RunAsked, fault: Fault, step: int) -> StruckRun:
    run = _Run(asked)
    blow = _Strike(run, blow_of(fault, asked.out), step)
    try:
        status = run.watch(blow.look)
    finally:
        blow.blow.end()
    if blow.struck_s is None:
        raise ManyhandsError(f"the run ended before it could be struck after step {step}: {run.said()}")
    found = StruckRun(struck_s=blow.struck_s, seen=run.seen, slow_s=blow.lasted_s)
    if not status:
        recomputed = _recomputed(RunDirectory.open(asked.out, lock=False))
        return replace(found, recomputed=recomputed, lost=_lost(asked.out), final=_final(asked.out))
    again = _Run(asked, since=run.since)
    if again.watch(lambda: None):
        return replace(found, kept_step=0, continued=again.seen, sentence=again.said())
    return replace(
        found,
        kept_step=_kept_step(asked.out),
        continued=again.seen,
        lost=_lost(asked.out),
        final=_final(asked.out),
        sentence=run.said(),
    )


class _Run:
    """The process of a run, and the steps that its history has had."""

    def __init__(self, asked: RunAsked, since: float | None = None) -> None:
        self._asked = asked
        self._log = asked.out.with_suffix(".log" if since is None else ".again.log")
        self._history = _Tail(asked.out / "metrics.jsonl")
        self._resumes = since is not None
        self.since = time.monotonic() if since is None else since
        self.seen: list[StepSeen] = []
        self.process: subprocess.Popen[bytes]

    def watch(self, look: Callable[[], None]) -> int:
        """Start the process and wait for its end, calling `look` all the time; its status."""
        deadline = time.monotonic() + self._asked.expected_s + _MARGIN_S
        words = [*self._asked.words, f"--out={self._asked.out}", "--progress=none"]
        with self._log.open("wb") as log, _started(self._command(words), log) as self.process:
            while (status := self.process.poll()) is None:
                self._progress()
                look()
                if time.monotonic() > deadline:
                    raise ManyhandsError(f"the run in {self._asked.out} did not end in time: {self.said()}")
                time.sleep(_LOOK_S)
        self._progress()
        return status

    def _command(self, words: list[str]) -> list[str]:
        return self._asked.launch([*words, "--resume"] if self._resumes else words)

    def _progress(self) -> None:
        newest = max((step for step in self._history.steps()), default=0)
        if newest > (self.seen[-1].step if self.seen else 0):
            self.seen.append(StepSeen(at_s=time.monotonic() - self.since, step=newest))

    def said(self) -> str:
        return last_said(self._log)

    def pids(self, kind: str) -> list[int]:
        """The processes of a kind, such as the workers, by number; of the whole run its launcher."""
        if kind == WHOLE_RUN:
            return [self.process.pid]
        found = []
        for path in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            for pid in _read(path).split():
                name = re.fullmatch(rf"{kind} (\d+)", _read(Path(f"/proc/{pid}/comm")).strip())
                if name is not None:
                    found.append((int(name[1]), int(pid)))
        return [pid for _, pid in sorted(found)]


@dataclass
class _Strike:
    """A blow to a run once `step` is done, until it is over."""

    run: _Run
    blow: Blow
    step: int
    struck_s: float | None = None
    lasted_s: float = 0.0
    _is_over: bool = False

    def look(self) -> None:
        if self.struck_s is None:
            done = self.run.seen[-1].step if self.run.seen else 0
            if done >= self.step and self.blow.begin(self.run.pids):
                self.struck_s = time.monotonic() - self.run.since
        elif not self._is_over:
            self.lasted_s = time.monotonic() - self.run.since - self.struck_s
            self._is_over = not self.blow.goes_on(self.lasted_s)
            if self._is_over:
                self.blow.end()


class _Tail:
    """The steps in the rows of a history that have been added since the last look."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def steps(self) -> Iterator[int]:
        try:
            with self._path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._offset:
                    self._offset = 0  # what came after the checkpoint was taken out
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        lines = data[: data.rfind(b"\n") + 1]
        self._offset += len(lines)
        for line in lines.splitlines():
            row = json.loads(line)
            if "step" in row:
                yield int(row["step"])


@contextmanager
def _started(command: list[str], log: BinaryIO) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C is for the comparison, which ends its runs itself
    )
    try:
        yield process
    finally:
        end_processes([process])


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended meanwhile
        return ""


def _summary(out: Path) -> dict[str, Any]:
    return RunDirectory.open(out, lock=False).read_summary() or {}


def _kept_step(out: Path) -> int:
    """The step of the checkpoint that a run continued from."""
    return whole(_summary(out).get("resumed_from_step")) or 0


def _final(out: Path) -> dict[str, float]:
    found = _summary(out).get("final")
    values = {name: number(value) for name, value in (found if isinstance(found, dict) else {}).items()}
    return {name: value for name, value in values.items() if value is not None}


def _recomputed(directory: RunDirectory) -> int:
    """How many steps a worker computed once more."""
    steps = [role.of(EventKind.STEP)["step"] for role in read_run_events(directory.events_path).roles]
    return sum(len(one) - len(set(one.tolist())) for one in steps)


def _lost(out: Path) -> int | None:
    if not (out / "updates").is_dir():
        return None
    from manyhands.strategies.ps.audit import audit_run

    return audit_run(out).found.lost
