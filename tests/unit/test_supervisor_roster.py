"""What a supervisor decides, without a process: members come and go, at moments we choose."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from manyhands.errors import DataError, UserError, WorkerFailed
from manyhands.places.local.control import Failed, Finished, Note, RoleStarted, Stop
from manyhands.places.local.roster import (
    EXIT_S,
    Ended,
    Event,
    Exited,
    Garbled,
    Heard,
    KillProcess,
    Patience,
    Roster,
    Said,
    Silent,
    Started,
)
from manyhands.places.local.status import State, StatusRow, StatusTable


class Play:
    """A roster whose members' hearts beat unless told otherwise, on a clock we move."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.lines: dict[int, StatusRow] = {}
        self.still: set[int] = set()
        self.kills: set[KillProcess] = set()
        patience = Patience(silent_after_s=5.0, grace_s=2.0, start_timeout_s=120.0)
        self.roster = Roster(patience, self.now_ns)

    @property
    def now_ns(self) -> int:
        return round(self.now_s * 1e9)

    def add(self, number: int) -> None:
        self.roster.add(number, f"server {number}", 100 + number, self.now_ns)
        self.lines[number] = StatusRow()

    def at_work(self, *numbers: int) -> Play:
        for number in numbers:
            self.add(number)
            assert self.hear(number, RoleStarted(pid=100 + number)) == [Started(number, 100 + number)]
            self.lines[number] = StatusRow(pid=1, marked_ns=self.now_ns, step=17, state=State.COMPUTING)
        return self

    def hear(
        self, number: int, message: RoleStarted | Note | Failed | Finished | Stop
    ) -> list[Event | KillProcess]:
        return self.roster.handle(Heard(number, message), self.now_ns)

    def exit(self, number: int, status: int, last_words: str = "") -> Ended:
        (ended,) = self.roster.handle(Exited(number, status, last_words), self.now_ns)
        assert isinstance(ended, Ended)
        return ended

    def let_pass(self, seconds: float, *, tick_s: float = 0.25) -> list[tuple[float, Event | KillProcess]]:
        """Look every tick; what was told, with the time since the start of this call, a kill only when it is new."""
        printed: list[tuple[float, Event | KillProcess]] = []
        start_s = self.now_s
        while self.now_s < start_s + seconds:
            self.now_s += tick_s
            for number, line in self.lines.items():
                if line.pid and number not in self.still:
                    self.lines[number] = replace(line, heartbeat_ns=self.now_ns)
            items = self.roster.look(self.lines, self.now_ns)
            printed += [(self.now_s - start_s, item) for item in items if item not in self.kills]
            self.kills |= {item for item in items if isinstance(item, KillProcess)}
        return printed


def test_a_failure_is_blamed_on_the_member_by_the_name_that_reports_have_for_it() -> None:
    play = Play().at_work(1)
    raised = Failed(kind="", error="OSError", message="disk", traceback="", step=3, details={})
    play.hear(1, raised)
    failure = play.exit(1, 1).failure
    assert failure is not None
    assert failure.error().blamed == "server 1"


def test_members_come_and_go_and_each_end_is_its_own() -> None:
    play = Play().at_work(1, 2)
    assert play.hear(2, Note(payload={"x": 1})) == [Said(2, {"x": 1})]
    assert play.hear(1, Finished(payload={"sum": 3})) == []
    assert tuple(play.roster.known) == (1, 2), "a member has ended when its process has"
    ended = play.exit(1, 0, "a warning")
    assert (ended.payload, ended.failure, ended.status) == ({"sum": 3}, None, 0)
    assert (ended.name, ended.last_words) == ("server 1", "a warning")
    play.at_work(7)
    assert tuple(play.roster.known) == (2, 7)
    assert play.let_pass(60.0) == []


def test_a_death_is_reported_with_place_and_last_words_and_nobody_else_is_touched() -> None:
    play = Play().at_work(1, 2)
    play.let_pass(1.0)
    ended = play.exit(2, -signal.SIGKILL, "it hurts\n")
    assert (ended.member, ended.status, ended.payload) == (2, -9, None)
    assert ended.failure is not None
    assert ended.failure.sentence.startswith("server 2 (pid 102) was killed by SIGKILL")
    assert "last seen computing step 17, 0.0 s ago" in ended.failure.sentence
    assert str(ended.failure.error()).endswith("the end of its stderr:\nit hurts")
    assert play.let_pass(60.0) == []


def test_a_reported_error_keeps_its_type_and_tells_what_the_other_was_doing() -> None:
    play = Play().at_work(1, 2)
    play.lines[1] = replace(play.lines[1], state=State.WAITING, waiting_for=2)
    play.let_pass(1.0)
    report = Failed(
        kind="DataError", error="DataError", message="cut short", traceback="T", step=17, details={}
    )
    assert play.hear(1, report) == []
    failure = play.exit(1, 1).failure
    assert failure is not None
    assert failure.reported == report
    assert "server 1 (pid 101) raised DataError at step 17: cut short" in failure.sentence
    assert "(waiting for server 2 (pid 102), last seen computing step 17, 0.0 s ago)" in failure.sentence
    assert type(failure.error()) is DataError


