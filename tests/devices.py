"""A server of devices for tests: its application in a loop of its own, asked without sockets, and devices to ask it."""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from manyhands.data.store.rundir import parameter_shapes
from manyhands.errors import ManyhandsError
from manyhands.strategies.federated.client_data import Partition
from manyhands.strategies.federated.deployed.device_client import Device, DevicePlan, enrol
from manyhands.strategies.federated.deployed.device_job import FederatedJob, RoundSettings, initial_model
from manyhands.strategies.federated.deployed.device_server import DeviceApp
from manyhands.strategies.federated.deployed.protocol import Reply, body_hash, request_text
from manyhands.strategies.federated.deployed.rounds_server import RoundServer
from manyhands.strategies.federated.deployed.run_files import TOKENS, DeviceState, ServerFiles
from manyhands.strategies.federated.secure.primitives import sign
from manyhands.task import Task
from manyhands.workloads.builtin_task import BuiltinTask
from manyhands.workloads.registry import WORKLOADS, Workload, load

_STEP_S = 60.0
POINTS = 96


def points(_: Any = None) -> Task:
    """Points on both sides of a line: trained in milliseconds."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(POINTS, 4, generator=generator)
    labels = (inputs @ torch.tensor([1.0, -2.0, 0.5, 1.5]) > 0).long()
    return Task(
        name="points",
        model=lambda: nn.Linear(4, 2),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        data=(inputs, labels),
        optimizer=partial(torch.optim.SGD, lr=0.5),
        evaluation=(inputs, labels),
        metrics={"accuracy": lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float().mean()},
    )


@dataclass(frozen=True)
class _NoOptions:
    pass


TOY: BuiltinTask[Any] = BuiltinTask(
    name="points", help="points", options_type=_NoOptions, make=points, epochs=1
)


def offer(monkeypatch: pytest.MonkeyPatch, toy: BuiltinTask[Any] = TOY) -> None:
    """Have the toy, or another form of it, among the built-in tasks."""
    monkeypatch.setattr("devices.TOY", toy)
    load.cache_clear()
    monkeypatch.setitem(WORKLOADS, "points", Workload(task="devices:TOY"))


def job_for(strategy: str, *, rounds: int = 3, **settings: Any) -> FederatedJob:
    """Points, by this strategy, with short waits."""
    usual: dict[str, Any] = {"deadline_s": 20.0, "select_s": 20.0, "hold_s": 0.5, "stage_s": 10.0}
    return FederatedJob.make(
        TOY.build(),
        f"federated {strategy}",
        RoundSettings(rounds=rounds, **{**usual, **settings}),
        schema="inputs=float32:4,labels=int64",
    )


def write_parts(
    folder: Path, parts: int, task: Task | None = None, names: tuple[str, ...] = ("inputs", "labels")
) -> None:
    """The task's data as the simulation would split it, a file for each device."""
    task = task or TOY.build()
    named = task.data if isinstance(task.data, dict) else dict(zip(names, task.data, strict=True))
    for number, chosen in enumerate(Partition.parse("iid").split(task.data, task.samples, parts, 0)):
        columns = {name: column[chosen].clone() for name, column in named.items()}
        save_file(columns, folder / f"{number}.safetensors")


@dataclass
class ServerClock:
    """The server's time: that of its loop, and what a test has let pass besides, for which nobody sleeps."""

    loop: asyncio.AbstractEventLoop
    ahead_s: float = 0.0

    def __call__(self) -> float:
        return self.loop.time() + self.ahead_s


@dataclass
class Served:
    """A server that is asked by calls."""

    app: DeviceApp
    loop: asyncio.AbstractEventLoop
    clock: ServerClock
    reported: list[str] = field(default_factory=list)

    @property
    def server(self) -> RoundServer:
        return self.app.server

    def ask(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        receive: Any = None,
    ) -> Reply:
        """Any request; `receive` gives its body otherwise than at once."""
        return self.begin(method, target, body, headers, receive).result(_STEP_S)

    def begin(
        self,
        method: str,
        target: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        receive: Any = None,
    ) -> Future[Reply]:
        """A request whose answer is waited for later."""
        sent = {"content-length": str(len(body)), **(headers or {})}
        return asyncio.run_coroutine_threadsafe(self._ask(method, target, body, sent, receive), self.loop)

    async def _ask(
        self, method: str, target: str, body: bytes, headers: dict[str, str], receive: Any
    ) -> Reply:
        parts = urlsplit(target)
        scope = {
            "type": "http",
            "method": method,
            "path": parts.path,
            "raw_path": parts.path.encode(),
            "query_string": parts.query.encode(),
            "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()],
        }
        answers: list[Any] = []

        async def at_once() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            answers.append(message)

        await self.app(scope, receive or at_once, send)
        return Reply(answers[0]["status"], answers[1]["body"])

    def signed(
        self, client: int, secret: bytes, method: str, target: str, body: bytes = b"", model: str = ""
    ) -> Reply:
        """A client's request."""
        return self.ask(method, target, body, self.headers(client, secret, method, target, body, model))

    def headers(
        self, client: int, secret: bytes, method: str, target: str, body: bytes = b"", model: str = ""
    ) -> dict[str, str]:
        """Those of a client's request."""
        text = request_text(self.server.plan["run"], client, method, target, model, body_hash(body))
        return {
            "x-client": str(client),
            "x-signature": sign(secret, text).hex(),
            "x-model": model,
            "x-body": body_hash(body),
        }

    def sender(self, device_state: DeviceState) -> Any:
        """What a device asks with."""

        def send(method: str, target: str, body: bytes, model: str, most_bytes: int) -> Reply:
            if device_state.client is None:
                return self.ask(method, target, body)
            reply = self.signed(device_state.client, device_state.secret, method, target, body, model)
            assert len(reply.body) <= most_bytes
            return reply

        return send


