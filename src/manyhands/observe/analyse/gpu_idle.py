"""What keeps a GPU waiting, by the trace of a few steps that one worker took with `torch.profiler`.

From the first activity of the GPU to its last, a moment in which it computes nothing is put down to

    exchange   a kernel of NCCL runs, or the host exchanges with other workers
    copies     the GPU copies
    input      the host gets samples, and has not launched the next kernel yet
    launches   the host does something else, and has not: it is slower than the GPU
    queue      the next kernel has been launched: the GPU takes its time between two, or waits for another stream
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from manyhands.observe.record.checked_values import number, text
from manyhands.observe.record.torch_traces import EXCHANGE, INPUT

_COMPUTES, _COPIES = ("kernel",), ("gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ADVICE: Final = {
    "exchange": "hide the exchange behind more computing: larger batches or a codec",
    "copies": "copy less, or beside the computing",
    "input": "samples come too late: give the task loaders, or prepare the data before",
    "launches": "the host launches kernels more slowly than they are computed: compile, or take larger micro-batches",
    "queue": "kernels are short or wait for each other: take larger micro-batches",
}
_LITTLE = 0.02  # of the time: nothing is to be done about it

Span = tuple[float, float]  # from, to, in microseconds


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuTime:
    """Where the time of one GPU goes in a trace."""

    span_us: float
    """From its first activity to its last."""
    waits: Mapping[str, float]
    """By cause, the share of the span in which it computes nothing."""

    @property
    def idle(self) -> float:
        return sum(self.waits.values())


def gpu_time(events: Iterable[Mapping[str, Any]]) -> GpuTime | None:
    """By the `traceEvents` of a trace; None where no GPU computes in it."""
    kernels, sends, copies = list[tuple[Span, Any]](), list[Span](), list[Span]()
    host: dict[str, list[Span]] = {INPUT: [], EXCHANGE: []}
    launched: dict[Any, float] = {}
    for event in events:
        begin, length = number(event.get("ts")), number(event.get("dur"))
        if begin is None or length is None or length < 0:
            continue
        kind, name = text(event.get("cat")), text(event.get("name"))
        about = event.get("args")
        correlation = number(about.get("correlation")) if isinstance(about, Mapping) else None
        span = begin, begin + length
        if kind in _COMPUTES and "nccl" in name.lower():
            sends.append(span)
        elif kind in _COMPUTES:
            kernels.append((span, correlation))
        elif kind in _COPIES:
            copies.append(span)
        elif kind in _LAUNCHES and correlation is not None:
            launched[correlation] = begin
        elif kind == "user_annotation" and name in host:
            host[name].append(span)
    if not any(end > begin for (begin, end), _ in kernels):
        return None
    return _time_of(sorted(kernels, key=lambda one: one[0]), launched, _Causes.of(sends, copies, host))


def gpu_words(worker: int, found: GpuTime) -> str:
    """A sentence or two about the GPU of one worker."""
    waits = sorted(((share, cause) for cause, share in found.waits.items() if share >= 0.0005), reverse=True)
    sentence = (
        f"The GPU of worker {worker} waits {found.idle:.1%} of {found.span_us / 1e3:.1f} ms in the trace"
    )
    if not waits:
        return f"{sentence}."
    causes = ", ".join(f"{cause} {share:.1%}" for share, cause in waits)
    if found.idle < _LITTLE:
        return f"{sentence}: {causes}."
    return f"{sentence}: {causes}; {_ADVICE[waits[0][1]]}."


@dataclass(frozen=True, slots=True)
class _Causes:
    """Spans in which something runs that is not the model's computing, each kind in order and apart."""

    sends: Sequence[Span]
    copies: Sequence[Span]
    input: Sequence[Span]
    exchange: Sequence[Span]

    @classmethod
    def of(cls, sends: list[Span], copies: list[Span], host: Mapping[str, list[Span]]) -> _Causes:
        return cls(_merged(sends), _merged(copies), _merged(host[INPUT]), _merged(host[EXCHANGE]))

    def of_gap(self, begin: float, end: float, launched: float) -> dict[str, float]:
        """Microseconds by cause, of a gap before a kernel that the host launched at `launched`."""
        found, gap = dict.fromkeys(_ADVICE, 0.0), [(begin, end)]
        late = min(max(begin, launched), end)  # until then the host is what the GPU waits for
        for cause, spans, until in (
            ("exchange", self.sends, end),
            ("exchange", self.exchange, late),
            ("copies", self.copies, end),
            ("input", self.input, late),
        ):
            taken, gap = _split(gap, spans, until)
            found[cause] += taken
        found["launches"] = sum(max(0.0, min(to, late) - start) for start, to in gap)
        found["queue"] = sum(max(0.0, to - max(start, late)) for start, to in gap)
        return found


def _time_of(kernels: Sequence[tuple[Span, Any]], launched: Mapping[Any, float], causes: _Causes) -> GpuTime:
    every = [*(span for span, _ in kernels), *causes.sends, *causes.copies]
    first, last = min(begin for begin, _ in every), max(end for _, end in every)
    waits, reached = dict.fromkeys(_ADVICE, 0.0), first
    for (begin, end), correlation in kernels:
        if begin > reached:
            for cause, spent in causes.of_gap(reached, begin, launched.get(correlation, begin)).items():
                waits[cause] += spent
        reached = max(reached, end)
    for cause, spent in causes.of_gap(reached, last, last).items():
        waits[cause] += spent
    span = last - first
    return GpuTime(span_us=span, waits={cause: spent / span for cause, spent in waits.items()})


def _merged(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _split(gap: Sequence[Span], spans: Sequence[Span], until: float) -> tuple[float, list[Span]]:
    """How much of `gap` before `until` is in `spans`, and what is left of it."""
    taken, left = 0.0, list[Span]()
    for begin, end in gap:
        at = max(0, bisect_right(spans, (begin, float("inf"))) - 1)
        while at < len(spans) and spans[at][0] < min(end, until):
            start, to = max(begin, spans[at][0]), min(end, until, spans[at][1])
            if to > start:
                taken += to - start
                if start > begin:
                    left.append((begin, start))
                begin = to
            at += 1
        if end > begin:
            left.append((begin, end))
    return taken, left
