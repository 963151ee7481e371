"""A worker's loader processes, which read its next items while it computes, and return each in shared memory.

    worker ──►  {path} and descriptors of the reader to unpack and of where stacks go
    worker ──►  {ticket, key, kept_from}  or  {forget: tickets}     over a socket that the loader inherits
    worker ◄──  {ticket} and the descriptor of a file in memory     that holds what was read, or the error

They are forks of a process that has computed nothing: of the worker itself, made before it began, if the launcher knew
that it would need them, else of a template. Either way they are the worker's children, and end with it. The file is
packed as a worker's job is (see `packed_job`); here the child writes it and its parent loads it: both run the same
user's code, and no other process can reach the socket.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from manyhands.data.reading import Loading
from manyhands.errors import ManyhandsError, UserError
from manyhands.native.closeable import Closeable
from manyhands.places.local.failure import describe_exit
from manyhands.places.local.forking import born_children
from manyhands.places.local.packed_job import load, pack
from manyhands.places.local.stacks import (
    LOADER_CALL,
    answer_with_stacks,
    answered_by,
    answers_to,
    ask_for_stack,
    call_of,
)
from manyhands.places.local.template import (
    AdoptedProcess,
    StillRunning,
    inherited_environment,
    obtain,
    serving_children,
)

_CALLS = "manyhands.places.local.loaders:run_loader"
_MESSAGE_BYTES = 1 << 20
_LOOK_S = 0.2
_LEAVE_S = 1.0  # how long a loader process may finish what it is reading when it is needed no more

_Key = TypeVar("_Key", bound=Hashable)


class KeyReader(Protocol):
    """Reads in a loader process."""

    def read(self, key: Any, kept_from: int) -> Any:
        """What `key` stands for; nothing before `kept_from` is asked for any more."""


class LoadFailed(NamedTuple):
    """Reading raised an error."""

    error: Exception
    trace: str  # of the loader process


class Loaders(Closeable, Generic[_Key]):
    """Up to `count` loader processes, started at the first request; a thread applies `prepare` to what they read."""

    def __init__(
        self,
        make: Callable[[], KeyReader],
        loading: Loading,
        count: int,
        owner: str,
        prepare: Callable[[Any], Any] | None = None,
    ) -> None:
        self._make, self._loading, self._count, self._owner = make, loading, count, owner
        if len(born_children) < count:
            obtain(inherited_environment())  # it imports while the worker builds its model
        self._prepare = prepare
        self._preparing = ThreadPoolExecutor(1, "prepare batches") if prepare is not None else None
        self._loaders: list[_Loader[_Key]] = []
        self._poll = select.poll()
        self._last_ticket = 0
        self._tickets: dict[_Key, int] = {}
        self._arrived: dict[_Key, Callable[[], Any]] = {}
        self._files = ExitStack()

    @property
    def window(self) -> int:
        return self._count * self._loading.ahead

    def get(self, key: _Key, upcoming: Sequence[_Key], kept_from: int = 0) -> Any:
        """What the reader reads for `key`; the processes continue with `upcoming`, and drop everything else.

        Raises what reading raised; ManyhandsError if a loader process is gone or does not answer.
        """
        if not self._loaders:
            self._start()
        self._take(0)
        wanted = [key, *upcoming[: self.window]]
        self._forget(set(wanted))
        for one in wanted:
            if one not in self._tickets:
                self._last_ticket += 1
                loader = min(self._loaders, key=lambda loader: len(loader.reading))
                loader.reading[self._last_ticket] = one
                self._tickets[one] = self._last_ticket
                loader.send(ticket=self._last_ticket, key=one, kept_from=kept_from)
        if key not in self._arrived:
            self._await(key)
        del self._tickets[key]
        found = self._arrived.pop(key)()
        if isinstance(found, LoadFailed):
            found.error.add_note(f"in a loader process of {self._owner}:\n{found.trace}")
            raise found.error
        return found

    def close(self) -> None:
        """End the processes, which may finish what they are reading, and drop what they have read."""
        self._forget(set())
        loaders, self._loaders = self._loaders, []
        for loader in loaders:
            loader.end.close()
        deadline = time.monotonic() + _LEAVE_S
        for loader in loaders:
            try:
                loader.process.wait(max(0.0, deadline - time.monotonic()))
            except StillRunning:  # it leads a session: what it has started goes, too
                os.killpg(loader.process.pid, signal.SIGKILL)
                loader.process.wait()
            loader.process.close()
        if self._preparing is not None:
            self._preparing.shutdown()
        self._files.close()

    def _start(self) -> None:
        try:
            job = pack(self._make)
        except UserError as error:
            raise UserError(
                f"loading: data cannot be sent to loader processes ({error.__cause__ or error}); use functions, "
                "arrays and plain objects, and open files when they are first read, or set workers=0"
            ) from error
        stacks = answers_to()
        if stacks is None:
            stacks = os.memfd_create("manyhands:stacks", os.MFD_CLOEXEC)
            self._files.callback(os.close, stacks)
        self._stacks = stacks
        names = [f"loader {number} of {self._owner}" for number in range(self._count)]
        try:
            for name, (process, end) in zip(names, serving_children(names, _CALLS), strict=True):
                self._loaders.append(_Loader[_Key](name, process, end))
            for loader in self._loaders:
                socket.send_fds(loader.end, [json.dumps({"path": sys.path}).encode()], [job, stacks])
                self._poll.register(loader.end, select.POLLIN)
                self._poll.register(loader.process.pidfd, select.POLLIN)
        finally:
            os.close(job)

    def _forget(self, wanted: set[_Key]) -> None:
        """Drop what was asked for and is not `wanted`; what is being read already is read, and dropped then."""
        unwanted = {ticket: key for key, ticket in self._tickets.items() if key not in wanted}
        for key in unwanted.values():
            del self._tickets[key]
            self._arrived.pop(key, None)
        for loader in self._loaders:
            tickets = [ticket for ticket in loader.reading if ticket in unwanted]
            if tickets:
                loader.send(forget=tickets)
                for ticket in tickets:
                    del loader.reading[ticket]

    def _await(self, key: _Key) -> None:
        begin = time.monotonic()
        loader = next(one for one in self._loaders if self._tickets[key] in one.reading)
        while key not in self._arrived:
            waited_s = time.monotonic() - begin
            if waited_s > self._loading.timeout_s:
                call = call_of(ask_for_stack(loader.process.pid, self._stacks)).removeprefix(LOADER_CALL)
                raise ManyhandsError(
                    f"{loader} returned nothing for {waited_s:.0f} s: it is {call}; if reading a batch takes longer, "
                    "set loading's timeout_s"
                )
            with answered_by(loader.process.pid) if waited_s > _LOOK_S else nullcontext():
                self._take(round(min(_LOOK_S, self._loading.timeout_s) * 1000))

    def _take(self, wait_ms: int) -> None:
        """What has come, after so long a wait at most; ManyhandsError if a process has ended."""
        ready = {descriptor for descriptor, _ in self._poll.poll(wait_ms)}
        for loader in self._loaders:
            if ready & {loader.end.fileno(), loader.process.pidfd}:
                while self._receive(loader):
                    pass
                if loader.process.pidfd in ready:
                    reading = next(iter(loader.reading.values()), None)
                    what = f" while reading {reading}" if reading is not None else ""
                    raise ManyhandsError(f"{loader} {describe_exit(loader.process.wait())}{what}")

    def _receive(self, loader: _Loader[_Key]) -> bool:
        try:
            data, descriptors, _, _ = socket.recv_fds(loader.end, 4096, 1)
        except (BlockingIOError, ConnectionResetError):
            return False
        if not data:
            return False
        if not descriptors:  # the kernel drops those that this process has no room for
            raise ManyhandsError(
                f"a batch of {loader} was lost: too many open files; raise the limit: ulimit -n 4096"
            )
        ticket = json.loads(data)["ticket"]
        if ticket < 0:  # it has no reader
            key = next(iter(loader.reading.values()))
        elif ticket in loader.reading:
            key = loader.reading.pop(ticket)
        else:  # forgotten meanwhile
            os.close(descriptors[0])
            return True
        file = _File(descriptors[0])
        if self._preparing is None:
            self._arrived[key] = file.load
        else:
            self._arrived[key] = self._preparing.submit(file.load, self._prepare).result
        return True


class _Loader(Generic[_Key]):
    """One process, the worker's end of its socket, and its pending requests."""

    def __init__(self, name: str, process: AdoptedProcess, end: socket.socket) -> None:
        self.name, self.process, self.end = name, process, end
        end.setblocking(False)
        self.reading: dict[int, _Key] = {}

    def __str__(self) -> str:
        return f"{self.name} (pid {self.process.pid})"

    def send(self, **request: Any) -> None:
        try:
            self.end.send(json.dumps(request).encode())
        except (BrokenPipeError, ConnectionResetError):  # it has ended, which its process descriptor tells
            pass
        except BlockingIOError as error:
            raise ManyhandsError(f"{self} reads no requests; set a smaller ahead= in loading") from error


