"""Who holds a run up, from what its roles show: tables in, verdicts and pages out."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import manyhands
from manyhands.errors import UserError
from manyhands.observe.record.event_ring import describe_event
from manyhands.observe.record.events import Event, EventKind
from manyhands.places.local.host import check_watchdog_s
from manyhands.places.local.stacks import STACK_SIGNAL, Frame, call_of, main_stack, split_threads
from manyhands.places.local.status import NOBODY, State, StatusRow
from manyhands.places.local.watchdog import (
    Being,
    End,
    SeenRole,
    Stall,
    details,
    headline,
    is_busy,
    judge,
    page,
)
from manyhands.strategies.registry import STRATEGIES

NOW_NS = 100_000_000_000


def role(
    number: int,
    waits_for: int = NOBODY,
    *,
    being: Being = Being.RUNNING,
    state: State = State.EXCHANGING,
    stack: tuple[Frame, ...] = (),
) -> SeenRole:
    line = StatusRow(
        pid=100 + number,
        marked_ns=NOW_NS - 70_000_000_000,
        step=6,
        state=state,
        waiting_for=waits_for,
        waiting_since_ns=NOW_NS - 61_000_000_000 if waits_for != NOBODY else 0,
    )
    return SeenRole(name=f"worker {number}", pid=100 + number, row=line, being=being, stack=stack)


def roles(*waits_for: int | Being | None) -> dict[int, SeenRole]:
    """One role for each: whom it waits for, None for nobody, or what it is in."""
    made = {}
    for number, one in enumerate(waits_for):
        if isinstance(one, Being):
            made[number] = role(number, being=one)
        else:
            made[number] = role(number, NOBODY if one is None else one)
    return made


@pytest.mark.parametrize(
    ("waits", "end", "culprits", "behind"),
    [
        pytest.param((1, 2, None), End.STUCK, (2,), 2, id="chain"),
        pytest.param((2, 2, None, 2), End.STUCK, (2,), 3, id="star"),
        pytest.param((1, None, None), End.STUCK, (1,), 1, id="one of two is waited for"),
        pytest.param((1, 2, 0), End.CYCLE, (0, 1, 2), 0, id="cycle"),
        pytest.param((1, 2, 1, None), End.CYCLE, (1, 2), 1, id="tail into a cycle, and one aside"),
        pytest.param((1, Being.LEFT), End.LEFT, (1,), 1, id="finished peer"),
        pytest.param((Being.LEFT, None), End.STUCK, (1,), 0, id="who has left in peace is not blamed"),
        pytest.param((1, Being.STOPPED, None), End.STOPPED, (1,), 1, id="stopped peer"),
        pytest.param((None, None), End.STUCK, (0, 1), 0, id="everybody computing"),
    ],
)
def test_the_arrows_lead_to_the_culprit(
    waits: tuple[int | Being | None, ...], end: End, culprits: tuple[int, ...], behind: int
) -> None:
    verdict = judge(roles(*waits))
    assert verdict is not None
    assert (verdict.end, verdict.culprits, verdict.behind) == (end, culprits, behind)


def test_a_server_is_to_blame_only_if_somebody_waits_for_it() -> None:
    serving = role(1, state=State.SERVING)
    assert judge({0: role(0, 7), 1: serving}) is None, "role 7 is gone, and its place will be taken"
    verdict = judge({0: role(0, 1), 1: role(1, 2, state=State.SERVING), 2: role(2)})
    assert verdict is not None
    assert (verdict.culprits, verdict.behind) == ((2,), 2)
    verdict = judge({0: role(0, 1), 1: serving})
    assert verdict is not None
    assert verdict.culprits == (1,)


def test_a_script_that_never_joined_is_to_blame_only_if_somebody_waits_for_it() -> None:
    idle = role(1, state=State.STARTING)
    assert judge({0: role(0, state=State.STARTING), 1: idle}) is None
    verdict = judge({0: role(0, 1), 1: idle})
    assert verdict is not None
    assert verdict.culprits == (1,)


def test_the_page_says_who_waits_for_whom_and_where() -> None:
    backward = Frame(file="/home/me/train.py", line=23, function="main", text="loss.backward()")
    sleeping = Frame(file="/home/me/train.py", line=9, function="think", text="time.sleep(1e9)")
    seen = {0: role(0, 1, stack=(backward,)), 1: role(1, state=State.COMPUTING, stack=(sleeping, backward))}
    verdict = judge(seen)
    assert verdict is not None
    assert headline(seen, verdict, 60.0) == (
        "worker 1 holds up the run: for 60 s it has been in time.sleep(1e9) (train.py:9) at step 6; it waits for "
        "no other, and 1 other waits for it: worker 0 in loss.backward() (train.py:23)"
    )
    assert page(seen, verdict, 60.0, NOW_NS).splitlines() == [
        "No progress for 60.0 s. Which process waits for which:",
        "",
        "  worker 0  exchanging step 6    has waited 61.0 s for worker 1   in loss.backward() (train.py:23)",
        "> worker 1  computing step 6     does not wait                    in time.sleep(1e9) (train.py:9)",
        "",
        "worker 1 is here (main thread, innermost call last):",
        "    train.py:23 in main:  loss.backward()",
        "    train.py:9 in think:  time.sleep(1e9)",
    ]


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        ((1, 0), "a cycle of waits: worker 0 waits for worker 1 waits for worker 0"),
        (
            (1, Being.STOPPED),
            "worker 1 (pid 101) is stopped (SIGSTOP, or a debugger) at step 6; 1 other waits",
        ),
        ((1, Being.LEFT), "worker 1 left after step 6, and 1 other waits for it"),
    ],
)
def test_each_kind_of_end_has_its_sentence(waits: tuple[int | Being | None, ...], said: str) -> None:
    seen = roles(*waits)
    verdict = judge(seen)
    assert verdict is not None
    assert said in headline(seen, verdict, 60.0)


def test_a_page_stays_a_page_and_the_details_hold_everything() -> None:
    deep = tuple(Frame(file="/home/me/deep.py", line=n, function="f", text="f()") for n in range(90))
    events = tuple(f"event {n}" for n in range(50))
    stuck = SeenRole(
        name="worker 0", pid=1, row=role(0).row, stack=deep, other_threads=("  File x",), events=events
    )
    seen = {0: stuck, **{n: role(n, 0) for n in range(1, 200)}}
    verdict = judge(seen)
    assert verdict is not None
    assert len(page(seen, verdict, 60.0, NOW_NS).splitlines()) <= 60
    whole = details(seen)
    assert all(event in whole for event in events)
    assert whole.count("deep.py") == 90
    assert "another thread" in whole


def test_progress_is_a_change_and_a_paused_launcher_blames_nobody() -> None:
    stall = Stall(10.0, 0)
    for second in range(1, 8):
        stall.look("a", second * 10**9)
    assert stall.is_suspicious
    assert not stall.is_over
    stall.look("b", 8 * 10**9)
    assert stall.idle_s == 0
    stall.look("b", 1000 * 10**9)  # the launcher was away
    assert not stall.is_over
    for second in range(1001, 1011):
        stall.look("b", second * 10**9)
    assert stall.is_over
    stall.found_at_work()
    assert not stall.is_suspicious


def test_who_computes_is_at_work_and_who_only_beats_is_not() -> None:
    assert is_busy(0.9, 1.0)
    assert is_busy(0.5, 6.0)
    assert not is_busy(0.01, 1.0)


DUMP = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 320 in wait

Current thread 0x00007f02 (most recent call first):
  File "/nowhere/train.py", line 9 in think
  File "/nowhere/train.py", line 17 in main
"""


