"""What clients keep from round to round, for the algorithm or of the model, and how it gets into a checkpoint.

In simulation a client's state is on the worker that simulates it. A client that keeps state is therefore always
simulated by the same worker, number `client % workers`. The checkpoint has all clients' states, and a run that
resumes with another number of workers redistributes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from manyhands.errors import UserError
from manyhands.strategies.federated.client_updates import ClientUpdate, TallySum, Tensors
from manyhands.wire.codec import codec_named, encodes, round_trip
from manyhands.wire.names import RAW, has_feedback
from manyhands.wire.parcels import Parcel

ClientStates = dict[
    int, list[Tensor]
]  # tensors by client number; clients that have not taken part yet are absent


def gathered(
    states: ClientStates, clients: int, like: Tensors, total: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Collective: the states of all of so many clients, each of which at most one worker has, for a checkpoint."""
    there = torch.zeros(clients, dtype=torch.float64)
    there[list(states)] = 1
    there = total(there)
    found: dict[str, list[Any]] = {"clients": [], "states": []}
    for client in torch.nonzero(there).flatten().tolist():
        mine = states.get(client, [torch.zeros_like(one) for one in like])
        flat = total(torch.cat([one.detach().flatten().to("cpu", torch.float64) for one in mine]))
        pieces = zip(torch.split(flat, [one.numel() for one in like]), like, strict=True)
        found["clients"].append(client)
        found["states"].append([piece.view(one.shape).to(one.dtype) for piece, one in pieces])
    return found if found["clients"] else {}


def restored(kept: Mapping[str, Any], rank: int, world: int, device: torch.device) -> ClientStates:
    pairs = zip(kept.get("clients", ()), kept.get("states", ()), strict=True)
    return {
        client: [one.clone().to(device) for one in state] for client, state in pairs if client % world == rank
    }


EVERYTHING_SHARED = "none"  # the setting with which nothing stays


def local_names(names: Sequence[str], patterns: str) -> frozenset[int]:
    """Tensors that the patterns reach by their name or a module's; UserError where one reaches none, or all are."""
    found: set[int] = set()
    for pattern in patterns.split(",") if patterns != EVERYTHING_SHARED else ():
        reached = {
            at
            for at, parts in enumerate(name.split(".") for name in names)
            if any(fnmatchcase(".".join(parts[: depth + 1]), pattern) for depth in range(len(parts)))
        }
        if not reached:
            shown = ", ".join(names[:8]) + (", …" if len(names) > 8 else "")
            raise UserError(f"keep={patterns}: no part of the model is named {pattern!r}; there are {shown}")
        found |= reached
    if found and len(found) == len(names):
        why = f"keep={patterns}: this is the complete model, and nothing would be shared; name fewer layers"
        raise UserError(why)
    return frozenset(found)


class LocalLayers:
    """The layers that stay on the clients of a run; by default none."""

    def __init__(self, names: Sequence[str] = (), patterns: str = EVERYTHING_SHARED) -> None:
        self._local = local_names(names, patterns)
        self.states: ClientStates = {}

    def kept(self, weights: Tensors) -> Tensors:
        return [weights[at] for at in sorted(self._local)]

    def put(self, client: int, weights: Tensors) -> Tensors:
        if client not in self.states:
            return weights
        own = dict(zip(sorted(self._local), self.states[client], strict=True))
        return [own.get(at, one) for at, one in enumerate(weights)]

    def keep(self, client: int, trained: Tensors) -> None:
        """Its own from what it has trained; what it had before where a number is not finite."""
        own = self.kept(trained)
        if own and all(bool(one.isfinite().all()) for one in own):
            self.states[client] = [one.detach().clone() for one in own]

    def shared(self, tensors: Tensors) -> Tensors:
        return [one for at, one in enumerate(tensors) if at not in self._local] if self._local else tensors

    def whole(self, found: TallySum, like: Tensors) -> TallySum:
        if not self._local:
            return found
        updates = [self._filled(change, like) for change in found.updates]
        return replace(found, sums=self._filled(found.sums, like), updates=updates)

    def _filled(self, tensors: Tensors, like: Tensors) -> list[Tensor]:
        rest = iter(tensors)
        return [
            torch.zeros_like(one, dtype=torch.float64) if at in self._local else next(rest)
            for at, one in enumerate(like)
        ]


