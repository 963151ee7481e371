"""A child of the launcher, from its inherited descriptors to the report of how its job ended.

In order: start the sentinel, be ready to tell its stacks, take the launcher's module search path, load the job,
run it, report. Only what is imported here stands between the launcher and the job, so none of it imports torch.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping

from manyhands.native import wait_sign
from manyhands.places.local.control import Channel, Finished, RoleContext, RoleStarted
from manyhands.places.local.failure import report
from manyhands.places.local.forking import RoleSpec
from manyhands.places.local.packed_job import load
from manyhands.places.local.stacks import answer_with_stacks
from manyhands.places.local.status import SIGN_OFFSET, StatusTable, start_sentinel

_REPORT_TIMEOUT_S = 60.0


def run_role(spec: RoleSpec) -> int:
    """Run the role that `spec` describes; 0 if its job returned, 1 if it raised."""
    for descriptor in spec.inherited():
        os.set_inheritable(descriptor, False)
    status_table = StatusTable(spec.status_table)
    status_table.sign_on(spec.row)
    start_sentinel(status_table, spec.row, lifeline=spec.lifeline, parent_pid=spec.parent_pid)
    answer_with_stacks(spec.stacks)
    wait_sign.hang_at(status_table.control_address(spec.row) + SIGN_OFFSET)
    sys.path[:] = spec.path  # modules are found where the launcher finds them
    if spec.python_path is None:
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = spec.python_path
    for stream in (sys.stdout, sys.stderr):  # they go through a pipe
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    channel = Channel(socket.socket(fileno=spec.control), "the launcher")
    context = RoleContext(spec, channel, status_table)
    try:
        target = load(spec.job)[spec.rank]
        os.close(spec.job)
        channel.send(RoleStarted(pid=os.getpid()), _REPORT_TIMEOUT_S)
        payload = target(context)
        if not isinstance(payload, Mapping | None):
            raise TypeError(f"the job of {spec.name} returned a {type(payload).__name__}, not a dict or None")
        channel.send(Finished(payload=dict(payload or {})), _REPORT_TIMEOUT_S)
    except BaseException as error:  # SystemExit too: a role that leaves early has not done its job
        channel.send(report(error, context.step), _REPORT_TIMEOUT_S)
        return 1
    return 0
