"""Hubs of real processes: one is killed, one is frozen, one forks before it dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

import warm
from manyhands.transport.hub.handshake import Credentials
from manyhands.transport.hub.hub import Hub
from manyhands.transport.hub.hub_events import Arrived, HubEvent, Joined, Lost, Settings
from manyhands.transport.liveness import LivenessTimes
from manyhands.transport.messages import MessageCoder

PATIENCE_S = 180.0  # for a child to start; imports are slow on a busy machine
TOKEN = b"the secret of this run, 32 bytes"
SETTINGS = Settings(liveness=LivenessTimes(heartbeat_s=0.1, silence_s=1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    value: int


CODEC = MessageCoder({1: Number})

CHILD = """
import os, sys, time
from dataclasses import dataclass
from manyhands.transport.messages import MessageCoder
from manyhands.transport.hub.handshake import Credentials
from manyhands.transport.hub.hub import Hub
from manyhands.transport.hub.hub_events import Joined, Lost, Arrived
from manyhands.transport.hub.hub_events import Settings
from manyhands.transport.liveness import LivenessTimes

@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    value: int

hub = Hub(
    Credentials(member=2, role="child", token=b"the secret of this run, 32 bytes", fingerprint="task"),
    MessageCoder({1: Number}),
    settings=Settings(liveness=LivenessTimes(heartbeat_s=0.1, silence_s=60.0)),
)
hub.connect(1, sys.argv[1])
while True:
    for event in hub.poll(1.0):
        match event:
            case Joined():
                hub.send(1, Number(value=os.getpid()))
            case Arrived():
                hub.send(1, event.message, [event.payload])
                hub.flush(10.0)
                event.release()
                after(event.message.value)
            case Lost():
                sys.exit(0)
"""


@contextmanager
def child(address: str, after: str = "pass") -> Iterator[subprocess.Popen[bytes]]:
    """A member 2 that answers every Number with the same, and then does `after`."""
    code = f"def after(value):\n{textwrap.indent(textwrap.dedent(after), '    ')}\n{CHILD}"
    process = warm.Popen([sys.executable, "-c", code, address], stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        assert process.stdin is not None
        process.stdin.close()


def hub() -> Hub:
    return Hub(Credentials(member=1, role="test", token=TOKEN, fingerprint="task"), CODEC, settings=SETTINGS)


def next_event(here: Hub, kind: type, within_s: float = PATIENCE_S) -> HubEvent:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        for event in here.poll(deadline - time.monotonic()):
            assert isinstance(event, (kind, Joined)), event
            if isinstance(event, kind):
                return event
    raise AssertionError(f"no {kind.__name__} within {within_s} s")


def answer_to(here: Hub, value: int, payload: bytes = b"") -> Arrived:
    assert here.send(2, Number(value=value), [payload])
    event = next_event(here, Arrived)
    assert isinstance(event, Arrived)
    assert event.message == Number(value=value)
    assert bytes(event.payload) == payload
    return event


@pytest.mark.parametrize("how", ["unix", "tcp"])
def test_a_killed_process_is_noticed_at_once(how: str) -> None:
    with hub() as here, child(here.listen(how)) as process:
        next_event(here, Arrived)
        for size in (0, 10_000, 3_000_000):
            answer_to(here, size, os.urandom(size)).release()
        process.send_signal(signal.SIGKILL)
        lost = next_event(here, Lost)
        assert isinstance(lost, Lost)
        assert not lost.in_peace
        assert "heartbeat" not in lost.reason  # the kernel said so, not the clock


@pytest.mark.parametrize("how", ["unix", "tcp"])
def test_a_frozen_process_is_noticed_at_the_limit_and_told_when_it_wakes(how: str) -> None:
    with hub() as here, child(here.listen(how)) as process:
        next_event(here, Arrived)
        process.send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        lost = next_event(here, Lost)
        waited_s = time.monotonic() - stopped_s
        assert isinstance(lost, Lost)
        assert "not even a heartbeat" in lost.reason
        limit_s = SETTINGS.liveness.silence_s
        assert limit_s - SETTINGS.liveness.heartbeat_s < waited_s < PATIENCE_S
        process.send_signal(signal.SIGCONT)
        assert process.wait(PATIENCE_S) == 0  # it saw that it was given up


def test_a_fork_of_a_process_does_not_hide_its_death() -> None:
    fork = """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads
        if os.fork() == 0:
            sys.stdin.buffer.read()  # until the test closes it
            os._exit(0)
    """
    with hub() as here, child(here.listen("unix"), fork) as process:
        next_event(here, Arrived)
        answer_to(here, 1)
        answer_to(here, 2)  # the fork of the first message is done
        process.send_signal(signal.SIGKILL)
        lost = next_event(here, Lost)
        assert isinstance(lost, Lost)
        assert "heartbeat" not in lost.reason
