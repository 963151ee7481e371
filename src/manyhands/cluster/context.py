"""What a role is given: its place in the run, its descriptors, and the ways to tell the launcher something.

`RoleSpec` is how the launcher tells a child which descriptors are which: plain text in one environment
variable. `RoleContext` is what the child's job gets as its only argument.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from manyhands.cluster.board import NOBODY, Board, State
from manyhands.cluster.control import Channel, Note, Stop
from manyhands.errors import UserError, nearest

__all__ = ["RoleContext", "RoleSpec"]

_SEND_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSpec:
    """One child's place in the run, its inherited descriptors, and the launcher's search path for modules."""

    name: str
    rank: int
    world: int
    parent_pid: int
    lifeline: int
    board: int
    job: int
    descriptors: Mapping[str, int]
    path: tuple[str, ...]
    python_path: str | None
    """PYTHONPATH as the user set it; the launcher borrows the variable to start the child."""

    control: int = -1
    """The child's end of its control channel; known when the child is started."""

    def inherited(self) -> tuple[int, ...]:
        """All descriptors that the child must hold."""
        own = (self.control, self.lifeline, self.board, self.job)
        return (*own, *self.descriptors.values())

    def to_text(self) -> str:
        """The form in the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RoleSpec:
        """Read what `to_text` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "path": tuple(fields["path"])})


class RoleContext:
    """A role's view of its run; `send` may be called from any thread, the rest from the thread of the job."""

    def __init__(self, spec: RoleSpec, channel: Channel, board: Board) -> None:
        self.name = spec.name
        self.rank = spec.rank
        self.world = spec.world
        self.step = 0
        self._descriptors = spec.descriptors
        self._channel = channel
        self._board = board
        self._stop_requested = False

    def descriptor(self, name: str) -> int:
        """The inherited descriptor that the launcher's `Role` calls `name`."""
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

    def mark(self, step: int, state: State, waiting_for: int = NOBODY) -> None:
        """Show on the board what this role is doing; costs a few microseconds, so do it often."""
        self.step = step
        self._board.mark(self.rank, step, state, waiting_for)

    def stop_requested(self) -> bool:
        """Whether the launcher asked to leave; a role that does not is killed after the launcher's grace."""
        if any(isinstance(message, Stop) for message in self._channel.receive()):
            self._stop_requested = True
        return self._stop_requested or self._channel.ended
