"""The template process: it has imported what takes seconds to import and computed nothing, and workers are its forks.

    launcher ──►  a batch                              ──►  template  forks once: a process in between
    launcher ──►  role, environment, descriptors       ──►            in between  forks a worker, and so on
    launcher  ◄── pid, pidfd                           ◄──            in between
    launcher ──►  that is all                          ──►            in between  ends
    launcher  ◄── done                                 ◄──  template, when it has

When the process in between ends, the launcher becomes the parent of its workers, which wait for that: it is a *child
subreaper* during a batch, which makes the kernel give it the orphans. A fork of a process that has computed is not
safe: threads of OpenMP and of CUDA do not come along. So nothing that is imported here may compute.
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
import sys
import time
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

FRAME_BYTES = 1 << 20
MOST_PASSED = 250  # descriptors that fit into one message, short of the kernel's 253

TEMPLATE_NAME = b"mh template"  # what a list of processes shows

CHILDREN_VARIABLE = "MANYHANDS_CHILDREN"
"""In the environment of a role: with how many processes it is born, which may become its loaders or actors."""

born_children: list[tuple[int, socket.socket]] = []
"""Those that are still nothing: their process ids and this process's ends of their sockets."""

_TAKEN_APART = ("torch", "numba", "llvmlite")
"""Whose finalizers change nothing but memory that ends with the process."""

_RUNNING_MS = 1000
"""If nothing was requested for so long after a fork, a run is in progress: modules for later forks are imported."""

_ADOPTED_S = 30.0
_PR_SET_NAME, _PR_SET_PDEATHSIG = 15, 1
_PASSED = ("control", "lifeline", "status_table", "stacks", "job")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """One child's place in the run, its inherited descriptors, and the launcher's search path for modules."""

    name: str
    rank: int
    world: int
    parent_pid: int
    lifeline: int
    status_table: int
    row: int  # of the status table
    descriptors: Mapping[str, int]
    path: tuple[str, ...]
    python_path: str | None
    """PYTHONPATH as the user set it; the launcher borrows the variable to start the child."""
    job: int = -1  # the file of its job
    stacks: int = -1  # where it writes its stacks on request
    control: int = -1  # the child's end of its control channel; known when the child is started

    def inherited(self) -> tuple[int, ...]:
        return (*(getattr(self, name) for name in _PASSED), *self.descriptors.values())

    def received(self, passed: Sequence[int]) -> RoleSpec:
        """This, with the numbers that `inherited` got on their way to another process."""
        own: dict[str, Any] = dict(zip(_PASSED, passed, strict=False))
        others = zip(self.descriptors, passed[len(_PASSED) :], strict=True)
        return replace(self, **own, descriptors=dict(others))

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RoleSpec:
        fields = json.loads(text)
        return cls(**{**fields, "path": tuple(fields["path"])})


def die_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Have the kernel send `number` when the thread that started this process ends; if it has, leave now."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) was refused")
    if os.getppid() != parent_pid:
        os.kill(0, signal.SIGKILL)


class TemplateSpec(NamedTuple):
    """What a template is given when it is started."""

    launcher_pid: int
    control: int  # its end of the socket on which forks are requested
    launcher: int  # a descriptor of the launcher's process, which reports its end
    modules: tuple[str, ...]  # what it imports before it forks
    later: tuple[str, ...]  # what it imports when nothing is requested
    path: tuple[str, ...]


class ForkRequest(NamedTuple):
    """One fork: the role, and what a process that is started would inherit; descriptors come along, outputs first."""

    role: str
    """The text of a `RoleSpec`; or name, parent and function of one that has no place in the run: a loader."""
    environment: Mapping[str, str]
    folder: str
    umask: int
    cores: tuple[int, ...]
    limits: Mapping[str, tuple[int, int]]
    num_descriptors: int


_Request = tuple[ForkRequest | dict[str, Any], list[int]]
"""What the launcher sends, with the descriptors that came along: a fork, or one of

{"imports": modules}    forks that follow soon will need them: imported when nothing is requested
{"batch": modules}      forks follow now, one after the other, which need these modules
{"end": true}           that is all: what was forked gets the launcher as its parent
"""

