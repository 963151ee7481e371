"""The local cluster: starts the roles of a run on this host, watches them, and leaves nothing behind.

    with LocalCluster([Role(name=f"worker {rank}", target=job) for rank in range(4)]) as cluster:
        results = cluster.run()

One thread, the caller's, waits on everything at once: control channels, output pipes, process descriptors and
a tick. What to do is decided in `watch`; this file does it.
"""

from __future__ import annotations

import os
import selectors
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from manyhands.cluster.board import Board
from manyhands.cluster.child import Child
from manyhands.cluster.context import RoleContext, RoleSpec
from manyhands.cluster.control import Channel, Finished, ProtocolError, Stop
from manyhands.cluster.job import pack
from manyhands.cluster.output import Output
from manyhands.cluster.sentinel import BEAT_S
from manyhands.cluster.signals import as_exception, counted_signals
from manyhands.cluster.watch import (
    TICK_S,
    Action,
    Alarm,
    AskToStop,
    Deliver,
    Event,
    Exited,
    Garbled,
    Heard,
    Interrupted,
    Kill,
    Looked,
    Patience,
    Watch,
)
from manyhands.errors import UserError

__all__ = ["LocalCluster", "OnFailure", "OnNote", "Role", "threads_per_role"]

OnNote = Callable[[int, Mapping[str, Any]], None]
OnFailure = Callable[[int], None]

_LEAST_SILENCE_S = 5 * BEAT_S


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


