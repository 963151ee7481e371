"""The launcher's side of the template: started when workers are first asked for, and kept for the next run.

Workers of a run are forks of one process that has already imported torch; see `forking`. A template fits as long as
what is read while importing stays the same: the interpreter, the package, and the variables that libraries read once.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

from manyhands.errors import ManyhandsError, PeerTimeout
from manyhands.places.local import entry
from manyhands.places.local.forking import MOST_PASSED, ForkRequest, TemplateSpec, born_children
from manyhands.strategies.registry import STRATEGIES

PRELOADED: Final = ("torch", "manyhands.engine.preload")  # what workers of every strategy need

_LATER: Final = tuple(module for strategy in STRATEGIES.values() for module in strategy.modules)
"""What those of one strategy need: the one that is asked for, and all when nothing is."""

# -P: no folder of ours is searched before the standard library. faulthandler: a crash in C code
# prints where Python was.
_COMMAND: Final = (sys.executable, "-P", "-X", "faulthandler")
_READ_ONCE: Final = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "NUMBA_", "TORCH", "PYTORCH", "PYTHON", "LD_", "MALLOC_", "CUDA_",
)  # fmt: skip
"""Variables that begin so are read while importing."""

_NOT_READ_ONCE: Final = ("OMP_NUM_THREADS", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "TORCHINDUCTOR_CACHE_DIR")
"""But for these: a worker sets its threads itself, takes over the launcher's search path, and compiles on its own."""

_LIMITS: Final = tuple(name for name in dir(resource) if name.startswith("RLIMIT_"))
_START_S: Final = 120.0
_PR_SET_SUBREAPER: Final = 36
_PR_GET_SUBREAPER: Final = 37


class Template:
    """One template process; any thread may ask it for forks. `close` ends it, and is idempotent."""

    def __init__(
        self, environment: Mapping[str, str], modules: Sequence[str], first_file: str = entry.__file__
    ) -> None:
        """Start it and return at once: it imports in the background. `first_file` is what it runs."""
        self.key = _key(environment, modules)
        self._lock = threading.RLock()
        self._in_batch = False
        self._foreseen: set[str] = set()
        self._starter = threading.current_thread()  # the kernel ends a child with the thread that started it
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        launcher = os.pidfd_open(os.getpid())
        try:
            with theirs:
                spec = TemplateSpec(
                    launcher_pid=os.getpid(),
                    control=theirs.fileno(),
                    launcher=launcher,
                    modules=tuple(modules),
                    later=_LATER if modules == PRELOADED else (),
                    path=tuple(sys.path),
                )
                self._process = subprocess.Popen(
                    (*_COMMAND, first_file, "template"),
                    stdin=subprocess.DEVNULL,
                    env={**environment, entry.TEMPLATE_VARIABLE: json.dumps(spec._asdict())},
                    pass_fds=(theirs.fileno(), launcher),
                    start_new_session=True,
                )
        except BaseException:
            self._control.close()
            raise
        finally:
            os.close(launcher)

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it can be asked, and will be there for a while."""
        return self._starter.is_alive() and self._process.poll() is None and self._control.fileno() >= 0

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Forks that are asked for inside come right one after the other; all of them begin when this is left."""
        with self._lock:
            if self._in_batch:
                yield
                return
            with _adopting_orphans():
                self._send(batch=list(_expected))
                self._in_batch = True
                try:
                    yield
                finally:
                    # Have what was forked begin: when `done` comes, this process is its parent.
                    self._in_batch = False
                    self._send(end=True)
                    message: dict[str, Any] = {}
                    while self._control.fileno() >= 0 and "done" not in message:
                        message, _ = self._receive("a batch of processes")

    def ask(
        self, name: str, role: str, passed: Sequence[int], environment: Mapping[str, str], folder: str = ""
    ) -> AdoptedProcess:
        """A child of this process for what the first file makes of `role`, in `folder` or here.

        `passed` are its descriptors, the writing ends of its stdout and stderr first. ManyhandsError names why there is
        none.
        """
        mask = os.umask(0o077)  # to know it, it has to be set
        os.umask(mask)
        request = ForkRequest(
            role=role,
            environment=environment,
            folder=folder or os.readlink("/proc/self/cwd"),
            umask=mask,
            cores=tuple(os.sched_getaffinity(0)),
            limits={name: resource.getrlimit(getattr(resource, name)) for name in _LIMITS},
            num_descriptors=len(passed),
        )
        with self.batch():
            try:
                data = json.dumps(request._asdict()).encode()
                socket.send_fds(self._control, [data], passed[:MOST_PASSED])
                for begin in range(MOST_PASSED, len(passed), MOST_PASSED):
                    socket.send_fds(self._control, [b"+"], passed[begin : begin + MOST_PASSED])
                message: dict[str, Any] = {}
                while not ("pid" in message or "error" in message):
                    message, descriptors = self._receive(name)
            except OSError as error:
                raise self._gone(name) from error
            except (KeyboardInterrupt, SystemExit):  # a late answer would be taken for that of the next
                self.close()
                raise
            if "error" in message:
                raise ManyhandsError(f"{name} cannot be started: {message['error']}")
            return AdoptedProcess(message["pid"], descriptors[0])

    def foresee(self, modules: Sequence[str]) -> None:
        """Have it import what forks will need before one is asked for; returns at once."""
        with self._lock:
            new = tuple(module for module in modules if module not in self._foreseen)
            self._foreseen.update(new)
            if new:
                self._send(imports=new)

    def close(self) -> None:
        """End it, which has nothing to lose; its forks live on."""
        if self._in_batch:
            self._send(end=True)
        self._control.close()
        self._process.kill()
        self._process.wait()

    def forget(self) -> None:
        """In a fork of the launcher: it is the launcher's, and not ours."""
        self._control.close()
        self._process.returncode = 0

    def _send(self, **message: Any) -> None:
        with suppress(OSError):  # it is gone, which the next request for a fork reports
            self._control.send(json.dumps(message).encode())

    def _receive(self, name: str) -> tuple[dict[str, Any], list[int]]:
        deadline = time.monotonic() + _START_S
        while not select.select([self._control], [], [], 0.2)[0]:
            if self._process.poll() is not None:
                raise self._gone(name)
            if time.monotonic() > deadline:
                raise PeerTimeout(
                    f"{name} was not started: the template process (pid {self.pid}) did not answer for {_START_S:g} s",
                    peer=-1,
                )
        data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, 1)
        if not data:
            raise self._gone(name)
        return json.loads(data), descriptors

    def _gone(self, name: str) -> ManyhandsError:
        self._control.close()
        self._process.kill()
        status = self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return ManyhandsError(
            f"{name} was not started: the template process (pid {self.pid}) that workers are forked from {how}"
        )


