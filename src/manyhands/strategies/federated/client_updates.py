"""What clients send in a round, and what becomes of it: one client's update, and the tally that collects them.

client ──ClientUpdate──► RoundTally.add, each with its weight; total() ──► TallySum ──► the algorithm: `mean`, `step`
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final, Protocol, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.errors import NonFinite, UserError

Tensors: TypeAlias = Sequence[Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientAssignment:
    """The work assigned to a client in a round."""

    client: int
    weights: Tensors  # the model that it begins with
    number: int  # the round in which the client was given the work, from 0; its random numbers follow from it
    staleness: int = 0  # how many rounds ago that was, when its update is counted
    samples: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """Indices of the client's samples, once an algorithm has said who takes part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundPlace:
    """The round that a worker is in: its number, the clients asked, and this worker's rank."""

    number: int  # number of the round, from 0
    clients: Sequence[int]  # the clients that were asked
    rank: int  # rank of this worker
    total: Callable[[Tensor], Tensor]  # collective: the sum over the workers


@dataclass(frozen=True, kw_only=True, slots=True)
class ClientUpdate:
    """What a client sends: how far each tensor has come, what it weighs, and how many steps it took."""

    client: int
    change: Tensors
    """In the order of the model's parameters, then its floating-point buffers, then what the algorithm adds."""
    samples: int
    steps: int
    loss: float  # the mean over its steps
    staleness: int = 0  # how many rounds old the model was that it began with
    encoded_bytes: int | None = None  # what a codec made of it; None: it travels as it is

    @property
    def num_bytes(self) -> int:
        if self.encoded_bytes is not None:
            return self.encoded_bytes
        return sum(change.numel() * change.element_size() for change in self.change)

    @property
    def norm(self) -> float:
        """Euclidean, over all tensors together, in double precision."""
        norms = [torch.linalg.vector_norm(one, dtype=torch.float64) for one in self.change]
        return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0

    @property
    def is_finite(self) -> bool:
        """Extremes are not finite where any item is not: one pass, without a tensor of results."""
        extremes = (torch.stack(one.aminmax()).tolist() for one in self.change if one.numel())
        return math.isfinite(self.loss) and all(map(math.isfinite, chain.from_iterable(extremes)))


@dataclass(kw_only=True, slots=True)
class TallySum:
    """What a round's updates come to; the result of a tally is the same on every worker, but for what was sent."""

    sums: Tensors  # of weight times update, a tensor for each of an update's, in double precision
    weight: float = 0.0  # sum of the weights; 0: no client's update was counted
    loss: float = 0.0  # the sum of weight times mean loss
    messages_sent: int = 0  # by the clients that this worker simulated
    bytes_sent: int = 0
    updates: Sequence[Tensors] = ()
    """Each by itself, in the order of the round's clients, for an algorithm with `single_updates`; else none."""
    missing: int = 0  # of the clients that `updates` would list, how many sent none that counts


class RoundTally(Protocol):
    """Collects the updates of one round, of the clients that this worker simulated."""

    def add(self, update: ClientUpdate, weight: float) -> None: ...

    def total(self, largest: int | None = None) -> TallySum:
        """Collective, once: of updates up to this `norm_class`, if given; NonFinite where the round is abandoned."""


def shaped(flat: Tensor, like: Tensors) -> list[Tensor]:
    pieces = torch.split(flat, [one.numel() for one in like])
    return [piece.view(one.shape).to(one.device) for piece, one in zip(pieces, like, strict=True)]


# An update that is far larger than the others of its round is left out. Updates are summed in double precision, grouped
# by the power of two of their norm. Once the median of a round's norms is known, whole groups can be left out without
# keeping single updates. Norms of honest clients lie within a few powers of two, so there are only a few sums.

FEWEST_NORMS: Final = 3  # fewest norms for a check: with two clients it is not clear which one is wrong
_ZERO_CLASS: Final = -2000  # below that of every number
_SHOWN: Final = 5


def check_norm_ratio(ratio: float) -> None:
    """UserError where about half of all updates would be rejected, or the number is not one."""
    if ratio and not 1 <= ratio < math.inf:
        raise UserError(f"norm_ratio={ratio:g}: must be a number of at least 1, or 0 for updates of any norm")


def norm_class(norm: float) -> int:
    """The exponent of the power of two above a norm: 2 ** (class - 1) ≤ norm < 2 ** class."""
    return math.frexp(norm)[1] if norm else _ZERO_CLASS


def largest_class(norms: Collection[float], ratio: float) -> int | None:
    """The largest class that counts; None where all do: too few norms to judge, most of them 0, or a ratio of 0."""
    if not ratio or len(norms) < FEWEST_NORMS:
        return None
    bound = ratio * statistics.median(norms)
    return norm_class(bound) if 0 < bound < math.inf else None