# Updates compressed on the way to the server, by the codecs of `wire/`. A client's update is one parcel of the model's
# tensors, and one of what the algorithm adds to them; single numbers are sent as they are. The residual of a biased
# codec stays on the client and is added to what it sends the next time.


class UpdateCoding:
    """How updates are encoded on their way to the server; `raw` leaves them as they are."""

    def __init__(self, text: str = RAW, *, feedback: bool = True, seed: int = 0) -> None:
        self._text, self._seed = text, seed
        self._feedback = feedback and text != RAW and has_feedback(text)
        self.states: ClientStates = {}  # what was left out of each client's updates so far, a row for each parcel
        self._before: dict[int, list[Tensor] | None] = {}  # of clients whose updates were coded in this round

    def kept(self, like: Tensors, weights: int) -> Tensors:
        """What is like that, for updates of tensors like these, of which the first so many are the model's."""
        parcels = _parcels(like, weights) if self._feedback else ()
        return [torch.zeros(parcel.count, dtype=parcel.dtype) for parcel, _ in parcels]

    def encoded(self, update: ClientUpdate, number: int, weights: int) -> ClientUpdate:
        """The update as the server decodes it in round `number`, and how many bytes it took."""
        if self._text == RAW:
            return update
        codec = codec_named(self._text, feedback=self._feedback, seed=self._seed, worker=update.client)
        assert codec is not None, "raw has none"
        codec.at(number)
        parcels = _parcels(update.change, weights)
        names = [f"left/{parcel.key}" for parcel, _ in parcels]
        if self._feedback and update.client in self.states:
            codec.remember(dict(zip(names, self.states[update.client], strict=True)))
        change, num_bytes = list(update.change), update.num_bytes
        for parcel, group in parcels:
            if not encodes(codec, parcel):
                continue
            num_bytes -= sum(change[at].numel() * change[at].element_size() for at in group)
            flat = torch.cat([change[at].detach().flatten().to("cpu", parcel.dtype) for at in group])
            buffer = torch.empty(codec.size(parcel), dtype=torch.uint8)
            num_bytes += len(round_trip(codec, parcel, flat, buffer))
            pieces = torch.split(flat, [change[at].numel() for at in group])
            for at, piece in zip(group, pieces, strict=True):
                change[at] = piece.view(change[at].shape).to(change[at].device, change[at].dtype)
        if self._feedback:
            memory = codec.memory()
            self._before[update.client] = self.states.get(update.client)
            self.states[update.client] = [
                memory[name].clone() if name in memory else torch.zeros(parcel.count, dtype=parcel.dtype)
                for name, (parcel, _) in zip(names, parcels, strict=True)
            ]
        return replace(update, change=change, encoded_bytes=num_bytes)

    def size(self, like: Tensors, weights: int) -> int:
        """The bytes of an encoded update of tensors like these, of which the first so many are the model's."""
        codec, num_bytes = codec_named(self._text), sum(one.nbytes for one in like)
        for parcel, group in _parcels(like, weights) if codec is not None else ():
            if codec is not None and encodes(codec, parcel):
                num_bytes += codec.size(parcel) - sum(like[at].nbytes for at in group)
        return num_bytes

    def begin_round(self) -> None:
        self._before = {}

    def refused(self, client: int) -> None:
        """The last encoded update of this client was not counted: restore the residual it had before."""
        if not self._feedback:
            return
        self.states.pop(client, None)
        if (before := self._before.pop(client, None)) is not None:
            self.states[client] = before


def _parcels(like: Tensors, weights: int) -> list[tuple[Parcel, list[int]]]:
    """A parcel of the first so many tensors, which are the model's, and one of the others; and of which tensors."""
    found, added = [], [at for at in range(weights, len(like)) if like[at].numel() > 1]
    for key, group in enumerate([list(range(weights)), added] if added else [list(range(weights))]):
        wide = any(like[at].dtype == torch.float64 for at in group)
        count = sum(like[at].numel() for at in group)
        found.append((Parcel.whole(key, count, torch.float64 if wide else torch.float32), group))
    return found
