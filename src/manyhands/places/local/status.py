"""The status table: one row of shared memory per role, with its heartbeat and what it is doing.

    row of a role    | pid | heartbeat_ns | marked_ns | mark | sign | place |
    mark             | step (40 bits) | state (8 bits) | waiting for (16 bits) |
    sign             | waiting since_ns | waiting for + 1 |
    place            | stage of a pipeline (32 bits) | micro-batch + 1 (32 bits), 0 for none |

Only the role writes its row; the launcher reads all rows. The heartbeat (written by the sentinel) proves that the
process lives, the mark proves that it works, the sign (`native.wait_sign`) says for which role a long wait is. A
mark is one word, so a reader never sees the step of one mark with the state of another.

The table is mapped here and not through `native.segment`, which imports torch: a role must have its row before it
imports anything heavy.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import signal
import threading
from dataclasses import dataclass
from enum import IntEnum, unique
from typing import Any

import numpy as np
from numba import types

from manyhands.native.atomics import clock_ns, load_i64, load_u32, store_i64
from manyhands.native.closeable import Closeable
from manyhands.native.decorators import njit
from manyhands.places.local.forking import die_with_parent

NOBODY = -1
HEARTBEAT_OFFSET = 8
SIGN_OFFSET = 32

StagePlace = tuple[int, int] | None
"""The stage and the micro-batch of a pipeline, from 0, where a role is at one."""

_ROW_BYTES = 128  # two 64-byte lines: adjacent-line prefetch makes neighbours share
_PID_OFFSET, _MARKED_OFFSET, _MARK_OFFSET, _PLACE_OFFSET = 0, 16, 24, 48
_MAX_STEP, _MAX_RANK = 2**39 - 1, 2**16 - 2


@unique
class State(IntEnum):
    """What a role is doing; the words of the launcher's errors."""

    STARTING = 0
    COMPUTING = 1
    EXCHANGING = 2
    WAITING = 3
    EVALUATING = 4
    SAVING = 5
    FINISHED = 6
    SERVING = 7  # at the service of others: it may have nothing to do for as long as they like


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRow:
    """One role's row at one moment; times are on the clock of `time.monotonic_ns`, 0 for never."""

    pid: int = 0
    heartbeat_ns: int = 0
    marked_ns: int = 0
    step: int = 0
    state: State = State.STARTING
    waiting_for: int = NOBODY
    waiting_since_ns: int = 0  # when a long wait began; 0 where only the mark speaks of a wait
    place: StagePlace = None

    @property
    def seen_ns(self) -> int:
        return max(self.heartbeat_ns, self.marked_ns)

    def doing(self) -> str:
        """`computing step 17`, `waiting for role 0 at step 17`, or `starting`."""
        if self.state in (State.STARTING, State.SERVING):
            return self.state.name.lower()
        if self.state is State.FINISHED:
            return f"finished after step {self.step}"
        where = "" if self.place is None else f", micro-batch {self.place[1]} on stage {self.place[0]}"
        if self.waiting_for != NOBODY:
            return f"waiting for role {self.waiting_for} at step {self.step}{where}"
        return f"{self.state.name.lower()} step {self.step}{where}"


