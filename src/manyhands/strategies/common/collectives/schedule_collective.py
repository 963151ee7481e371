"""Sums of buckets by a schedule over links, and `codec=auto`: the codec of a run is measured, and all switch alike.

What is measured belongs to the run: a sample of what is summed, encoded and decoded by every candidate codec, and the
time to sum the sample unencoded. `wire.choice` decides.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import torch

from manyhands.engine.exchange import PeerTraffic, Resources, Times, Traffic
from manyhands.native.group.shared_group import SharedGroup
from manyhands.native.segment import CACHE_LINE, round_up
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.strategies.common.collectives.compressed import Compressor
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.strategies.common.collectives.row_sums import GradientRows
from manyhands.strategies.common.collectives.schedule import Algorithm
from manyhands.transport.link.interface import Link
from manyhands.transport.link.wire import Wire, wire_of
from manyhands.wire import choice
from manyhands.wire.codec import ParcelCodec, codec_named, encodes
from manyhands.wire.names import RAW, auto_error, rounds_hops
from manyhands.wire.parcels import Parcel

_SAMPLE_BYTES: Final = 1 << 20
_TIMES: Final = 3  # of which the fastest counts
_FEW: Final = 8  # items of what is sent to see what a message takes
_IN_USE: Final = "in use:"
_COSTS: Final = ("encode_s", "decode_s", "share", "error")
_LOOK_S = 1.0  # how often who waits sees whether the thread is still there
_END_S = 10.0  # a thread that has not ended by then ends with the process

Filled = Sequence[tuple[Parcel, torch.Tensor]]
"""What is about to be summed: each parcel, and this worker's part of it."""