class _File:
    """What a loader process has read; the file goes when it is loaded or dropped."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def load(self, prepare: Callable[[Any], Any] | None = None) -> Any:
        found = load(self._descriptor)
        return found if prepare is None or isinstance(found, LoadFailed) else prepare(found)

    def __del__(self) -> None:
        os.close(self._descriptor)


def run_loader(end: socket.socket) -> int:
    """Be a loader until its worker, at the other end of the socket, is done; leaves the process by itself."""
    status = 1
    try:
        with end:
            status = _live(end)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _live(end: socket.socket) -> int:
    data, descriptors, _, _ = socket.recv_fds(end, _MESSAGE_BYTES, 2)
    if not data:
        return 0
    job, stacks = descriptors
    sys.path[:] = json.loads(data)["path"]
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    answer_with_stacks(stacks)
    try:
        reader: KeyReader = load(job)()
    except Exception as error:
        _hand_over(end, -1, _failure(error))
        return 1
    os.close(job)
    requests: deque[dict[str, Any]] = deque()
    while _take_requests(end, requests):
        if requests:
            wanted = requests.popleft()
            try:
                found = reader.read(tuple(wanted["key"]), wanted["kept_from"])
            except Exception as error:
                found = _failure(error)
            _hand_over(end, wanted["ticket"], found)
    return 0


def _take_requests(end: socket.socket, requests: deque[dict[str, Any]]) -> bool:
    """Take all requests up to now, and wait only where there is nothing to do; False once the worker is gone."""
    while True:
        try:
            data = end.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT if requests else 0)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        if not data:
            return False
        request = json.loads(data)
        if "forget" in request:
            kept = [one for one in requests if one["ticket"] not in request["forget"]]
            requests.clear()
            requests.extend(kept)
        else:
            requests.append(request)


def _hand_over(end: socket.socket, ticket: int, found: Any) -> None:
    try:
        descriptor = pack(found)
    except UserError as error:
        why = f"a loader process cannot send its batch ({error.__cause__ or error}); have collate return tensors"
        descriptor = pack(_failure(UserError(f"{why}, arrays and plain objects, or set loading's workers=0")))
    try:
        socket.send_fds(end, [json.dumps({"ticket": ticket}).encode()], [descriptor])
    except (BrokenPipeError, ConnectionResetError):  # the worker is gone, which the next `recv` says
        pass
    finally:
        os.close(descriptor)


def _failure(error: Exception) -> LoadFailed:
    # As it can be sent: an error that cannot be made again there is described in words.
    trace = "".join(traceback.format_exception(error))
    bare = error.with_traceback(None)
    bare.__cause__ = bare.__context__ = None
    try:
        descriptor = pack(bare)
        try:
            load(descriptor)
        finally:
            os.close(descriptor)
    except Exception:
        bare = RuntimeError(f"{type(error).__name__}: {error}")
    return LoadFailed(bare, trace)
