"""A trained model behind HTTP, put together: the web thread, the switchboard in it, the workers and the page.

client ──HTTP──► ModelApp ──► Switchboard ──batch──► worker 1 ┐ forks, each with the whole model
                                 ▲ Dispatch          worker 2 ┘ Replicas starts and replaces them

POST /predict   {"inputs": [...]} → {"answers": [...]}, one for each input, or {"error": "one sentence"}

A model that writes text has a `TextSwitchboard` in the place of the switchboard, workers that let a text join between
two tokens, and POST /generate.

`routes` has the other addresses, and what each status means.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from manyhands.errors import ManyhandsError, UserError, num_of
from manyhands.observe.analyse.serving_view import ServingTally, ServingView
from manyhands.observe.draw import serving_page as drawn
from manyhands.places.local.packed_job import pack
from manyhands.places.local.supervisor import Ended, Role, Said, Silent, Supervisor
from manyhands.places.local.template import warm
from manyhands.serving import page_app
from manyhands.serving.batching import BatchLimits, Switchboard
from manyhands.serving.hosting import LOOPBACK, Listening, WebThread
from manyhands.serving.model_app import BodyLimits, ModelApp
from manyhands.serving.model_parts import ModelParts
from manyhands.serving.model_replica import replica
from manyhands.serving.page_app import PageApp
from manyhands.serving.routes import openapi
from manyhands.serving.text_generator import TextGenerator
from manyhands.serving.text_replica import text_replica
from manyhands.serving.text_scheduler import TextLimits
from manyhands.serving.text_switchboard import TextSwitchboard
from manyhands.serving.worker_switchboard import WorkerSwitchboard
from manyhands.workloads.predictor import Predictor

START_S = 120.0
_POLL_S = 0.05
_STOP_S = 10.0


class Staffing:
    """Decides when a worker that ended is replaced, and when to give up; pure."""

    MOST_FAILED = 3  # workers that may end, one after another, before one of them was ready

    def __init__(self) -> None:
        self._ready: set[int] = set()
        self._failed = 0

    def ready(self, worker: int) -> None:
        self._ready.add(worker)
        self._failed = 0

    def replaces(self, worker: int) -> bool:
        """A worker has ended: return whether to replace it; False after too many consecutive failed starts."""
        self._failed += worker not in self._ready
        self._ready.discard(worker)
        return self._failed < self.MOST_FAILED


class Replicas:
    """`count` workers that serve `predictor`; `start` returns when one answers, `stop` when all are gone.

    All have the model as of the server's start: its weights are packed once, and every worker maps the same pages. A
    worker is a process, or several where the model is cut into parts; its number is that of the first.
    `on_start(worker, socket)` and `on_note(now, sentence, death)` are called in the thread of the replicas.
    """

    def __init__(
        self,
        predictor: Predictor[Any],
        count: int,
        on_start: Callable[[int, socket.socket], None],
        on_note: Callable[[float, str, bool], None],
    ) -> None:
        self._predictor, self._count = predictor, count
        self._on_start, self._on_note = on_start, on_note
        self._last = 0
        self._worker_of: dict[int, int] = {}  # by the number of a process
        self.to_kill: queue.SimpleQueue[int] = queue.SimpleQueue()  # workers, each of which is then replaced
        self._wanted = threading.Event()
        self._answers = threading.Event()
        self.ended = threading.Event()  # on their own; `failure` says why
        self.failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="replicas", daemon=True)

    def start(self) -> None:
        """Start the workers, and wait until one answers; raises the failure of the first ones."""
        self._wanted.set()
        warm()  # start the fork server here: it would otherwise end with the thread that first used it
        deadline = time.monotonic() + START_S
        self._thread.start()
        try:
            while not self._answers.wait(_POLL_S):
                if self.failure is not None or time.monotonic() > deadline:
                    why = self.failure or "none was ready in time"
                    raise ManyhandsError(f"no worker could serve the model: {why}")
        except BaseException:  # Ctrl-C as well: workers that load their model would be left behind
            self.stop()
            raise

    def stop(self) -> None:
        self._wanted.clear()
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        try:
            with ExitStack() as resources:
                parts = ModelParts(self._predictor.model, resources)
                packed = pack(self._predictor)
                resources.callback(os.close, packed)
                supervisor = Supervisor(num_members=self._count * parts.count, start_timeout_s=START_S)
                self._watch(resources.enter_context(supervisor), packed, parts)
        except BaseException as failure:  # reported by `start`, and on the server's page
            self.failure = failure
        finally:
            self.ended.set()

    def _watch(self, supervisor: Supervisor, packed: int, parts: ModelParts) -> None:
        staffing = Staffing()
        for _ in range(self._count):
            self._start(supervisor, packed, parts)
        while self._wanted.is_set():
            while not self.to_kill.empty():
                supervisor.kill(self.to_kill.get())
            for event in supervisor.poll(_POLL_S):
                match event:
                    case Said(member=worker):
                        staffing.ready(worker)
                        self._on_note(time.monotonic(), f"worker {worker} is ready", False)
                        self._answers.set()
                    case Silent(member=worker, seen=seen):
                        sentence = f"worker {worker} does not respond ({seen}); it is killed"
                        self._on_note(time.monotonic(), sentence, False)
                        supervisor.kill(worker)
                    case Ended(member=member, failure=failure) if member in self._worker_of:
                        worker = self._worker_of[member]
                        if failure is None and member != worker:
                            continue  # its first process is gone, which says why
                        for other in [one for one, its in self._worker_of.items() if its == worker]:
                            del self._worker_of[other]
                            supervisor.kill(other)
                        why = failure.sentence if failure is not None else f"{event.name} has ended"
                        self._on_note(time.monotonic(), f"{why}; a new one replaces it", True)
                        if not staffing.replaces(worker):
                            raise ManyhandsError(why)
                        self._start(supervisor, packed, parts)

    def _start(self, supervisor: Supervisor, packed: int, parts: ModelParts) -> None:
        worker = self._last + 1
        ours, theirs = socket.socketpair()
        with ExitStack() as copies:  # the worker has its own; when it dies, ours must reach end of file
            copies.enter_context(theirs)
            more, others = parts.roles(f"worker {worker}", copies)
            descriptors = {"model": packed, "requests": theirs.fileno(), **more}
            target = text_replica if isinstance(self._predictor, TextGenerator) else replica
            first = Role(name=f"worker {worker}", target=target, descriptors=descriptors)
            for role in (first, *others):
                self._last += 1
                self._worker_of[supervisor.start(role, self._last)] = worker
        self._on_start(worker, ours)


_log = logging.getLogger("manyhands")
MOST_WORKERS = 256
_FAREWELL_S = 3.0
_LOOK_S = 0.05
_MOST_CONNECTIONS = 512
_SHARE = 2  # every second free descriptor is for a connection; the others are for the workers

_PAGE: page_app.Drawn[ServingView] = page_app.Drawn(
    title=drawn.serving_title, sections=drawn.serving_sections, report=drawn.serving_report
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """How a model is served."""

    workers: int = 2
    host: str = LOOPBACK
    port: int = 0
    names: tuple[str, ...] = ()  # further names that clients reach the server by, as in the Host header
    token: str | None = field(default=None, repr=False)  # None: a new one at every start
    batches: BatchLimits = field(default_factory=BatchLimits)
    bodies: BodyLimits = field(default_factory=BodyLimits)
    cache_bytes: int = TextLimits().cache_bytes  # of each worker that writes text

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MOST_WORKERS:
            raise UserError(f"workers={self.workers} must be from 1 to {MOST_WORKERS}")
        if self.token is not None and not _TOKEN.fullmatch(self.token):
            raise UserError("the token must have at least 16 letters, digits or . _ ~ + / = -")


_TOKEN = re.compile(r"[\w.~+/=-]{16,}", re.ASCII)


class ModelServer:
    """Serves `predictor` while entered; a context manager. `url` opens its page; clients use `address`, `token`."""

    def __init__(self, predictor: Predictor[Any], model: str, options: ServeOptions | None = None) -> None:
        page_app.require_web()
        from manyhands.serving.connections import room_here  # requires the web extra

        self._options = options or ServeOptions()
        self._predictor, self._model = predictor, model
        self._listening = Listening(
            self._options.host,
            self._options.port,
            "the server",
            names=self._options.names,
            token=self._options.token,
        )
        self.url, self.address = self._listening.url, self._listening.address
        self.token = self._listening.guard.token
        self._tally = ServingTally(time.monotonic())
        self._replicas = Replicas(predictor, self._options.workers, self._on_start, self._tally.note)
        self._switchboard = self._make_switchboard(predictor)
        guard = self._listening.guard
        self._page: PageApp[ServingView] = PageApp(self.view, guard, drawn.serving_metrics, drawn=_PAGE)
        bodies = self._options.bodies
        about = openapi(
            predictor.task,
            predictor.takes,
            predictor.example,
            bodies.inputs,
            writes_text=isinstance(predictor, TextGenerator),
        )
        app = ModelApp(self._switchboard, self._page, self._tally, bodies, about)
        self._web = WebThread(app, self._listening, room_here(_MOST_CONNECTIONS, _SHARE))
        self._example = json.dumps(predictor.example) if predictor.example is not None else "…"

    def _make_switchboard(self, predictor: Predictor[Any]) -> WorkerSwitchboard:
        batches, kill = self._options.batches, self._replicas.to_kill.put
        if not isinstance(predictor, TextGenerator):
            return Switchboard(batches, self._tally, kill)
        predictor.limit(
            TextLimits(rows=batches.batch, waiting=batches.waiting, cache_bytes=self._options.cache_bytes)
        )
        return TextSwitchboard(predictor, batches, self._tally, kill)

    def __enter__(self) -> Self:
        self._web.start()
        try:
            self._replicas.start()
        except BaseException:
            self._web.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._finish()
        finally:  # after a second Ctrl-C, too, which ends the waiting
            if self._web.loop is not None:
                self._web.loop.call_soon_threadsafe(self._switchboard.close)
            self._replicas.stop()
            self._web.stop()

    def _finish(self) -> None:
        """Refuse new requests, wait for the answers to the others, then for the pages to show the end."""
        self._switchboard.refuse()
        if waiting := self._switchboard.unanswered:
            _log.warning(
                "answering %s before the server ends; Ctrl-C again: at once", num_of(waiting, "request")
            )
        deadline = (
            time.monotonic() + self._options.batches.deadline_s
        )  # by then each has been answered or refused
        while self._switchboard.unanswered and not self._replicas.ended.is_set():
            if time.monotonic() > deadline:
                break
            time.sleep(_LOOK_S)
        self._page.end("The server has ended; manyhands serve starts it again.")
        deadline = time.monotonic() + _FAREWELL_S
        while self._page.num_streams and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def wait(self) -> None:
        """Block until interrupted; raises where no worker could be kept alive."""
        while not self._replicas.ended.is_set():
            time.sleep(_LOOK_S)
        raise ManyhandsError(f"the workers failed repeatedly: {self._replicas.failure}")

    def view(self) -> ServingView:
        return ServingView(
            model=self._model,
            task=self._predictor.task,
            takes=self._predictor.takes,
            example=self._example,
            waiting=self._switchboard.core.waiting_inputs,
            workers=self._switchboard.replicas(),
            wanted=self._options.workers,
            **self._tally.figures(time.monotonic()),  # type: ignore[arg-type]
        )

    def _on_start(self, worker: int, end: socket.socket) -> None:
        assert self._web.loop is not None, "the web thread is started before the workers are"
        self._switchboard.attach(self._web.loop, worker, end)
