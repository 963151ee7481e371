"""A role's thread that sends its heartbeats and ends it when the launcher dies, in compiled code.

Neither task may need the interpreter: user code can hold the GIL in a C function for minutes. So the thread runs
one compiled loop that never takes the GIL: every `HEARTBEAT_S` it writes the time into the role's row of the status
table, and in between it sleeps in `poll` on the *lifeline*, a pipe whose only writing end is the launcher's. When
the launcher is gone, however it ended, the pipe reports it at once and the loop kills the role's whole process
group, grandchildren included. The loop runs until the process ends, so a role is monitored while it leaves, too.

A stopped process (SIGSTOP) runs no loop. For that the kernel is asked to send SIGCONT when the launcher dies
(PR_SET_PDEATHSIG): it wakes a stopped role, whose loop then ends it, and means nothing to a running one. SIGKILL
would be wrong there: it would end the role before its loop could reach the grandchildren. Only before the loop
runs, when there are no grandchildren yet, the signal is SIGKILL.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from typing import Any

import numpy as np
from numba import types

from manyhands.native.atomics import clock_ns, load_u32, store_i64
from manyhands.native.decorators import njit
from manyhands.places.local.parent import die_with_parent
from manyhands.places.local.status import HEARTBEAT_OFFSET, StatusTable

__all__ = ["HEARTBEAT_S", "start_sentinel"]

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
    """Write heartbeats; kill the process group when the launcher is gone.

    `watched` is the address of a pollfd structure for the lifeline; what poll returns is the upper half of its
    second word. The parent's id is compared too, in case a fork of the launcher holds the lifeline.
    """
    while True:
        store_i64(heartbeat, clock_ns())
        _poll(watched, types.uint64(1), types.int32(_HEARTBEAT_MS))
        if load_u32(watched + 4) >> 16 != 0 or _getppid() != parent:
            _kill(types.int32(0), types.int32(_SIGKILL))
