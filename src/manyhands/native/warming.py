"""Compile kernels before they are needed: several at once, with a line that says so, and never twice.

numba compiles under one lock, so what compiles side by side are processes, forked from one that has imported numba and
nothing that computes. A family is the jobs that one kind of run needs; a file in the cache says that a job was done.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path

from manyhands.native.cache_folder import cache_folder, digest_of, imported_files, module_file
from manyhands.workloads.registry import FAMILIES, JOBS, WORKLOADS, CompileJob, Workload, find

_PATIENCE_S = 600.0
_SHOWN_EVERY_S = 1.0
_PREPARED: set[str] = set()  # what this process has prepared, or tried to
_SPENT_S: list[float] = []


def prepare(*families: str) -> float:
    """Compile what these families need and is not there yet; the seconds it took, 0 where nothing was left to do.

    To be called before the modules with these kernels are imported. One process of a user compiles and others wait for
    it. Where nothing can be kept nothing is done, and where a kernel does not compile that is said; whoever needs it
    compiles it.
    """
    root = cache_folder()
    if root is None or _PREPARED.issuperset(families) or not missing_jobs(*families):
        return 0.0
    _PREPARED.update(families)
    began = time.monotonic()
    with _alone(root):
        missing = missing_jobs(*families)
        if missing:  # and no other process has done it meanwhile
            cores = len(os.sched_getaffinity(0))
            _warn(f"compiling kernels on {cores} cores, once per machine and version; stored in {root}")
            _compile_in_child(missing)
    seconds = time.monotonic() - began
    _SPENT_S.append(seconds)
    if missing:
        _warn(f"compiled in {seconds:.1f} s")
    return seconds


def spent_s() -> float:
    """The seconds that `prepare` has taken in this process: not part of a training's time."""
    return sum(_SPENT_S)


def missing_jobs(*families: str) -> list[str]:
    """The jobs of these families that have not been done here, with the sources as they are."""
    return [job for job in jobs_of(*families) if not _mark(job).exists()]


def jobs_of(*families: str) -> list[str]:
    """The jobs of these families, each once: a kind of run, a workload's name, or `all`."""
    found: list[str] = []
    for family in families:
        if family == "all":
            found += [*JOBS, *(job for name in WORKLOADS for job in _workload_jobs(name))]
        elif family in FAMILIES:
            found += FAMILIES[family]
        else:
            found += [*_workload(family).uses, *_workload_jobs(family, rare=False)]
    return list(dict.fromkeys(found))


def job_named(name: str) -> CompileJob:
    return JOBS[name] if name in JOBS else _workload_jobs(name.rpartition(".")[0])[name]


def _workload(name: str) -> Workload:
    found = WORKLOADS.get(name) or find(name)
    assert found is not None, f"no workload {name}"
    return found


@cache
def _workload_jobs(name: str, *, rare: bool = True) -> dict[str, CompileJob]:
    """Each kernel of a workload is a job, which comes after the one of waiting where its code calls that."""
    workload, waiting, found = _workload(name), module_file("manyhands.native.waiting"), {}
    for call in (*workload.kernels, *(workload.rare_kernels if rare else ())):
        module, _, function = call.partition(":")
        file = module_file(module)
        waits = file is not None and waiting in imported_files(file)
        job = f"{name}.{module.rpartition('.')[2]}{'' if function == 'warm' else f'-{function}'}"
        found[job] = CompileJob((call,), after="waiting" if waits else None)
    return found


@cache
def _mark(job: str) -> Path:
    root = cache_folder()
    assert root is not None, "the callers have asked"
    files = [module_file(call.partition(":")[0]) for call in job_named(job).calls]
    sources = digest_of([file for file in files if file is not None])
    digest = hashlib.sha256(_machine() + sources.encode()).hexdigest()[:16]
    return root / f"{job}-{digest}.done"


@cache
def _machine() -> bytes:
    """What kind of processor this is; a home on a shared disk serves several."""
    try:
        with open("/proc/cpuinfo", "rb") as file:
            first = file.read(1 << 16).partition(b"\n\n")[0]
    except OSError:
        first = b""
    kinds = (b"model name", b"flags", b"Features", b"CPU part")
    lines = [line for line in first.splitlines() if line.startswith(kinds)]
    return b"\n".join([platform.machine().encode(), os.environ.get("NUMBA_CPU_NAME", "").encode(), *lines])


@contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Context in which no other process of this user compiles; entered anyway after a long wait."""
    descriptor = os.open(root / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _PATIENCE_S
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    _warn(f"another process compiles for over {_PATIENCE_S:.0f} s; continuing without it")
                    break
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)  # which lets go of the lock


def _compile_in_child(names: Sequence[str]) -> None:
    command = [sys.executable, "-m", "manyhands.native.warming", *names]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment,
        start_new_session=True, text=True,
    )  # fmt: skip
    try:
        said = _stderr_of(process, names)
    finally:
        if process.poll() is None:  # it took too long, or somebody pressed Ctrl-C
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.stderr is not None:
            process.stderr.close()
    if said is None:
        _warn(f"kernels were not compiled within {_PATIENCE_S:.0f} s; continuing without them")
    elif process.returncode != 0:
        last = said.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        _warn(f"kernels could not be compiled beforehand: {last[0]}")


def _stderr_of(process: subprocess.Popen[str], names: Sequence[str]) -> str | None:
    """All that it writes until it ends, while a terminal shows how far it is; None where it takes too long."""
    began, shows = time.monotonic(), sys.stderr.isatty()
    try:
        while (seconds := time.monotonic() - began) < _PATIENCE_S:
            try:
                return process.communicate(timeout=_SHOWN_EVERY_S)[1]
            except subprocess.TimeoutExpired:
                if shows:
                    done = sum(_mark(name).exists() for name in names)
                    line = f"manyhands: compiling: {done} of {len(names)} parts done, {seconds:.0f} s"
                    print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        return None
    finally:
        if shows:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def run_jobs(names: Sequence[str], slots: int) -> list[str]:
    """Run jobs in forked processes, `slots` at once, each after the one that it builds on; the names of failed ones.

    This process has one thread and has computed nothing.
    """
    waiting, done, failed = list(names), set[str](), list[str]()
    running: dict[int, str] = {}
    while waiting or running:
        ready = [name for name in waiting if job_named(name).after not in set(names) - done]
        while ready and len(running) < slots:
            name = ready.pop(0)
            waiting.remove(name)
            running[_fork(name)] = name
        pid, status = os.wait()
        name = running.pop(pid)
        done.add(name)
        if status != 0:
            failed.append(name)
    return failed


def _fork(name: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        for call in job_named(name).calls:
            module, _, function = call.partition(":")
            found = import_module(module)
            if function:
                getattr(found, function)()
        _mark(name).touch()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _warn(line: str) -> None:
    print(f"manyhands: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    # Once for all: numba, and what it does before it compiles its first function.
    import_module("manyhands.native.decorators").njit("int64(int64)")(lambda value: abs(value))
    failed_jobs = run_jobs(sys.argv[1:], slots=max(1, len(os.sched_getaffinity(0))))
    if failed_jobs:
        sys.exit(f"{', '.join(failed_jobs)} failed")