def threads_per_role(num_roles: int) -> int:
    """How many threads torch gets in each of `num_roles` processes: an equal share of the cores, or 1."""
    return max(1, len(os.sched_getaffinity(0)) // num_roles)


class LocalCluster:
    """Runs `roles` side by side, rank by position; a context manager, used for one `run`.

    `on_note(rank, payload)` gets what the roles send, `on_failure(rank)` is called at the first failure,
    before anyone else is told (to end waits in shared memory). Both are called in the thread of `run`.

    A role whose process gives no sign of life is noticed within `silent_after_s`. After a failure or an
    interruption, the others have `grace_s` to leave.
    """

    def __init__(
        self,
        roles: Sequence[Role],
        *,
        on_note: OnNote | None = None,
        on_failure: OnFailure | None = None,
        silent_after_s: float = 5.0,
        grace_s: float = 2.0,
        start_timeout_s: float = 120.0,
    ) -> None:
        if not roles:
            raise UserError("roles=[] must hold at least one role")
        if silent_after_s < _LEAST_SILENCE_S:
            raise UserError(
                f"silent_after_s={silent_after_s:g} must be at least {_LEAST_SILENCE_S:g}: five heartbeats"
            )
        if grace_s < 0 or start_timeout_s <= 0:
            raise UserError(f"{grace_s=:g} must not be negative and {start_timeout_s=:g} must be positive")
        self._roles = tuple(roles)
        self._on_note = on_note
        self._on_failure = on_failure
        self._patience = Patience(
            silent_after_s=silent_after_s, grace_s=grace_s, start_timeout_s=start_timeout_s
        )
        self._stack = ExitStack()
        self._shared: _Shared | None = None

    def __enter__(self) -> LocalCluster:
        """Pack the job and make what all roles share; no process is started yet."""
        with ExitStack() as stack:
            self._shared = _Shared.make(stack, self._roles)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release what `__enter__` made; the processes are gone when `run` returns or raises."""
        self._shared = None
        self._stack.close()

    def run(self) -> list[Finished]:
        """Start every role and wait for all results, by rank; called once.

        Raises WorkerFailed for the first failure, or the role's own error if that was a UserError. On Ctrl-C
        and on SIGTERM (in the main thread, where they have their default meaning) all roles are taken down
        first; then KeyboardInterrupt or SystemExit(143) is raised. When this returns or raises, every process
        is gone.
        """
        if self._shared is None:
            raise RuntimeError("a cluster runs once, as a context manager: with LocalCluster(...) as cluster")
        shared, self._shared = self._shared, None
        with counted_signals() as signals, _Run(shared, self._roles, self._patience) as run:
            try:
                run.until_over(signals, self._on_note, self._on_failure)
            except BaseException as error:  # from a callback, or from a signal handler of the user's own
                run.handle(Interrupted())
                run.until_over(signals)
                if run.watch.failure is not None:
                    error.add_note(f"before that: {run.watch.failure}")
                raise
        if signals:
            raise as_exception(signals[0]) from run.watch.failure
        if run.watch.failure is not None:
            raise run.watch.failure
        return run.watch.results()


@dataclass(frozen=True, slots=True)
class _Shared:
    """What all roles of a run share, as descriptors of this process."""

    board: Board
    job: int
    lifeline: int
    """The children's reading end: it ends when this process, which alone holds the writing end, is gone."""

    @classmethod
    def make(cls, stack: ExitStack, roles: Sequence[Role]) -> _Shared:
        job = pack([role.target for role in roles])
        stack.callback(os.close, job)
        board = stack.enter_context(Board.create(len(roles)))
        lifeline, held = os.pipe()
        stack.callback(os.close, lifeline)
        stack.callback(os.close, held)
        return cls(board, job, lifeline)


class _Run:
    """The processes of one run and the loop around them; entering starts them, leaving leaves none."""

    def __init__(self, shared: _Shared, roles: Sequence[Role], patience: Patience) -> None:
        self._shared = shared
        self._roles = roles
        self._patience = patience
        self._children: list[Child] = []
        self._signals_handled = 0
        self._on_note: OnNote | None = None
        self._on_failure: OnFailure | None = None

    def __enter__(self) -> _Run:
        self._selector = selectors.DefaultSelector()
        try:
            for rank, role in enumerate(self._roles):
                self._start(rank, role)
        except BaseException:
            self._end()
            raise
        started = [(self._roles[child.rank].name, child.process.pid) for child in self._children]
        self.watch = Watch(started, self._patience, time.monotonic_ns())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def until_over(
        self, signals: Sequence[int], on_note: OnNote | None = None, on_failure: OnFailure | None = None
    ) -> None:
        """Watch until every process has ended."""
        self._on_note, self._on_failure = on_note, on_failure
        while not self.watch.over:
            ready = self._selector.select(TICK_S)
            self.handle(Looked([self._shared.board.read(rank) for rank in range(len(self._roles))]))
            for _ in signals[self._signals_handled :]:
                self._signals_handled += 1
                self.handle(Interrupted())
            ended = {key.data for key, _ in ready if key.fileobj == key.data.pidfd}
            for child in {key.data for key, _ in ready}:
                self._attend(child)
                if child in ended:
                    self._bury(child)

    def handle(self, event: Event) -> None:
        """Let the watch decide about `event`, and do what it says."""
        for action in self.watch.handle(event, time.monotonic_ns()):
            self._do(action)

    def _start(self, rank: int, role: Role) -> None:
        spec = RoleSpec(
            name=role.name,
            rank=rank,
            world=len(self._roles),
            parent_pid=os.getpid(),
            lifeline=self._shared.lifeline,
            board=self._shared.board.descriptor,
            job=self._shared.job,
            descriptors=dict(role.descriptors),
            path=tuple(sys.path),
            python_path=role.env.get("PYTHONPATH", os.environ.get("PYTHONPATH")),
        )
        child = Child(spec, _environment(role, len(self._roles)))
        self._children.append(child)
        for source in (child.channel, child.stdout, child.stderr, child.pidfd):
            self._selector.register(source, selectors.EVENT_READ, child)

    def _attend(self, child: Child) -> None:
        """Pass on its output and hear what it says, as far as that has arrived."""
        for output in (child.stdout, child.stderr):
            if not output.pump():
                self._ignore(output)
        try:
            messages = child.channel.receive()
        except ProtocolError as error:
            self._ignore(child.channel)
            self.handle(Garbled(child.rank, str(error)))
            return
        if child.channel.ended:
            self._ignore(child.channel)
        for message in messages:
            self.handle(Heard(child.rank, message))

    def _bury(self, child: Child) -> None:
        for source in (child.channel, child.stdout, child.stderr, child.pidfd):
            self._ignore(source)
        status = child.bury()
        child.close()
        self.handle(Exited(child.rank, status, child.stderr.last_words))

    def _ignore(self, source: Channel | Output | int) -> None:
        if source in self._selector.get_map():
            self._selector.unregister(source)

    def _do(self, action: Action) -> None:
        match action:
            case Deliver(rank, note):
                if self._on_note is not None:
                    self._on_note(rank, note.payload)
            case Alarm(rank):
                if self._on_failure is not None:
                    self._on_failure(rank)
            case AskToStop(rank):
                self._children[rank].channel.offer(Stop())
            case Kill(rank):
                self._children[rank].kill()

    def _end(self) -> None:
        for child in self._children:
            child.kill()  # all of them first: closing waits for the end
        for child in self._children:
            child.close()
        self._selector.close()


def _environment(role: Role, num_roles: int) -> dict[str, str]:
    """The launcher's environment and the role's own; cores are shared out unless either says otherwise."""
    return {
        "OMP_NUM_THREADS": str(threads_per_role(num_roles)),
        **os.environ,
        **role.env,
        # The child must find this package where the launcher did; the role then takes over the exact path.
        "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
    }
