"""Exchange what workers know of their GPUs, and build the collective that sums there if NCCL is chosen."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Self

import torch

from manyhands.engine.worker_resources import Resources
from manyhands.errors import ManyhandsError, PeerTimeout, UserError, first_line
from manyhands.places.external.key_value_store import comes_true
from manyhands.places.local.host import host_identity
from manyhands.places.local.rendezvous import RendezvousStore
from manyhands.strategies.allreduce.exchange import collective_across_hosts, collective_for
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.strategies.common.collectives.torch_sums import TorchCollective, done_in_time
from manyhands.transport.link.torch_p2p import SumGroup, nccl_version

__all__ = [
    "SUMS",
    "GpuSeat",
    "SumsChoice",
    "announced",
    "choose_sums",
    "chosen_sums",
    "seat_of",
    "sums_on_gpus",
    "sums_sentence",
]


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
        peer = 1 if resources.rank == 0 else 0
        group = done_in_time(connect, what, timeout_s=timeout_s, alarm=resources.alarm, peer=peer)
    except RuntimeError as error:
        raise ManyhandsError(
            f"{what} by NCCL, which fails: {first_line(error)}; NCCL_DEBUG=INFO tells more, and allreduce link=tcp "
            "does without it"
        ) from error
    # Small exact values lie in host memory.
    if resources.several_hosts:
        over_links = strategy.across_hosts(resources.hosts)
        assert isinstance(over_links, AllReduce), "whatever it is on one host"
        words: Collective = collective_across_hosts(over_links, resources)[1]
    else:
        words = collective_for(replace(strategy, link="shared"), resources)
    return TorchCollective(group, device, words, timeout_s, resources.alarm)


SUMS: Final = "sums"
"""The summary key under which a run reports how gradients are summed: `by` nccl or links, and `why`."""


# Decide whether NCCL sums the gradients of a run on the GPUs, from what all workers announced, and give the reason.
# NCCL takes one rank per GPU, sums whole buckets without encoding, and does not encrypt. It is chosen only if every
# worker has its own GPU, the strategy asks for nothing else, and no data leaves a host that must not be readable on the
# network. All workers decide from the same facts, so all decide alike. Pure, except `seat_of`, which inspects the host.
@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSeat:
    """Where one worker computes, as it announces this to the others."""

    host: str
    """The identity of the worker's host."""
    gpu: str
    """The UUID of the worker's GPU, unique across hosts; empty if the worker computes on the CPU."""
    nccl: str
    """The worker's NCCL version; empty if its torch has none."""
    nccl_host: str = ""
    """The host identity that NCCL uses, if NCCL_HOSTID sets one."""

    def to_text(self) -> str:
        return json.dumps([self.host, self.gpu, self.nccl, self.nccl_host])

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Parse the output of `to_text`; raises ManyhandsError for any other text."""
        try:
            found = json.loads(text)
        except ValueError:
            found = None
        if not isinstance(found, list) or [type(one) for one in found] != [str] * 4:
            raise ManyhandsError(
                f"the run's store holds {text[:80]!r} where a worker says which GPU it computes on"
            )
        host, gpu, nccl, nccl_host = found
        return cls(host=host, gpu=gpu, nccl=nccl, nccl_host=nccl_host)


def seat_of(device: torch.device) -> GpuSeat:
    host = host_identity()
    if device.type != "cuda":
        return GpuSeat(host=host, gpu="", nccl="")
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    return GpuSeat(host=host, gpu=gpu, nccl=nccl_version(), nccl_host=os.environ.get("NCCL_HOSTID", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class SumsChoice:
    """Whether NCCL sums, and the reason as the end of a sentence."""

    nccl: bool
    why: str

    def summary(self) -> dict[str, Any]:
        return {SUMS: {"by": "nccl" if self.nccl else "links", "why": self.why}}


def choose_sums(strategy: AllReduce, seats: Sequence[GpuSeat], *, in_the_clear: bool) -> SumsChoice:
    """Choose between NCCL and links or host memory; raises UserError if `link=nccl` asks for the impossible.

    `in_the_clear` says that the user trusts the network between hosts.
    """
    forced, asks = strategy.link == "nccl", strategy.instead_of_nccl
    found = (asks, "leave that out") if asks else _hindrance(seats, forced=forced, in_the_clear=in_the_clear)
    if found is None:
        return SumsChoice(nccl=True, why=f"each of {len(seats)} workers has a GPU of its own")
    why, fix = found
    if forced:
        raise UserError(f"link=nccl: {why}; {fix}")
    return SumsChoice(nccl=False, why=why)


def sums_sentence(choice: dict[str, Any]) -> str:
    if choice["by"] == "nccl":
        return f"gradients are summed on the GPUs by NCCL: {choice['why']}"
    return f"gradients are summed in the host's memory or over links, not by NCCL: {choice['why']}"


def _hindrance(seats: Sequence[GpuSeat], *, forced: bool, in_the_clear: bool) -> tuple[str, str] | None:
    """Return the first thing that rules NCCL out, with what to do about it; None if nothing does."""
    for worker, seat in enumerate(seats):
        if not seat.gpu:
            return f"worker {worker} computes on the CPU", "use device=cuda, or leave link=nccl out"
        if not seat.nccl:
            return (
                f"the torch of worker {worker} has no NCCL",
                "install a CUDA build of torch, or leave link=nccl out",
            )
        if seat.nccl != seats[0].nccl:
            return (
                f"worker 0 has NCCL {seats[0].nccl}, and worker {worker} has NCCL {seat.nccl}",
                "install one torch on all hosts, or leave link=nccl out",
            )
    owners: dict[tuple[str, str], int] = {}
    for worker, seat in enumerate(seats):
        named = seat.nccl_host if forced else ""  # for tests on one GPU: NCCL assumes several hosts
        first = owners.setdefault((named, seat.gpu), worker)
        if first != worker:
            return (
                f"workers {first} and {worker} share one GPU, and NCCL takes one worker for each",
                "start as many workers as there are GPUs, or leave link=nccl out",
            )
    hosts = len({seat.host for seat in seats})
    if hosts > 1 and not in_the_clear:
        return (
            f"workers are on {hosts} hosts, and NCCL does not encrypt what it sends between them",
            "say --insecure where you trust the network, or leave link=nccl out",
        )
    return None
