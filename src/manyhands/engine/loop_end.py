"""A process's end of a loop of the user's own, where workers do not meet at every backward.

    attach ─► (the user's forward and backward of batch `batch`) ─► push ─► (of the next `batch`) ─► … ─► leave

A worker learns which batch is its own, computes it, and gives its gradients away; when `push` returns, the model has
newer parameters. Workers that never meet agree on the rest through a store: small values that all can read, and that
outlive a worker, whose successor finds there what it had said.
"""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import torch
from torch import nn
from torch._C._distributed_c10d import Store
from torch.optim import Optimizer

from manyhands.data.store.checkpoint import Loaded
from manyhands.engine.exchange import Exchange, LocalStep, SharedStep, WorkerPart
from manyhands.engine.reporting import WorkerContext
from manyhands.errors import PeerTimeout, UserError
from manyhands.places.external.process_place import ProcessPlace
from manyhands.strategy import Strategy

_FIRST_LOOK_S: Final = 0.0002
_LOOK_S: Final = 0.01


class GroupStore:
    """Values by name in a store that all workers of a group have; a wait for one lasts at most `timeout_s`."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s

    def put(self, name: str, value: bytes) -> None:
        self._store.set(name, value.hex() or " ")

    def find(self, name: str) -> bytes | None:
        return bytes.fromhex(self._store.get(name).decode()) if self._store.check([name]) else None

    def remove(self, name: str) -> None:
        """Forget a value that nobody will ask for."""
        self._store.delete_key(name)

    def first(self, name: str, value: bytes) -> bytes:
        """The value of the first who brought one: this, or an earlier one."""
        return bytes.fromhex(self._store.compare_set(name, "", value.hex()).decode())

    def get(self, name: str, who: str, meanwhile: Callable[[], None] = lambda: None) -> bytes:
        """Wait for a value that `who` brings; `meanwhile` is called again and again."""
        deadline, pause_s = time.monotonic() + self._timeout_s, _FIRST_LOOK_S
        while (found := self.find(name)) is None:
            if time.monotonic() > deadline:
                raise PeerTimeout(f"{who} did not come within {self._timeout_s:.0f} s ({name})", peer=-1)
            meanwhile()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_S)
        return found


class LoopEnd(Exchange):
    """One worker's end; its steps are taken by `push`, never by the optimizer of the user's loop itself."""

    steps_itself: ClassVar[bool] = True
    synchronous: bool  # every batch is split over all workers, and all of them take every step
    batch: int = 0  # the batch that this worker computes next, where it has all of it
    clock: int = 0  # how many updates there were in this worker's place before the next one
    store: GroupStore
    holds_state: ClassVar[bool] = True  # or other processes have the parameters and the optimizer's state
    # Runs the script in the processes of a strategy that has others besides workers; None: in workers alone
    launch: ClassVar[Callable[..., tuple[bool, dict[str, Any]]] | None] = None

    def __init__(self, rank: int, world: int, store: GroupStore) -> None:
        self.rank, self.world, self.store = rank, world, store
        self.part = WorkerPart(index=rank, count=world)

    @classmethod
    @abstractmethod
    def open(cls, place: ProcessPlace, name: str, strategy: Strategy, timeout_s: float) -> LoopEnd:
        """This process's end of the group `name`; the others need not be there yet."""

    @abstractmethod
    def begin(self, model: nn.Module, optimizer: Optimizer, worker_context: WorkerContext) -> None:
        """Give the model the current parameters; a process that serves does not return, and ends with SystemExit."""

    def enter(self) -> None:
        """Called before the forward of a batch of this worker: where steps are taken in an order, wait for it."""

    def stop_requested(self) -> bool:
        """Whether the launcher asks to stop, and leaves time for it."""
        return False

    @abstractmethod
    def push(self, weight: float, settings: Mapping[str, Any]) -> None:
        """Take the gradients out of the parameters, and wait for newer parameters; `weight` is their share of a batch.

        `settings` are those that the optimizer's step is to be taken with: see `changed_settings`.
        """

    @abstractmethod
    def skip(self) -> None:
        """Go on to the next batch without an update."""

    def refresh(self) -> None:
        """Give the model the current parameters, without an update."""

    @abstractmethod
    def save(self, folder: Path, model: nn.Module) -> Mapping[str, Any] | None:
        """Collective: bring the model up to date; on worker 0, the optimizer's whole `state_dict()`.

        None where nothing is to be written.
        """

    @abstractmethod
    def load(self, folder: Path, loaded: Loaded, *, again: bool) -> None:
        """Collective, after model and optimizer were loaded here: train on from there.

        With `again`, a predecessor has done it.
        """

    @abstractmethod
    def leave(self) -> None:
        """Collective: wait until all workers have left their loops; the model then has the final parameters."""

    def finish(self) -> None:
        """Say that this worker needs the others no more."""

    def clips(self, model: nn.Module, max_norm: float) -> float | None:
        """Scale this worker's gradient down to `max_norm` and return its norm; None where that is done in the step."""
        return float(nn.utils.clip_grad_norm_(model.parameters(), max_norm))

    # Of an exchange, nothing else is asked for in a loop of the user's own.

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        raise NotImplementedError("begin takes its place")

    def agree(self, local: LocalStep) -> SharedStep:
        raise NotImplementedError("push takes its place")

    def apply(self) -> None:
        raise NotImplementedError("push takes its place")

    def total(self, values: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("workers do not meet")

    def optimizer_state(self) -> dict[str, Any] | None:
        raise NotImplementedError("save takes its place")


def plain_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The settings of each parameter group as plain values; those that are something else are left out."""

    def plain(value: Any) -> Any:
        return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value

    kinds = (bool, int, float, str, list, tuple, type(None))
    groups = ({key: plain(value) for key, value in group.items()} for group in optimizer.param_groups)
    return [
        {key: value for key, value in group.items() if key != "params" and isinstance(value, kinds)}
        for group in groups
    ]


def changed_settings(first: list[dict[str, Any]], optimizer: Optimizer) -> dict[str, Any]:
    """What of a group's settings differs from `first`, by the group's number: a schedule's rates, say."""
    now = plain_settings(optimizer)
    if len(now) != len(first):
        raise UserError("a parameter group was added after prepare; add all groups before it")
    return {
        str(number): changed
        for number, (group, before) in enumerate(zip(now, first, strict=True))
        if (changed := {key: value for key, value in group.items() if before.get(key) != value})
    }


def settings_text(settings: Mapping[str, Any]) -> str:
    return json.dumps(settings, separators=(",", ":"))
