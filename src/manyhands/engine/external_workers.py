"""Workers that were started externally: how each connects to the others, and what reaches the leader.

Every process runs the common loop in its main thread. It is connected to the others by shared memory on its host and
by links to other hosts (`connect_worker`). The leader is worker 0, with a thread that listens to the others
(`ControlListener`): the first failure ends every worker's waits, and is the one that every worker reports.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Final, Self

from manyhands.engine.device import device_of
from manyhands.engine.exchange import Resources
from manyhands.engine.reporting import NOTES, WorkerNote
from manyhands.engine.run import RowsInOrder
from manyhands.engine.training import Stage
from manyhands.errors import Aborted, PeerTimeout, UserError, WorkerFailed, printable
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles
from manyhands.native.threads import with_threads
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.external.control_connection import ControlConnection
from manyhands.places.external.control_server import ControlEvent, Warned
from manyhands.places.external.links import (
    attach_group,
    no_group,
    open_heartbeats,
    open_links,
    share_group_files,
    share_links,
)
from manyhands.places.external.process_group import GroupMember, ProcessGroup
from manyhands.places.external.run_store import RunStore, comes_true
from manyhands.places.local.control import TypedNotes
from manyhands.places.local.failure import Failure, report
from manyhands.places.local.host import threads_per_role
from manyhands.places.local.rendezvous import Rendezvous, meet
from manyhands.places.local.roster import Ended, Said
from manyhands.places.local.signals import as_exception, counted_signals
from manyhands.places.local.status import State
from manyhands.strategy import Strategy
from manyhands.transport.link.interface import Link
from manyhands.transport.link.tcp import TcpLink
from manyhands.transport.liveness import Alarm, RendezvousStore

_log = logging.getLogger("manyhands")
_TICK_S: Final = 0.1
_CAUSE_S, _REPORT_S, _ALL_MET_S = 1.0, 3.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BeginTraining:
    """The leader's message to the other workers before the first step."""

    resumes: bool  # the state to continue from comes behind this
    keeps: bool  # the run has a directory, on the leader's host: all take part in saving


ORDERS: Final = TypedNotes(BeginTraining)


def wait_for_orders(member: GroupMember) -> BeginTraining:
    """Wait for the leader's first message; PeerTimeout if it does not come, Aborted if the run is over."""
    connection, deadline = member.connection, time.monotonic() + member.timeout_s
    while True:
        for payload in connection.received(min(1.0, member.timeout_s)):
            order = ORDERS.read(payload)
            assert isinstance(order, BeginTraining)
            return order
        if connection.over is not None:
            raise Aborted(connection.over.sentence)
        if time.monotonic() >= deadline:
            leader, seconds = connection.leader, member.timeout_s
            raise PeerTimeout(
                f"{connection.name}: the leader, {leader}, did not start within {seconds:.0f} s", 0
            )


