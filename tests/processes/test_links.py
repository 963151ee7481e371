"""Links between real processes: sudden death, a frozen peer, many ranks, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import warm
from descriptors import open_descriptors
from manyhands.transport.link.interface import Closed, Link, Message, PeerDied, Received, TimedOut
from manyhands.transport.link.mesh import mesh_kind
from manyhands.transport.link.shared_link import LinkDescriptors, SharedLink, SharedLinkFiles
from manyhands.transport.link.torch_p2p import TorchLink

PATIENCE_S = 180.0  # for a child to start; imports are slow on a busy machine


PREAMBLE = """
import os, sys, torch
from manyhands.transport.link.interface import Message
from manyhands.transport.link.shared_link import LinkDescriptors, SharedLink
def attach(arguments, end):
    return SharedLink.attach(LinkDescriptors(*map(int, arguments)), end=end, peer="the test")
"""


@contextmanager
def child(
    code: str,
    arguments: Sequence[object],
    descriptors: Sequence[int],
    popen: type[subprocess.Popen[bytes]] = warm.Popen,
) -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs `code`; it never outlives the block."""
    command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(code), *map(str, arguments)]
    process = popen(command, pass_fds=descriptors, stdin=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        assert process.stdin is not None
        process.stdin.close()


@contextmanager
def peer_that(code: str) -> Iterator[tuple[SharedLink, subprocess.Popen[bytes]]]:
    """This process's end of a link, and the child at the other end."""
    before = open_descriptors()
    with SharedLinkFiles.create(capacity_bytes=1 << 16) as files:
        theirs = files.descriptors(1)
        with child(code, theirs, theirs) as process:
            mine = LinkDescriptors(*map(os.dup, files.descriptors(0)))
            files.close()
            with SharedLink.attach(mine, end=0, peer="the child") as link:
                yield link, process
    assert open_descriptors() == before


def receive(link: Link) -> Message:
    outcome = link.receive(PATIENCE_S)
    assert isinstance(outcome, Received), outcome
    return outcome.message


HELLO_THEN_SILENCE = """
link = attach(sys.argv[1:3], end=1)
link.send(Message(kind=1))
sys.stdin.read()
"""


def test_a_killed_peer_is_noticed_by_its_end() -> None:
    with peer_that(HELLO_THEN_SILENCE) as (link, process):
        assert receive(link).kind == 1
        link.send(Message(kind=2, payload=torch.zeros(1 << 20)))
        assert isinstance(link.flush(0.1), TimedOut)
        process.kill()
        start = time.monotonic()
        outcome = link.receive(PATIENCE_S)
        assert isinstance(outcome, PeerDied)
        assert "the child" in outcome.reason
        assert isinstance(link.flush(PATIENCE_S), PeerDied)
        assert time.monotonic() - start < PATIENCE_S / 2
        assert isinstance(link.send(Message(kind=0)), PeerDied)


def test_death_shows_in_the_middle_of_a_message_and_behind_a_fork() -> None:
    code = """
    link = attach(sys.argv[1:3], end=1)
    if os.fork() == 0:  # as a data loader does
        sys.stdin.read()
        os._exit(0)
    link.send(Message(kind=1))
    link.send(Message(kind=2, payload=torch.ones(1 << 22)))
    sys.stdin.read()
    """
    with peer_that(code) as (link, process):
        assert receive(link).kind == 1
        target = torch.zeros(1 << 22)
        while target[0] == 0:  # a look takes no more than the ring holds, so it ends in the middle
            assert isinstance(link.receive(0, target), TimedOut)
        process.kill()
        start = time.monotonic()
        assert isinstance(link.receive(PATIENCE_S, target), PeerDied)
        assert time.monotonic() - start < PATIENCE_S / 2


def test_a_frozen_peer_is_a_timeout_and_goes_on_later() -> None:
    code = """
    link = attach(sys.argv[1:3], end=1)
    link.send(Message(kind=1))
    link.receive(60)
    link.send(Message(kind=2))
    link.close()
    """
    with peer_that(code) as (link, process):
        assert receive(link).kind == 1
        process.send_signal(signal.SIGSTOP)
        link.send(Message(kind=0))
        outcome = link.receive(0.4)
        assert isinstance(outcome, TimedOut)
        assert 0.4 <= outcome.waited_s < PATIENCE_S / 2
        process.send_signal(signal.SIGCONT)
        assert receive(link).kind == 2
        assert link.receive(PATIENCE_S) == Closed()


@pytest.mark.parametrize("network", [False, True], ids=["shared", "tcp"])
def test_a_mesh_joins_every_pair_of_processes(network: bool) -> None:
    code = """
    from manyhands.transport.link.mesh import mesh_kind
    rank, network, *words = [int(word) for word in sys.argv[1:]]
    kind = mesh_kind(network=bool(network))
    step = 1 + len(kind.parts)
    links = kind.attach(rank, {words[i]: words[i + 1 : i + step] for i in range(0, len(words), step)})
    for peer, link in links.items():
        link.send(Message(kind=rank, tag=peer, payload=torch.full((100_000,), float(rank))))
    for peer, link in links.items():
        message = link.receive(60).message
        assert (message.kind, message.tag) == (peer, rank), message
        assert torch.equal(message.payload, torch.full((100_000,), float(peer)))
    for link in links.values():
        link.flush(60)
    for link in links.values():
        link.close()
    """
    before = open_descriptors()
    with mesh_kind(network=network)(3) as mesh, ExitStack() as stack:
        processes = []
        for rank in range(3):
            descriptors = mesh.descriptors(rank)
            words = [word for peer, files in descriptors.items() for word in (peer, *files)]
            passed = [descriptor for files in descriptors.values() for descriptor in files]
            processes.append(stack.enter_context(child(code, [rank, int(network), *words], passed)))
        mesh.close()
        assert [process.wait(PATIENCE_S) for process in processes] == [0, 0, 0]
    assert open_descriptors() == before


def test_torch_notices_a_killed_peer(tmp_path: Path) -> None:
    code = """
    import torch.distributed as dist
    from manyhands.transport.link.torch_p2p import TorchLink
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=1, world_size=2)
    link = TorchLink(dist.group.WORLD, 0)
    link.send(Message(kind=1, payload=torch.arange(5.0)))
    sys.stdin.read()
    """
    where = f"file://{tmp_path}/store"
    with child(code, [where], []) as process:
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=2)
        group = dist.group.WORLD
        assert group is not None
        link = TorchLink(group, 1)
        try:
            assert receive(link).kind == 1
            assert isinstance(link.receive(0.1), TimedOut)
            process.kill()
            start = time.monotonic()
            outcome = link.receive(PATIENCE_S)
            assert time.monotonic() - start < PATIENCE_S / 2
            assert isinstance(outcome, PeerDied)
            assert "rank 1" in outcome.reason
        finally:
            link.close()
            dist.destroy_process_group()


