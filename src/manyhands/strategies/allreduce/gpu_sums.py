"""Exchange what workers know of their GPUs, and build the collective that sums there if NCCL is chosen."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from functools import partial
from operator import methodcaller
from typing import Any, Final, Self, TypeVar

import torch

from manyhands.engine.exchange import Resources, Times, Traffic
from manyhands.errors import Aborted, ManyhandsError, PeerTimeout, UserError, WorkerFailed, first_line
from manyhands.native.wait_sign import LongWait
from manyhands.places.external.run_store import comes_true
from manyhands.places.local.host import host_identity
from manyhands.strategies.allreduce.exchange import collective_across_hosts, collective_for
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.strategies.common.collectives.row_sums import GradientRows
from manyhands.transport.link.torch_p2p import SumGroup, nccl_version
from manyhands.transport.link.wire import Wire, wire_of
from manyhands.transport.liveness import Alarm
from manyhands.wire.parcels import Parcel


def chosen_sums(strategy: AllReduce, resources: Resources) -> SumsChoice | None:
    """Collective: decide whether NCCL sums, None on CPUs; PeerTimeout names a worker that announced no GPU."""
    mine = seat_of(resources.device)
    if not mine.gpu or resources.torch_store is None:
        return None
    if strategy.instead_of_nccl:
        return SumsChoice(nccl=False, why=strategy.instead_of_nccl)
    store, timeout_s, seats = resources.torch_store(), resources.timeout_s, []
    store.set(f"gpu/{resources.rank}", mine.to_text())
    deadline = time.monotonic() + timeout_s
    for worker in range(resources.world):
        if not comes_true(partial(store.check, [f"gpu/{worker}"]), deadline - time.monotonic()):
            raise PeerTimeout(f"worker {worker} did not report its GPU within {timeout_s:g} s", worker)
        seats.append(GpuSeat.from_text(store.get(f"gpu/{worker}").decode()))
    return choose_sums(strategy, seats, in_the_clear=resources.in_the_clear)


def sums_on_gpus(strategy: AllReduce, resources: Resources) -> Collective:
    """Collective, if NCCL was chosen: return this worker's connected end.

    Small exact values travel as without NCCL.
    """
    assert resources.torch_store is not None, "a worker that was chosen for NCCL has a store"
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
            f"{what} by NCCL, which fails: {first_line(error)}; set NCCL_DEBUG=INFO for details, or use allreduce "
            "link=tcp"
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
@dataclass(frozen=True, slots=True)
class GpuSeat:
    """Where one worker computes, as it announces this to the others."""

    host: str  # the identity of the worker's host
    gpu: str  # the UUID of the worker's GPU, unique across hosts; empty if the worker computes on the CPU
    nccl: str  # the worker's NCCL version; empty if its torch has none
    nccl_host: str = ""  # the host identity that NCCL uses, if NCCL_HOSTID sets one

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
            raise ManyhandsError(f"the run's store holds {text[:80]!r} instead of a worker's GPU")
        return cls(*found)


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
        return SumsChoice(nccl=True, why=f"each of {len(seats)} workers has its own GPU")
    why, fix = found
    if forced:
        raise UserError(f"link=nccl: {why}; {fix}")
    return SumsChoice(nccl=False, why=why)


def sums_sentence(choice: dict[str, Any]) -> str:
    by_nccl, not_by = "on the GPUs by NCCL", "in the host's memory or over links, not by NCCL"
    return f"gradients are summed {by_nccl if choice['by'] == 'nccl' else not_by}: {choice['why']}"


def _hindrance(seats: Sequence[GpuSeat], *, forced: bool, in_the_clear: bool) -> tuple[str, str] | None:
    """Return the first thing that rules NCCL out, with what to do about it; None if nothing does."""
    out = "or leave link=nccl out"
    for worker, seat in enumerate(seats):
        if not seat.gpu:
            return f"worker {worker} computes on the CPU", f"use device=cuda, {out}"
        if not seat.nccl:
            return f"the torch of worker {worker} has no NCCL", f"install a CUDA build of torch, {out}"
        if seat.nccl != seats[0].nccl:
            why = f"worker 0 has NCCL {seats[0].nccl}, but worker {worker} has NCCL {seat.nccl}"
            return why, f"install the same torch on all hosts, {out}"
    owners: dict[tuple[str, str], int] = {}
    for worker, seat in enumerate(seats):
        named = seat.nccl_host if forced else ""  # for tests on one GPU: NCCL assumes several hosts
        first = owners.setdefault((named, seat.gpu), worker)
        if first != worker:
            why = f"workers {first} and {worker} share one GPU, but NCCL needs one GPU per worker"
            return why, f"start one worker per GPU, {out}"
    hosts = len({seat.host for seat in seats})
    if hosts > 1 and not in_the_clear:
        why = f"workers are on {hosts} hosts, and NCCL does not encrypt its traffic"
        return why, f"give --insecure if you trust the network, {out}"
    return None


# Buckets that a torch process group sums: by NCCL on the GPUs where gradients are, without copies to the host.
#
# A bucket's sum begins as soon as it is full, on NCCL's stream beside the kernels of backward. What workers agree on
# (losses, flags, totals: float64, in host memory) goes through another collective, which also tells which worker is
# late: once its sum is there, all workers have launched everything. From then on the host runs ahead of the GPU;
# whether the sums succeeded is checked before any of them is kept, or the next step is agreed on.

_T = TypeVar("_T")
_CAUSE_S: Final = 2.0
_LEAVING_S: Final = 10.0
_FIRST_LOOK_S: Final = 20e-6  # doubled up to the longest
_LONGEST_LOOK_S: Final = 1e-3


class TorchCollective(Collective):
    """Buckets in the memory of `device`, summed by `group`; exact ones by `words`, whose ranks are the same.

    Every wait lasts at most `timeout_s`; an `alarm` ends it and names the lost worker. Owns the group and `words`.
    """

    wire = wire_of(Wire.TORCH)

    def __init__(
        self,
        group: SumGroup,
        device: torch.device,
        words: Collective,
        timeout_s: float,
        alarm: Alarm | None = None,
    ) -> None:
        self.rank, self.world, self.sums_rows = words.rank, words.world, words.sums_rows
        self._group: SumGroup | None = group
        self._device, self._words, self._timeout_s, self._alarm = device, words, timeout_s, alarm
        self._buckets: list[torch.Tensor] = []
        self._word_of: dict[int, int] = {}
        self._under_way: list[Any] = []
        self._unsure: list[Any] = []
        self._sent = Traffic()
        self._ending: threading.Thread | None = None
        self._lock = threading.Lock()
        if alarm is not None:
            alarm.on_ring(self._end)

    def allocate(self, parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        exact = [number for number, parcel in enumerate(parcels) if parcel.exact]
        self._word_of = {number: place for place, number in enumerate(exact)}
        words = self._words.allocate([parcels[number] for number in exact])
        self._buckets = [
            words[self._word_of[number]]
            if parcel.exact
            else torch.zeros(parcel.count, dtype=parcel.dtype, device=self._device)
            for number, parcel in enumerate(parcels)
        ]
        return self._buckets

    def sum_rows(self, mine: GradientRows, below: int) -> GradientRows:
        return self._words.sum_rows(mine, below)

    def begin(self, step: int) -> None:
        super().begin(step)
        self._words.begin(step)

    def launch(self, index: int) -> None:
        """Have the group sum it, after the kernels that fill it and beside those that follow; returns at once."""
        if index in self._word_of:
            self._words.launch(self._word_of[index])
            return
        bucket = self._buckets[index]
        if not bucket.numel():
            return
        self._under_way.append(self._ask(lambda group: group.allreduce(bucket)))
        others = self.world - 1
        self._sent += Traffic(messages_sent=2 * others, bytes_sent=2 * others * bucket.nbytes // self.world)

    def finish(self) -> None:
        """Wait for the exact values of all, and order what is queued from here on after the sums."""
        self._await_unsure()
        self._words.step = self.step
        self._words.finish()
        self._unsure, self._under_way = self._under_way, []
        if self._device.type == "cpu":
            self._await_unsure()
            return
        for work in self._unsure:
            self._checked(work.wait)  # the stream waits, and the host does not

    def synchronize(self) -> bool:
        """Wait until this worker's sums are there, or raise; others may still be reading from this worker."""
        self._await_unsure()
        return True

    def broadcast(self, index: int, root: int = 0) -> None:
        if index in self._word_of:
            self._words.broadcast(self._word_of[index], root)
            return
        bucket = self._buckets[index]
        work = self._ask(lambda group: group.broadcast(bucket, root))
        self._await(work, "the weights of worker 0")

    @torch.no_grad()
    def spread(self, tensors: Iterable[torch.Tensor]) -> bool:
        for tensor in tensors:
            if not tensor.numel():
                continue
            flat = tensor.detach().to(self._device).contiguous().flatten()
            self._await(self._ask(methodcaller("broadcast", flat.view(torch.uint8), 0)), "its weights")
            if flat.data_ptr() != tensor.data_ptr():
                tensor.copy_(flat.view(tensor.shape))
        return True

    def take_times(self) -> Times:
        return self._words.take_times()

    def traffic(self) -> Traffic:
        """Return the buckets' traffic as in a ring, which NCCL may do otherwise, and that of exact values."""
        return self._words.traffic() + self._sent

    def close(self) -> None:
        self._end()
        if self._ending is not None:
            self._ending.join(_LEAVING_S)
        self._buckets, self._under_way, self._unsure = [], [], []
        self._words.close()

    def _end(self) -> None:
        """From any thread: abort everything in progress, without waiting for it."""
        with self._lock:
            group, self._group = self._group, None
            if group is not None:
                self._ending = threading.Thread(
                    target=group.abort, name="manyhands leaves the group of GPUs", daemon=True
                )
                self._ending.start()

    def _ask(self, begin: Callable[[SumGroup], _T]) -> _T:
        group = self._group
        if group is None:
            self._check_alarm()
            raise Aborted(f"worker {self.rank} has left the group of GPUs")
        return self._checked(lambda: begin(group))

    def _await_unsure(self) -> None:
        """Wait until earlier sums are there, or raise: otherwise a bucket does not hold a sum."""
        for work in self._unsure:
            self._await(work, "its sums")
        self._unsure = []
        self._check_alarm()  # a group that was ended leaves anything in its buckets

    def _await(self, work: Any, what: str) -> None:
        deadline, pause_s = time.monotonic() + self._timeout_s, _FIRST_LOOK_S
        with LongWait() as wait:
            while not work.is_completed():
                self._check_alarm()
                if time.monotonic() >= deadline:
                    others = [rank for rank in range(self.world) if rank != self.rank]
                    who = f"worker{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
                    raise PeerTimeout(
                        f"worker {self.rank}: {what} did not arrive from the GPUs of {who} within {self._timeout_s:g} "
                        "s, though all take part; set NCCL_DEBUG=INFO for details",
                        others[0],
                    )
                wait.goes_on(0 if self.rank else 1)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
        self._check_alarm()
        self._checked(work.wait)

    def _checked(self, act: Callable[[], _T]) -> _T:
        try:
            return act()
        except RuntimeError as error:
            self._check_alarm(_CAUSE_S)  # a peer is gone, whose name will be known in a moment
            raise Aborted(
                f"worker {self.rank}: the GPUs can no longer communicate: {first_line(error)}"
            ) from error

    def _check_alarm(self, wait_s: float = 0.0) -> None:
        lost = self._alarm.lost(wait_s) if self._alarm is not None else None
        if lost is not None:
            raise WorkerFailed(f"worker {self.rank}, sums on GPUs: {lost[1]}", lost[0])


def done_in_time(
    act: Callable[[], _T], what: str, *, timeout_s: float, alarm: Alarm | None = None, peer: int = 0
) -> _T:
    """Run `act`, which waits in foreign code; PeerTimeout if it takes too long, WorkerFailed if a worker is lost.

    It runs in a thread that is abandoned if it does not return.
    """
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            outcome.set_result(act())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, name=f"manyhands: {what}", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while not wait_for([outcome], timeout=0.05).done:
        lost = alarm.lost() if alarm is not None else None
        if lost is not None:
            raise WorkerFailed(f"{what}: {lost[1]}", lost[0])
        if time.monotonic() >= deadline:
            raise PeerTimeout(
                f"{what}: not all workers connected within {timeout_s:g} s; set NCCL_DEBUG=INFO for details",
                peer,
            )
    return outcome.result()
