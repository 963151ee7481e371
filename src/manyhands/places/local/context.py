"""The worker context, a role's only argument: its place, its descriptors, and its channel to the leader."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from manyhands.errors import UserError, nearest
from manyhands.places.local.child_descriptors import RoleSpec
from manyhands.places.local.control import Channel, Message, Note, Stop
from manyhands.places.local.status import NOBODY, State, StatusTable

__all__ = ["Context", "RoleContext"]

_SEND_TIMEOUT_S = 60.0


class Context(Protocol):
    """What a role needs of its worker context, however its process was started: `RoleContext` or
    `ControlConnection`.
    """

    name: str
    rank: int
    world: int

    def send(self, payload: Mapping[str, Any]) -> None:
        """Tell the leader something, as JSON."""

    def mark(
        self,
        step: int,
        state: State,
        waiting_for: int = NOBODY,
        *,
        place: tuple[int, int] | None = None,
    ) -> None:
        """Show what this role is doing."""

    def stop_requested(self) -> bool:
        """Whether the leader asked to leave."""

    @property
    def stopping(self) -> bool:
        """Whether a request to leave is among what was read so far."""

    def received(self) -> list[Mapping[str, Any]]:
        """What the leader told this role since the last call."""


class RoleContext:
    """A role's view of its run; `send` may be called from any thread, the rest from the thread of the job."""

    def __init__(self, spec: RoleSpec, channel: Channel, status_table: StatusTable) -> None:
        self.name = spec.name
        self.rank = spec.rank
        self.world = spec.world
        self.step = 0
        self._descriptors = spec.descriptors
        self._channel = channel
        self._status_table = status_table
        self._line = spec.line
        self._told: list[Mapping[str, Any]] = []
        self._stop_requested = False

    def descriptor(self, name: str) -> int:
        if name not in self._descriptors:
            raise UserError(
                f"{self.name} inherited no descriptor {name!r}; {nearest(name, self._descriptors)}"
            )
        return self._descriptors[name]

    def send(self, payload: Mapping[str, Any]) -> None:
        """Tell the launcher something, as JSON; in order, and all of it before the run's result.

        Raises PeerTimeout if the launcher has read nothing for a minute.
        """
        self._channel.send(Note(payload=payload), _SEND_TIMEOUT_S)

    def mark(
        self,
        step: int,
        state: State,
        waiting_for: int = NOBODY,
        *,
        place: tuple[int, int] | None = None,
    ) -> None:
        """Show in the status table what this role is doing; costs a few microseconds, so call it often.

        In a pipeline `place` is the stage and the micro-batch.
        """
        self.step = step
        self._status_table.mark(self._line, step, state, waiting_for, place)

    def stop_requested(self) -> bool:
        """Whether the launcher asked to leave; a role that does not is killed after the launcher's grace."""
        self._sort(self._channel.receive())
        return self._stop_requested or self._channel.ended

    @property
    def stopping(self) -> bool:
        """Whether a request to leave is among what was read so far; unlike `stop_requested`, reads nothing."""
        return self._stop_requested or self._channel.ended

    def received(self) -> list[Mapping[str, Any]]:
        """What the launcher told this role since the last call, in order; does not wait."""
        self._sort(self._channel.receive())
        told, self._told = self._told, []
        return told

    def control_fileno(self) -> int:
        """A descriptor for a selector, readable when the launcher sent something (or is gone).

        Both `stop_requested` and `received` read what arrived, so check both before waiting for more.
        """
        return self._channel.fileno()

    def _sort(self, messages: Iterable[Message]) -> None:
        for message in messages:
            match message:
                case Stop():
                    self._stop_requested = True
                case Note(payload=payload):
                    self._told.append(payload)
