"""The child processes of this process, and the one place where all of them are waited for.

One thread, the caller's, waits on everything at once: control channels, output pipes and process descriptors. The
reaction is decided elsewhere: `local` runs a fixed set of roles on these children, `supervisor` members that come
and go.

All of them are forks of one template process, which has already imported the slow modules (`template`).
"""

from __future__ import annotations

import os
import selectors
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from manyhands.errors import ManyhandsError, UserError
from manyhands.places.local.child import Child
from manyhands.places.local.child_descriptors import RoleSpec
from manyhands.places.local.context import RoleContext
from manyhands.places.local.control import Channel, Message
from manyhands.places.local.cores import threads_per_role
from manyhands.places.local.member import Exited, Garbled, Heard
from manyhands.places.local.output import Output
from manyhands.places.local.status import StatusRow, StatusTable
from manyhands.places.local.template import inherited_environment, obtain
from manyhands.transport.messages import ProtocolError

__all__ = ["Children", "Role"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One child: its name, what it runs, and what it inherits."""

    name: str
    target: Callable[[RoleContext], Mapping[str, Any] | None]
    """Called in the child; what it returns (plain numbers and text) is the payload of its `Finished`."""

    descriptors: Mapping[str, int] = field(default_factory=dict)
    """Open descriptors of this process that the child inherits, by the name it asks for."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of the launcher's environment."""

    def __post_init__(self) -> None:
        if not self.name:
            raise UserError("name='' must name the role, such as 'worker 0'")
        if not callable(self.target):
            raise UserError(f"target={self.target!r} must be a function of one RoleContext")


class Children:
    """The child processes; entering creates what they share, and leaving ends all of them.

    At most `capacity` exist at once; `world` is the number in their contexts, by which the cores are divided. All
    calls come from one thread: the kernel ties the lifetime of the processes to it.
    """

    def __init__(self, *, capacity: int, world: int) -> None:
        self._capacity = capacity
        self._world = world
        self._stack = ExitStack()
        self._processes: set[Child] = set()
        self._children: dict[int, Child] = {}
        self._lines: dict[int, int] = {}
        self._free_lines = deque(range(capacity))
        self._untold: list[Heard | Garbled | Exited] = []
        self._batches: ExitStack | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._status_table = stack.enter_context(StatusTable.create(self._capacity))
            # The children hold the reading end: it reports the end of this process, the only writer.
            self._lifeline, held = os.pipe()
            stack.callback(os.close, self._lifeline)
            stack.callback(os.close, held)
            self._selector = stack.enter_context(selectors.DefaultSelector())
            stack.callback(self.end)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Roles that are started inside come right one after the other; all of them begin when this is left."""
        with ExitStack() as batches:
            self._batches = batches
            try:
                yield
            finally:
                self._batches = None

    def start(self, rank: int, role: Role, job: int) -> int:
        """Start `role` as `rank`, its target being item `rank` of the packed `job`; the process id.

        `job` and the role's descriptors stay the caller's.
        """
        environment = _environment(role.env, self._world)
        line = self._free_line()
        self._status_table.wipe(line)
        self._lines = {rank: of for rank, of in self._lines.items() if of != line}
        template = obtain(environment)
        if self._batches is not None:
            self._batches.enter_context(template.batch())
        child = Child(self._spec(rank, role, job, line), environment, template)
        self._processes.add(child)
        self._free_lines.remove(line)
        for source in _sources(child):
            self._selector.register(source, selectors.EVENT_READ, child)
        self._children[rank] = child
        self._lines[rank] = line
        return child.process.pid

    def wait(self, timeout_s: float) -> list[Heard | Garbled | Exited]:
        """What members sent and did, waiting up to `timeout_s` for anything; their output is passed on.

        What was seen before an exception (a signal handler of the application may raise anywhere) is returned by
        the next call.
        """
        ready = self._selector.select(0.0 if self._untold else timeout_s)
        ended = {key.data for key, _ in ready if key.fileobj == key.data.pidfd}
        for child in dict.fromkeys(key.data for key, _ in ready):
            self._untold += self._attend(child)
            if child in ended:
                self._bury(child)
        events, self._untold = self._untold, []
        return events

    def line(self, rank: int) -> StatusRow:
        """The status of `rank`; also after its end, until its row is given to another."""
        return self._status_table.read(self._lines[rank])

    def post(self, rank: int, message: Message) -> None:
        """Send `message` without waiting, the rest of it in `wait`; nothing happens if `rank` is gone."""
        child = self._children.get(rank)
        if child is not None:
            child.channel.post(message)
            self._await_room(child)

    def ask_for_stacks(self, rank: int) -> None:
        """Have `rank`, whose job has begun, write its stacks; nothing happens if it is gone."""
        if rank in self._children:
            self._children[rank].ask_for_stacks()

    def read_stacks(self, rank: int) -> str:
        """What `rank` has written since it was asked."""
        return self._children[rank].read_stacks() if rank in self._children else ""

    def kill(self, rank: int) -> None:
        """Kill the process group of `rank`; nothing happens if it is gone."""
        if rank in self._children:
            self._children[rank].kill()

    def end(self) -> None:
        """Kill everyone and wait until they are gone; idempotent."""
        for child in self._processes:
            child.kill()  # all of them first: closing waits for the end
        for child in list(self._processes):
            self._release(child)

    def _spec(self, rank: int, role: Role, job: int, line: int) -> RoleSpec:
        return RoleSpec(
            name=role.name,
            rank=rank,
            world=self._world,
            parent_pid=os.getpid(),
            lifeline=self._lifeline,
            status_table=self._status_table.descriptor,
            line=line,
            job=job,
            descriptors=dict(role.descriptors),
            path=tuple(sys.path),
            python_path=role.env.get("PYTHONPATH", os.environ.get("PYTHONPATH")),
        )

    def _free_line(self) -> int:
        if not self._free_lines:
            raise ManyhandsError(
                f"{self._capacity} processes are there already, and no more are allowed at once"
            )
        return self._free_lines[0]

    def _attend(self, child: Child) -> list[Heard | Garbled | Exited]:
        """Pass on its output and hear what it says, as far as that has arrived."""
        for output in (child.stdout, child.stderr):
            if not output.pump():
                self._ignore(output)
        child.channel.flush()
        self._await_room(child)
        try:
            messages = child.channel.receive()
        except ProtocolError as error:
            self._ignore(child.channel)
            return [Garbled(child.rank, str(error))]
        if child.channel.ended:
            self._ignore(child.channel)
        return [Heard(child.rank, message) for message in messages]

    def _await_room(self, child: Child) -> None:
        """Wait for space in its channel if something is queued for it."""
        if child.channel in self._selector.get_map():
            waits = selectors.EVENT_WRITE if child.channel.has_more else 0
            self._selector.modify(child.channel, selectors.EVENT_READ | waits, child)

    def _bury(self, child: Child) -> None:
        status = child.bury()
        self._untold.append(Exited(child.rank, status, child.stderr.last_words))
        self._release(child)

    def _release(self, child: Child) -> None:
        """Forget a child and close it, in this order: what is closed cannot be looked up in the selector."""
        for source in _sources(child):
            self._ignore(source)
        self._children.pop(child.rank, None)
        try:
            child.close()
        finally:
            if child.is_closed:  # else `end` goes on with it
                self._processes.discard(child)
            if child.is_closed and child.process.returncode is not None:
                # A process that is stuck in the kernel may still write to its row.
                self._free_lines.append(child.line)

    def _ignore(self, source: Channel | Output | int) -> None:
        """Wait for it no longer; harmless for one that is closed, which nobody waits for."""
        try:
            self._selector.unregister(source)
        except (KeyError, ValueError):  # it was not registered, or has no descriptor any more
            pass


def _environment(env: Mapping[str, str], world: int) -> dict[str, str]:
    """The launcher's environment and the role's own; cores are shared out unless either says otherwise.

    The role takes over the launcher's exact search path later, and the PYTHONPATH of its own.
    """
    inherited = inherited_environment()
    return {
        "OMP_NUM_THREADS": str(threads_per_role(world)),
        **inherited,
        **env,
        "PYTHONPATH": inherited["PYTHONPATH"],
    }


def _sources(child: Child) -> tuple[Channel, Output, Output, int]:
    return child.channel, child.stdout, child.stderr, child.pidfd
