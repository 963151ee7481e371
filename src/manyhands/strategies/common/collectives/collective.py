"""How a set of buckets is summed over workers: in place in shared memory, or by a schedule over links.

The reducer fills buckets and launches them in order; a collective makes each the sum over all workers. Two of them:
`SharedCollective` (one host, nothing is copied) and `ScheduleCollective` (any algorithm over any link).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

import torch

from manyhands.engine.exchange import PeerTraffic, Times, Traffic
from manyhands.engine.worker_resources import Resources
from manyhands.native.group.shared_group import Bucket, SharedGroup, slice_of
from manyhands.native.segment import CACHE_LINE
from manyhands.strategies.common.collectives.background import Background
from manyhands.strategies.common.collectives.codec_choice import CodecChooser
from manyhands.strategies.common.collectives.compressed import Compressor
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.strategies.common.collectives.row_sums import GradientRows
from manyhands.strategies.common.collectives.schedule import Algorithm
from manyhands.transport.link.interface import Link
from manyhands.transport.link.wire import Wire, wire_of
from manyhands.wire.codec import ParcelCodec, codec_named
from manyhands.wire.flat_layout import side_by_side
from manyhands.wire.names import RAW, auto_error, rounds_hops
from manyhands.wire.parcels import Parcel

__all__ = [
    "Collective",
    "ScheduleCollective",
    "SharedCollective",
    "across_hosts",
    "barrier_in",
    "carrier",
    "over_links",
    "without_barrier",
]


class Collective(ABC):
    """Sums buckets over workers; every worker allocates, launches and finishes the same ones in the same order."""

    rank: int
    world: int
    wire: int = Wire.MEMORY
    """What carries the buckets, and in which codec: the result of `wire_of`."""
    codec: str = RAW
    """The codec setting."""
    step: int = 0
    """Which step the launched buckets belong to; set it before `finish`."""

    def begin(self, step: int) -> None:
        """Begin a step: buckets launched from here on belong to it, and may be summed before `finish`."""
        self.step = step

    @abstractmethod
    def allocate(self, parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        """Collective, once: return a zeroed flat tensor for each parcel, in order, for this worker's part."""

    def rounds(self, parcel: Parcel) -> bool:
        """Whether the contents of the parcel are rounded in transit."""
        del parcel
        return False

    sums_rows: bool = False
    """Whether row-sparse gradients are summed as such; otherwise only dense ones are."""
    instead_of_rows: str = (
        "its rows are summed over links, if it is that of an nn.Embedding: add link=tcp, or build it with "
        "sparse=False"
    )
    """What the user can do if row-sparse gradients are not supported."""

    def sum_rows(self, mine: GradientRows, below: int) -> GradientRows:
        """Collective, if it `sums_rows`: return the sum over workers of rows of a table that has `below` of them."""
        raise NotImplementedError(
            f"{type(self).__name__} sums dense gradients, not {len(mine.numbers)} of {below}"
        )

    def summary(self) -> dict[str, Any]:
        return {}

    def memory(self) -> dict[str, torch.Tensor]:
        return {}

    def remember(self, memory: Mapping[str, torch.Tensor]) -> None:  # noqa: B027 - only codecs keep something
        """Restore the residuals that a worker of this number kept."""

    @abstractmethod
    def launch(self, index: int) -> None:
        """Mark this worker's part of a bucket as filled; returns at once."""

    def poll(self) -> bool:
        """Do what can be done without waiting; return whether a launched bucket is still to be reduced here."""
        return False

    @abstractmethod
    def finish(self) -> None:
        """Wait until every launched bucket holds its sum, or raise naming the worker waited for."""

    def settle(self) -> bool:
        """Wait until the results of `finish` are certain, if the host runs ahead of a GPU; call before keeping any.

        Returns whether other workers may still need this one for their results.
        """
        return False

    @abstractmethod
    def broadcast(self, index: int, root: int = 0) -> None:
        """Collective: worker `root`'s bucket becomes everyone's."""

    def spread(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Collective, if supported: give every worker worker 0's values directly; return whether it did.

        Otherwise the caller sends them through a bucket.
        """
        del tensors
        return False

    @abstractmethod
    def take_times(self) -> Times:
        """Return where time went since the last call."""

    @abstractmethod
    def traffic(self) -> Traffic:
        """Return what this worker has sent so far."""

    @abstractmethod
    def close(self) -> None:
        """Release memory and links."""


class SharedCollective(Collective):
    """Buckets that live in shared memory and are summed in place: `direct`, in worker order, nothing copied.

    The first buckets, as many as `owned` has entries, stop halfway: of bucket i worker r gets the sum of the items
    `owned[i][r]`, and the rest of its part stays as it is.
    """

    def __init__(self, group: SharedGroup, owned: Sequence[Sequence[range]] = ()) -> None:
        self.rank = group.rank
        self.world = group.world
        self._group, self._owned = group, owned
        self._buckets: list[Bucket] = []
        self._sent: list[Traffic] = []  # by bucket: what its sum takes
        self._traffic = Traffic()

    def allocate(self, parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        offsets, end = side_by_side((parcel.num_bytes for parcel in parcels), CACHE_LINE)
        self._group.allocate(end, f"the gradients of {self.world} workers")
        self._buckets = [
            self._group.bucket(offset, parcel.count, parcel.dtype, ranges)
            for offset, parcel, ranges in zip_longest(offsets, parcels, self._owned)
        ]
        parts = [bucket.tensor for bucket in self._buckets]
        for index, part in enumerate(parts):
            size, others = part.element_size(), self.world - 1
            if index < len(self._owned):
                messages, mine = others, self._owned[index][self.rank]
            else:
                messages, mine = 2 * others, slice_of(part.numel(), size, self.rank, self.world)
            self._sent.append(Traffic(messages_sent=messages, bytes_sent=messages * len(mine) * size))
        return parts

    def launch(self, index: int) -> None:
        self._group.launch(self._buckets[index], scatter=index < len(self._owned))
        self._traffic += self._sent[index]

    def poll(self) -> bool:
        """Reduce this worker's slice of every bucket that all have filled."""
        return self._group.poll()

    def finish(self) -> None:
        self._group.finish()

    def broadcast(self, index: int, root: int = 0) -> None:
        self._group.broadcast(self._buckets[index], root)

    def is_done(self, index: int) -> bool:
        return self._group.is_done(self._buckets[index])

    def parts(self, index: int) -> Sequence[torch.Tensor]:
        """Every worker's part of a bucket; read those of others between two barriers, or once all are done."""
        return self._buckets[index].parts

    def take_times(self) -> Times:
        stats = self._group.take_stats()
        waits = {peer: waited for peer, waited in enumerate(stats.waiting_ns) if waited}
        return Times(exchange_ns=stats.reducing_ns, wait_ns=waits)

    def traffic(self) -> Traffic:
        return self._traffic

    def close(self) -> None:
        self._buckets = []
        self._group.close()


class ScheduleCollective(Collective):
    """Buckets summed one after the other by a schedule over links, in launch order.

    If links are a network and `begin` has announced the step, a thread sums each bucket as soon as it is launched,
    while the worker continues its backward; otherwise `finish` does. Collectives over one executor share the
    `background`, so that everything is sent in launch order.

    `arrive`, if given, waits until every worker has arrived and returns the nanoseconds waited for each: it separates
    lateness from the exchange itself. `codec` names what the executor encodes with; a `chooser` changes it during the
    run. Owns the links.
    """

    sums_rows = True

    def __init__(
        self,
        executor: ScheduleExecutor,
        links: Mapping[int, Link],
        arrive: Callable[[], Mapping[int, int]] | None = None,
        codec: str = RAW,
        chooser: CodecChooser | None = None,
        background: Background | None = None,
    ) -> None:
        self.rank = executor.rank
        self.world = executor.world
        self._executor, self._links, self.codec = executor, links, codec
        self._chooser, self._arrive = chooser, arrive
        self._parcels: Sequence[Parcel] = ()
        self._buckets: list[torch.Tensor] = []
        self._launched: list[int] = []
        self._waits: dict[int, int] = {}
        self._background = background or Background("manyhands sums of buckets")
        self._begun = False
        self._leaves_early = False
        self._last_given = 0

    @property
    def wire(self) -> int:  # type: ignore[override]
        codec = self.codec if self._chooser is None else self._chooser.codec
        return wire_of(next((link.wire for link in self._links.values()), Wire.NONE), codec)

    def summary(self) -> dict[str, Any]:
        return {} if self._chooser is None else self._chooser.summary()

    def allocate(self, parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        self._parcels = parcels
        self._buckets = [torch.zeros(parcel.count, dtype=parcel.dtype) for parcel in parcels]
        return self._buckets

    def rounds(self, parcel: Parcel) -> bool:
        """Whether the executor encodes the parcel, or a codec that does may still be chosen."""
        return self._executor.encodes(parcel) or (self._chooser is not None and not parcel.exact)

    def sum_rows(self, mine: GradientRows, below: int) -> GradientRows:
        return self._executor.sum_rows(mine, below)

    def sum_part(self, part: Parcel) -> None:
        """Collective, at once: sum the named part of a bucket over workers."""
        item = part.dtype.itemsize
        items = self._buckets[part.number][part.begin // item : part.end // item]
        self._executor.at(self.step)
        self._executor.all_reduce(items, parcel=part)

    def gather(self, mine: torch.Tensor) -> tuple[list[torch.Tensor], dict[int, tuple[int, int]]]:
        """Collective, at once: return every worker's few bytes, and the interval in which each was waited for."""
        return self._executor.gather(mine)

    def memory(self) -> dict[str, torch.Tensor]:
        return (self._chooser or self._executor).memory()

    def remember(self, memory: Mapping[str, torch.Tensor]) -> None:
        (self._chooser or self._executor).remember(memory)

    def begin(self, step: int) -> None:
        """Begin a step; buckets may be sent from here on, unless codecs are measured on all of them first."""
        super().begin(step)
        self._begun = True
        self._executor.at(step)
        looks = self._chooser is not None and self._chooser.is_due(step)
        # Data on a network needs no core of this host, so a thread may sum while the worker computes.
        overlaps = any(link.wire in (Wire.TCP, Wire.TORCH) for link in self._links.values())
        self._leaves_early = overlaps and not looks

    def launch(self, index: int) -> None:
        if self._leaves_early:
            self._last_given = self._background.give(partial(self._sum, [index]))
        else:
            self._launched.append(index)

    def finish(self) -> None:
        self._begun = False
        if self._arrive is not None:
            for peer, waited in self._arrive().items():
                self._waits[peer] = self._waits.get(peer, 0) + waited
        if self._leaves_early:
            self._leaves_early = False
            self._background.wait(self._last_given)
            return
        launched, self._launched = self._launched, []
        if self._chooser is not None:
            self._chooser.look(
                self.step, [(self._parcels[index], self._buckets[index]) for index in launched]
            )
        self._executor.at(self.step)
        self._sum(launched)

    def _sum(self, launched: Sequence[int]) -> None:
        for index in launched:
            self._executor.all_reduce(self._buckets[index], parcel=self._parcels[index])

    def barrier(self) -> None:
        self._executor.barrier()

    def broadcast(self, index: int, root: int = 0) -> None:
        self._executor.broadcast(self._buckets[index], root)

    def take_times(self) -> Times:
        waits, self._waits = self._waits, {}
        over = not self._begun and self._background.is_idle  # a step's traffic is reported together
        return Times(wait_ns=waits, posts=self._take_traffic() if over else {})

    def _take_traffic(self) -> Mapping[int, PeerTraffic]:
        return self._executor.mailbox.take_traffic()

    def traffic(self) -> Traffic:
        return self._executor.mailbox.traffic()

    def close(self) -> None:
        def close_links() -> None:
            for link in self._links.values():
                link.close()

        self._background.close(close_links)


def carrier(
    codec: str, *, feedback: bool, seed: int, rank: int, world: int
) -> ParcelCodec | Compressor | None:
    """Return what encodes for an executor: at every hop, or as a `Compressor`; None if nothing does yet."""
    if auto_error(codec) is not None:
        return None
    if rounds_hops(codec):
        return codec_named(codec)
    return Compressor(codec, feedback=feedback, seed=seed, rank=rank, world=world)


def over_links(
    algorithm: Algorithm, resources: Resources, codec: str = RAW, *, feedback: bool = True
) -> ScheduleCollective:
    """Return a worker's end over the links of one host, with a barrier in shared memory that tells which was late."""
    return without_barrier(
        algorithm, resources, codec, feedback=feedback, arrive=barrier_in(resources.group())
    )


def barrier_in(group: SharedGroup) -> Callable[[], Mapping[int, int]]:
    """Return a barrier of the group that reports how long each later worker was waited for, in nanoseconds."""

    def arrive() -> Mapping[int, int]:
        group.barrier()
        waits = group.take_stats().waiting_ns
        return {peer: waited for peer, waited in enumerate(waits) if waited}

    return arrive


def without_barrier(
    algorithm: Algorithm,
    resources: Resources,
    codec: str = RAW,
    *,
    feedback: bool = True,
    arrive: Callable[[], Mapping[int, int]] | None = None,
) -> ScheduleCollective:
    """Return a worker's end over links, on one host or several, that waits for arrivals by `arrive` alone."""
    links = resources.links()
    make = partial(
        carrier, feedback=feedback, seed=resources.seed, rank=resources.rank, world=resources.world
    )
    executor = ScheduleExecutor(
        algorithm, resources.rank, resources.world, links, resources.timeout_s, resources.alarm, make(codec)
    )
    chooser = None
    if auto_error(codec) is not None:
        chooser = CodecChooser(codec, executor, partial(make, feedback=True))
    return ScheduleCollective(executor, links, arrive, codec, chooser)


def across_hosts(
    algorithm: Algorithm, resources: Resources, codec: str = RAW, *, feedback: bool = True
) -> tuple[ScheduleCollective, ScheduleCollective]:
    """Return a worker's ends over links between hosts: for what may be encoded, and for small exact values."""
    gradients = without_barrier(algorithm, resources, codec, feedback=feedback)
    return gradients, of_words(gradients)


def of_words(gradients: ScheduleCollective) -> ScheduleCollective:
    """Return another collective over the same links, for small exact values."""
    return ScheduleCollective(gradients._executor, gradients._links, background=gradients._background)
