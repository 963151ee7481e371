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
from dataclasses import dataclass
from typing import Any, Protocol

from manyhands.errors import UserError
from manyhands.places.local.packed_job import load, pack
from manyhands.places.local.stacks import answer_with_stacks

__all__ = ["KeyReader", "LoadFailed"]

_MESSAGE_BYTES = 1 << 20


class KeyReader(Protocol):
    """Reads in a loader process."""

    def read(self, key: Any, kept_from: int) -> Any:
        """What `key` stands for; nothing before `kept_from` is asked for any more."""


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """Reading raised an error."""

    error: Exception
    trace: str
    """Of the loader process."""


def run_loader(line: socket.socket) -> int:
    """Be a loader until its worker, at the other end of `line`, needs it no more; the exit status.

    Leaves the process by itself: whose fork it is does not matter.
    """
    status = 1
    try:
        with line:
            status = _live(line)
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)


def _live(line: socket.socket) -> int:
    data, descriptors, _, _ = socket.recv_fds(line, _MESSAGE_BYTES, 2)
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
        _hand_over(line, -1, _failure(error))
        return 1
    os.close(job)
    _serve(line, reader)
    return 0


def _serve(line: socket.socket, reader: KeyReader) -> None:
    asked: deque[dict[str, Any]] = deque()
    while True:
        if not _hear(line, asked):
            return
        if asked:
            wanted = asked.popleft()
            try:
                found = reader.read(tuple(wanted["key"]), wanted["kept_from"])
            except Exception as error:
                found = _failure(error)
            _hand_over(line, wanted["ticket"], found)


def _hear(line: socket.socket, asked: deque[dict[str, Any]]) -> bool:
    """Take all that was asked up to now, and wait only where there is nothing to do; False once the worker is gone."""
    while True:
        try:
            data = line.recv(_MESSAGE_BYTES, socket.MSG_DONTWAIT if asked else 0)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        if not data:
            return False
        message = json.loads(data)
        if "forget" in message:
            kept = [one for one in asked if one["ticket"] not in message["forget"]]
            asked.clear()
            asked.extend(kept)
        else:
            asked.append(message)


def _hand_over(line: socket.socket, ticket: int, found: Any) -> None:
    try:
        descriptor = pack(found)
    except UserError as error:
        why = f"a loader process cannot hand over what it read ({error.__cause__ or error}); let collate give tensors"
        descriptor = pack(_failure(UserError(f"{why}, arrays and plain objects, or set loading's workers=0")))
    try:
        socket.send_fds(line, [json.dumps({"ticket": ticket}).encode()], [descriptor])
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
