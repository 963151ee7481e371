"""The child processes of this process, and the one place where all of them are waited for.

One thread, the caller's, waits on everything at once: control channels, output pipes and process descriptors. All
children are forks of one template process, which has already imported the slow modules (`template`).
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import IO, Any, Literal, Self

from manyhands.errors import ManyhandsError, UserError
from manyhands.places.local.control import Channel, Message, RoleContext
from manyhands.places.local.forking import RoleSpec
from manyhands.places.local.host import threads_per_role
from manyhands.places.local.roster import Exited, Garbled, Heard
from manyhands.places.local.stacks import STACK_SIGNAL
from manyhands.places.local.status import StatusRow, StatusTable
from manyhands.places.local.template import StillRunning, Template, inherited_environment, obtain
from manyhands.transport.messages import ProtocolError

KEPT_BYTES = 4096
_READ_BYTES = 64 * 2**10
_LONGEST_LINE = 64 * 2**10
_REAP_S = 5.0


class Output:
    """One output stream of a child: the reading end of its pipe."""

    def __init__(self, pipe: IO[bytes], name: Literal["stdout", "stderr"]) -> None:
        """Own `pipe`; its content goes to the stream `name` of this process."""
        os.set_blocking(pipe.fileno(), False)
        self._pipe = pipe
        self._name = name
        self._waiting = b""
        self.last_words = b""
        self.fileno = pipe.fileno

    def pump(self) -> bool:
        """Pass on the whole lines that have arrived, without waiting; whether more may come."""
        while True:
            try:
                data = os.read(self.fileno(), _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                return False
            self.last_words = (self.last_words + data)[-KEPT_BYTES:]
            data = self._waiting + data
            # A progress bar's lines end with a carriage return.
            end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
            if len(data) - end > _LONGEST_LINE:
                end = len(data)
            self._waiting = data[end:]
            self._pass_on(data[:end])

    def close(self) -> None:
        """Pass on an unfinished last line and close the pipe."""
        self._pass_on(self._waiting)
        self._waiting = b""
        self._pipe.close()

    def _pass_on(self, data: bytes) -> None:
        stream = getattr(sys, self._name)
        # If our own reader is gone or the stream closed, that is not a reason to end the run.
        with suppress(OSError, ValueError):
            if data and stream is not None:
                stream.write(data.decode(errors="replace"))
                stream.flush()


class Child:
    """A running role; `close` kills its process group if need be, reaps it and closes everything."""

    def __init__(self, spec: RoleSpec, environment: Mapping[str, str], template: Template) -> None:
        """Have it forked; `spec.control` and `spec.stacks` are filled in here.

        The child leads a session of its own: Ctrl-C does not reach it, and one kill reaches all its children.
        """
        self.rank = spec.rank
        self.row = spec.row
        self.is_closed = False
        self._stacks_read = 0
        with ExitStack() as stack:
            self._stacks = os.memfd_create("manyhands:stacks", os.MFD_CLOEXEC)
            stack.callback(os.close, self._stacks)
            ours, theirs = socket.socketpair()
            self.channel = Channel(ours, spec.name)
            stack.callback(self.channel.close)
            (out, out_end), (errors, errors_end) = os.pipe(), os.pipe()
            self.stdout = Output(os.fdopen(out, "rb", 0), "stdout")
            self.stderr = Output(os.fdopen(errors, "rb", 0), "stderr")
            stack.callback(self.stdout.close)
            stack.callback(self.stderr.close)
            try:
                spec = replace(spec, control=theirs.fileno(), stacks=self._stacks)
                passed = [out_end, errors_end, *spec.inherited()]
                self.process = template.ask(spec.name, spec.to_text(), passed, environment)
            finally:
                theirs.close()
                os.close(out_end)
                os.close(errors_end)
            stack.pop_all()

    @property
    def sources(self) -> tuple[Channel, Output, Output, int]:
        return self.channel, self.stdout, self.stderr, self.process.pidfd

    def ask_for_stacks(self) -> None:
        """Have it write its stacks, for `read_stacks` a moment later; only once its job has begun."""
        self._stacks_read = os.fstat(self._stacks).st_size
        if self.process.returncode is None:
            os.kill(self.process.pid, STACK_SIGNAL)

    def read_stacks(self) -> str:
        """What it has written since it was asked; nothing if it is stopped."""
        num_bytes = os.fstat(self._stacks).st_size - self._stacks_read
        return os.pread(self._stacks, num_bytes, self._stacks_read).decode(errors="replace")

    def kill(self) -> None:
        """Kill the process and all of its group; harmless once it is reaped."""
        if self.process.returncode is None:  # not reaped, so its number still means this process
            os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Make sure that the process is gone, and close every descriptor; may be called again."""
        self.kill()
        with suppress(StillRunning):  # stuck in the kernel, which the roster has reported
            self.process.wait(_REAP_S)
        for output in (self.stdout, self.stderr):
            output.close()
        self.channel.close()
        self.process.close()
        stacks, self._stacks = self._stacks, -1
        if stacks >= 0:
            os.close(stacks)
        self.is_closed = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One child: its name, what it runs, and what it inherits."""

    name: str
    target: Callable[[RoleContext], Mapping[str, Any] | None]
    """Called in the child; what it returns (plain numbers and text) is the payload of its `Finished`."""
    descriptors: Mapping[str, int] = field(default_factory=dict)
    """Open descriptors of this process that the child inherits, by the name it asks for."""
    env: Mapping[str, str] = field(default_factory=dict)  # variables on top of the launcher's environment

    def __post_init__(self) -> None:
        if not self.name:
            raise UserError("name='' must not be empty; give a name such as 'worker 0'")
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
        self._rows: dict[int, int] = {}
        self._free_rows = deque(range(capacity))
        self._unreported: list[Heard | Garbled | Exited] = []
        self._batches: ExitStack | None = None

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._status_table = stack.enter_context(StatusTable.create(self._capacity))
            # The children hold the reading end: it reports the end of this process, the only writer.
            self._lifeline, held = os.pipe()
            stack.callback(os.close, self._lifeline)
            stack.callback(os.close, held)
            self._selector = stack.enter_context(selectors.DefaultSelector())
            stack.callback(self._end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Roles that are started inside come right one after the other; all of them begin when this is left."""
        with ExitStack() as batches:
            self._batches = batches
            try:
                yield
            finally:
                self._batches = None

    def start(self, rank: int, role: Role, job: int) -> int:
        """Start `role` as `rank`, its target being item `rank` of the packed `job`; the process id.

        `job` and the role's descriptors stay the caller's. Cores are shared out unless the launcher's environment or
        the role's says otherwise; the role takes over the launcher's exact search path later, and its own PYTHONPATH.
        """
        inherited = inherited_environment()
        threads = {"OMP_NUM_THREADS": str(threads_per_role(self._world))}
        environment = {**threads, **inherited, **role.env, "PYTHONPATH": inherited["PYTHONPATH"]}
        if not self._free_rows:
            raise ManyhandsError(f"{self._capacity} processes are already running; no more are allowed")
        row = self._free_rows[0]
        self._status_table.wipe(row)
        self._rows = {rank: of for rank, of in self._rows.items() if of != row}
        template = obtain(environment)
        if self._batches is not None:
            self._batches.enter_context(template.batch())
        spec = RoleSpec(
            name=role.name,
            rank=rank,
            world=self._world,
            parent_pid=os.getpid(),
            lifeline=self._lifeline,
            status_table=self._status_table.descriptor,
            row=row,
            job=job,
            descriptors=dict(role.descriptors),
            path=tuple(sys.path),
            python_path=role.env.get("PYTHONPATH", os.environ.get("PYTHONPATH")),
        )
        child = Child(spec, environment, template)
        self._processes.add(child)
        self._free_rows.remove(row)
        for source in child.sources:
            self._selector.register(source, selectors.EVENT_READ, child)
        self._children[rank] = child
        self._rows[rank] = row
        return child.process.pid

    def wait(self, timeout_s: float) -> list[Heard | Garbled | Exited]:
        """What members sent and did, waiting up to `timeout_s` for anything; their output is passed on.

        What was seen before an exception (a signal handler of the application may raise anywhere) is returned by
        the next call.
        """
        ready = self._selector.select(0.0 if self._unreported else timeout_s)
        ended = {key.data for key, _ in ready if key.fileobj == key.data.process.pidfd}
        for child in dict.fromkeys(key.data for key, _ in ready):
            self._unreported += self._attend(child)
            if child in ended:
                child.kill()  # what is left of its group
                status = child.process.wait()
                last_words = child.stderr.last_words.decode(errors="replace")
                self._unreported.append(Exited(child.rank, status, last_words))
                self._release(child)
        events, self._unreported = self._unreported, []
        return events

    def status(self, rank: int) -> StatusRow:
        """The status of `rank`; also after its end, until its row is given to another."""
        return self._status_table.read(self._rows[rank])

    def post(self, rank: int, message: Message) -> None:
        """Send `message` without waiting, the rest of it in `wait`; a no-op if `rank` is gone."""
        child = self._children.get(rank)
        if child is not None:
            child.channel.post(message)
            self._await_room(child)

    def ask_for_stacks(self, rank: int) -> None:
        """Have `rank`, whose job has begun, write its stacks; a no-op if it is gone."""
        if rank in self._children:
            self._children[rank].ask_for_stacks()

    def read_stacks(self, rank: int) -> str:
        return self._children[rank].read_stacks() if rank in self._children else ""

    def kill(self, rank: int) -> None:
        """Kill the process group of `rank`; a no-op if it is gone."""
        if rank in self._children:
            self._children[rank].kill()

    def _end(self) -> None:
        for child in self._processes:
            child.kill()  # all of them first: closing waits for the end
        for child in list(self._processes):
            self._release(child)

    def _attend(self, child: Child) -> list[Heard | Garbled | Exited]:
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
        if child.channel in self._selector.get_map():
            waits = selectors.EVENT_WRITE if child.channel.queue else 0
            self._selector.modify(child.channel, selectors.EVENT_READ | waits, child)

    def _release(self, child: Child) -> None:
        """Forget a child and close it, in this order: what is closed cannot be looked up in the selector."""
        for source in child.sources:
            self._ignore(source)
        self._children.pop(child.rank, None)
        try:
            child.close()
        finally:
            if child.is_closed:  # else `_end` continues with it
                self._processes.discard(child)
            if child.is_closed and child.process.returncode is not None:
                # A process that is stuck in the kernel may still write to its row.
                self._free_rows.append(child.row)

    def _ignore(self, source: Channel | Output | int) -> None:
        with suppress(KeyError, ValueError):  # it was not registered, or has no descriptor any more
            self._selector.unregister(source)