def test_a_process_that_leaves_while_torch_waits_for_its_peer_has_the_status_it_left_with(
    tmp_path: Path,
) -> None:
    """The peer goes while the interpreter is being taken apart: a thread that Gloo lets go then would abort it."""
    code = """
    import time
    import torch.distributed as dist
    from manyhands.transport.link.torch_p2p import TorchLink
    class Last:
        tell, rest = staticmethod(os.write), staticmethod(time.sleep)
        def __del__(self):
            self.tell(int(self.descriptor), b"leaving")
            self.rest(1.0)
    dist.init_process_group("gloo", init_method=sys.argv[1], rank=1, world_size=2)
    dist.barrier()  # the peer is connected, too, before this process leaves
    link = TorchLink(dist.group.WORLD, 0)
    last = Last()
    last.descriptor = sys.argv[2]
    last.itself = last
    sys.exit(3)
    """
    where = f"file://{tmp_path}/store"
    reading, writing = os.pipe()
    with child(code, [where, writing], [writing], subprocess.Popen) as process:
        os.close(writing)
        dist.init_process_group("gloo", init_method=where, rank=0, world_size=2)
        dist.barrier()
        group = dist.group.WORLD
        assert group is not None
        link = TorchLink(group, 1)
        try:
            assert os.read(reading, 7) == b"leaving"
            link.break_off()
            assert process.wait(PATIENCE_S) == 3
        finally:
            os.close(reading)
            link.close()
            dist.destroy_process_group()