def test_silence_is_reported_in_time_once_until_the_heart_beats_again_and_kills_nobody() -> None:
    play = Play().at_work(1, 2)
    play.let_pass(1.0)
    play.still = {2}
    ((after_s, silent),) = play.let_pass(30.0, tick_s=0.2)
    assert isinstance(silent, Silent)
    assert (silent.member, 4.5 < after_s < 5.0) == (2, True)
    assert "server 2 (pid 102) fell silent" in silent.seen
    play.still = set()
    assert play.let_pass(30.0) == []
    play.still = {2}
    assert [type(item) for _, item in play.let_pass(10.0)] == [Silent]


def test_a_launcher_that_was_paused_calls_nobody_silent() -> None:
    play = Play().at_work(1)
    play.let_pass(1.0)
    play.still = {1}
    play.now_s += 60.0
    assert play.let_pass(1.0) == []


def test_who_was_asked_to_stop_and_stays_is_killed_after_the_grace() -> None:
    play = Play().at_work(1, 2)
    play.roster.ask_to_stop(1, play.now_ns)
    assert play.let_pass(1.0) == []
    play.roster.ask_to_stop(1, play.now_ns)  # asking again gives no more time
    assert play.let_pass(5.0) == [(1.0, KillProcess(1))]
    ended = play.exit(1, -9)
    assert ended.failure is not None
    assert "server 1 (pid 101) was killed by its launcher; last seen computing" in ended.failure.sentence

    play.roster.ask_to_stop(2, play.now_ns)
    play.hear(2, Finished(payload={"saved": 1}))
    assert play.exit(2, 0).payload == {"saved": 1}


def test_a_kill_is_done_once_and_a_result_that_came_before_stands() -> None:
    play = Play().at_work(1)
    play.hear(1, Finished(payload={"x": 1}))
    assert play.roster.kill(1, play.now_ns) == [KillProcess(1)]
    assert play.roster.kill(1, play.now_ns) == []
    ended = play.exit(1, -9)
    assert (ended.payload, ended.failure) == ({"x": 1}, None)


def test_one_who_does_not_leave_after_its_result_is_killed() -> None:
    play = Play().at_work(1)
    play.hear(1, Finished(payload={}))
    play.still = {1}  # no heartbeat is owed after the result
    assert play.let_pass(EXIT_S + 1) == [(EXIT_S + 0.25, KillProcess(1))]


def test_one_who_never_starts_is_killed_and_reported() -> None:
    play = Play()
    play.add(3)
    assert play.let_pass(121.0) == [(120.25, KillProcess(3))]
    failure = play.exit(3, -9).failure
    assert failure is not None
    assert "server 3 (pid 103) did not start within 120 s; never seen" in failure.sentence


def test_who_is_to_be_killed_is_named_until_it_is_gone_as_an_exception_may_come_between() -> None:
    play = Play().at_work(1, 2)
    assert play.roster.kill(1, play.now_ns) == [KillProcess(1)]
    assert [play.roster.look(play.lines, play.now_ns) for _ in range(2)] == [[KillProcess(1)]] * 2
    play.exit(1, -9)
    assert play.roster.look(play.lines, play.now_ns) == []


def test_one_who_can_not_be_killed_is_given_up_and_its_later_end_is_no_news() -> None:
    play = Play().at_work(1)
    play.kills = set(play.roster.kill(1, play.now_ns))
    ((_, ended),) = play.let_pass(EXIT_S + 1)
    assert isinstance(ended, Ended)
    assert ended.status is None
    assert isinstance(ended.failure and ended.failure.error(), WorkerFailed)
    assert "did not end within 10 s of being killed" in str(ended.failure)
    assert tuple(play.roster.known) == ()
    assert play.roster.handle(Exited(1, -9), play.now_ns) == []


def test_what_a_child_may_not_say_is_its_end() -> None:
    message = Stop()
    play = Play().at_work(1, 2)
    assert play.hear(1, message) == [KillProcess(1)]
    assert play.roster.handle(Garbled(2, "not a message"), play.now_ns) == [KillProcess(2)]
    failure = play.exit(1, -9).failure
    assert failure is not None
    assert f"a child must not send {type(message).__name__}" in failure.sentence
    assert "violated the control protocol: not a message" in str(play.exit(2, -9).failure)


def test_patience_without_sense_is_refused_by_name() -> None:
    for changed, complaint in (
        ({"silent_after_s": 0.5}, r"silent_after_s=0\.5 must be at least 1"),
        ({"silent_after_s": float("nan")}, "silent_after_s=nan must be at least 1"),
        ({"grace_s": -1.0}, "grace_s=-1 must be at least 0"),
        ({"start_timeout_s": 0.0}, "start_timeout_s=0 must be above 0"),
    ):
        usual = {"silent_after_s": 5.0, "grace_s": 2.0, "start_timeout_s": 120.0}
        with pytest.raises(UserError, match=complaint):
            Patience(**{**usual, **changed})


def test_a_wiped_line_is_as_good_as_new_and_its_neighbours_stay() -> None:
    with StatusTable.create(3) as status_table:
        for line in range(3):
            status_table.sign_on(line)
            status_table.mark(line, 17, State.COMPUTING)
        status_table.wipe(1)
        assert [status_table.read(line).step for line in range(3)] == [17, 0, 17]
        assert status_table.read(1) == StatusRow()
