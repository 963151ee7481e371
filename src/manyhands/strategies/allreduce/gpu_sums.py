"""Exchange what workers know of their GPUs, and build the collective that sums there if NCCL is chosen."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import torch

from manyhands.engine.worker_resources import Resources
from manyhands.errors import ManyhandsError, PeerTimeout, first_line
from manyhands.places.external.key_value_store import comes_true
from manyhands.places.local.rendezvous import RendezvousStore
from manyhands.strategies.allreduce.exchange import collective_across_hosts, collective_for
from manyhands.strategies.allreduce.gpu_choice import GpuSeat, SumsChoice, choose_sums, seat_of
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.strategies.common.collectives.torch_sums import TorchCollective, done_in_time
from manyhands.transport.link.torch_p2p import SumGroup

__all__ = ["announced", "chosen_sums", "sums_on_gpus"]


def chosen_sums(strategy: AllReduce, resources: Resources) -> SumsChoice | None:
    """Collective: decide whether NCCL sums; None if the workers compute on the CPU and nobody asked for it."""
    mine = seat_of(resources.device)
    if not mine.gpu or resources.torch_store is None:
        return None
    if strategy.instead_of_nccl:
        return SumsChoice(nccl=False, why=strategy.instead_of_nccl)
    seats = announced(resources.torch_store(), mine, resources.rank, resources.world, resources.timeout_s)
    return choose_sums(strategy, seats, in_the_clear=resources.in_the_clear)


def announced(
    store: RendezvousStore, mine: GpuSeat, rank: int, world: int, timeout_s: float
) -> list[GpuSeat]:
    """Collective: return every worker's seat; PeerTimeout names a worker that announced none."""
    store.set(f"gpu/{rank}", mine.to_text())
    deadline = time.monotonic() + timeout_s
    seats = []
    for worker in range(world):
        if not comes_true(partial(store.check, [f"gpu/{worker}"]), deadline - time.monotonic()):
            raise PeerTimeout(
                f"worker {worker} did not say within {timeout_s:g} s which GPU it computes on", worker
            )
        seats.append(GpuSeat.from_text(store.get(f"gpu/{worker}").decode()))
    return seats


def sums_on_gpus(strategy: AllReduce, resources: Resources) -> Collective:
    """Collective, if NCCL was chosen: return this worker's connected end.

    Small exact values travel as without NCCL.
    """
    assert resources.torch_store is not None, "who was chosen for NCCL has a store"
    store, device, timeout_s = resources.torch_store(), resources.device, resources.timeout_s

    def connect() -> SumGroup:
        group = SumGroup(device, store, resources.rank, resources.world, timeout_s)
        group.allreduce(torch.zeros(1, device=device)).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return group

    what = f"worker {resources.rank} connects its GPU with those of {resources.world - 1} others"
    try:
        group = done_in_time(
            connect,
            what,
            timeout_s=timeout_s,
            alarm=resources.alarm,
            peer=1 if resources.rank == 0 else 0,
        )
    except RuntimeError as error:
        raise ManyhandsError(
            f"{what} by NCCL, which fails: {first_line(error)}; NCCL_DEBUG=INFO tells more, and allreduce link=tcp "
            "does without it"
        ) from error
    words = _words(strategy, resources)
    return TorchCollective(group, device, words, timeout_s, resources.alarm)


def _words(strategy: AllReduce, resources: Resources) -> Collective:
    """Return the collective for small exact values, which lie in host memory."""
    if not resources.several_hosts:
        return collective_for(replace(strategy, link="shared"), resources)
    over_links = strategy.across_hosts(resources.hosts)
    assert isinstance(over_links, AllReduce), "whatever it is on one host"
    _, words = collective_across_hosts(over_links, resources)
    return words