def test_what_faulthandler_writes_is_read() -> None:
    assert len(split_threads(DUMP)) == 2
    assert [(frame.place, frame.function) for frame in main_stack(DUMP)] == [
        ("train.py:9", "think"),
        ("train.py:17", "main"),
    ]
    assert main_stack("") == ()


def test_the_call_is_the_users_line_or_else_the_strategys() -> None:
    from manyhands.native.group import shared_group
    from manyhands.strategies.allreduce import exchange

    finish = Frame(file=shared_group.__file__, line=300, function="finish")
    agree = Frame(file=exchange.__file__, line=76, function="agree")
    users = Frame(file="/home/me/task.py", line=3, function="loss", text="")
    assert not finish.is_users
    assert users.is_users
    assert call_of((finish, agree)) == "in agree() (strategies/allreduce/exchange.py:76)"
    assert call_of((finish, agree, users)) == "in loss (task.py:3)"
    assert call_of(()) == "at an unknown place"


def ours(place: str, function: str = "f") -> Frame:
    return Frame(file=str(Path(manyhands.__file__).parent / place), line=7, function=function)


def elsewhere(file: str) -> Frame:
    return Frame(file=file, line=9, function="inner")


WAIT, WORKER = ours("native/waiting.py", "wait"), ours("engine/worker.py", "run")


