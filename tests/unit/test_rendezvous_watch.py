"""The thread that waits for the other processes of a host is gone when there are none any more, or at the close."""

from __future__ import annotations

import os
import socket
import threading
import time

from manyhands.places.local.rendezvous import Rendezvous


def _rendezvous(*ends: socket.socket) -> Rendezvous:
    ranks = range(1, len(ends) + 1)
    return Rendezvous(name="g", rank=0, hosts=((0, *ranks),), sockets=dict(zip(ranks, ends, strict=True)))


def _watching() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "manyhands rendezvous"]


def _until_nobody_watches() -> None:
    deadline = time.monotonic() + 180
    while _watching():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_the_thread_ends_with_the_last_peer_or_at_the_close() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    gone: list[tuple[int, bool]] = []
    one = _rendezvous(*(mine for mine, _ in pairs))
    one.watch(lambda rank, in_peace: gone.append((rank, in_peace)))
    assert len(_watching()) == 1
    pairs[1][1].send(b"farewell")
    pairs[0][1].close()
    _until_nobody_watches()
    assert sorted(gone) == [(1, False), (2, True)]
    one.close()
    pairs[1][1].close()

    mine, theirs = socket.socketpair()
    with theirs:
        two = _rendezvous(mine)
        two.watch(lambda rank, in_peace: None)
        two.close()
        assert _watching() == []
        assert theirs.recv(64) == b"farewell"
        two.close()


def test_it_may_be_closed_by_what_is_called_at_an_end() -> None:
    mine, theirs = socket.socketpair()
    one = _rendezvous(mine)
    one.watch(lambda rank, in_peace: one.close())
    theirs.close()
    _until_nobody_watches()
    assert mine.fileno() == -1


def test_a_forked_child_does_not_hide_the_death_of_its_parent() -> None:
    mine, theirs = socket.socketpair()
    with theirs:
        one = _rendezvous(mine)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(reader, 1)
            os._exit(0)
        mine.close()  # as if this process were gone
        theirs.settimeout(10)
        assert theirs.recv(64) == b""
        os.write(writer, b".")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)
        one.close()
