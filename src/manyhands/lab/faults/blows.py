"""What strikes a run: signals to its processes, connections that fall silent, a disk without space.

A connection falls silent without root and without a network of its own: the kernel gives whoever may trace a process a
duplicate of its sockets (`pidfd_getfd`), and a socket filter drops all that arrives there, acknowledgements included.
Neither end is told, as with a cable that was pulled out. A full disk is a small file system in memory, and takes
root.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from manyhands.lab.compare.figures import KINDS
from manyhands.lab.faults.fault_costs import FULL_S, PAUSE_S, SLOW, WHOLE_RUN, Fault, Kind

Pids = Callable[[str], list[int]]
"""A kind of process, such as worker -> those of the run, by number; of the whole run its launcher."""

_Ends = tuple[Any, Any]  # the addresses of a connection: its own, and the other end's

_SLICE_S = 0.03  # of a slow worker: so long it runs
_PROBE_S = 10.0
_PIDFD_GETFD: Final = 438  # on every architecture
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # SO_…; of Linux, and not among Python's names
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # one instruction: return 0 bytes of the packet
_ROOM_BYTES = 16 << 20


class Blow(ABC):
    """One fault at one run: it begins once, may change while it lasts, and ends."""

    @abstractmethod
    def begin(self, pids: Pids) -> bool:
        """Strike; False where there is nobody to strike yet."""

    def goes_on(self, lasted_s: float) -> bool:
        """Whether the fault still lasts, after so many seconds; changes what has to change by then."""
        return lasted_s < PAUSE_S

    @abstractmethod
    def end(self) -> None:
        """Take back what can be taken back; also where nothing was begun."""


def blow_of(fault: Fault, out: Path) -> Blow:
    """The blow that `fault` is to the run in `out`."""
    if fault.kind is Kind.CUT:
        return _CutConnections(fault.victim)
    if fault.kind is Kind.FULL:
        return _FullDisk(out)
    return _Signals(fault)


def why_not(kind: Kind) -> str:
    """Why this machine cannot do such a thing to a run, in a sentence; empty where it can."""
    if kind is Kind.CUT:
        return _why_no_filter()
    return _why_no_mount() if kind is Kind.FULL else ""


class _Signals(Blow):
    """The last process of a kind is killed, stopped, or stopped two thirds of the time."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._victims: list[int] = []
        self._runs = False

    def begin(self, pids: Pids) -> bool:
        self._victims = pids(self._fault.victim)[-1:]
        self._send(signal.SIGKILL if self._fault.kind is Kind.KILL else signal.SIGSTOP)
        return bool(self._victims)

    def goes_on(self, lasted_s: float) -> bool:
        if self._fault.kind is Kind.SLOW:
            runs = lasted_s % (SLOW * _SLICE_S) < _SLICE_S
            if runs != self._runs:
                self._send(signal.SIGCONT if runs else signal.SIGSTOP)
                self._runs = runs
        return self._fault.kind is not Kind.KILL and super().goes_on(lasted_s)

    def end(self) -> None:
        if self._fault.kind is not Kind.KILL:
            self._send(signal.SIGCONT)

    def _send(self, number: signal.Signals) -> None:
        for pid in self._victims:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


class _CutConnections(Blow):
    """Every TCP connection of the last process of a kind is silent at both ends.

    A connection that one of them makes meanwhile is not. The duplicates stay open until the end: a close, too, is heard
    of only then.
    """

    def __init__(self, victim: str) -> None:
        self._victim = victim
        self._silent: list[socket.socket] = []

    def begin(self, pids: Pids) -> bool:
        victims = pids(self._victim)[-1:]
        cut = {names: one for pid in victims for names, one in _connections(pid).items()}
        ends = list(cut.values())
        others = {pid for kind in (WHOLE_RUN, *KINDS) for pid in pids(kind)} - set(victims)
        for names, one in (found for pid in others for found in _connections(pid).items()):
            if names[::-1] in cut:
                ends.append(one)
            else:
                one.close()
        for one in ends:
            _drop_what_arrives(one)
        self._silent = ends
        return bool(ends)

    def end(self) -> None:
        for one in self._silent:
            with suppress(OSError):  # it has ended meanwhile
                one.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
            one.close()
        self._silent = []


class _FullDisk(Blow):
    """No page is free on the file system of the run's directory."""

    def __init__(self, out: Path) -> None:
        self._ballast = out / "ballast"

    def begin(self, pids: Pids) -> bool:
        del pids
        with self._ballast.open("wb", buffering=0) as file:
            while room := _room(self._ballast.parent):
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), room)
                except OSError as error:  # the run was faster; what is left is asked for next
                    if error.errno != errno.ENOSPC:
                        raise
        return True

    def goes_on(self, lasted_s: float) -> bool:
        return lasted_s < FULL_S

    def end(self) -> None:
        self._ballast.unlink(missing_ok=True)


def _room(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[None]:
    """A file system in memory at `folder`, as large as a run that wrote `num_bytes` needs; it goes with its files."""
    folder.mkdir()
    subprocess.run(_mount(folder, 2 * num_bytes + _ROOM_BYTES), check=True, timeout=_PROBE_S)
    try:
        yield
    finally:  # lazily: a process that was killed may not be gone yet
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=_PROBE_S)


def _mount(folder: Path, num_bytes: int) -> list[str]:
    return ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(folder)]


def _why_no_mount() -> str:
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return "the programs mount and unshare are missing"
    # Where mounts are of this process alone, nothing is left behind.
    command = ["unshare", "--mount", *_mount(Path("/tmp"), _ROOM_BYTES)]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=False)
    said = tried.stderr.strip().splitlines() or [f"it ended with status {tried.returncode}"]
    return f"a small file system takes root: {said[-1]}" if tried.returncode else ""


def _connections(pid: int) -> dict[_Ends, socket.socket]:
    """Duplicates of the TCP connections of a process, by the addresses of its own and the other end."""
    found: dict[_Ends, socket.socket] = {}
    with suppress(ProcessLookupError, FileNotFoundError), _process(pid) as process:
        for name in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # closed meanwhile
                if os.readlink(name).startswith("socket:"):
                    one = socket.socket(fileno=_duplicate(process, int(name.name)))
                    try:
                        if one.type != socket.SOCK_STREAM or one.family == socket.AF_UNIX:
                            raise OSError("no TCP")
                        found[one.getsockname(), one.getpeername()] = one
                    except OSError:  # no connection
                        one.close()
    return found


@contextmanager
def _process(pid: int) -> Iterator[int]:
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _duplicate(process: int, descriptor: int) -> int:
    found = int(ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0))
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def _drop_what_arrives(end: socket.socket) -> None:
    program: Any = ctypes.create_string_buffer(_DROP_ALL)
    with suppress(ConnectionError):
        end.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))


def _why_no_filter() -> str:
    if not sys.platform.startswith("linux"):
        return f"only Linux has filters of sockets, and this is {sys.platform}"
    with socket.socket() as tried:
        try:
            with _process(os.getpid()) as process:
                os.close(_duplicate(process, tried.fileno()))
            _drop_what_arrives(tried)
        except OSError as error:
            return f"the kernel does not let a connection be silenced: {error.strerror}"
    return ""
