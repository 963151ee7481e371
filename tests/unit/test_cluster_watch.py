"""What the launcher decides, without a process: events in, actions out, at moments we choose."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest

from manyhands.errors import (
    Aborted,
    DataError,
    NonFinite,
    OutOfSharedMemory,
    PeerTimeout,
    UserError,
    WorkerFailed,
)
from manyhands.places.local.children import Role
from manyhands.places.local.control import Failed, Finished, Note, RoleStarted, Stop
from manyhands.places.local.failure import Failure, describe_exit, report
from manyhands.places.local.roster import (
    EXIT_S,
    Event,
    Exited,
    Garbled,
    Heard,
    Interrupted,
    KillProcess,
    Patience,
    Roster,
)
from manyhands.places.local.status import NOBODY, State, StatusRow, StatusTable, pack_mark, unpack_mark
from manyhands.places.local.supervisor import LocalCluster

Action = KillProcess | tuple[str, int] | tuple[str, int, object]
INTERRUPTED = Interrupted(signal.SIGINT)


class Play:
    """A cluster of `num_roles` roles without processes, whose rows beat unless told otherwise, on a clock we move.

    It is the supervisor of the cluster, too.
    """

    def __init__(self, num_roles: int, *, silent_after_s: float = 5.0) -> None:
        self.now_s = 1000.0
        self.rows = [StatusRow() for _ in range(num_roles)]
        self.silent: set[int] = set()
        self.kills: set[KillProcess] = set()
        self.stop_wanted = False
        patience = Patience(silent_after_s=silent_after_s, grace_s=2.0, start_timeout_s=120.0)
        self.roster = Roster(patience, self.now_ns)
        for rank in range(num_roles):
            self.roster.add(rank, f"worker {rank}", 100 + rank, self.now_ns)
        self.actions: list[Action] = []
        self.cluster = LocalCluster(
            [Role(name=f"worker {rank}", target=lambda context: None) for rank in range(num_roles)],
            on_note=lambda rank, payload: self.actions.append(("note", rank, payload)),
            on_failure=lambda rank: self.actions.append(("alarm", rank)),
            stop_wanted=lambda: self.stop_wanted,
        )
        self.cluster._supervisor = self  # type: ignore[assignment]

    @property
    def now_ns(self) -> int:
        return round(self.now_s * 1e9)

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self.roster.known)

    @property
    def failures(self) -> list[Failure]:
        return self.roster.failures

    def ask_to_stop(self, rank: int, *, patiently: bool = False) -> None:
        self.actions.append(("stop", rank))
        if not patiently:
            self.roster.ask_to_stop(rank, self.now_ns)

    def kill(self, rank: int) -> None:
        self.actions += self.roster.kill(rank, self.now_ns)

    def at_work(self) -> Play:
        for rank in range(len(self.rows)):
            self.do(Heard(rank, RoleStarted(pid=100 + rank)))
            self.mark(rank, 17, State.COMPUTING)
        return self

    def mark(self, rank: int, step: int, state: State, waiting_for: int = NOBODY) -> None:
        self.rows[rank] = StatusRow(
            pid=100 + rank,
            heartbeat_ns=self.now_ns,
            marked_ns=self.now_ns,
            step=step,
            state=state,
            waiting_for=waiting_for,
        )

    def do(self, event: Heard | Garbled | Exited | Interrupted) -> list[Action]:
        if isinstance(event, Interrupted):
            return self.react([event])
        return self.react(self.roster.handle(event, self.now_ns))

    def look(self) -> list[Action]:
        return self.react(self.roster.look(dict(enumerate(self.rows)), self.now_ns))

    def react(self, decided: list[Event | KillProcess]) -> list[Action]:
        self.actions += [one for one in decided if isinstance(one, KillProcess)]
        self.cluster.look([one for one in decided if not isinstance(one, KillProcess)])
        actions, self.actions = self.actions, []
        return actions

    def let_pass(self, seconds: float, *, tick_s: float = 0.25) -> list[tuple[float, Action]]:
        """Look every tick; the actions with the time since the start of this call, a kill only when it is new."""
        seen: list[tuple[float, Action]] = []
        start_s = self.now_s
        while self.now_s < start_s + seconds:
            self.now_s += tick_s
            for rank, row in enumerate(self.rows):
                if rank not in self.silent and row.pid:
                    self.rows[rank] = replace(row, heartbeat_ns=self.now_ns)
            actions = self.look()
            seen += [(self.now_s - start_s, action) for action in actions if action not in self.kills]
            self.kills |= {action for action in actions if isinstance(action, KillProcess)}
        return seen

    @property
    def results(self) -> list[Finished]:
        return [self.cluster._results[rank] for rank in sorted(self.cluster._results)]

    def failure(self) -> Exception:
        assert self.cluster.failure is not None
        return self.cluster.failure


def failed(error: Exception, step: int = 17) -> Failed:
    def job() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        job()
    return report(caught.value, step)


def test_a_run_without_trouble_ends_with_every_result_by_rank() -> None:
    play = Play(2).at_work()
    assert play.do(Heard(1, Note(payload={"x": 1}))) == [("note", 1, {"x": 1})]
    for rank in (1, 0):
        assert play.do(Heard(rank, Finished(payload={"rank": rank}))) == []
        assert play.do(Exited(rank, 0)) == []
    assert not play.members
    assert play.cluster.failure is None
    assert play.results == [Finished(payload={"rank": 0}), Finished(payload={"rank": 1})]


def test_an_error_raises_the_alarm_and_takes_the_others_down_after_the_grace() -> None:
    play = Play(3).at_work()
    actions = play.do(Heard(1, failed(ValueError("bad thing"))))
    assert actions == [("alarm", 1), ("stop", 0), ("stop", 1), ("stop", 2)]
    assert play.do(Exited(1, 1)) == []
    assert play.do(Exited(0, 1)) == []
    assert play.let_pass(5.0) == [(2.0, KillProcess(2))]
    assert play.do(Exited(2, -9)) == []
    assert not play.members
    error = play.failure()
    assert isinstance(error, WorkerFailed)
    assert error.worker_rank == 1
    assert str(error).startswith("worker 1 (pid 101) raised ValueError at step 17: bad thing\n")
    assert "Traceback (most recent call last)" in str(error)


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (3, "worker 0 (pid 100) exited with status 3 before it reported a result"),
        (0, "worker 0 (pid 100) exited with status 0 before it reported a result"),
        (-signal.SIGSEGV, "worker 0 (pid 100) was killed by SIGSEGV"),
        (-signal.SIGKILL, "worker 0 (pid 100) was killed by SIGKILL (by a user, or by the kernel"),
    ],
)
def test_a_death_without_a_report_is_reported_with_place_and_last_words(status: int, said: str) -> None:
    play = Play(2).at_work()
    play.let_pass(1.0)
    assert play.do(Exited(0, status, "it hurts\n"))[0] == ("alarm", 0)
    text = str(play.failure())
    assert text.startswith(said)
    assert "last seen computing step 17, 0.0 s ago" in text
    assert text.endswith("the end of its stderr:\nit hurts")


def test_a_signal_without_a_name_is_reported_by_number() -> None:
    assert describe_exit(-200) == "was killed by signal 200"


def test_a_silent_role_is_killed_at_once_within_the_promise() -> None:
    play = Play(2).at_work()
    play.silent = {1}
    actions = play.let_pass(5.0, tick_s=0.2)
    stops = [("stop", rank) for rank in range(2)]
    assert [action for _, action in actions] == [("alarm", 1), *stops, KillProcess(1)]
    assert 4.5 < actions[0][0] < 5.0
    assert "worker 1 (pid 101) fell silent" in str(play.failure())
    assert "last seen computing step 17, 4." in str(play.failure())


def test_a_launcher_that_was_paused_blames_nobody() -> None:
    play = Play(1).at_work()
    play.let_pass(1.0)
    play.silent = {0}
    play.now_s += 60.0  # a stopped machine: neither the launcher nor the role ran
    assert play.let_pass(1.0) == []
    play.silent = set()
    assert play.let_pass(20.0) == []
    play.silent = {0}
    assert play.let_pass(30.0, tick_s=1.5)[0][1] == ("alarm", 0), "a slow launcher still notices"


def test_a_role_that_never_starts_is_reported() -> None:
    play = Play(1)
    actions = play.let_pass(121.0)
    assert [action for _, action in actions] == [KillProcess(0), ("alarm", 0), ("stop", 0)]
    assert "did not start within 120 s; never seen" in str(play.failure())


def test_a_consequence_gives_way_to_its_cause() -> None:
    play = Play(3).at_work()
    assert play.do(Heard(0, failed(PeerTimeout("no answer from 2", peer=2))))[0] == ("alarm", 0)
    assert play.do(Heard(1, failed(Aborted("someone failed")))) == []
    assert "worker 0 (pid 100) raised PeerTimeout" in str(play.failure())
    assert play.do(Exited(2, -11)) == []
    assert "worker 2 (pid 102) was killed by SIGSEGV" in str(play.failure())
    play.do(Exited(0, -6))
    assert "worker 2" in str(play.failure())


def test_who_lost_another_gives_way_to_what_that_one_tells() -> None:
    play = Play(2).at_work()
    play.do(Heard(0, failed(WorkerFailed("lost worker 1: the link was closed", 1))))
    assert "lost worker 1" in str(play.failure())
    play.do(Heard(1, failed(ArithmeticError("on purpose"))))
    assert "worker 1 (pid 101) raised ArithmeticError" in str(play.failure())


def test_what_the_takedown_itself_does_is_no_cause() -> None:
    play = Play(2).at_work()
    play.do(Heard(0, failed(Aborted("by whom?"))))
    play.let_pass(3.0)
    play.do(Exited(1, -9))  # ours
    assert "worker 0 (pid 100) raised Aborted" in str(play.failure())


def test_the_first_of_two_failures_is_reported() -> None:
    play = Play(2).at_work()
    play.do(Heard(1, failed(ValueError("first"))))
    play.do(Heard(0, failed(ValueError("second"))))
    assert "first" in str(play.failure())


def test_an_error_while_waiting_tells_what_the_other_was_doing() -> None:
    play = Play(2).at_work()
    play.mark(0, 18, State.WAITING, waiting_for=1)
    play.let_pass(1.0)
    play.do(Heard(0, failed(PeerTimeout("no answer", peer=1), step=18)))
    assert "(waiting for worker 1 (pid 101), last seen computing step 17, 0.0 s ago)" in str(play.failure())


def test_an_interruption_asks_then_kills_and_a_second_kills_now() -> None:
    play = Play(2).at_work()
    stop = [("stop", rank) for rank in range(2)]
    assert play.do(INTERRUPTED) == stop
    assert play.let_pass(2.0) == [(2.0, KillProcess(0)), (2.0, KillProcess(1))]
    assert play.cluster.failure is None

    play = Play(2).at_work()
    assert play.do(INTERRUPTED) == stop
    assert play.do(INTERRUPTED) == [KillProcess(0), KillProcess(1)]


def test_who_is_wanted_to_stop_is_asked_once_and_takes_the_time_it_needs() -> None:
    play = Play(2).at_work()
    stop = [("stop", rank) for rank in range(2)]
    play.stop_wanted = True
    assert play.look() == stop
    assert play.look() == []
    assert play.let_pass(60.0) == []
    assert play.do(INTERRUPTED) == stop  # asked already, but now there is a limit
    assert play.let_pass(2.0) == [(2.0, KillProcess(0)), (2.0, KillProcess(1))]


def test_a_role_that_does_not_leave_after_its_result_is_killed_and_its_result_stands() -> None:
    play = Play(1).at_work()
    play.do(Heard(0, Finished(payload={"x": 1})))
    play.silent = {0}  # no heartbeat is owed after the result
    ((after_s, action),) = play.let_pass(EXIT_S + 1)
    assert (action, after_s) == (KillProcess(0), EXIT_S + 0.25)
    play.do(Exited(0, -9))
    assert play.cluster.failure is None
    assert play.results == [Finished(payload={"x": 1})]


def test_who_is_to_be_killed_is_named_until_it_is_gone_as_an_exception_may_come_between() -> None:
    play = Play(2).at_work()
    play.do(INTERRUPTED)
    play.do(INTERRUPTED)
    assert [play.look() for _ in range(3)] == [[KillProcess(0), KillProcess(1)]] * 3
    play.do(Exited(0, -9))
    assert play.look() == [KillProcess(1)]


def test_a_process_that_can_not_be_killed_is_given_up_by_name() -> None:
    play = Play(2).at_work()
    play.do(INTERRUPTED)
    assert play.do(Exited(1, 1)) == [("alarm", 1)]
    play.let_pass(2.0 + EXIT_S)
    assert play.cluster.failure is None
    assert play.members == (0,)
    play.let_pass(1.0)
    assert play.members == ()
    assert "worker 0 (pid 100) did not end within 10 s of being killed" in str(play.failure())


def test_what_a_child_may_not_say_is_its_failure() -> None:
    play = Play(1).at_work()
    assert play.do(Garbled(0, "not a message")) == [KillProcess(0), ("alarm", 0), ("stop", 0)]
    assert "worker 0 (pid 100) violated the control protocol: not a message" in str(play.failure())
    play = Play(1).at_work()
    assert play.do(Heard(0, Stop())) == [KillProcess(0), ("alarm", 0), ("stop", 0)]


@pytest.mark.parametrize(
    "error",
    [
        UserError("lr=-1 must be positive"),
        DataError("train.idx, offset 16: truncated"),
        NonFinite("worker 1, step 3: the loss is not finite"),
        OutOfSharedMemory("gradients", 10 * 2**30, 2**30),
    ],
)
def test_the_users_mistake_keeps_its_type_message_and_numbers(error: UserError) -> None:
    play = Play(1).at_work()
    play.do(Heard(0, failed(error)))
    raised = play.failure()
    assert type(raised) is type(error)
    assert str(raised) == str(error)
    assert vars(raised) == {**vars(error), "__notes__": raised.__notes__, "blamed": "worker 0"}
    assert raised.__notes__[0].startswith(f"worker 0 (pid 100) raised {type(error).__name__} at step 17")


def test_a_kind_of_user_error_we_do_not_know_arrives_as_the_nearest_we_know() -> None:
    class StrangeError(DataError):
        pass

    play = Play(1).at_work()
    play.do(Heard(0, failed(StrangeError("odd"))))
    assert type(play.failure()) is DataError


def test_a_report_of_a_huge_error_stays_small() -> None:
    reported = failed(ValueError("x" * 10**7))
    assert len(reported.message) < 10_000
    assert len(reported.traceback) <= 64 * 1024
    assert reported.traceback.endswith("xxx\n")


def test_marks_are_packed_into_one_word() -> None:
    assert unpack_mark(0) == (0, State.STARTING, NOBODY)
    for step in (0, 1, 17, 2**39 - 1):
        for state in State:
            for waiting_for in (NOBODY, 0, 3, 65534):
                mark = pack_mark(step, state, waiting_for)
                assert -(2**63) <= mark < 2**63
                assert unpack_mark(mark) == (step, state, waiting_for)
    with pytest.raises(ValueError, match="step=-1"):
        pack_mark(-1, State.COMPUTING)
    with pytest.raises(ValueError, match="waiting_for=65535"):
        pack_mark(0, State.WAITING, 65535)


def test_the_status_table_shows_to_all_what_one_writes() -> None:
    with StatusTable.create(3) as status_table, StatusTable(os.dup(status_table.descriptor)) as other:
        status_table.sign_on(1)
        status_table.mark(1, 17, State.WAITING, waiting_for=2)
        line = other.read(1)
        assert (line.pid, line.step, line.state, line.waiting_for) == (os.getpid(), 17, State.WAITING, 2)
        assert line.doing() == "waiting for role 2 at step 17"
        status_table.mark(1, 18, State.COMPUTING, place=(3, 0))
        assert other.read(1).doing() == "computing step 18, micro-batch 0 on stage 3"
        status_table.mark(1, 18, State.EXCHANGING)
        assert other.read(1).doing() == "exchanging step 18"
        assert other.read(0) == other.read(2) == StatusRow()
        with pytest.raises(IndexError, match="no row 3"):
            status_table.read(3)
    status_table.close()
    with pytest.raises(ValueError, match="closed"):
        status_table.read(0)