class ControlListener:
    """The leader's thread that listens to the others, a context manager; the first failure ends all waits."""

    def __init__(self, process_group: ProcessGroup) -> None:
        self._process_group = process_group
        self._act: Callable[[int, str], None] | None = None  # at the first failure
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._suspect: tuple[Failure, float] | None = None
        self.failure: Failure | None = None  # what ended the run, once that is known
        self.finished: dict[int, Mapping[str, Any]] = {}  # what each other worker reported at its end
        # Notes of others, and remarks about them, for the thread of `fit`
        self.said: queue.SimpleQueue[Mapping[str, Any] | str] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="manyhands listener", daemon=True)

    def on_failure(self, act: Callable[[int, str], None]) -> None:
        """Call `act(rank, sentence)` at the first failure; at once if it has happened."""
        with self._changed:
            self._act, failure = act, self.failure
        if failure is not None:
            act(failure.rank, failure.sentence)

    def wait_for_failure(self, timeout_s: float) -> Failure | None:
        with self._changed:
            self._changed.wait_for(lambda: self.failure is not None, timeout_s)
            return self.failure

    def wait_for_all(self, timeout_s: float) -> None:
        others = self._process_group.place.world - 1
        with self._changed:
            done = self._changed.wait_for(
                lambda: self.failure is not None or len(self.finished) == others, timeout_s
            )
            if self.failure is not None:
                raise self.failure.error()
            if not done:
                late = min(rank for rank in range(1, others + 1) if rank not in self.finished)
                name = self._process_group.control_server.name_of(late)
                raise PeerTimeout(f"{name} did not finish within {timeout_s:.0f} s after worker 0", late)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        """Run the thread: an exception in it counts as the leader's failure, as nothing else would report it."""
        group = self._process_group
        try:
            for event in group.early:
                self._take(event)
            while not self._stop.is_set():
                for event in group.control_server.poll(_TICK_S):
                    self._take(event)
                if self._suspect is not None and time.monotonic() >= self._suspect[1]:
                    self._fail(self._suspect[0])
        except Exception as error:
            sentence = f"{group.place.name}, the leader, can no longer receive from the others: {error!r}"
            self._fail(Failure(rank=0, sentence=sentence, name="worker 0", reported=report(error, 0)))

    def _take(self, event: ControlEvent) -> None:
        match event:
            case Said(payload=payload):
                self.said.put(payload)
            case Warned(sentence=sentence):
                self.said.put(sentence)
            case Ended(member=rank, payload=payload, failure=None):
                with self._changed:
                    self.finished[rank] = payload or {}
                    self._changed.notify_all()
            case Ended(failure=Failure() as failure) if not failure.is_consequence:
                self._fail(failure)
            case Ended(failure=Failure() as failure) if self._suspect is None:
                # It may follow from another's failure: it is reported if no cause arrives.
                self._suspect = failure, time.monotonic() + _CAUSE_S

    def _fail(self, failure: Failure) -> None:
        with self._changed:
            if self.failure is not None:
                return  # the first failure stands: later ones may follow from it
            self.failure, act = failure, self._act
            self._changed.notify_all()
        if act is not None:
            act(failure.rank, failure.sentence)
        self._process_group.control_server.break_off(failure.rank, failure.sentence)


class ExternalWorker(ABC):
    """The worker context of an externally started process; signals are polled: others must be told first."""

    def __init__(self, ring: EventRing, on_failure: Callable[[Callable[[int, str], None]], None]) -> None:
        """`on_failure` registers what ends this worker's waits when another has failed: `act(rank, sentence)`."""
        self.record, self._on_failure = ring.record, on_failure
        self._stack = ExitStack()
        self._signals: list[int] = []
        self._worker_links: WorkerLinks | None = None

    def connect(self, worker_links: WorkerLinks) -> None:
        """A worker that fails or misses heartbeats ends this one's waits on its links."""
        self._worker_links = worker_links
        self._on_failure(worker_links.abort)

    @abstractmethod
    def _end(self, error: BaseException) -> BaseException:
        """The exception to raise in place of the one that ended this worker's part."""

    def _raise_signals(self) -> None:
        if self._signals:
            raise as_exception(self._signals[0])

    def __enter__(self) -> Self:
        self._signals = self._stack.enter_context(counted_signals())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if error is None:
            self._raise_signals()
            return
        reported = self._end(error)
        if reported is not error:
            raise reported from error


