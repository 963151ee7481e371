"""The supervisor with real processes: members come and go, each end is told, and nothing is left.

Functions of this module go to the children by value, so that a child imports no test module.
"""

from __future__ import annotations

import os
import random
import resource
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import pytest

from descriptors import open_descriptors
from kills import Run, await_that
from manyhands.errors import ManyhandsError, UserError
from manyhands.places.local.children import Child
from manyhands.places.local.control import MAX_FRAME_BYTES, RoleContext, Unread
from manyhands.places.local.status import State
from manyhands.places.local.supervisor import Ended, Event, Hung, Role, Said, Silent, Started, Supervisor
from manyhands.places.local.template import kept_pid

cloudpickle.register_pickle_by_value(sys.modules[__name__])

E = TypeVar("E", Started, Said, Silent, Ended)


def shared_memory() -> set[str]:
    """The inodes of our memory files that this process maps; another test's may wait to be collected."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "manyhands:" in line}


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    before = open_descriptors()
    mapped = shared_memory()
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    yield
    assert open_descriptors() == before
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert shared_memory() <= mapped


class Heard:
    """Everything a supervisor told, and a way to wait for one thing."""

    def __init__(self, supervisor: Supervisor) -> None:
        self.events: list[Event] = []
        self._supervisor = supervisor

    def first(self, kind: type[E], member: int, where: Callable[[E], bool] = lambda _: True) -> E:
        deadline = time.monotonic() + 180
        seen = 0
        while True:
            for event in self.events[seen:]:
                if isinstance(event, kind) and event.member == member and where(event):
                    return event
            seen = len(self.events)
            assert time.monotonic() < deadline, f"no {kind.__name__} of {member}: {self.events}"
            self.events += self._supervisor.poll(1.0)


def echo(context: RoleContext) -> Mapping[str, Any]:
    """Say back what is said until asked to stop, asleep in between."""
    from manyhands.places.local.status import State

    context.mark(3, State.COMPUTING)
    answered = 0
    while not context.stop_requested():
        for payload in context.received():
            answered += 1
            context.send({"echo": payload})
        select.select([context.control_fileno()], [], [], 10.0)
    return {"rank": context.rank, "world": context.world, "answered": answered}


def role(name: str, target: Callable[[RoleContext], Mapping[str, Any] | None] = echo, **options: Any) -> Role:
    return Role(name=name, target=target, **options)


def test_members_come_are_killed_are_replaced_and_leave(capfd: pytest.CaptureFixture[str]) -> None:
    def talk(context: RoleContext) -> Mapping[str, Any]:
        print(f"hello from {context.name}")
        context.send({"said": "hello"})
        return echo(context)

    with Supervisor(num_members=3) as supervisor:
        heard = Heard(supervisor)
        numbers = [supervisor.start(role(f"server {index}", talk)) for index in range(3)]
        assert numbers == [1, 2, 3]
        pids = {number: heard.first(Started, number).pid for number in numbers}
        for number in numbers:
            heard.first(Said, number)
        assert supervisor._open_children().status(2).pid == pids[2]

        start = time.monotonic()
        os.kill(pids[2], signal.SIGKILL)
        ended = heard.first(Ended, 2)
        assert time.monotonic() - start < 60.0, "noticed by its end, not by a deadline"
        assert (ended.name, ended.status, ended.payload) == ("server 1", -signal.SIGKILL, None)
        assert ended.failure is not None
        assert f"server 1 (pid {pids[2]}) was killed by SIGKILL" in ended.failure.sentence
        assert "last seen" in ended.failure.sentence
        assert supervisor.members == (1, 3), "the end of one is no reason for another's"

        assert supervisor.start(role("server 3", talk)) == 4
        heard.first(Started, 4)
        supervisor.kill(1)
        failure = heard.first(Ended, 1).failure
        assert failure is not None
        assert "was killed by its launcher" in failure.sentence
        for number in (3, 4):
            supervisor.ask_to_stop(number)
            assert heard.first(Ended, number).payload == {"rank": number, "world": 3, "answered": 0}
        assert supervisor.members == ()
        for late in (supervisor.ask_to_stop, supervisor.kill, lambda member: supervisor.tell(member, {})):
            late(2)  # who is gone cannot be reached, and that is no error
            with pytest.raises(UserError, match="member=9 was never started"):
                late(9)
    assert sorted(capfd.readouterr().out.split()) == sorted(["hello", "from", "server"] * 4 + [*"0123"])


def test_a_stopped_member_is_reported_in_time_and_lives_on_when_it_wakes() -> None:
    with Supervisor(num_members=2, silent_after_s=2.0) as supervisor:
        heard = Heard(supervisor)
        for number in (5, 9):
            assert supervisor.start(role(f"worker {number}"), member=number) == number
        assert supervisor.start(role("worker 10")) == 10
        pid = heard.first(Started, 5).pid
        supervisor.tell(5, {"are you": "at work"})
        heard.first(Said, 5)
        start = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        silent = heard.first(Silent, 5)
        assert 1.0 < time.monotonic() - start < 60.0
        assert "worker 5" in silent.seen
        assert "last seen computing step 3" in silent.seen
        supervisor.tell(5, {"are you": "there"})
        os.kill(pid, signal.SIGCONT)
        heard.first(Said, 5, lambda said: said.payload == {"echo": {"are you": "there"}})
        assert not [event for event in heard.events if isinstance(event, Silent) and event.member != 5]
        with pytest.raises(UserError, match="member=5 must be a number"):
            supervisor.start(role("worker 5"), member=5)


def test_much_is_told_to_one_who_does_not_read_without_waiting_and_arrives_in_order() -> None:
    def slow(context: RoleContext) -> Mapping[str, Any]:
        os.read(context.descriptor("gate"), 1)
        report: list[int] = []
        while not context.stop_requested() or len(report) < 40:
            report += [payload["number"] for payload in context.received()]
            select.select([context.control_fileno()], [], [], 0.05)
        return {"reported": report}

    gate, opener = os.pipe()
    with Supervisor(num_members=1, grace_s=30.0) as supervisor:
        heard = Heard(supervisor)
        member = supervisor.start(role("worker 0", slow, descriptors={"gate": gate}))
        heard.first(Started, member)
        start = time.monotonic()
        for number in range(40):
            supervisor.tell(member, {"number": number, "weight": "x" * 2**18})
        assert time.monotonic() - start < 60.0, "nobody was waited for"
        supervisor.ask_to_stop(member)
        os.write(opener, b"!")
        assert heard.first(Ended, member).payload == {"reported": list(range(40))}

        member = supervisor.start(role("worker 1", slow, descriptors={"gate": gate}))
        supervisor.tell(member, {"weight": "x" * (MAX_FRAME_BYTES - 100)})
        supervisor.tell(member, {"weight": "x" * 2**20})
        with pytest.raises(Unread, match="worker 1 has left"):
            supervisor.tell(member, {"one": "too many"})
        supervisor.ask_to_stop(member)
        supervisor.kill(member)
        assert heard.first(Ended, member).status == -signal.SIGKILL
    os.close(gate)
    os.close(opener)


def test_roles_are_forks_of_a_template_with_the_surroundings_that_they_would_have_alone(
    tmp_path: Path,
) -> None:
    def look(context: RoleContext) -> Mapping[str, Any]:
        os.pwrite(context.descriptor("shared"), str(context.rank).encode(), 0)
        return {
            "torch": "torch" in sys.modules,
            "parent": os.getppid(),
            "leads": os.getpgrp() == os.getpid(),
            "own": os.environ.get("OWN", ""),
            "folder": os.getcwd(),
            "cores": len(os.sched_getaffinity(0)),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "random": random.random(),
        }

    shared = os.memfd_create("manyhands:test", os.MFD_CLOEXEC)
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    cores, here = os.sched_getaffinity(0), os.getcwd()
    try:
        with Supervisor(num_members=2) as supervisor:
            heard = Heard(supervisor)
            first = supervisor.start(role("worker 0", look, descriptors={"shared": shared}))
            heard.first(Ended, first)
            template = kept_pid()
            os.chdir(tmp_path)  # what changes in the launcher is what the next role finds
            os.sched_setaffinity(0, {min(cores)})
            resource.setrlimit(resource.RLIMIT_NOFILE, (files - 1, most))
            second = supervisor.start(
                role("worker 1", look, descriptors={"shared": shared}, env={"OWN": "1"})
            )
            heard.first(Ended, second)
    finally:
        os.chdir(here)
        os.sched_setaffinity(0, cores)
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, most))
    one, other = (heard.first(Ended, number).payload for number in (first, second))
    assert one is not None
    assert other is not None
    assert template == kept_pid() is not None
    for payload in (one, other):
        assert payload["torch"], "which nobody had to import"
        assert payload["parent"] == os.getpid()
        assert payload["leads"]
    assert (one["own"], one["folder"], one["cores"], one["files"]) == ("", here, len(cores), files)
    assert (other["own"], other["folder"], other["cores"], other["files"]) == (
        "1",
        str(tmp_path),
        1,
        files - 1,
    )
    assert one["random"] != other["random"]
    assert os.pread(shared, 10, 0) == str(second).encode()
    os.close(shared)


def test_template_that_is_killed_takes_nobody_along_and_another_is_started() -> None:
    with Supervisor(num_members=2) as supervisor:
        heard = Heard(supervisor)
        first = supervisor.start(role("worker 0"))
        heard.first(Started, first)
        template = kept_pid()
        assert template is not None
        os.kill(template, signal.SIGKILL)
        os.waitid(os.P_PID, template, os.WEXITED | os.WNOWAIT)  # it is dead, and nobody knows yet
        second = supervisor.start(role("worker 1"))
        heard.first(Started, second)
        assert kept_pid() not in (None, template)
        for member in (first, second):
            supervisor.tell(member, {"still": "here"})
            assert heard.first(Said, member).payload == {"echo": {"still": "here"}}


def test_roles_with_more_descriptors_than_one_message_carries() -> None:
    def count(context: RoleContext) -> Mapping[str, Any]:
        return {"seen": [os.pread(context.descriptor(f"file {n}"), 9, 0).decode() for n in range(600)]}

    files = [os.memfd_create(f"manyhands:test {n}", os.MFD_CLOEXEC) for n in range(600)]
    for n, file in enumerate(files):
        os.write(file, str(n).encode())
    with Supervisor(num_members=1) as supervisor:
        named = {f"file {n}": file for n, file in enumerate(files)}
        member = supervisor.start(role("worker 0", count, descriptors=named))
        payload = Heard(supervisor).first(Ended, member).payload
    for file in files:
        os.close(file)
    assert payload == {"seen": [str(n) for n in range(600)]}


def test_lines_of_the_board_are_used_again_but_not_more_than_there_are() -> None:
    def brief(context: RoleContext) -> None:
        context.mark(context.rank, State.COMPUTING)

    with Supervisor(num_members=1, capacity=2) as supervisor:
        heard = Heard(supervisor)
        stays = supervisor.start(role("worker 0"))
        for _ in range(3):
            assert heard.first(Ended, supervisor.start(role("brief", brief))).payload == {}
        last = supervisor.start(role("worker 4"))
        with pytest.raises(ManyhandsError, match="2 processes are already running"):
            supervisor.start(role("one too many"))
        heard.first(Started, last)
        assert supervisor._open_children().status(stays).pid == heard.first(Started, stays).pid
        assert supervisor._open_children().status(last).pid == heard.first(Started, last).pid


def quiet_end(context: RoleContext) -> Mapping[str, Any]:
    return {"rank": context.rank}


def test_an_interruption_in_the_middle_of_a_burial_loses_neither_the_death_nor_the_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal handler of the user's own may raise anywhere: here when a dead member's descriptors are just closed."""
    close = Child.close

    def close_and_be_interrupted(child: Child) -> None:
        close(child)
        if child.rank == 1:
            monkeypatch.setattr(Child, "close", close)
            raise KeyboardInterrupt

    with Supervisor(num_members=2) as supervisor:
        supervisor.start(role("dies", quiet_end))
        supervisor.start(role("lives"))
        monkeypatch.setattr(Child, "close", close_and_be_interrupted)
        seen: list[Event | Hung] = []

        def poll_on() -> None:
            while True:
                seen.extend(supervisor.poll(10.0))

        with pytest.raises(KeyboardInterrupt):
            poll_on()
        supervisor.tell(1, {"anything": "to one who is gone"})
        while not any(isinstance(event, Ended) for event in seen):
            report = supervisor.poll(10.0)
            assert report, "the death that was being noticed is told after all"
            seen += report
        assert [event.payload for event in seen if isinstance(event, Ended)] == [{"rank": 1}]
        assert supervisor.members == (2,)


