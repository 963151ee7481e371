"""A sweep under way: each trial a process of its own, as many at once as there are cores for; what is done is kept.

    OUT/sweep.json       the plan
    OUT/runs/0001/ …     a run directory a trial
    OUT/runs/0001.log    what its process said

A trial whose run has a summary is done. One that was cut continues from its newest checkpoint. Nothing else is kept, so
a sweep that was killed at any moment continues from what its runs have: before its plan was written it begins, and runs
of the killed sweep that have not left yet are waited for.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from manyhands.data.store.atomic import make_directory, reason, write_json
from manyhands.data.store.rundir import RunDirectory, RunLock
from manyhands.errors import DataError, ManyhandsError, UserError
from manyhands.lab.compare.comparison import Progress
from manyhands.lab.sweep.sweep_report import SweepRow, read_row
from manyhands.lab.sweep.trials import SweepPlan, SweepTrial
from manyhands.strategy import Strategy

Launch = Callable[[Sequence[int], Sequence[str]], list[str]]
"""(cores, words of a `manyhands` command) -> the command line of a process that runs it on those cores."""

_PLAN, _LOCK, _RUNS = "sweep.json", "sweep.lock", "runs"
_UNFINISHED = {f".{_PLAN}.writing"}  # left by one that was killed while its plan was being written
_FORMAT, _VERSION = "manyhands sweep", 1
_LOOK_S = 0.05
_END_S = 20.0  # for a run to leave in good order
_MESSAGE_CHARS = 400


def open_sweep(out: Path, plan: SweepPlan, *, resume: bool) -> None:
    """Begin a sweep in a new or empty directory, or continue the one there; UserError says what is in the way."""
    path = out / _PLAN
    try:
        taken = sorted({entry.name for entry in out.iterdir()} - _UNFINISHED) if out.exists() else None
        if not resume and not taken:
            make_directory(out)
    except OSError as error:
        raise UserError(f"--out {out} cannot be used: {reason(error)}") from error
    if not resume and taken:
        more = "add --resume to continue it, or " if path.exists() else ""
        raise UserError(f"--out {out} is not empty (it contains {taken[0]!r}); {more}choose another")
    if not resume or taken == []:
        write_json(path, {"format": _FORMAT, "version": _VERSION, **plan.to_dict()})
        return
    conflict = read_plan(path).conflict(plan)
    if conflict is not None:
        raise UserError(f"{out} cannot be resumed: {conflict}; give the settings it was started with")


def read_plan(path: Path) -> SweepPlan:
    """The plan in this file of a sweep's directory; UserError where there is none, DataError where it is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{path.parent} holds no sweep ({_PLAN} is missing); start one without --resume"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: {error}") from error
    if not isinstance(found, dict) or (found.get("format"), found.get("version")) != (_FORMAT, _VERSION):
        raise DataError(f"{path} does not have format {_FORMAT!r} version {_VERSION}")
    try:
        return SweepPlan.from_dict(found)
    except DataError as error:
        raise DataError(f"{path} {error}") from None


def sweep_rows(plan: SweepPlan, out: Path, failures: dict[int, str] | None = None) -> list[SweepRow]:
    failures = failures or {}
    return [read_row(one, out / _RUNS / one.folder, failures.get(one.number, "")) for one in plan.trials()]


def cores_of(trial: SweepTrial) -> int:
    """How many cores a trial keeps busy: one for each of its processes."""
    strategy = Strategy.parse(trial.values.get("strategy", "single"))
    return sum(strategy.processes(int(trial.values.get("workers", "1"))).values())


def run_sweep(
    plan: SweepPlan,
    out: Path,
    launch: Launch,
    *,
    cores: Sequence[int],
    jobs: int | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> list[SweepRow]:
    """Run what is not done, at most `jobs` trials at once; one that fails is a row. No process of it is left."""
    with closing(RunLock(out / _LOCK)):
        # Runs of a sweep that was killed were told to end; one that does not in time will be refused.
        deadline = time.monotonic() + _END_S
        for trial in plan.trials():
            while RunDirectory.is_live(out / _RUNS / trial.folder) and time.monotonic() < deadline:
                time.sleep(_LOOK_S)
        waiting = [row.trial for row in sweep_rows(plan, out) if not row.done]
        children = _Children(plan, out, launch, cores, jobs)
        num_trials, to_do, began = len(plan.trials()), len(waiting), time.monotonic()

        def report() -> None:
            running = len(children.running)
            ended = to_do - len(waiting) - running
            left_s = (time.monotonic() - began) / ended * (to_do - ended) if ended else None
            done, current = num_trials - to_do + ended, f"{running} under way"
            on_progress(Progress(done=done, runs=num_trials, current=current, seconds_left=left_s))

        try:
            while waiting or children.running:
                while waiting and children.has_room_for(waiting[0]):
                    children.start(waiting.pop(0))
                    report()
                if children.collect():
                    report()
                else:
                    time.sleep(_LOOK_S)
        finally:
            end_processes([process for _, process, _ in children.running])
        return sweep_rows(plan, out, children.failures)


class _Children:
    """The processes of the trials that are under way."""

    def __init__(
        self, plan: SweepPlan, out: Path, launch: Launch, cores: Sequence[int], jobs: int | None
    ) -> None:
        self._plan, self._runs, self._launch = plan, out / _RUNS, launch
        make_directory(self._runs)
        self._free, self._all = list(cores), tuple(cores)
        self._jobs = jobs
        self.running: list[tuple[SweepTrial, subprocess.Popen[bytes], tuple[int, ...]]] = []
        self.failures: dict[int, str] = {}

    def has_room_for(self, trial: SweepTrial) -> bool:
        """Whether there are cores for one more; one that wants more than there are has all of them."""
        if self._jobs is not None and len(self.running) >= self._jobs:
            return False
        return len(self._free) >= min(cores_of(trial), len(self._all))

    def start(self, trial: SweepTrial) -> None:
        folder = self._runs / trial.folder
        count = min(cores_of(trial), len(self._all))
        cores, self._free = tuple(self._free[:count]), self._free[count:]
        words = ["train", self._plan.task, *trial.words()]
        words += [f"{name}={value}" for name, value in self._plan.common.items()]
        words += [f"--out={folder}", "--progress=none"]
        if RunDirectory.is_one(folder):
            words.append("--resume")
        with (self._runs / f"{trial.folder}.log").open("wb") as log:
            process = subprocess.Popen(
                self._launch(cores, words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the sweep, which ends its runs itself
            )
        self.running.append((trial, process, cores))

    def collect(self) -> bool:
        ended = [one for one in self.running if one[1].poll() is not None]
        for one in ended:
            self.running.remove(one)
            trial, process, cores = one
            self._free = sorted((*self._free, *cores))
            if process.returncode:
                said = last_said(self._runs / f"{trial.folder}.log")
                sentence = f"run {trial.folder} ended with status {process.returncode}: {said}"
                self.failures[trial.number] = sentence
        return bool(ended)


def end_processes(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ask all of them to end, and wait until they have; what does not within 20 seconds is killed."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _END_S
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def last_said(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    ours = [line.removeprefix("manyhands: ") for line in lines if line.startswith("manyhands: ")]
    return (ours or lines or ["it printed nothing"])[-1][:_MESSAGE_CHARS]


def usable_cores() -> list[int]:
    found = sorted(os.sched_getaffinity(0))
    if not found:
        raise ManyhandsError("no core is available to this process")
    return found