class LeadingWorker(ExternalWorker):
    """Worker 0, in the leading process: it reports directly to `fit`."""

    def __init__(
        self,
        stage: Stage,
        process_group: ProcessGroup,
        listener: ControlListener,
        ring: EventRing,
        rows: RowsInOrder,
    ) -> None:
        super().__init__(ring, listener.on_failure)
        self._stage, self._process_group, self._listener, self._rows = stage, process_group, listener, rows
        self._step, self._asked_to_stop = 0, False

    def mark(self, step: int, state: State, *, place: tuple[int, int] | None = None) -> None:
        del state, place
        self._step = step

    def note(self, note: WorkerNote) -> None:
        """Deliver a note in the thread of `fit`, as everything that callbacks receive."""
        self._stage.hear(note, self._rows)

    def hear_others(self) -> None:
        said = self._listener.said
        while not said.empty():
            reported = said.get()
            if isinstance(reported, str):
                self._stage.say(reported)
            else:
                self._stage.hear(NOTES.read(reported), self._rows)

    def stop_requested(self) -> bool:
        """Whether `fit` requests a stop; if so, the other workers are asked, too."""
        self._raise_signals()
        self.hear_others()
        wanted, server = self._stage.stop_wanted(), self._process_group.control_server
        if wanted and not self._asked_to_stop:
            self._asked_to_stop = True
            for rank in server.members:
                server.ask_to_stop(rank)
        return wanted

    def _end(self, error: BaseException) -> BaseException:
        follows = isinstance(error, Aborted | PeerTimeout | WorkerFailed)
        silent = self._worker_links.silent if follows and self._worker_links else None
        patience_s = 0.0 if not follows else _CAUSE_S if silent is not None else _REPORT_S
        failure = self._listener.wait_for_failure(patience_s)
        if failure is None and self._signals:  # torchrun ends the others when one has failed
            failure = self._listener.wait_for_failure(_CAUSE_S)
        if silent is not None and (failure is None or failure.is_consequence):
            return WorkerFailed(silent[1], worker_rank=silent[0])
        if failure is not None:
            return failure.error()
        if not isinstance(error, Exception) or isinstance(error, WorkerFailed):
            return error
        # An error of the leader becomes a WorkerFailed, like any worker's, with its traceback.
        reported, name = report(error, self._step), self._process_group.place.name
        sentence = f"{name} raised {reported.error} at step {self._step}: {printable(reported.message)}"
        return Failure(rank=0, sentence=sentence, name="worker 0", reported=reported).error()


class MemberWorker(ExternalWorker):
    """A worker other than the leader: it reports over its control connection."""

    def __init__(self, connection: ControlConnection) -> None:
        def on_failure(act: Callable[[int, str], None]) -> None:
            connection.on_over(lambda broken: act(broken.rank, broken.sentence))

        super().__init__(connection.ring, on_failure)
        self._connection = connection

    def mark(self, step: int, state: State, *, place: tuple[int, int] | None = None) -> None:
        self._connection.mark(step, state, place=place)

    def note(self, note: WorkerNote) -> None:
        self._connection.send(NOTES.write(note))

    def stop_requested(self) -> bool:
        self._raise_signals()
        return self._connection.stop_requested()

    def _end(self, error: BaseException) -> BaseException:
        """Report to the leader what ended this process; what to raise is the run's failure if this follows from it.

        A peer without heartbeat is named if the leader, which may be cut off as well, does not say what happened.
        """
        connection, follows = self._connection, isinstance(error, Aborted | PeerTimeout | WorkerFailed)
        is_signal = isinstance(error, SystemExit | KeyboardInterrupt)
        over, missed = connection.over, self._worker_links.silent if follows and self._worker_links else None
        if over is None:
            reported = Aborted(f"{connection.name} was ended by a signal") if is_signal else error
            connection.fail(reported if missed is None else Aborted(missed[1]))
            if follows:
                over = connection.wait_over(_REPORT_S if missed is None else _CAUSE_S)
        if missed is not None and (over is None or over.is_lost):
            return WorkerFailed(missed[1], worker_rank=missed[0])
        if over is None or is_signal:
            return error
        return WorkerFailed(over.sentence, worker_rank=over.rank)


@dataclass(kw_only=True)
class WorkerLinks:
    """One worker's connections to the others; made by `connect_worker`."""

    resources: Resources
    rendezvous: Rendezvous
    files: SharedGroupFiles | None
    alarm: Alarm
    silent: tuple[int, str] | None = None  # the rank that missed its heartbeats, and the sentence on it
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def abort(self, rank: int, sentence: str) -> None:
        """From any thread: end this host's waits because `rank` has failed; idempotent."""
        with self._lock:
            if self._closed:
                return
            self.alarm.ring(rank, sentence)
            if self.files is not None:
                here = self.rendezvous.here
                self.files.abort(here.index(rank) if rank in here else None)
            for link in self.resources.links().values():
                if isinstance(link, TcpLink):
                    link.interrupt()

    def missed(self, rank: int, sentence: str) -> None:
        """From the heartbeat thread: `rank` missed its heartbeats. Reported at once; this host's waits end."""
        self.silent = rank, sentence
        _log.warning("%s", sentence)
        self.abort(rank, sentence)

    def close(self) -> None:
        """No wait is under way, and none ends by `abort` from here on."""
        with self._lock:
            self._closed = True