_Born = tuple[ForkRequest, list[int]]  # what a fork is to be


def run_template(text: str) -> int:
    """Import, then fork whatever is asked for until the launcher is gone; in a fork, the life of its role."""
    born = await_birth(text)
    return _live(*born) if born is not None else 0


def await_birth(text: str) -> _Born | None:
    """Import, then fork; it returns in every fork, with its request and descriptors, and at the end with None."""
    spec = TemplateSpec(**json.loads(text))
    sys.path[:] = spec.path
    _show_name(TEMPLATE_NAME)
    _import_all(spec.modules)
    with socket.socket(fileno=spec.control) as control:
        return _serve(control, spec)


def _import_all(names: Sequence[str]) -> None:
    """Import what is missing; a failure is reported, and occurs again in the worker that needs the module."""
    gc.disable()  # what is imported stays: looking for garbage among it takes a fifth of the time
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            if isinstance(error, OSError):  # such as a limit of this shell, which the launcher names
                print(f"manyhands: {name} could not be imported in advance: {error}", file=sys.stderr)
            else:
                traceback.print_exc()
    spare_finalizers()
    gc.enable()
    gc.freeze()  # or collecting in a fork would copy what all forks share


def spare_finalizers() -> None:
    """Have forks end without removing the thousands of operators that torch and numba registered, one by one."""
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        peeked = finalizer.peek()
        if peeked is not None and str(getattr(peeked[1], "__module__", "")).partition(".")[0] in _TAKEN_APART:
            finalizer.atexit = False


def _serve(control: socket.socket, spec: TemplateSpec) -> _Born | None:
    """In the template, None at the end; in a fork, what it is."""
    poll = _poll_for(control, spec)
    soon, later = list[str](), list(spec.later)
    has_waited = True
    why_none = "no batch has begun"
    while True:
        wait_ms = (0 if has_waited else _RUNNING_MS) if later else None
        ready = poll.poll(0 if soon else wait_ms)
        if not ready:
            has_waited = has_waited or not soon
            _import_all([(soon or later).pop(0)])
            continue
        match _next_of(control, spec, ready):
            case None:
                return None
            case {"imports": modules}, _:
                soon += modules
            case {"batch": modules}, _:
                if not sys.modules.keys() >= set(modules):
                    _import_all(modules)
                born = _serve_batch(control, spec)
                if isinstance(born, tuple):
                    return born
                if isinstance(born, str):
                    why_none = born
                else:
                    has_waited = False
                    _reply(control, done=True)
            case {"end": _}, _:
                _reply(control, done=True)
            case ForkRequest(), passed:
                _reply(control, error=why_none)
                _close_all(passed)


def _serve_batch(control: socket.socket, spec: TemplateSpec) -> _Born | str | None:
    """In the template None, or a word on why nobody else can be forked; in a fork, what it is."""
    try:
        between = os.fork()
    except OSError as error:
        return f"{error.strerror or error}"
    if between == 0:
        return _live_between(control, spec)
    _, status = os.waitpid(between, 0)
    if os.WIFSIGNALED(status):
        why = f"the process that forks them was killed by signal {os.WTERMSIG(status)}"
        _reply(control, error=why)  # to the caller that waits for a fork; without one, to the next
        return why
    return None


def _live_between(control: socket.socket, spec: TemplateSpec) -> _Born:
    # Fork whoever is asked for, and end with the batch; it returns in these forks, when the launcher is their parent.
    try:
        poll, own = _poll_for(control, spec), os.pidfd_open(os.getpid())
        while True:
            request, passed = _next_of(control, spec, poll.poll()) or (None, ())
            if not isinstance(request, ForkRequest):
                os._exit(0)
            try:
                worker = _fork_leader()
            except OSError as error:
                _reply(control, error=f"{error.strerror or error}")
            else:
                if worker == 0:
                    _await_adoption(spec, own)
                    return request, list(passed)
                pidfd = os.pidfd_open(worker)
                socket.send_fds(control, [json.dumps({"pid": worker}).encode()], [pidfd])
                os.close(pidfd)
            _close_all(passed)
    except BaseException:
        traceback.print_exc()
        os._exit(0)


