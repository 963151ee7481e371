"""Workers that are forked together: one process in between for all of them, and what its death or the launcher's does.

Functions of this module go to the children by value, so that a child imports no test module.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from kills import await_that
from manyhands.errors import ManyhandsError
from manyhands.places.local.children import Children, Role
from manyhands.places.local.control import Finished, RoleContext
from manyhands.places.local.packed_job import pack
from manyhands.places.local.roster import Exited, Heard
from manyhands.places.local.template import inherited_environment, kept_pid, obtain
from processes.test_cluster import exists, nothing_stays_open

__all__ = ["nothing_stays_open"]  # for every test here, too

cloudpickle.register_pickle_by_value(sys.modules[__name__])


def parents(_: RoleContext) -> dict[str, int]:
    return {"parent": os.getppid(), "session": os.getsid(0), "own": os.getpid()}


ROLES = [Role(name=f"worker {rank}", target=parents) for rank in range(3)]


@pytest.fixture
def job() -> Iterator[int]:
    packed = pack([role.target for role in ROLES])
    yield packed
    os.close(packed)


def between() -> int:
    """The process that forks, while a batch lasts."""
    template = obtain(inherited_environment()).pid
    children = Path(f"/proc/{template}/task/{template}/children")
    await_that(lambda: children.read_text().strip() != "", "the process in between", 60.0)
    (found,) = children.read_text().split()
    return int(found)


def ended(children: Children, count: int) -> dict[int, int]:
    """The status of each of so many that end."""
    statuses: dict[int, int] = {}
    deadline = time.monotonic() + 180
    while len(statuses) < count:
        assert time.monotonic() < deadline
        for event in children.wait(0.1):
            if isinstance(event, Exited):
                statuses[event.rank] = event.status
    return statuses


def test_all_of_a_batch_are_children_of_the_launcher_and_lead_sessions(job: int) -> None:
    report = []
    with Children(capacity=3, world=3) as children:
        with children.batch():
            pids = [children.start(rank, role, job) for rank, role in enumerate(ROLES)]
            assert len(set(pids)) == 3
            assert between() not in pids
        deadline = time.monotonic() + 180
        while len(report) < 3:
            assert time.monotonic() < deadline
            report += [
                event.message.payload
                for event in children.wait(0.1)
                if isinstance(event, Heard) and isinstance(event.message, Finished)
            ]
    assert {one["parent"] for one in report} == {os.getpid()}
    assert sorted(one["own"] for one in report) == sorted(pids)
    assert all(one["session"] == one["own"] for one in report)


def test_they_begin_when_the_batch_is_left(job: int) -> None:
    with Children(capacity=1, world=1) as children:
        with children.batch():
            pid = children.start(0, ROLES[0], job)
            assert children.wait(0.2) == []
            assert exists(pid)
        assert ended(children, 1) == {0: 0}


def test_a_killed_process_in_between_is_told_of_and_the_next_batch_has_another(job: int) -> None:
    with Children(capacity=3, world=3) as children:
        with children.batch():
            children.start(0, ROLES[0], job)
            first = kept_pid()
            os.kill(between(), signal.SIGKILL)
            with pytest.raises(ManyhandsError, match=r"worker 1 cannot be started: .*killed by signal 9"):
                children.start(1, ROLES[1], job)
        assert ended(children, 1) == {0: 0}, "who was forked before is a child of ours, and does its job"
        children.start(2, ROLES[2], job)
        assert ended(children, 1) == {2: 0}
        assert kept_pid() == first


_IN_A_BATCH = """
import time
from manyhands.places.local.children import Children, Role
from manyhands.places.local.packed_job import pack
from manyhands.places.local.template import kept_pid
role = Role(name="worker 0", target=lambda context: time.sleep(60))
with Children(capacity=1, world=1) as children:
    job = pack([role.target])
    with children.batch():
        pid = children.start(0, role, job)
        print(pid, kept_pid(), flush=True)
        time.sleep(60)
"""


def test_the_launchers_death_in_a_batch_ends_all() -> None:
    process = subprocess.Popen([sys.executable, "-c", _IN_A_BATCH], stdout=subprocess.PIPE, text=True)
    with process:
        try:
            assert process.stdout is not None
            worker, template = map(int, process.stdout.readline().split())
            (middle,) = Path(f"/proc/{template}/task/{template}/children").read_text().split()
        finally:
            process.kill()
    for pid in (worker, template, int(middle)):
        await_that(lambda pid=pid: not exists(pid), f"the end of {pid}", 60.0)