@contextmanager
def connect_worker(
    party: ProcessGroup | GroupMember,
    store: RendezvousStore,
    strategy: Strategy,
    *,
    device: str,
    seed: int,
    timeout_s: float,
) -> Iterator[WorkerLinks]:
    """Collective: rendezvous, then open shared memory and links as `strategy` needs; UserError where it cannot."""
    place = party.place
    with ExitStack() as stack:
        rendezvous = stack.enter_context(
            meet(store, rank=place.rank, world=place.world, name="fit", timeout_s=timeout_s)
        )
        alarm, several = Alarm(), len(rendezvous.hosts) > 1
        helpers = strategy.processes(1).get("helper", 0)
        several_links: list[dict[int, Link]] = [{} for _ in range(strategy.facts.streams if several else 1)]
        for links in several_links:
            stack.push(partial(_let_go, links))
        files: SharedGroupFiles | None = None
        group: Callable[[], SharedGroup] = no_group

        def check_peers() -> None:  # while waiting on the run's key-value store
            lost = alarm.lost()
            if lost is not None:
                raise WorkerFailed(lost[1], lost[0])

        for number, links in enumerate(several_links):
            _open_links(links, party, store, strategy, rendezvous, timeout_s, f"link {number}")
        if not helpers:  # the members of the group
            files = stack.enter_context(share_group_files(rendezvous, "gradients", timeout_s))
            group = partial(attach_group, files, rendezvous, timeout_s)
        resources = Resources(
            rank=place.rank,
            world=place.world - helpers,
            helpers=helpers,
            timeout_s=timeout_s,
            group=no_group if several else group,
            host_group=group,
            shares_memory=files is not None and not several,
            links=lambda: several_links[0],
            more_links=several_links[1:],
            seed=seed,
            device=device_of(device, rendezvous.local_rank),
            hosts=rendezvous.hosts if several else (),
            torch_store=partial(RunStore, store, "torch", timeout_s, check_peers),
            in_the_clear=party.security.anywhere and not party.security.tls,
            alarm=alarm,
        )
        worker_links = WorkerLinks(resources=resources, rendezvous=rendezvous, files=files, alarm=alarm)
        stack.callback(worker_links.close)
        address = party.address if several else "127.0.0.1"
        heartbeats = open_heartbeats(
            place.rank, place.world, store, address=address, timeout_s=timeout_s, on_lost=worker_links.missed
        )
        stack.callback(heartbeats.close)
        alarm.mark = heartbeats.mark
        with with_threads(threads_per_role(len(rendezvous.here))):
            yield worker_links


def _open_links(
    links: dict[int, Link],
    party: ProcessGroup | GroupMember,
    store: RendezvousStore,
    strategy: Strategy,
    rendezvous: Rendezvous,
    timeout_s: float,
    purpose: str,
) -> None:
    """Collective: add the links that this worker needs; the caller closes those that are there if one fails.

    UserError where the strategy cannot span these hosts. No worker raises it before all have reached this point: an
    earlier error would end the run for workers that are still connecting, and those that already accept connections
    would wait in vain.
    """
    if len(rendezvous.hosts) > 1:
        try:
            strategy.across_hosts(rendezvous.hosts)
        except UserError:
            store.add("refused", 1)
            comes_true(lambda: int(store.get("refused")) >= rendezvous.world, _ALL_MET_S)
            raise
        links.update(share_links(rendezvous, timeout_s, purpose=purpose))
        links.update(
            open_links(
                rendezvous.rank,
                [rank for rank in range(rendezvous.world) if rank not in rendezvous.here],
                store,
                address=party.address,
                token=party.token,
                security=party.security,
                timeout_s=timeout_s,
                purpose=purpose,
            )
        )
    elif strategy.facts.uses_links:
        links.update(share_links(rendezvous, timeout_s, network=strategy.uses_network, purpose=purpose))


def _let_go(links: Mapping[int, Link], kind: type[BaseException] | None, *_: object) -> None:
    """Close links that an exchange left open; without a goodbye where this worker failed, so that no peer waits."""
    for link in links.values():
        if kind is not None and isinstance(link, TcpLink):
            link.close(silently=True)
        link.close()