def test_leaving_by_an_error_ends_everyone_and_one_who_does_not_stop_is_killed() -> None:
    def stubborn(context: RoleContext) -> None:
        context.send({"pid": os.getpid()})
        time.sleep(600)

    start = 0.0
    with pytest.raises(KeyError, match="mine"), Supervisor(num_members=2, grace_s=0.5) as supervisor:  # noqa: PT012
        heard = Heard(supervisor)
        pid = heard.first(Said, supervisor.start(role("worker 0", stubborn))).payload["pid"]
        supervisor.start(role("worker 1"))  # is starting when we leave
        start = time.monotonic()
        raise KeyError("mine")
    assert 0.5 < time.monotonic() - start < 90.0
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(RuntimeError, match="is a context manager"):
        supervisor.start(role("worker 2"))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match="num_members=0 must be between 1 and capacity=1024"):
        Supervisor(num_members=0)
    with pytest.raises(UserError, match=r"silent_after_s=0\.1 must be at least 1"):
        Supervisor(num_members=1, silent_after_s=0.1)


def children_of(pid: int) -> set[int]:
    threads = Path(f"/proc/{pid}/task").glob("*/children")
    return {int(child) for children in threads for child in children.read_text().split()}


SCRIPT = """
import os, signal, sys, time
from manyhands.places.local.signals import as_exception
from manyhands.places.local.supervisor import *
from manyhands.places.local import children, template
children.obtain = lambda environment: template.obtain(environment, ("manyhands.places.local.role_process",))

def job(context):
    context.send({"at": "work"})
    while not context.stop_requested():
        time.sleep(0.005)
    return {"left": "in peace"}

with Supervisor(num_members=2, grace_s=20.0) as supervisor:
    for index in range(2):
        supervisor.start(Role(name=f"worker {index}", target=job))
    while supervisor.members:
        for event in supervisor.poll(5.0):
            print(event, flush=True)
            if isinstance(event, Interrupted):
                for member in supervisor.members:
                    supervisor.ask_to_stop(member)
if supervisor._signals:
    raise as_exception(supervisor._signals[0])
"""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Run]:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    with Run.of([sys.executable, str(path)], tmp_path) as started:
        await_that(lambda: started.text().count("work'}") == 2 or started.ended, "both work", 60.0)
        yield started


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)]
)
def test_an_interruption_is_an_event(number: signal.Signals, status: int, running: Run) -> None:
    segments = running.segments()
    running.parent.send_signal(number)
    assert running.parent.wait(timeout=240) == status
    running.check_nothing_is_left(segments)
    assert f"Interrupted(signal=<Signals.{number.name}" in running.text()
    assert running.text().count("payload={'left': 'in peace'}") == 2


def test_the_launchers_death_ends_everyone(running: Run) -> None:
    segments = running.segments()
    stopped, *_ = running.roles()
    os.kill(stopped, signal.SIGSTOP)
    assert len(running.processes()) == 4
    running.parent.kill()
    running.parent.wait()
    running.check_nothing_is_left(segments)


def test_an_interruption_that_was_not_told_is_raised_on_leaving() -> None:
    with pytest.raises(KeyboardInterrupt), Supervisor(num_members=1) as supervisor:  # noqa: PT012
        supervisor.start(role("worker 0"))
        os.kill(os.getpid(), signal.SIGINT)
    assert supervisor._signals == [signal.SIGINT]
