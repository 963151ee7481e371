"""Parcel codecs: a codec is a class with three methods, and a setting of a strategy.

Where parcels are sent, `codec=bf16` rounds them to half the bytes. The sender replaces its values by what the
receivers decode, so that all continue with the same numbers; sums are taken in the parcel's type. A codec whose sums
are rounded at every hop must be idempotent: encoding what it has decoded gives the same bytes, so that forwarded
values are the same everywhere. The others are encoded by the worker that computed the values, and decoded by the
worker that adds them up.

Bytes from a socket are never trusted: bytes that the same codec cannot have made raise BadBytes.

The state of a codec, in a checkpoint: bytes of the names (u64) · names, types and counts as JSON, filled up to 8 · the
tensors, one after the other.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.data.randomness import mix
from manyhands.errors import ManyhandsError, UserError
from manyhands.native.dtypes import NAMED
from manyhands.wire.names import CODECS, has_feedback, momentum_of, parse_codec
from manyhands.wire.parcels import Parcel

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
_WORD: Final = 8
_DRAWN: Final = 0xC0DEC  # or seed and step would only count by their sum


class BadBytes(ManyhandsError):
    """Bytes that no encoder has made; the message says what is wrong with them."""


class ParcelCodec(ABC):
    """One worker's codec; any state that it keeps per parcel is local.

    Random draws depend on the seed, the step, the worker and the parcel, and on nothing else.
    """

    carries_values: bool = True
    """Whether parameters may travel in it, and not only gradients and other changes, parts of which may come later."""
    sums_vote: bool = False
    """Whether `finalize` changes sums, so that whoever adds up must have every worker's."""
    seed: int = 0
    worker: int = 0
    step: int = 0
    inner: ParcelCodec | None = None  # the codec that it gives its own values to, if any

    @abstractmethod
    def size(self, parcel: Parcel) -> int:
        """The most bytes that `parcel` takes encoded, whatever its values; receivers reserve that much."""

    def usual_size(self, parcel: Parcel) -> int:
        """The typical size, by which the form of an exchange is chosen: `size`, except during a warm-up."""
        return self.size(parcel)

    @abstractmethod
    def encode(self, parcel: Parcel, values: Tensor, into: Tensor) -> int:
        """Write the encoded `values`, flat and of the parcel's type, to the first bytes of `into`; how many those are.

        `into` is of bytes, begins at a multiple of 64 and has room for `size`.
        """

    @abstractmethod
    def decode(self, parcel: Parcel, encoded: Tensor, into: Tensor) -> None:
        """Write to `into`, flat and of the parcel's type, what the bytes of `encoded` stand for, or raise BadBytes."""

    def add(self, parcel: Parcel, encoded: Tensor, into: Tensor, alpha: float = 1.0) -> None:
        """Add what the bytes stand for, times `alpha`, to `into`."""
        read = torch.empty_like(into)
        self.decode(parcel, encoded, read)
        into.add_(read, alpha=alpha)

    def finalize(self, parcel: Parcel, total: Tensor) -> None:  # noqa: B027 - sums are what they are, but for votes
        """Finalize the sum of all workers' parts, in place."""

    def at(self, step: int) -> None:
        self.step = step
        if self.inner is not None:
            self.inner.at(step)

    def from_worker(self, seed: int, worker: int) -> None:
        self.seed, self.worker = seed, worker
        if self.inner is not None:
            self.inner.from_worker(seed, worker)

    def drawn(self, parcel: Parcel) -> int:
        return mix(_DRAWN, self.seed, self.step, self.worker, parcel.number, parcel.begin)

    def memory(self) -> dict[str, Tensor]:
        """The state from one step to the next, by name: for checkpoints, never written to."""
        return {}

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        """Load the state that another codec of the same kind gave as `memory`."""
        if memory:
            raise ValueError(f"{type(self).__name__} has no state, but got {', '.join(memory)}")


class ErrorFeedback(ParcelCodec):
    """Wraps any codec: what that leaves out is kept, in the parcel's type, and added to what is sent next.

    All that was ever sent, and what is still kept, add up to all that was ever given: Σ sent + memory = Σ given (Seide
    et al., Interspeech 2014). So what is left out is late and not lost, and a biased codec converges like none
    (Karimireddy et al., ICML 2019). Values that are not finite are sent and not kept.
    """

    inner: ParcelCodec

    def __init__(self, codec: ParcelCodec) -> None:
        self.inner, self.carries_values, self.sums_vote = codec, codec.carries_values, codec.sums_vote
        self._kept: dict[str, Tensor] = {}

    def size(self, parcel: Parcel) -> int:
        return self.inner.size(parcel)

    def usual_size(self, parcel: Parcel) -> int:
        return self.inner.usual_size(parcel)

    def encode(self, parcel: Parcel, values: Tensor, into: Tensor) -> int:
        residual = self.with_residual(parcel, values)
        num_bytes = self.inner.encode(parcel, residual, into)
        self.inner.add(parcel, into[:num_bytes], residual, -1.0)
        self.keep(residual)
        return num_bytes

    def decode(self, parcel: Parcel, encoded: Tensor, into: Tensor) -> None:
        self.inner.decode(parcel, encoded, into)

    def add(self, parcel: Parcel, encoded: Tensor, into: Tensor, alpha: float = 1.0) -> None:
        self.inner.add(parcel, encoded, into, alpha)

    def finalize(self, parcel: Parcel, total: Tensor) -> None:
        self.inner.finalize(parcel, total)

    def with_residual(self, parcel: Parcel, values: Tensor) -> Tensor:
        """Add `values` to the parcel's residual, in place, and return it; the caller subtracts what it sends."""
        if parcel.key not in self._kept:
            self._kept[parcel.key] = torch.zeros_like(values)
        return self._kept[parcel.key].add_(values)

    def keep(self, residual: Tensor) -> None:
        """Clear what is not finite from a residual, or it would stay there forever."""
        if not residual.sum().isfinite():
            residual.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

    def memory(self) -> dict[str, Tensor]:
        return {f"left/{key}": kept for key, kept in self._kept.items()} | self.inner.memory()

    def remember(self, memory: Mapping[str, Tensor]) -> None:
        mine = {name: kept for name, kept in memory.items() if name.startswith("left/")}
        self._kept = {name.removeprefix("left/"): kept.clone() for name, kept in mine.items()}
        self.inner.remember({name: kept for name, kept in memory.items() if name not in mine})