@contextmanager
def serving(job: FederatedJob, out: Path, *, resume: bool = False) -> Iterator[Served]:
    """The application, ticking, in a thread."""
    with ExitStack() as ending:
        loop = asyncio.new_event_loop()
        ending.callback(loop.close)
        thread = threading.Thread(target=loop.run_forever, name="server of devices", daemon=True)
        thread.start()
        ending.callback(thread.join, 10)
        ending.callback(loop.call_soon_threadsafe, loop.stop)
        shapes = parameter_shapes(initial_model(job.task, job.seed).named_parameters())
        files = ServerFiles.begin(out, job.config(shapes, secrets.token_hex(16)), resume=resume)
        ending.callback(files.close)
        clock, reported = ServerClock(loop), list[str]()
        make = partial(RoundServer, job, files, 0.0, reported.append)
        app = DeviceApp(make, job.settings.hold_s, clock=clock)
        ending.callback(app.close)
        served = Served(app, loop, clock, reported)
        ends = threading.Event()

        async def tick() -> None:
            while not ends.is_set() and served.server.failed is None:
                try:
                    await app.tick()
                except ManyhandsError:
                    if served.server.failed is None:  # else it failed by a request that came first
                        raise
                await asyncio.sleep(0.01)

        ticking = asyncio.run_coroutine_threadsafe(tick(), loop)
        ending.callback(ticking.result, 10)
        ending.callback(ends.set)
        yield served


def make_device(served: Served, folder: Path, number: int, token: str | None, sender: Any = None) -> Device:
    """A device with its part of the points."""
    device_state = DeviceState(folder / f"device-{number}")
    send = sender or served.sender(device_state)
    enrol(served.sender(device_state), device_state, token, "https://test")
    plan = DevicePlan.read(served.server.plan, folder / f"{number}.safetensors")
    device_state.begin(plan.config)
    return Device(send, device_state, plan, sleep=lambda _: None)


def tokens(out: Path) -> list[str]:
    """Those that a server has made."""
    return (out / TOKENS).read_text().split()


def ask_work(served: Served, *devices: object) -> list[dict[str, object]]:
    """All of them at once: a round begins with the last, and nobody's question is held back until then in vain."""
    target, asked = "/work?have=1&after=0", []
    for device in devices:
        own = device._state  # type: ignore[attr-defined]
        asked.append(served.begin("GET", target, b"", served.headers(own.client, own.secret, "GET", target)))
    return [json.loads(reply.result(_STEP_S).body) for reply in asked]


class Hostile:
    """A server with an open round of two clients, and one of them, who is up to something."""

    def __init__(self, served: Served, folder: Path) -> None:
        given = tokens(folder / "run")
        self.served, self.folder = served, folder
        self.honest, self.device = (make_device(served, folder, number, given[number]) for number in range(2))
        ask_work(served, self.honest, self.device)
        self.secret = self.device._state.secret
        self.model = served.server.model_hash
        self.form = served.server.form
        self.zeros = [torch.zeros(shape) for _, _, shape in self.form.rows]

    def body(self, change: list[torch.Tensor] | None = None, **about: str) -> bytes:
        said = {"samples": "5", "steps": "1", "loss": "0.5", **about}
        return self.form.encode(change or self.zeros, said)

    def report(self, body: bytes, attempt: int = 1, **other: object) -> tuple[int, str]:
        values = {"client": 1, "secret": self.secret, "model": self.model, **other}
        reply = self.served.signed(
            values["client"], values["secret"], "POST", f"/report/{attempt}", body, values["model"]
        )  # fmt: skip
        return reply.status, reply.body.decode()
