"""Buckets that a torch process group sums: by NCCL on the GPUs where gradients are, without copies to the host.

A bucket's sum begins as soon as it is full, on NCCL's stream beside the kernels of backward. What workers agree on
(losses, flags, totals: float64, in host memory) goes through another collective, which also tells which worker is
late: once its sum is there, all workers have launched everything. From then on the host runs ahead of the GPU;
whether the sums succeeded is checked before any of them is kept, or the next step is agreed on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from typing import Any, Final, TypeVar

import torch

from manyhands.engine.exchange import Times, Traffic
from manyhands.errors import Aborted, PeerTimeout, WorkerFailed, first_line
from manyhands.native.wait_sign import LongWait
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.strategies.common.collectives.row_sums import GradientRows
from manyhands.transport.link.torch_p2p import SumGroup
from manyhands.transport.link.wire import Wire, wire_of
from manyhands.transport.liveness import Alarm
from manyhands.wire.parcels import Parcel

__all__ = ["TorchCollective", "done_in_time"]

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
        self.rank = words.rank
        self.world = words.world
        self.sums_rows = words.sums_rows
        self._group: SumGroup | None = group
        self._device, self._words, self._timeout_s = device, words, timeout_s
        self._alarm = alarm
        self._buckets: list[torch.Tensor] = []
        self._word_of: dict[int, int] = {}
        self._under_way: list[Any] = []
        self._unsure: list[Any] = []
        self._messages = 0
        self._bytes = 0
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
        self._messages += 2 * (self.world - 1)
        self._bytes += 2 * (self.world - 1) * bucket.nbytes // self.world

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
        return self._words.traffic() + Traffic(messages_sent=self._messages, bytes_sent=self._bytes)

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
                        f"worker {self.rank}: {what} did not come from the GPUs of {who} within {self._timeout_s:g} s, "
                        "though all of them take part; NCCL_DEBUG=INFO tells more",
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
                f"worker {self.rank}: the workers' GPUs cannot exchange any more: {first_line(error)}"
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
    outcome: list[_T] = []
    trouble: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(act())
        except BaseException as error:
            trouble.append(error)

    thread = threading.Thread(target=run, name=f"manyhands: {what}", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_s
    while thread.is_alive():
        thread.join(0.05)
        lost = alarm.lost() if alarm is not None else None
        if lost is not None:
            raise WorkerFailed(f"{what}: {lost[1]}", lost[0])
        if time.monotonic() >= deadline:
            raise PeerTimeout(
                f"{what}: not all came within {timeout_s:g} s; NCCL_DEBUG=INFO tells more", peer
            )
    if trouble:
        raise trouble[0]
    return outcome[0]