def obtain(environment: Mapping[str, str], modules: Sequence[str] = PRELOADED) -> Template:
    """The kept template if it fits, or a new one, which is kept from now on."""
    global _kept
    with _keeping:
        if _kept is not None and not (_kept.is_alive() and _kept.key == _key(environment, modules)):
            _kept.close()
            _kept = None
        if _kept is None:
            _kept = Template(environment, modules)
        return _kept


def warm() -> None:
    """Have the process that workers come from import what they need while the caller does something else.

    Returns at once. `fit` does this first of all; a script that calls it before it imports torch and loads its data
    waits the less for its first step. Without a `fit`, the process ends with the script.
    """
    obtain(inherited_environment()).foresee(tuple(_expected))


def expect(modules: Sequence[str]) -> None:
    """Have templates import `modules` before the next fork, for it and those that come after; with `warm`, at once."""
    _expected.update(dict.fromkeys(modules))


def inherited_environment() -> dict[str, str]:
    """The launcher's, in which a child finds this package where the launcher did."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folder or os.getcwd() for folder in sys.path)}


def serving_children(names: Sequence[str], calls: str) -> Iterator[tuple[AdoptedProcess, socket.socket]]:
    """A process for each name that runs the function `calls`, as module:function, with our end of its socket.

    Those that this process was born with are there at once; if they do not suffice, all are forks of a template.
    """
    if len(born_children) >= len(names):
        for _ in names:
            pid, end = born_children.pop(0)
            with suppress(BrokenPipeError):  # it has ended, which its process descriptor tells
                end.send(calls.encode())
            yield AdoptedProcess(pid, os.pidfd_open(pid)), end
        return
    template, environment = obtain(inherited_environment()), {**os.environ, "OMP_NUM_THREADS": "1"}
    with template.batch():
        for name in names:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                role = json.dumps({"name": name, "parent_pid": os.getpid(), "calls": calls})
                process = template.ask(name, role, [1, 2, theirs.fileno()], environment)
            yield process, ours


def kept_pid() -> int | None:
    kept = _kept
    return kept.pid if kept is not None and kept.is_alive() else None


def end_kept() -> None:
    """End the kept template; the next run starts another."""
    global _kept
    with _keeping:
        kept, _kept = _kept, None
    if kept is not None:
        kept.close()


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Have the kernel give this process the orphans among its descendants, for a moment."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    before = ctypes.c_int()
    if prctl(_PR_GET_SUBREAPER, ctypes.byref(before), 0, 0, 0) or prctl(_PR_SET_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) was refused")
    try:
        yield
    finally:
        prctl(_PR_SET_SUBREAPER, before.value, 0, 0, 0)


def _key(environment: Mapping[str, str], modules: Sequence[str]) -> tuple[object, ...]:
    read_once = {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_ONCE) and name not in _NOT_READ_ONCE
    }
    return sys.executable, entry.__file__, tuple(modules), tuple(sorted(read_once.items()))


_expected: dict[str, None] = {}
_keeping = threading.Lock()
_kept: Template | None = None


def _forget_in_child() -> None:
    global _kept, _keeping
    kept, _kept, _keeping = _kept, None, threading.Lock()
    if kept is not None:
        kept.forget()


os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(end_kept)


class StillRunning(Exception):
    """The process has not ended in time."""


class AdoptedProcess:
    """A child of ours, with its process descriptor, which it owns; only this object waits for it."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.pidfd = pidfd
        self.returncode: int | None = None  # as in `subprocess`; None until it is waited for

    def wait(self, timeout_s: float | None = None) -> int:
        """Its return code, once it has ended; StillRunning after `timeout_s`."""
        if self.returncode is None:
            if timeout_s is not None and not select.select([self.pidfd], [], [], timeout_s)[0]:
                raise StillRunning(f"process {self.pid} has not ended after {timeout_s:g} s")
            _, status = os.waitpid(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def close(self) -> None:
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