class CodecChooser:
    """One worker's end: switches its executor's codec, at the same steps as all others.

    `make` returns the encoder of a codec by name; `clock_s` is the clock for exchanges and codecs.
    """

    def __init__(
        self,
        setting: str,
        executor: ScheduleExecutor,
        make: Callable[[str], ParcelCodec | Compressor | None],
        clock_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        error = auto_error(setting)
        assert error is not None, "a codec that is named is not chosen"
        self._error = error
        self._executor, self._make, self._clock_s = executor, make, clock_s
        self.codec = RAW  # the codec in use
        self.decisions: list[choice.CodecChoice] = []

    def is_due(self, step: int) -> bool:
        return choice.looks_at(step, self.decisions[-1].step if self.decisions else -1)

    def look(self, step: int, filled: Filled) -> None:
        """Collective, before the exchange of a step: measure and choose, if due."""
        free = [(parcel, part) for parcel, part in filled if not parcel.exact and parcel.count]
        if not free or not self.is_due(step):
            return
        parcel, part = max(free, key=lambda one: one[0].num_bytes)
        count = min(parcel.count, _SAMPLE_BYTES // parcel.dtype.itemsize)
        sample, values = parcel.part(0, count), part[:count]
        names = choice.candidates(self._error, double=parcel.dtype == torch.float64)
        if not names:
            why = f"{RAW}: every smaller codec loses something; codec=auto:0.01 would allow an error of 1 %"
            self._take(choice.CodecChoice(codec=RAW, step=step, why=why), filled)
            return
        measured = [  # seconds to sum the sample unencoded, to sum next to nothing, and what each codec costs
            self._fastest(values.clone()),
            self._fastest(torch.zeros(_FEW, dtype=values.dtype)),
            *(x for name in names for x in self._cost(name, sample, values)),
        ]
        worst = torch.tensor(measured, dtype=torch.float64)
        self._executor.all_reduce(worst, "max")
        large_s, small_s = worst[:2].tolist()
        world = self._executor.world
        large_bytes = choice.sent_bytes(sample.num_bytes, 1.0, world, gathered=False)
        rows = zip(names, worst[2:].view(-1, 4).tolist(), strict=True)
        decision = choice.decide(
            [choice.CodecCost(codec=name, **dict(zip(_COSTS, row, strict=True))) for name, row in rows],
            choice.LinkCost.of(small_s=small_s, large_s=large_s, large_bytes=large_bytes),
            sample_bytes=sample.num_bytes,
            num_bytes=sum(one.num_bytes for one, _ in free),
            world=world,
            error=self._error,
            now=self.codec,
            step=step,
        )
        self._take(decision, filled)

    def summary(self) -> dict[str, Any]:
        return {
            choice.CHOSEN: [{"step": one.step, "codec": one.codec, "why": one.why} for one in self.decisions]
        }

    def memory(self) -> dict[str, torch.Tensor]:
        since = torch.tensor([self.decisions[-1].step if self.decisions else 0])
        return {f"{_IN_USE}{self.codec}": since, **self._executor.memory()}

    def remember(self, memory: Mapping[str, torch.Tensor]) -> None:
        kept = dict(memory)
        for name, since in memory.items():
            if name.startswith(_IN_USE):
                del kept[name]
                self._use(name.removeprefix(_IN_USE))
                why = f"{self.codec}: used before the run was resumed"
                self.decisions = [choice.CodecChoice(codec=self.codec, step=int(since), why=why)]
        self._executor.remember(kept)

    def _take(self, decision: choice.CodecChoice, filled: Filled) -> None:
        self.decisions.append(decision)
        if decision.codec == self.codec:
            return
        # The residual is added to what is sent next: the next codec, if any, keeps its own from then on. Names are as
        # `Compressor.memory` makes them from parcel keys: what was left out of a part, or of a sum by the worker that
        # sent it, which only that worker holds.
        parts = {parcel.number: part for parcel, part in filled}
        for name, kept in self._executor.memory().items():
            number, begin, end = map(int, name.rpartition("/")[2].split("."))
            parts[number].view(torch.uint8)[begin:end].view(kept.dtype).add_(kept)
        self._use(decision.codec)

    def _use(self, codec: str) -> None:
        self.codec = codec
        self._executor.carry_by(self._make(codec))

    def _fastest(self, vector: torch.Tensor) -> float:
        took = []
        for _ in range(_TIMES):
            vector.zero_()  # otherwise sums of sums would overflow
            begin = self._clock_s()
            self._executor.all_reduce(vector)
            took.append(self._clock_s() - begin)
        return min(took)

    def _cost(self, name: str, parcel: Parcel, values: torch.Tensor) -> tuple[float, float, float, float]:
        """Return seconds to encode and to decode, the remaining share of the bytes, and the relative error."""
        codec = codec_named(name, feedback=False)
        assert codec is not None, "raw is not measured"
        if not encodes(codec, parcel):
            return 0.0, 0.0, 1.0, math.inf
        room = torch.empty(round_up(codec.size(parcel), CACHE_LINE), dtype=torch.uint8)
        read = torch.empty_like(values)
        encode_s, decode_s, num_bytes = [], [], 0
        for _ in range(_TIMES):
            begin = self._clock_s()
            num_bytes = codec.encode(parcel, values, room)
            middle = self._clock_s()
            codec.decode(parcel, room[:num_bytes], read)
            encode_s.append(middle - begin)
            decode_s.append(self._clock_s() - middle)
        norm = float(values.norm())
        error = float((values - read).norm()) / norm if norm else 0.0
        return min(encode_s), min(decode_s), num_bytes / parcel.num_bytes, error


class Background:
    """A thread that does work in the order given, while its worker computes; started with the first work.

    Shared fields are read and changed under `_changed`. An error in the thread is raised by `wait`; work that was
    given after it is not done. `close` is idempotent.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._ends = False
        self._thread: threading.Thread | None = None
        self._waiting: deque[Callable[[], None]] = deque()
        self._given = self._done = 0

    @property
    def is_idle(self) -> bool:
        with self._changed:
            return self._done == self._given

    def give(self, work: Callable[[], None]) -> int:
        """Queue work after what was given before; return its number, for `wait`, at once."""
        with self._changed:
            self._given += 1
            if self._error is None and not self._ends:
                self._waiting.append(work)
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
                self._changed.notify_all()
            return self._given

    def wait(self, number: int) -> None:
        """Wait until work `number` is done, or raise an earlier error; each piece of work has its own deadlines."""
        with self._changed:
            while self._done < number:
                if self._error is not None:
                    raise self._error
                if self._thread is None or not self._thread.is_alive():
                    raise RuntimeError(f"the thread {self._name!r} has ended, but this worker waits for it")
                self._changed.wait(_LOOK_S)

    def close(self, release: Callable[[], None]) -> None:
        """Stop the thread; `release` ends whatever it waits for. Idempotent if `release` is."""
        with self._changed:
            self._waiting.clear()
            self._ends = True
            idle = self._done == self._given
            self._changed.notify_all()
        if idle and self._thread is not None:
            self._thread.join(_END_S)
        release()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ends:
                    self._changed.wait()
                if self._ends:
                    return
                work = self._waiting.popleft()
            try:
                work()
            except BaseException as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._done += 1
                self._changed.notify_all()


class ScheduleCollective(Collective):
    """Buckets summed one after the other by a schedule over links, in launch order.

    If links are a network and `begin` has announced the step, a thread sums each bucket as soon as it is launched,
    while the worker continues its backward; otherwise `finish` does. Collectives over one executor share the
    `background`, so that everything is sent in launch order.

    `arrive`, if given, waits until every worker has arrived and returns the nanoseconds waited for each: it separates
    lateness from the exchange itself. `codec` names what the executor encodes with; a `chooser` changes it during the
    run. Owns the links.

    With `more` executors, each over links of its own, buckets take turns: while what has come of one is added, another
    is on the cable.
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
        more: Sequence[ScheduleExecutor] = (),
    ) -> None:
        self.rank, self.world, self.codec = executor.rank, executor.world, codec
        self.executor, self._links = executor, links
        self._chooser, self._arrive = chooser, arrive
        self._parcels: Sequence[Parcel] = ()
        self._buckets: list[torch.Tensor] = []
        self._launched: list[int] = []
        self._waits: dict[int, int] = {}
        self._executors = (executor, *more)
        first = background or Background("manyhands sums of buckets")
        self._backgrounds = (first, *(Background("manyhands sums of buckets") for _ in more))
        self._begun = self._leaves_early = False
        self._last_given = [0] * len(self._executors)
        self.mailboxes = [one.mailbox for one in self._executors]  # that count what is sent

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
        return self.executor.encodes(parcel) or (self._chooser is not None and not parcel.exact)

    def sum_rows(self, mine: GradientRows, below: int) -> GradientRows:
        return self.executor.sum_rows(mine, below)

    def of_words(self) -> ScheduleCollective:
        """Return another collective over the same links, for small exact values."""
        return ScheduleCollective(self.executor, self._links, background=self._backgrounds[0])

    def memory(self) -> dict[str, torch.Tensor]:
        return (self._chooser or self.executor).memory()

    def remember(self, memory: Mapping[str, torch.Tensor]) -> None:
        (self._chooser or self.executor).remember(memory)

    def begin(self, step: int) -> None:
        """Begin a step; buckets may be sent from here on, unless codecs are measured on all of them first."""
        super().begin(step)
        self._begun = True
        self.executor.at(step)
        looks = self._chooser is not None and self._chooser.is_due(step)
        # Data on a network needs no core of this host, so a thread may sum while the worker computes.
        overlaps = any(link.wire in (Wire.TCP, Wire.TORCH) for link in self._links.values())
        self._leaves_early = overlaps and not looks

    def launch(self, index: int) -> None:
        if self._leaves_early:
            turn = index % len(self._executors)
            self._last_given[turn] = self._backgrounds[turn].give(partial(self._sum, [index]))
        else:
            self._launched.append(index)

    def finish(self) -> None:
        self._begun = False
        if self._arrive is not None:
            for peer, waited in self._arrive().items():
                self._waits[peer] = self._waits.get(peer, 0) + waited
        if self._leaves_early:
            self._leaves_early = False
            for background, number in zip(self._backgrounds, self._last_given, strict=True):
                background.wait(number)
            return
        launched, self._launched = self._launched, []
        if self._chooser is not None:
            self._chooser.look(
                self.step, [(self._parcels[index], self._buckets[index]) for index in launched]
            )
        self.executor.at(self.step)
        self._sum(launched)

    def _sum(self, launched: Sequence[int]) -> None:
        for index in launched:
            executor = self._executors[index % len(self._executors)]
            executor.all_reduce(self._buckets[index], parcel=self._parcels[index])

    def broadcast(self, index: int, root: int = 0) -> None:
        self.executor.broadcast(self._buckets[index], root)

    def take_times(self) -> Times:
        waits, self._waits = self._waits, {}
        posts: dict[int, PeerTraffic] = {}
        if not self._begun and all(
            one.is_idle for one in self._backgrounds
        ):  # a step's traffic is reported together
            for peer, post in (pair for one in self.mailboxes for pair in one.take_traffic().items()):
                posts.setdefault(peer, PeerTraffic()).add(post)
        return Times(wait_ns=waits, posts=posts)

    def traffic(self) -> Traffic:
        return sum((one.traffic() for one in self.mailboxes), Traffic())

    def close(self) -> None:
        for background, executor in zip(self._backgrounds, self._executors, strict=True):
            background.close(partial(close_links, executor.mailbox.links))


def close_links(links: Mapping[int, Link]) -> None:
    for link in links.values():
        link.close()


def carrier(
    codec: str, *, feedback: bool, seed: int, rank: int, world: int
) -> ParcelCodec | Compressor | None:
    """Return what encodes for an executor: at every hop, or as a `Compressor`; None if nothing does yet."""
    if auto_error(codec) is not None:
        return None
    if rounds_hops(codec):
        return codec_named(codec)
    return Compressor(codec, feedback=feedback, seed=seed, rank=rank, world=world)


def barrier_in(group: SharedGroup) -> Callable[[], Mapping[int, int]]:
    """Return a barrier of the group that reports how long each later worker was waited for, in nanoseconds."""

    def arrive() -> Mapping[int, int]:
        group.barrier()
        return {peer: waited for peer, waited in enumerate(group.take_stats().waiting_ns) if waited}

    return arrive


def over_links(
    algorithm: Algorithm,
    resources: Resources,
    codec: str = RAW,
    *,
    feedback: bool = True,
    arrive: Callable[[], Mapping[int, int]] | None = None,
) -> ScheduleCollective:
    """Return a worker's end over links, on one host or several, that waits for late workers by `arrive`, if at all."""
    links, rank, world = resources.links(), resources.rank, resources.world
    make = partial(carrier, feedback=feedback, seed=resources.seed, rank=rank, world=world)
    executor = ScheduleExecutor(
        algorithm, rank, world, links, resources.timeout_s, resources.alarm, make(codec)
    )
    auto = auto_error(codec) is not None
    chooser = CodecChooser(codec, executor, partial(make, feedback=True)) if auto else None
    more = [
        ScheduleExecutor(algorithm, rank, world, others, resources.timeout_s, resources.alarm)
        for others in resources.more_links
    ]
    return ScheduleCollective(executor, links, arrive, codec, chooser, more=more)
