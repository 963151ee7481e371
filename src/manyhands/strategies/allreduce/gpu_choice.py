"""Decide whether NCCL sums the gradients of a run on the GPUs, from what all workers announced, and give the reason.

NCCL takes one rank per GPU, sums whole buckets without encoding, and does not encrypt. It is chosen only if every
worker has its own GPU, the strategy asks for nothing else, and no data leaves a host that must not be readable on the
network. All workers decide from the same facts, so all decide alike. Pure, except `seat_of`, which inspects the host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import torch

from manyhands.errors import ManyhandsError, UserError
from manyhands.places.local.host import host_identity
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.transport.link.torch_p2p import nccl_version

__all__ = ["SUMS", "GpuSeat", "SumsChoice", "choose_sums", "seat_of", "sums_sentence"]

SUMS: Final = "sums"
"""The summary key under which a run reports how gradients are summed: `by` nccl or links, and `why`."""


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
    forced = strategy.link == "nccl"
    asks = strategy.instead_of_nccl
    found = (asks, "leave that out") if asks else _hindrance(seats, forced=forced, in_the_clear=in_the_clear)
    if found is None:
        return SumsChoice(nccl=True, why=f"each of {len(seats)} workers has a GPU of its own")
    why, fix = found
    if forced:
        raise UserError(f"link=nccl: {why}; {fix}")
    return SumsChoice(nccl=False, why=why)


def sums_sentence(told: dict[str, Any]) -> str:
    """Return the sentence that reports a choice, from what `SumsChoice.summary` returned."""
    if told["by"] == "nccl":
        return f"gradients are summed on the GPUs by NCCL: {told['why']}"
    return f"gradients are summed in the host's memory or over links, not by NCCL: {told['why']}"


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
        told = seat.nccl_host if forced else ""  # for tests on one GPU: NCCL assumes several hosts
        first = owners.setdefault((told, seat.gpu), worker)
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
