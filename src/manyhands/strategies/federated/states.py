"""What clients keep from round to round, and how it gets into a checkpoint.

In simulation a client's state is on the worker that simulates it. A client that keeps state is therefore always
simulated by the same worker, number `client % workers`. The checkpoint has all clients' states, and a run that
resumes with another number of workers redistributes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["ClientStates", "gathered", "restored"]

ClientStates = dict[int, list[Tensor]]
"""Tensors by client number; clients that have not taken part yet are absent."""


def gathered(
    states: ClientStates, clients: int, like: Sequence[Tensor], total: Callable[[Tensor], Tensor]
) -> dict[str, Any]:
    """Collective: the states of all of so many clients, each of which at most one worker has, for a checkpoint."""
    there = torch.zeros(clients, dtype=torch.float64)
    there[list(states)] = 1
    there = total(there)
    found: dict[str, list[Any]] = {"clients": [], "states": []}
    for client in torch.nonzero(there).flatten().tolist():
        mine = states.get(client, [torch.zeros_like(one) for one in like])
        flat = total(torch.cat([one.detach().flatten().to("cpu", torch.float64) for one in mine]))
        pieces = torch.split(flat, [one.numel() for one in like])
        found["clients"].append(client)
        found["states"].append(
            [piece.view(one.shape).to(one.dtype) for piece, one in zip(pieces, like, strict=True)]
        )
    return found if found["clients"] else {}


def restored(kept: Mapping[str, Any], rank: int, world: int, device: torch.device) -> ClientStates:
    """The states of the clients that worker `rank` simulates, out of what `gathered` found."""
    pairs = zip(kept.get("clients", ()), kept.get("states", ()), strict=True)
    return {
        client: [one.clone().to(device) for one in state] for client, state in pairs if client % world == rank
    }
