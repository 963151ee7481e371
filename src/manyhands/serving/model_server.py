"""A trained model behind HTTP, put together: the web thread, the switchboard in it, the workers and the page.

with ModelServer(predictor, "runs/digits-1", workers=2) as server:
    print(server.url)          the page, with its token
    server.wait()

client ──HTTP──► ModelApp ──► Switchboard ──batch──► worker 1 ┐ forks, each with the whole model
                                 ▲ Dispatch          worker 2 ┘ Replicas starts and replaces them
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Self

from manyhands.errors import ManyhandsError, UserError
from manyhands.observe.analyse.serving_view import ServingTally, ServingView
from manyhands.observe.draw.serving_page import (
    serving_metrics,
    serving_report,
    serving_sections,
    serving_title,
)
from manyhands.serving.batching import BatchLimits
from manyhands.serving.hosting import LOOPBACK, Listening, WebThread
from manyhands.serving.model_app import BodyLimits, ModelApp
from manyhands.serving.page_app import Drawn, PageApp, require_web
from manyhands.serving.replicas import Replicas
from manyhands.serving.switchboard import Switchboard
from manyhands.workloads.predictor import Predictor

__all__ = ["ModelServer", "ServeOptions"]

MOST_WORKERS = 256
_FAREWELL_S = 3.0
_LOOK_S = 0.05
_MOST_CONNECTIONS = 512
_SHARE = 2  # every second free descriptor is for a connection; the others are for the workers

_PAGE: Drawn[ServingView] = Drawn(title=serving_title, sections=serving_sections, report=serving_report)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """How a model is served."""

    workers: int = 2
    host: str = LOOPBACK
    port: int = 0
    batches: BatchLimits = field(default_factory=BatchLimits)
    bodies: BodyLimits = field(default_factory=BodyLimits)

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MOST_WORKERS:
            raise UserError(f"workers={self.workers} must be from 1 to {MOST_WORKERS}")


class ModelServer:
    """Serves `predictor` while entered; a context manager. `url` opens its page; clients use `address`, `token`."""

    def __init__(self, predictor: Predictor[Any], model: str, options: ServeOptions | None = None) -> None:
        require_web()
        from manyhands.serving.connections import room_here  # requires the web extra

        self._options = options or ServeOptions()
        self._predictor, self._model = predictor, model
        self._listening = Listening(self._options.host, self._options.port, "the server")
        self.url, self.address = self._listening.url, self._listening.address
        self.token = self._listening.guard.token
        self._tally = ServingTally(time.monotonic())
        self._replicas = Replicas(predictor, self._options.workers, self._on_start, self._on_note)
        self._switchboard = Switchboard(self._options.batches, self._tally, self._replicas.kill)
        self._page: PageApp[ServingView] = PageApp(
            self.view, self._listening.guard, serving_metrics, drawn=_PAGE
        )
        app = ModelApp(
            self._switchboard, self._page, self._listening.guard, self._tally, self._options.bodies
        )
        self._web = WebThread(app, self._listening, room_here(_MOST_CONNECTIONS, _SHARE))
        self._example = json.dumps(predictor.example)

    def __enter__(self) -> Self:
        self._web.start()
        try:
            self._replicas.start()
        except BaseException:
            self._web.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._page.end("The server has ended; manyhands serve starts it again.")
        deadline = time.monotonic() + _FAREWELL_S
        while self._page.num_streams and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        if self._web.loop is not None:
            self._web.loop.call_soon_threadsafe(self._switchboard.close)
        self._replicas.stop()
        self._web.stop()

    def wait(self) -> None:
        """Block until interrupted; raises where no worker could be kept alive."""
        while not self._replicas.over:
            time.sleep(_LOOK_S)
        raise ManyhandsError(f"the workers could not be kept alive: {self._replicas.failure}")

    def view(self) -> ServingView:
        """Return what the page shows."""
        return ServingView(
            model=self._model,
            task=self._predictor.task,
            takes=self._predictor.takes,
            example=self._example,
            waiting=self._switchboard.waiting,
            workers=self._switchboard.replicas(),
            wanted=self._options.workers,
            **self._tally.figures(time.monotonic()),  # type: ignore[arg-type]
        )

    def _on_start(self, worker: int, end: socket.socket) -> None:
        assert self._web.loop is not None, "the web thread is started before the workers are"
        self._switchboard.attach(self._web.loop, worker, end)

    def _on_note(self, sentence: str, death: bool) -> None:
        self._tally.note(time.monotonic(), sentence, death=death)