def codec_named(
    text: str, *, feedback: bool = True, seed: int = 0, worker: int = 0, sums: bool = False
) -> ParcelCodec | None:
    """A new codec of that setting, for one worker; None for parcels that are sent uncompressed.

    With `feedback`, the residual of a biased codec is kept. `sums` asks for the variant for sums, whose values
    include momentum already, where a codec has one.
    """
    stages = parse_codec(text)
    if not stages:
        return None
    (word, options), *rest = ((stage.word, dict(stage.options)) for stage in stages)
    location, remembers = CODECS[word].location, CODECS[word].remembers
    if sums and word == "dgc":
        location, remembers = "sparse:DgcSums", False
        options = {name: options[name] for name in ("fraction", "warmup")}
    for inner, inner_options in rest:
        options["values"] = _make(CODECS[inner].location, inner_options)
    codec = _make(location, options)
    if feedback and has_feedback(text) and not remembers:
        codec = ErrorFeedback(codec)
    codec.from_worker(seed, worker)
    return codec


def _make(location: str, options: Mapping[str, Any]) -> ParcelCodec:
    module, _, name = location.partition(":")
    made: ParcelCodec = getattr(import_module(f"manyhands.wire.codecs.{module}"), name)(**options)
    return made


def encodes(codec: ParcelCodec | None, parcel: Parcel) -> bool:
    """Whether a parcel is sent encoded: if it need not be exact, and is smaller then."""
    return codec is not None and not parcel.exact and codec.size(parcel) < parcel.num_bytes


def round_trip(codec: ParcelCodec, parcel: Parcel, values: Tensor, room: Tensor) -> Tensor:
    """Encode `values` into `room`, and replace them by what receivers will decode; the bytes to send."""
    encoded = room[: codec.encode(parcel, values, room)]
    codec.decode(parcel, encoded, values)
    return encoded


def check_optimizer(text: str, optimizer: Optimizer) -> None:
    """Raise UserError where a codec keeps momentum and the optimizer has some as well: it would count twice."""
    own = max((float(group.get("momentum", 0.0) or 0.0) for group in optimizer.param_groups), default=0.0)
    if momentum_of(text) and own:
        raise UserError(
            f"codec={text} keeps the momentum of {momentum_of(text):g} itself, but {type(optimizer).__name__} has "
            f"{own:g} as well; build it with momentum=0, or write momentum=0 after the fraction"
        )


def key_of(drawn: int) -> tuple[np.uint32, np.uint32]:
    return np.uint32(drawn & 0xFFFFFFFF), np.uint32(drawn >> 32)


def expect_bytes(encoded: Tensor, num_bytes: int) -> None:
    if encoded.numel() != num_bytes:
        raise BadBytes(f"received {encoded.numel()} bytes; expected {num_bytes}")


def as_one(memory: Mapping[str, Tensor]) -> Tensor:
    rows = [[name, str(one.dtype).removeprefix("torch."), one.numel()] for name, one in memory.items()]
    head = json.dumps(rows).encode()
    head += b" " * (-len(head) % _WORD)
    names = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    parts = [torch.tensor([len(head)]).view(torch.uint8), names]
    for one in memory.values():
        flat = one.contiguous().view(torch.uint8)
        parts += [flat, torch.zeros(-flat.numel() % _WORD, dtype=torch.uint8)]
    return torch.cat(parts)


def as_memory(given: Tensor) -> dict[str, Tensor]:
    """The tensors from the bytes of `as_one`; BadBytes for malformed ones."""
    try:
        end = _WORD + int(given[:_WORD].view(torch.int64).item())
        memory: dict[str, Tensor] = {}
        for name, dtype, count in json.loads(given[_WORD:end].numpy().tobytes()):
            num_bytes = NAMED[dtype].itemsize * count
            memory[name] = given[end : end + num_bytes].clone().view(NAMED[dtype])
            if len(memory[name]) != count:
                raise ValueError(f"{name} is cut short")
            end += num_bytes + -num_bytes % _WORD
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise BadBytes(f"cannot read the state of a codec: {error}") from error
    return memory