def _fork_leader() -> int:
    """The process id of a child that leads a session; 0 in that child."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb", 0) as result, os.fdopen(writer, "wb", 0) as report:
        worker = os.fork()
        if worker == 0:
            os.setsid()  # before anybody knows its number, so that it can be killed with its group at once
            report.write(b".")
            return 0
        report.close()
        if not result.read(1):
            raise OSError("it ended immediately after the fork")
        return worker


def _poll_for(control: socket.socket, spec: TemplateSpec) -> select.poll:
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(spec.launcher, select.POLLIN)
    return poll


def _next_of(control: socket.socket, spec: TemplateSpec, ready: Sequence[tuple[int, int]]) -> _Request | None:
    if any(descriptor == spec.launcher for descriptor, _ in ready):
        return None
    data, passed, _, _ = socket.recv_fds(control, FRAME_BYTES, MOST_PASSED)
    if not data:
        return None
    message = json.loads(data)
    if "role" not in message:
        return message, []
    request = ForkRequest(**message)
    while len(passed) < request.num_descriptors:
        more, others, _, _ = socket.recv_fds(control, 1, MOST_PASSED)
        if not more:
            return None
        passed += others
    for descriptor in passed:
        os.set_inheritable(descriptor, False)
    return request, passed


def _reply(control: socket.socket, **message: Any) -> None:
    control.send(json.dumps(message).encode())


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _await_adoption(spec: TemplateSpec, between: int) -> None:
    # Wait until the process in between has ended, of which `between` tells, and the launcher is this worker's parent.
    # Leave if it never is.
    select.select([between, spec.launcher], [], [])
    deadline = time.monotonic() + _ADOPTED_S
    while os.getppid() != spec.launcher_pid:
        if time.monotonic() > deadline or select.select([spec.launcher], [], [], 0.0005)[0]:
            os._exit(1)
    os.close(between)
    os.close(spec.launcher)


def _live(request: ForkRequest, passed: Sequence[int]) -> int:
    """Run the role, with its output, environment and random seed, as a newly started process would."""
    stdout, stderr, *inherited = passed
    role = json.loads(request.role)
    for descriptor, number in ((stdout, 1), (stderr, 2)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    die_with_parent(role["parent_pid"], signal.SIGKILL)
    take_environment(request)
    _show_name(role["name"].encode())
    sys.orig_argv[-1] = role["name"]
    if "rank" not in role:
        return _serve_parent(socket.socket(fileno=inherited[0]), role["calls"])
    end = _bear_children(int(os.environ.pop(CHILDREN_VARIABLE, "0")))
    if end is not None:
        _show_name(b"mh child")
        calls = end.recv(FRAME_BYTES).decode()
        if not calls:  # the role has no use for it, or is gone
            os._exit(0)
        return _serve_parent(end, calls)
    spec = RoleSpec.from_text(request.role).received(inherited)
    return int(importlib.import_module("manyhands.places.local.role_process").run_role(spec))


def _serve_parent(end: socket.socket, calls: str) -> int:
    _take_threads("1")
    module, _, function = calls.partition(":")
    return int(getattr(importlib.import_module(module), function)(end))


def _bear_children(count: int) -> socket.socket | None:
    # Fork so many processes while this one has a single thread and has computed nothing; in each of them, its socket.
    # They hold nothing of the role's: a socket that they kept would hide its death.
    role = os.getpid()
    for _ in range(count):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            die_with_parent(role, signal.SIGKILL)
            for held in (ours, *(end for _, end in born_children)):
                held.detach()  # or the object would close a number that means something else by then
            born_children.clear()
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor > 2 and descriptor != theirs.fileno():
                    with suppress(OSError):  # that of the listing itself is closed already
                        os.close(descriptor)
            return theirs
        theirs.close()
        born_children.append((pid, ours))
    return None


def take_environment(request: ForkRequest) -> None:
    """What a process that is started would have inherited or read: of its parent, and random numbers of its own."""
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.folder)
    os.umask(request.umask)
    os.sched_setaffinity(0, request.cores)
    for name, (soft, hard) in request.limits.items():
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
    # What a list of processes shows, at most 15 letters.
    ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name[:15]), 0, 0, 0)
