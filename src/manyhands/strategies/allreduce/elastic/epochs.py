"""What the members of one epoch have in common, at one of them: memory of one host, or links between any hosts.

ready ──► view ──► open ──► hand_over (who has the state) ─┬─► collective ──► close
                            take      (who is new)         ┘
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from manyhands.data.store.checkpoint import Loaded
from manyhands.engine.worker_resources import Resources
from manyhands.native.group.shared_group import SharedGroup
from manyhands.strategies.allreduce.chosen import collective_for
from manyhands.strategies.allreduce.elastic.elastic_messages import EpochView, MemberReady
from manyhands.strategies.allreduce.elastic.epoch_files import STATE_FILES, close_all, receive_files
from manyhands.strategies.allreduce.elastic.member_control import MemberLine
from manyhands.strategies.allreduce.elastic.state import read_state, write_state
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.strategies.common.collectives.collective import Collective
from manyhands.transport.link.interface import Link
from manyhands.transport.link.mesh import mesh_kind

__all__ = ["Epoch", "Epochs", "SharedEpochs"]

State = Callable[[], Mapping[str, Any]]
"""Returns a `state.state_tree`."""


class Epoch(ABC):
    """One member's end of one epoch; a wait for a lost member raises `epoch_collective.LOST`."""

    @abstractmethod
    def hand_over(self, state: State | None) -> None:
        """Collective among members that are not fresh, if some are: the donor passes its `state`, the others None."""

    @abstractmethod
    def take(self) -> Loaded:
        """On a fresh member: wait for the donor's state."""

    @abstractmethod
    def collective(self, strategy: AllReduce) -> tuple[Collective, Callable[[], None] | None]:
        """Collective, once: return the strategy's collective, and what `ElasticCollective` confirms by."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources; idempotent."""


class Epochs(ABC):
    """Opens one member's epochs one after the other; a context manager."""

    @abstractmethod
    def ready(self, member: int) -> MemberReady:
        """Return the message that asks for a seat."""

    @abstractmethod
    def open(self, view: EpochView, line: MemberLine) -> Epoch:
        """Collective: enter this epoch; raises `epoch_collective.LOST` if a member is lost before all are in."""

    @abstractmethod
    def close(self) -> None:
        """Release what opening epochs needs; no epoch is opened afterwards."""


class SharedEpochs(Epochs):
    """Epochs on one host, whose memory the launcher sends over a Unix socket; owns the socket."""

    def __init__(self, files: socket.socket, timeout_s: float) -> None:
        self._files, self._timeout_s = files, timeout_s

    def ready(self, member: int) -> MemberReady:
        """Return the message that asks for a seat; all members are on one host."""
        return MemberReady(member=member)

    def open(self, view: EpochView, line: MemberLine) -> Epoch:
        """Receive the memory, which the launcher sent before the view."""
        return _SharedEpoch(
            receive_files(self._files, view.epoch, self._timeout_s), view, line.member, self._timeout_s
        )

    def close(self) -> None:
        """Close the socket."""
        self._files.close()


class _SharedEpoch(Epoch):
    def __init__(self, files: dict[str, int], view: EpochView, member: int, timeout_s: float) -> None:
        self._files = files
        self._timeout_s = timeout_s
        self._group = SharedGroup(
            control=files.pop("control"),
            arena=files.pop("arena"),
            rank=view.rank_of(member),
            world=len(view.seats),
            timeout_s=timeout_s,
            roles=[seat.member for seat in view.seats],
        )

    def hand_over(self, state: State | None) -> None:
        if state is not None:
            write_state(*self._state_files, state())
        self._group.barrier()

    def take(self) -> Loaded:
        self._group.barrier()
        return read_state(*self._state_files)

    def collective(self, strategy: AllReduce) -> tuple[Collective, Callable[[], None] | None]:
        close_all(self._files.pop(name) for name in STATE_FILES if name in self._files)
        group = self._group
        resources = Resources(
            rank=group.rank,
            world=group.world,
            timeout_s=self._timeout_s,
            group=lambda: group,
            links=lambda: self._links(strategy),
        )
        return collective_for(strategy, resources), group.barrier if strategy.facts.uses_links else None

    def close(self) -> None:
        self._group.close()
        files, self._files = self._files, {}
        close_all(files.values())

    def _links(self, strategy: AllReduce) -> Mapping[int, Link]:
        kind = mesh_kind(network=strategy.uses_network)
        ends = {
            peer: [self._files.pop(f"link {peer} {part}") for part in kind.parts]
            for peer in range(self._group.world)
            if peer != self._group.rank
        }
        return kind.attach(self._group.rank, ends)

    @property
    def _state_files(self) -> tuple[int, int]:
        tensors, tree = (self._files[name] for name in STATE_FILES)
        return tensors, tree
