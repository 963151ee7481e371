"""The template process: it has imported what takes seconds to import and computed nothing, and workers are its forks.

    launcher ──►  role, surroundings, descriptors      ──►  template
                                                            forks twice: the fork in between ends at once,
    launcher  ◄── pid, pidfd                           ◄──  so that the launcher is the worker's parent

A fork of a process that has computed is not safe: threads of OpenMP and of CUDA do not come along. So nothing here, and
nothing that is imported here, may compute. The launcher is a *child subreaper* while it asks, which makes the kernel
give it the orphan; from then on a worker is a child of the launcher like any other.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import random
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from manyhands.cluster.pages import use_large_pages
from manyhands.cluster.parent import die_with_parent
from manyhands.cluster.spec import RoleSpec

__all__ = [
    "FRAME_BYTES",
    "MOST_PASSED",
    "TEMPLATE_NAME",
    "ForkRequest",
    "ImportRequest",
    "TemplateSpec",
    "await_birth",
    "run_template",
    "spare_finalizers",
    "take_surroundings",
]

FRAME_BYTES = 1 << 20
MOST_PASSED = 250
"""Descriptors that fit into one message, short of the kernel's 253."""

TEMPLATE_NAME = b"mh template"
"""What a list of processes shows."""

_TAKEN_APART = ("torch", "numba", "llvmlite")
"""Whose finalizers change nothing but memory that ends with the process."""

_MANY_FORKS = 8
"""After so many, and when nobody has asked for another in `_QUIET_MS`, it pays to make the next ones cheaper."""
_QUIET_MS = 100

_ADOPTED_S = 30.0
_PR_SET_NAME = 15
_PID = struct.Struct("=i")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSpec:
    """What a template is told when it is started."""

    launcher_pid: int
    control: int
    """Its end of the socket on which forks are asked for."""

    launcher: int
    """A descriptor of the launcher's process, which reports its end."""

    modules: tuple[str, ...]
    """What it imports before it forks."""

    later: tuple[str, ...]
    """What it imports when nobody asks for anything."""

    path: tuple[str, ...]

    def to_text(self) -> str:
        """The form in the environment variable."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """One fork: the role, and what a process that the launcher started itself would inherit.

    Its output's two pipes and then the role's descriptors, in the order of `RoleSpec.inherited`, come along.
    """

    role: str
    """The text of a `RoleSpec`."""

    modules: tuple[str, ...]
    """What the template imports first, where it has not: the fork will need it, and so may its siblings."""

    environment: Mapping[str, str]
    folder: str
    umask: int
    cores: tuple[int, ...]
    limits: Mapping[str, tuple[int, int]]
    num_descriptors: int

    def to_bytes(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class ImportRequest:
    """What forks that are asked for soon will need: it is imported as soon as nobody asks for anything."""

    modules: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """As it is sent."""
        return json.dumps({"imports": self.modules}).encode()


def run_template(text: str) -> int:
    """Import, then fork whatever is asked for until the launcher is gone; in a fork, the life of its role."""
    born = await_birth(text)
    return _live(*born) if born is not None else 0


def await_birth(text: str) -> tuple[ForkRequest, list[int]] | None:
    """Import, then fork; it returns in every fork, with what was asked and its descriptors, and at the end with None.

    `text` is that of a `TemplateSpec`.
    """
    spec = TemplateSpec(**json.loads(text))
    sys.path[:] = spec.path
    _show_name(TEMPLATE_NAME)
    _import_all(spec.modules)
    with socket.socket(fileno=spec.control) as control:
        return _serve(control, spec)


def _import_all(names: Sequence[str]) -> None:
    """Import what is not there yet; what fails is told of, and fails again in the worker that needs it."""
    gc.disable()  # what is imported stays: looking for garbage among it takes a fifth of the time
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
    spare_finalizers()
    gc.enable()
    gc.freeze()  # or collecting in a fork would copy what all forks share


def spare_finalizers() -> None:
    """Have forks end without taking torch's and numba's tables apart, which takes as long as a short run.

    Thousands of operators are registered while importing, and are to be removed one by one when a process ends; what
    others ask for at the end is done.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        peeked = finalizer.peek()
        if peeked is not None and str(getattr(peeked[1], "__module__", "")).partition(".")[0] in _TAKEN_APART:
            finalizer.atexit = False


