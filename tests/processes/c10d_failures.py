"""Ranks that come to grief: `python -m processes.c10d_failures SCENE RANK WORLD STORE`.

Each scene is played by all ranks; what a rank sees goes to its standard output.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

from manyhands.c10d import BACKEND
from manyhands.places.local import rendezvous
from manyhands.places.local.host import host_identity


def say(text: object) -> None:
    print(text, flush=True)


def tell(error: BaseException) -> None:
    say(f"{type(error).__name__}: {error}")


def open_group(rank: int, world: int, store: str, timeout_s: float) -> None:
    dist.init_process_group(
        BACKEND,
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout_s),
    )


def killed(rank: int, world: int, store: str) -> None:
    """Rank 1 is killed by the test while all reduce; a child that it has forked lives on and must not hide it."""
    open_group(rank, world, store, 60)
    warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
    if rank == 1 and os.fork() == 0:
        sys.stdin.readline()  # until the test ends
        os._exit(0)
    say("running")
    tensor = torch.ones(1000)
    try:
        while True:
            dist.all_reduce(tensor)
    except Exception as error:
        tell(error)
    began = time.monotonic()
    for call in (dist.barrier, lambda: dist.all_reduce(tensor, async_op=True).wait()):
        try:
            call()
        except Exception as error:
            tell(error)
    assert time.monotonic() - began < 60, "a stopped group answers at once"


def killed_first(rank: int, world: int, store: str) -> None:
    """Rank 0 kills itself while all others wait for it, each in another way."""
    open_group(rank, world, store, 60)
    dist.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:  # it may be dead before the others have begun to wait for it
        work = dist.irecv(torch.ones(3), 0) if rank == 1 else dist.all_reduce(torch.ones(3), async_op=True)
        work.wait()
    except Exception as error:
        tell(error)


def ends(rank: int, world: int, store: str) -> None:
    """Rank 1 just ends: the interpreter's end closes its group."""
    open_group(rank, world, store, 60)
    dist.barrier()
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(1))
        except Exception as error:
            tell(error)


def several_hosts(rank: int, world: int, store: str) -> None:
    """Each rank believes to be on a host of its own: everything goes through Gloo; then all are on one again."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rendezvous.host_identity = lambda: f"host {rank}"
    open_group(rank, world, store, 60)
    assert dist.group.WORLD is not None
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert type(backend).__name__ == "ProcessGroupGloo", backend
    tensor = torch.full((5,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.eq(sum(range(world))).all()
    outputs = torch.empty(world)
    dist.all_gather_into_tensor(outputs, torch.tensor([float(rank)]))
    assert outputs.tolist() == list(range(world))
    if rank == 0:
        dist.send(tensor, 1)
    elif rank == 1:
        dist.recv(tensor, 0)
    with dist._coalescing_manager():
        dist.all_reduce(tensor.fill_(1))
    assert tensor.eq(world).all()
    names: list[object] = [None] * world
    dist.all_gather_object(names, rank)
    dist.barrier()
    dist.destroy_process_group()
    say(names)
    rendezvous.host_identity = host_identity
    reopened(rank, world, f"{store}-again")


def reopened(rank: int, world: int, store: str) -> None:
    """A group can be opened again and again on one store, under the same names."""
    shared = dist.FileStore(store, -1)
    for turn in range(5):
        dist.init_process_group(
            BACKEND, store=shared, rank=rank, world_size=world, timeout=timedelta(seconds=30)
        )
        tensor = torch.tensor([float(turn)])
        dist.all_reduce(tensor)
        assert tensor.item() == turn * world
        dist.destroy_process_group()
    say([thread.name for thread in threading.enumerate()])


if __name__ == "__main__":
    torch.set_num_threads(1)
    globals()[sys.argv[1]](int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
