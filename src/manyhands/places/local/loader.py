"""A loader process: it reads what its worker requests, one item after another, and returns each in shared memory.

    worker ──►  {path} and descriptors of the reader to unpack and of where stacks go
    worker ──►  {ticket, key, kept_from}  or  {forget: tickets}     over a socket that the loader inherits
    worker ◄──  {ticket} and the descriptor of a file in memory     that holds what was read, or the error

The file is packed as a worker's job is (see `packed_job`). Here the child writes it and its parent loads it: both
run the same user's code, and no other process can reach the socket. The loader ends when the worker closes its end
or dies.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections import deque
from typing import Any, NamedTuple, Protocol

from manyhands.errors import UserError
from manyhands.places.local.packed_job import load, pack
from manyhands.places.local.stacks import answer_with_stacks

__all__ = ["KeyReader", "LoadFailed"]

_MESSAGE_BYTES = 1 << 20


class KeyReader(Protocol):
    """Reads in a loader process."""

    def read(self, key: Any, kept_from: int) -> Any:
        """What `key` stands for; nothing before `kept_from` is asked for any more."""


class LoadFailed(NamedTuple):
    """Reading raised an error."""

    error: Exception
    trace: str
    """Of the loader process."""


def run_loader(end: socket.socket) -> int:
    """Be a loader until its worker, at the other end of the socket, needs it no more; the exit status.

    Leaves the process by itself: whose fork it is does not matter.
    """
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
    while _hear(end, requests):
        if requests:
            wanted = requests.popleft()
            try:
                found = reader.read(tuple(wanted["key"]), wanted["kept_from"])
            except Exception as error:
                found = _failure(error)
            _hand_over(end, wanted["ticket"], found)
    return 0


def _hear(end: socket.socket, requests: deque[dict[str, Any]]) -> bool:
    """Take all that was asked up to now, and wait only where there is nothing to do; False once the worker is gone."""
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
        why = f"a loader process cannot hand over what it read ({error.__cause__ or error}); let collate give tensors"
        descriptor = pack(_failure(UserError(f"{why}, arrays and plain objects, or set loading's workers=0")))
    try:
        socket.send_fds(end, [json.dumps({"ticket": ticket}).encode()], [descriptor])
    except (BrokenPipeError, ConnectionResetError):  # the worker is gone, which the next `recv` says
        pass
    finally:
        os.close(descriptor)


def _failure(error: Exception) -> LoadFailed:
    """As it can be sent: an error that cannot be made again there is told in words."""
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
