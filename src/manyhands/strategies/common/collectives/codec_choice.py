"""`codec=auto`: workers measure at the same steps, share the worst measurement, and all switch alike.

What is measured belongs to the run: a sample of what is summed, encoded and decoded by every candidate codec, and the
time to sum the sample unencoded. `wire.choice` decides.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from manyhands.native.segment import CACHE_LINE, round_up
from manyhands.strategies.common.collectives.compressed import Compressor
from manyhands.strategies.common.collectives.executor import ScheduleExecutor
from manyhands.wire.choice import (
    CHOSEN,
    CodecChoice,
    CodecCost,
    LinkCost,
    candidates,
    decide,
    looks_at,
    sent_bytes,
)
from manyhands.wire.codec import ParcelCodec, codec_named, encodes
from manyhands.wire.names import RAW, auto_error
from manyhands.wire.parcels import Parcel

__all__ = ["CodecChooser"]

_SAMPLE_BYTES: Final = 1 << 20
_TIMES: Final = 3  # of which the fastest counts
_FEW: Final = 8  # items of what is sent to see what a message takes
_IN_USE: Final = "in use:"

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
        self.codec = RAW
        """The codec in use."""
        self.decisions: list[CodecChoice] = []

    def is_due(self, step: int) -> bool:
        return looks_at(step, self.decisions[-1].step if self.decisions else -1)

    def look(self, step: int, filled: Filled) -> None:
        """Collective, before the exchange of a step: measure and choose, if due."""
        free = [(parcel, part) for parcel, part in filled if not parcel.exact and parcel.count]
        if not free or not self.is_due(step):
            return
        parcel, part = max(free, key=lambda one: one[0].num_bytes)
        count = min(parcel.count, _SAMPLE_BYTES // parcel.dtype.itemsize)
        sample, values = parcel.part(0, count), part[:count]
        names = candidates(self._error, double=parcel.dtype == torch.float64)
        if not names:
            why = (
                f"{RAW}: nothing smaller has all of what is sent; codec=auto:0.01 would allow an error of 1 %"
            )
            self._take(CodecChoice(codec=RAW, step=step, why=why), filled)
            return
        measured = [  # seconds to sum the sample unencoded, to sum next to nothing, and what each codec costs
            self._fastest(values.clone()),
            self._fastest(torch.zeros(_FEW, dtype=values.dtype)),
            *(x for name in names for x in self._cost(name, sample, values)),
        ]
        worst = torch.tensor(measured, dtype=torch.float64)
        self._executor.all_reduce(worst, "max")
        large_s, small_s, *of_codecs = worst.tolist()
        world = self._executor.world
        large_bytes = sent_bytes(sample.num_bytes, 1.0, world, gathered=False)
        costs = [
            CodecCost(codec=name, encode_s=encode_s, decode_s=decode_s, share=share, error=error)
            for name, encode_s, decode_s, share, error in zip(
                names, of_codecs[::4], of_codecs[1::4], of_codecs[2::4], of_codecs[3::4], strict=True
            )
        ]
        decision = decide(
            costs,
            LinkCost.of(small_s=small_s, large_s=large_s, large_bytes=large_bytes),
            sample_bytes=sample.num_bytes,
            num_bytes=sum(one.num_bytes for one, _ in free),
            world=world,
            error=self._error,
            now=self.codec,
            step=step,
        )
        self._take(decision, filled)

    def summary(self) -> dict[str, Any]:
        return {CHOSEN: [{"step": one.step, "codec": one.codec, "why": one.why} for one in self.decisions]}

    def memory(self) -> dict[str, torch.Tensor]:
        since = torch.tensor([self.decisions[-1].step if self.decisions else 0])
        return {f"{_IN_USE}{self.codec}": since, **self._executor.memory()}

    def remember(self, memory: Mapping[str, torch.Tensor]) -> None:
        kept = dict(memory)
        for name, since in memory.items():
            if name.startswith(_IN_USE):
                del kept[name]
                self._use(name.removeprefix(_IN_USE))
                why = f"{self.codec}: as before the run was resumed"
                self.decisions = [CodecChoice(codec=self.codec, step=int(since), why=why)]
        self._executor.remember(kept)

    def _take(self, decision: CodecChoice, filled: Filled) -> None:
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
