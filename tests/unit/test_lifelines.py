"""The thread that waits for the sockets between processes is gone when nobody is watched any more."""

from __future__ import annotations

import selectors
import socket
import threading
import time

import pytest

from manyhands.places.local import lifelines


class _SlowToClose(selectors.DefaultSelector):
    """The last thing that the thread does takes its time, and is noticed."""

    slowly = threading.Event()

    def close(self) -> None:
        self.slowly.set()
        time.sleep(0.05)
        super().close()


def _watching() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "manyhands lifelines"]


def _ends(gone: list[bool]) -> None:
    """Wait until the thread has told of the peer, has nobody to watch, and is about to end."""
    deadline = time.monotonic() + 10
    while not (gone and _SlowToClose.slowly.is_set()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_whoever_forgets_a_peer_that_left_first_waits_for_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifelines.selectors, "DefaultSelector", _SlowToClose)
    for _ in range(2):  # it may be started again
        mine, theirs = socket.socketpair()
        with mine, theirs:
            gone: list[bool] = []
            lifelines.watch(
                mine, lambda in_peace, gone=gone: (gone.append(in_peace), _SlowToClose.slowly.clear())
            )
            theirs.send(lifelines.FAREWELL)
            _ends(gone)
            lifelines.forget(mine)
            assert _watching() == []


def test_a_thread_that_is_about_to_end_is_followed_by_one_that_watches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lifelines.selectors, "DefaultSelector", _SlowToClose)
    pairs = [socket.socketpair() for _ in range(2)]
    for mine, theirs in pairs:
        gone: list[bool] = []
        lifelines.watch(
            mine, lambda in_peace, gone=gone: (gone.append(in_peace), _SlowToClose.slowly.clear())
        )
        assert len(_watching()) == 1
        theirs.close()
        _ends(gone)
        assert gone == [False]
    for mine, _ in pairs:
        lifelines.forget(mine)
        mine.close()
    assert _watching() == []