@pytest.mark.parametrize("word", STRATEGIES)
def test_the_call_of_every_strategy_is_named_in_its_own_package(word: str) -> None:
    package = "/".join(STRATEGIES[word].value.split(".")[:2])
    begun = (WORKER, ours(f"{package}/training.py", "train"), ours("places/local/entry.py", "main"))
    asked = ours(f"{package}/exchange.py", "compute")
    said = f"in compute() ({package}/exchange.py:7)"
    assert call_of((WAIT, ours("native/group/shared_group.py"), asked, *begun)) == said


def test_the_call_is_the_one_that_torch_or_the_loop_of_every_role_has_made() -> None:
    torchs = elsewhere("/opt/other/lib/python3.11/site-packages/torch/nn/modules/module.py")
    hook = ours("strategies/sharded/exchange.py", "_carry_out")
    whole = (
        WAIT,
        hook,
        ours("strategies/common/sharding/layer_units.py"),
        torchs,
        ours("engine/computing.py"),
    )
    whole += (
        ours("strategies/sharded/exchange.py", "compute"),
        WORKER,
        ours("places/local/entry.py", "main"),
    )
    assert not torchs.is_users, "an environment may use the packages of another"
    assert call_of(whole) == "in _carry_out() (strategies/sharded/exchange.py:7)"
    assert call_of(whole[3:]) == "in compute() (strategies/sharded/exchange.py:7)", (
        "it computes, and nothing called back"
    )
    loop = (
        WAIT,
        ours("interop/own_loop/backward_rounds.py", "step"),
        torchs,
        ours("places/local/entry.py", "main"),
    )
    assert call_of(loop) == "in step() (interop/own_loop/backward_rounds.py:7)"


def test_an_event_in_words() -> None:
    event = Event(
        kind=EventKind.WAIT,
        role=0,
        id=3,
        start_ns=NOW_NS - 3_000_000_000,
        duration_ns=2_000_000,
        step=16,
        peer=1,
        num_bytes=0,
        count=0,
        value=0.0,
    )
    assert " ".join(describe_event(event, NOW_NS).split()) == "3.0 s ago wait step 17 2.00 ms peer 1"


def test_the_deadline_is_long_enough_for_a_wait_to_show() -> None:
    assert check_watchdog_s(0) == 0
    assert check_watchdog_s(3) == 3
    with pytest.raises(UserError, match=r"watchdog_s=1 must be at least 2, or 0"):
        check_watchdog_s(1)


def test_the_signal_is_a_real_time_one() -> None:
    assert signal.SIGRTMIN < STACK_SIGNAL < signal.SIGRTMAX
