"""`codec=auto`: which codec sums over workers should travel in, from what was measured: a decision, and why.

A codec pays where the time that it saves on the wire is more than the time it takes to encode and decode:

    (raw bytes - its bytes) · seconds per byte  >  encode + decode

All workers decide by the same numbers, the worst that any of them measured, so all choose the same. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

from manyhands.errors import num_of
from manyhands.wire.names import RAW, rounds_hops

CHOSEN: Final = "codec_choices"  # the key of the choices in a summary: a list of `step`, `codec` and `why`
LOSSY: Final = ("fp16", "bf16", "int8", "fp8", "qsgd:127", "sign", "topk:0.01")
"""What may be chosen where an error is allowed."""
_PAYS = 0.95  # of the time without it: what is nearer makes no difference
_SWITCH = 0.9  # of the time by the codec in use: or noise would change it back and forth
_FIRST, _EVERY = 3, 200  # the first steps load and compile what later ones have


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecCost:
    """What one codec does to a sample of the gradient: the worst of all workers."""

    codec: str
    encode_s: float
    decode_s: float
    share: float  # of the bytes, what is left
    error: float  # how far what is decoded lies from what was encoded, as a share of its norm


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkCost:
    """The time of an all-reduce as a function of the bytes that each worker sends."""

    latency_s: float
    seconds_per_byte: float

    @classmethod
    def of(cls, *, small_s: float, large_s: float, large_bytes: float) -> LinkCost:
        """From the time of an almost empty all-reduce, and that of a sample."""
        return cls(latency_s=small_s, seconds_per_byte=max(0.0, large_s - small_s) / large_bytes)

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + self.seconds_per_byte * num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class CodecChoice:
    """The codec that gradients take from a step on."""

    codec: str
    step: int  # since when
    why: str


def looks_at(step: int, last: int) -> bool:
    """Whether workers measure before the exchange that ends this step, counted from 0; `last` ended with such a look.

    -1 for none. Not every step needs to end with an exchange: it is the first one that is due.
    """
    return step >= _FIRST if last < _FIRST else step // _EVERY > last // _EVERY


def candidates(error: float, *, double: bool) -> tuple[str, ...]:
    return (*(("fp32",) if double else ()), *(LOSSY if error > 0 else ()))


def sent_bytes(num_bytes: float, share: float, world: int, *, gathered: bool) -> float:
    """What each of `world` workers sends for an all-reduce of so many bytes: gathered, or in two phases."""
    return ((world - 1) if gathered else 2 * (world - 1) / world) * num_bytes * share


def decide(
    costs: Sequence[CodecCost],
    link: LinkCost,
    *,
    sample_bytes: int,
    num_bytes: int,
    world: int,
    error: float,
    now: str = RAW,
    step: int = 0,
) -> CodecChoice:
    """The codec in which an exchange of `num_bytes` is over first, of those whose error is allowed.

    `costs` are of `sample_bytes` of it, `now` is the codec in use, which only one that is clearly better replaces.
    """
    raw_s = link.seconds(sent_bytes(num_bytes, 1.0, world, gathered=False))
    wire: dict[str, float] = {RAW: raw_s}
    work: dict[str, float] = {RAW: 0.0}
    for cost in costs:
        # Double precision may always be sent as single; an error that is not finite is never allowed.
        if not cost.error <= (math.inf if cost.codec == "fp32" else error):
            continue
        gathered = not rounds_hops(cost.codec) and cost.share * world < 2
        wire[cost.codec] = link.seconds(sent_bytes(num_bytes, cost.share, world, gathered=gathered))
        passes = (1, world) if gathered else (1 + 1 / world, 2)  # of encoding and decoding all of it
        scale = num_bytes / sample_bytes
        work[cost.codec] = scale * (passes[0] * cost.encode_s + passes[1] * cost.decode_s)
    total = {codec: wire[codec] + work[codec] for codec in wire}
    best = min(total, key=total.__getitem__)
    if total[best] > _PAYS * raw_s:
        best = RAW
    if now in total and best != now and total[best] > _SWITCH * total[now]:
        best = now
    rate = 1 / link.seconds_per_byte if link.seconds_per_byte > 0 else 0.0
    shown_rate = f" at {rate / 1e6:,.3g} MB/s" if rate < 1e9 else f" at {rate / 1e9:.3g} GB/s"
    speed = shown_rate if rate else ""
    why = f"{best}: an exchange of {num_bytes / 1e6:.3g} MB takes {1e3 * raw_s:.3g} ms uncompressed{speed}"
    others = [codec for codec in wire if codec != RAW]
    shown = best if best != RAW else min(others, key=total.__getitem__, default=None)
    if shown is None:
        why += ", and no codec meets the allowed error"
    else:
        verb = "takes" if best != RAW else "would take"
        why += f"; in {shown} it {verb} {1e3 * wire[shown]:.3g} ms on the wire"
        why += f" and {1e3 * work[shown]:.3g} ms to encode and decode"
    return CodecChoice(codec=best, step=step, why=why)


def codec_sentence(choices: Sequence[Mapping[str, Any]] | None) -> str:
    """What to say of a run by `codec=auto`: the last choice with its reason, and how often it has changed.

    None: nobody measured, because nothing travels.
    """
    if choices is None:
        return f"codec=auto chose {RAW}: workers share memory and send nothing"
    if not choices:
        return f"codec=auto chose {RAW}: the run was too short to measure anything"
    changes = sum(one["codec"] != before["codec"] for before, one in pairwise(choices))
    last = choices[-1]
    often = (
        f", the last of {len(choices)} measurements, with {num_of(changes, 'change')}"
        if len(choices) > 1
        else ""
    )
    return f"codec=auto chose {last['why']} (at step {last['step'] + 1}{often})"