class StatusTable(Closeable):
    """The mapped status table; a context manager, `close` is idempotent.

    The launcher calls `create` and passes `descriptor` to its children, which map it too. The launcher assigns the
    rows; the row of a process that is gone may be given to another.
    """

    def __init__(self, descriptor: int) -> None:
        """Map the table behind `descriptor`, which this object now owns."""
        self.descriptor = descriptor
        self._map: mmap.mmap | None = mmap.mmap(descriptor, 0)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._num_rows = len(self._map) // _ROW_BYTES

    @classmethod
    def create(cls, num_rows: int) -> StatusTable:
        descriptor = os.memfd_create("manyhands:status", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, num_rows * _ROW_BYTES)
            return cls(descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def control_address(self, row: int) -> int:
        """Where `row` starts in this process, for compiled code."""
        if self._map is None:
            raise ValueError("the status table is closed")
        if not 0 <= row < self._num_rows:
            raise IndexError(f"there is no row {row}; the table has {self._num_rows}")
        return self._address + row * _ROW_BYTES

    def sign_on(self, row: int) -> None:
        """Write this process's id into its row, with a first mark."""
        ctypes.c_int64.from_address(self.control_address(row) + _PID_OFFSET).value = os.getpid()
        self.mark(row, 0, State.STARTING)

    def mark(
        self, row: int, step: int, state: State, waiting_for: int = NOBODY, place: StagePlace = None
    ) -> None:
        """Write what the owner of the row is doing; takes a few microseconds."""
        at = 0 if place is None else place[0] << 32 | place[1] + 1
        _write_mark(self.control_address(row), pack_mark(step, state, waiting_for), at)

    def wipe(self, row: int) -> None:
        ctypes.memset(self.control_address(row), 0, _ROW_BYTES)

    def read(self, row: int) -> StatusRow:
        pid, heartbeat_ns, marked_ns, mark, since_ns, waited_for, place = _read_row(self.control_address(row))
        step, state, waiting_for = unpack_mark(mark)
        return StatusRow(
            pid=pid,
            heartbeat_ns=heartbeat_ns,
            marked_ns=marked_ns,
            step=step,
            state=state,
            waiting_for=waited_for - 1 if waited_for else waiting_for,
            waiting_since_ns=since_ns if waited_for else 0,
            place=(place >> 32, (place & 0xFFFFFFFF) - 1) if place else None,
        )

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None
            os.close(self.descriptor)


def pack_mark(step: int, state: State, waiting_for: int = NOBODY) -> int:
    if not 0 <= step <= _MAX_STEP:
        raise ValueError(f"step={step} must be between 0 and {_MAX_STEP}")
    if not NOBODY <= waiting_for <= _MAX_RANK:
        raise ValueError(f"waiting_for={waiting_for} must be between {NOBODY} (none) and {_MAX_RANK}")
    return step << 24 | state << 16 | (waiting_for + 1)


def unpack_mark(mark: int) -> tuple[int, State, int]:
    return mark >> 24, State(mark >> 16 & 0xFF), (mark & 0xFFFF) - 1


@njit("void(int64, int64, int64)", nogil=True, cache=True)
def _write_mark(row, mark, place):  # type: ignore[no-untyped-def]
    store_i64(row + _PLACE_OFFSET, place)
    store_i64(row + _MARK_OFFSET, mark)
    store_i64(row + _MARKED_OFFSET, clock_ns())


@njit("UniTuple(int64, 7)(int64)", nogil=True, cache=True)
def _read_row(row):  # type: ignore[no-untyped-def]
    return (
        load_i64(row + _PID_OFFSET),
        load_i64(row + HEARTBEAT_OFFSET),
        load_i64(row + _MARKED_OFFSET),
        load_i64(row + _MARK_OFFSET),
        load_i64(row + SIGN_OFFSET),
        load_i64(row + SIGN_OFFSET + 8),
        load_i64(row + _PLACE_OFFSET),
    )


# A role's thread sends heartbeats and ends it when the launcher dies, in compiled code that never takes the GIL: user
# code can hold it in a C function for minutes. The *lifeline* is a pipe whose only writing end is the launcher's. When
# the launcher is gone, however it ended, the pipe reports it at once and the loop kills the role's whole process group,
# grandchildren included. The loop runs until the process ends, so a role is monitored while it leaves, too.
#
# A stopped process (SIGSTOP) runs no loop. For that the kernel is asked to send SIGCONT when the launcher dies
# (PR_SET_PDEATHSIG): it wakes a stopped role, whose loop then ends it. SIGKILL would end the role before its loop could
# reach the grandchildren; it is the signal only before the loop runs, when there are none yet.

HEARTBEAT_S = 0.2
_HEARTBEAT_MS = round(HEARTBEAT_S * 1000)
_SIGKILL = int(signal.SIGKILL)
_POLL_ENTRY = np.dtype([("descriptor", np.int32), ("events", np.int16), ("returned", np.int16)])

_poll: Any = types.ExternalFunction("poll", types.int32(types.int64, types.uint64, types.int32))
_getppid: Any = types.ExternalFunction("getppid", types.int32())
_kill: Any = types.ExternalFunction("kill", types.int32(types.int32, types.int32))


def start_sentinel(status_table: StatusTable, rank: int, *, lifeline: int, parent_pid: int) -> None:
    """Write heartbeats to the row of `rank`, and monitor `lifeline` and `parent_pid`, until this process ends.

    The process must lead its own process group: all of that group is killed when the launcher dies.
    """
    if os.getpgrp() != os.getpid():
        raise RuntimeError("a role must lead its own process group")
    watched = np.array([(lifeline, select.POLLIN, 0)], _POLL_ENTRY)
    for used_by_the_loop in (status_table, watched, _guard):
        # The interpreter frees everything before the process ends, and the loop outlives the interpreter.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(used_by_the_loop))
    arguments = (status_table.control_address(rank) + HEARTBEAT_OFFSET, watched.ctypes.data, parent_pid)
    threading.Thread(target=_guard, args=arguments, name="sentinel", daemon=True).start()
    die_with_parent(parent_pid, signal.SIGCONT)


@njit("void(int64, int64, int64)", nogil=True, cache=True)
def _guard(heartbeat, watched, parent):  # type: ignore[no-untyped-def]
    # `watched` is the address of a pollfd structure for the lifeline; what poll returns is the upper half of its second
    # word. The parent's id is compared too, in case a fork of the launcher holds the lifeline.
    while True:
        store_i64(heartbeat, clock_ns())
        _poll(watched, types.uint64(1), types.int32(_HEARTBEAT_MS))
        if load_u32(watched + 4) >> 16 != 0 or _getppid() != parent:
            _kill(types.int32(0), types.int32(_SIGKILL))