def rejected_by_norm(norms: Mapping[int, float], ratio: float) -> tuple[int, ...]:
    largest = largest_class(norms.values(), ratio)
    rejected = (
        client for client, norm in norms.items() if largest is not None and norm_class(norm) > largest
    )
    return tuple(sorted(rejected))


def described_norms(norms: Mapping[int, float]) -> str:
    """Who sent what, the largest first: `client 2 (norm 1.8e+19), client 0 (norm 0.52) and 3 with at most 0.5`."""
    ranked = sorted(norms.items(), key=lambda one: (-one[1], one[0]))
    shown = ", ".join(f"client {client} (norm {norm:.2g})" for client, norm in ranked[:_SHOWN])
    rest = ranked[_SHOWN:]
    return shown if not rest else f"{shown} and {len(rest)} with at most {rest[0][1]:.2g}"


def described_clients(clients: Sequence[int]) -> str:
    rest = len(clients) - _SHOWN
    shown = ", ".join(f"client {client}" for client in clients[:_SHOWN])
    return shown if rest <= 0 else f"{shown} and {rest} more"


def require_finite(measured: Mapping[str, float], number: int, came: str, *, weights: bool = True) -> None:
    """NonFinite where round `number` has spoiled the model, by its loss or its `weights`; `came`: whose updates."""
    loss = measured.get("evaluation_loss", 0.0)
    if weights and math.isfinite(loss):
        return
    what = f"its evaluation_loss is {loss}" if weights else "one of its weights is not finite"
    raise NonFinite(
        f"round {number} broke the model: {what}; it used the updates of {came}; leave out a "
        "client whose norm stands out, or use a smaller learning rate"
    )


class ClassSums:
    """The partial sums of a round's updates so far, by norm class."""

    def __init__(self, like: Tensors, *, by_norm: bool) -> None:
        """Of tensors like these; not `by_norm`: all in one sum."""
        self._like, self._by_norm = like, by_norm
        self._classes: dict[int, TallySum] = {}

    def add(self, update: ClientUpdate, weight: float) -> None:
        which = norm_class(update.norm) if self._by_norm else 0
        if which not in self._classes:
            self._classes[which] = self._empty()
        part = self._classes[which]
        for total, change in zip(part.sums, update.change, strict=True):
            total.add_(change, alpha=weight)
        part.weight += weight
        part.loss += weight * update.loss

    def total(self, largest: int | None = None) -> TallySum:
        """Up to the class `largest`, if given; it may be the stored sum, not a copy."""
        parts = [part for which, part in sorted(self._classes.items()) if largest is None or which <= largest]
        if len(parts) == 1:
            return parts[0]
        found = self._empty()
        for part in parts:
            for total, one in zip(found.sums, part.sums, strict=True):
                total.add_(one)
            found.weight += part.weight
            found.loss += part.loss
        return found

    def _empty(self) -> TallySum:
        return TallySum(sums=[torch.zeros_like(one, dtype=torch.float64) for one in self._like])


class RoundNorms:
    """One worker's view of the norms of a round; with a ratio of 0 norms are not checked."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self._mine: dict[int, float] = {}
        self._all: dict[int, float] = {}
        self.rejected: dict[int, float] = {}  # whose updates of this round do not count, and their norms
        self.total_rejected = 0  # rejected updates of clients that this worker simulated, over all rounds

    def begin_round(self) -> None:
        self._mine, self._all, self.rejected = {}, {}, {}

    def add(self, update: ClientUpdate) -> None:
        if self._ratio:
            self._mine[update.client] = update.norm

    def judge(self, clients: Sequence[int], total: Callable[[Tensor], Tensor]) -> int | None:
        """Collective: which updates of these clients are rejected; returns the largest class that counts, if any."""
        if not self._ratio:
            return None
        place = {client: at for at, client in enumerate(clients)}
        rows = torch.zeros(2, len(place), dtype=torch.float64)  # whether an update came, and its norm
        for client, norm in self._mine.items():
            rows[:, place[client]] = torch.tensor([1.0, norm], dtype=torch.float64)
        came, norms = total(rows.flatten()).view(2, -1).tolist()
        self._all = {client: norms[at] for client, at in place.items() if came[at]}
        self.rejected = {client: self._all[client] for client in rejected_by_norm(self._all, self._ratio)}
        self.total_rejected += len(self.rejected_here)
        return largest_class(self._all.values(), self._ratio)

    @property
    def rejected_here(self) -> list[int]:
        return [client for client in self.rejected if client in self._mine]

    def describe(self, clients: Sequence[int]) -> str:
        if not self._ratio:
            return f"{described_clients(clients) or 'its clients'}, whose norms were not measured"
        return described_norms({one: norm for one, norm in self._all.items() if one not in self.rejected})