def _serve(control: socket.socket, spec: TemplateSpec) -> tuple[ForkRequest, list[int]] | None:
    """In the template, None at the end; in a fork, what it is."""
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(spec.launcher, select.POLLIN)
    later = list(spec.later)
    num_forks, is_large = 0, False
    while True:
        pays = num_forks >= _MANY_FORKS and not is_large
        ready = {descriptor for descriptor, _ in poll.poll(0 if later else _QUIET_MS if pays else None)}
        if not ready and later:
            _import_all([later.pop(0)])
            continue
        if not ready:
            use_large_pages()
            is_large = True
            continue
        if spec.launcher in ready:
            return None
        asked = _receive(control)
        if asked is None:
            return None
        request, passed = asked
        if isinstance(request, ImportRequest):
            later = [*request.modules, *later]
            continue
        if not sys.modules.keys() >= set(request.modules):
            _import_all(request.modules)
        try:
            pid = _fork_twice()
        except OSError as error:
            control.send(json.dumps({"error": f"{error.strerror or error}"}).encode())
        else:
            if pid == 0:
                _await_adoption(spec)
                os.close(spec.launcher)
                return request, passed
            pidfd = os.pidfd_open(pid)
            socket.send_fds(control, [json.dumps({"pid": pid}).encode()], [pidfd])
            os.close(pidfd)
            num_forks += 1
        for descriptor in passed:
            os.close(descriptor)


def _receive(control: socket.socket) -> tuple[ForkRequest | ImportRequest, list[int]] | None:
    data, passed, _, _ = socket.recv_fds(control, FRAME_BYTES, MOST_PASSED)
    if not data:
        return None
    told = json.loads(data)
    if "imports" in told:
        return ImportRequest(tuple(told["imports"])), []
    request = ForkRequest(**told)
    while len(passed) < request.num_descriptors:
        more, others, _, _ = socket.recv_fds(control, 1, MOST_PASSED)
        if not more:
            return None
        passed += others
    for descriptor in passed:
        os.set_inheritable(descriptor, False)
    return request, passed


def _fork_twice() -> int:
    """The process id of a grandchild that leads a session and whose parent has ended; 0 in that grandchild."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        worker = -1
        try:
            worker = os.fork()
            if worker == 0:
                os.setsid()  # before anybody knows its number, so that it can be killed with its group at once
                os.write(writer, _PID.pack(os.getpid()))
                os.close(reader)
                os.close(writer)
                return 0
        finally:
            if worker != 0:
                os._exit(0)
    os.close(writer)
    told = os.read(reader, _PID.size)
    os.close(reader)
    os.waitpid(between, 0)
    if not told:
        raise OSError("no more processes can be made")
    (worker,) = _PID.unpack(told)
    return int(worker)


def _await_adoption(spec: TemplateSpec) -> None:
    """Wait until the launcher is this worker's parent; leave if it never is."""
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() != spec.launcher_pid:
        if time.monotonic() > deadline or select.select([spec.launcher], [], [], 0.0005)[0]:
            os._exit(1)


def _live(request: ForkRequest, passed: Sequence[int]) -> int:
    """Be the role: with its own output, surroundings and random numbers, as a process of its own would be."""
    stdout, stderr, *inherited = passed
    spec = RoleSpec.from_text(request.role).received(inherited)
    for descriptor, number in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    die_with_parent(spec.parent_pid, signal.SIGKILL)
    take_surroundings(request)
    _show_name(spec.name.encode())
    sys.orig_argv[-1] = spec.name
    role = importlib.import_module("manyhands.cluster.role")
    status: int = role.run_role(spec)
    return status


def take_surroundings(request: ForkRequest) -> None:
    """What a process that is started would have inherited or read: of its parent, and random numbers of its own."""
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    os.umask(request.umask)
    os.sched_setaffinity(0, request.cores)
    for name, limit in request.limits.items():
        soft, hard = limit
        resource.setrlimit(getattr(resource, name), (soft, hard))
    random.seed()
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()
    _take_threads(request.environment.get("OMP_NUM_THREADS", ""))


def _take_threads(count: str) -> None:
    """As many as the role is given: the variable was read when the template imported torch."""
    torch: Any = sys.modules.get("torch")
    if torch is not None and count.isdecimal() and int(count) > 0:
        torch.set_num_threads(int(count))


def _show_name(name: bytes) -> None:
    """For those who list processes, and see at most 15 letters of it."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name[:15]), 0, 0, 0)
