"""The device server as a process: serves HTTPS until all rounds count and devices have the last model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import socket
import ssl
import stat
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs

from manyhands.data.store.rundir import parameter_shapes
from manyhands.errors import ManyhandsError, UserError, printable
from manyhands.strategies.federated.deployed import protocol
from manyhands.strategies.federated.deployed.device_job import FederatedJob, initial_model
from manyhands.strategies.federated.deployed.protocol import MessageRejected, whole_in
from manyhands.strategies.federated.deployed.rounds_server import RoundServer
from manyhands.strategies.federated.deployed.run_files import ServerFiles
from manyhands.strategies.federated.round_core import RoundPhase
from manyhands.strategies.federated.secure.primitives import need_cryptography
from manyhands.transport.certificates import make_certificates
from manyhands.transport.security import AUTHORITY, CERTIFICATE, KEY, validity

_Receive = Callable[[], Awaitable[Mapping[str, Any]]]
_Send = Callable[[Mapping[str, Any]], Awaitable[None]]
_Made = TypeVar("_Made")
_LOOK_S, _TICK_S, _IDLE_S = 0.05, 0.05, 75
_WAITING = 1024
_MAX_HEADER_BYTES = 16 << 10
_CERTIFICATES, _CERTIFICATE_DAYS = "certificates", 365.0
_BODY_S = 60.0
_BODIES = 2  # of one client that are read at once: the newest, and one whose connection was lost
_JSON, _BYTES, _TEXT = "application/json", "application/octet-stream", "text/plain; charset=utf-8"


class DeviceApp:
    """The ASGI application; only its worker thread touches `server`. Call `close` at the end."""

    def __init__(
        self, make: Callable[[], RoundServer], hold_s: float, clock: Callable[[], float] = time.monotonic
    ):
        self._hold_s, self._clock = hold_s, clock
        self._thread = ThreadPoolExecutor(1, "rounds")
        try:
            self.server = self._thread.submit(make).result()
        except BaseException:
            self._thread.shutdown()
            raise
        self._version: tuple[Any, ...] = ()
        self._reading: Counter[int] = Counter()
        self._changed = asyncio.Event()
        self.with_last_model: set[int] = set()  # clients that know of the end of the run, and have its model

    def close(self) -> None:
        self._thread.shutdown()

    async def tick(self) -> None:
        """Deadlines; to be called every few hundredths of a second."""
        await self._run(self.server.tick, self._clock())

    async def _run(self, call: Callable[..., _Made], *arguments: Any) -> _Made:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, partial(call, *arguments))
        finally:
            state, secure = self.server.state, self.server.secure
            version = state.phase, state.done, state.attempt, secure and secure.server.stage
            if version != self._version:
                self._version = version
                self._changed.set()
                self._changed = asyncio.Event()

    async def __call__(self, scope: Mapping[str, Any], receive: _Receive, send: _Send) -> None:
        if scope["type"] != "http":
            return
        try:
            status, kind, body = await self._answer(scope, receive)
        except MessageRejected as refused:
            status, kind, body = refused.status, _TEXT, f"{refused}\n".encode()
        except Exception as error:
            # where the run has failed, the server ends (`RoundServer.failed`); devices ask the next one
            self.server.notify(f"a request failed: {type(error).__name__}: {printable(str(error))}")
            status, kind, body = 503, _TEXT, b"the server could not answer; ask again later\n"
        headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
        if status in (401, 403, 411, 413):  # the rest of an unauthenticated request is not read
            headers.append((b"connection", b"close"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _answer(self, scope: Mapping[str, Any], receive: _Receive) -> tuple[int, str, bytes]:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if "transfer-encoding" in headers:
            # also where no body is read: what follows it could pass for a request
            raise MessageRejected(411, "the request has Transfer-Encoding; send Content-Length instead")
        words = scope["path"].strip("/").split("/")
        match scope["method"], *words:
            case "POST", "enrol":
                body = await _body(receive, headers, protocol.SMALL_BYTES)
                request = protocol.read_object(body, "the enrolment")
                return 200, _JSON, _json(await self._run(self.server.enrol, request))
            case "POST", "report", attempt:
                number = whole_in({"attempt": attempt}, "attempt")
                server, client = self.server, await self._who(scope, headers)
                await self._run(server.expects, client, number)
                body = await self._signed_body(client, headers, receive, server.updates.most_bytes)
                report = server.report, client, number, headers.get(protocol.MODEL, ""), body, self._clock()
                return 200, _JSON, _json(await self._run(*report))
            case "POST", "leave", attempt:
                client = await self._who(scope, headers)
                number = whole_in({"attempt": attempt}, "attempt")
                return 200, _JSON, _json(await self._run(self.server.leave, client, number, self._clock()))
            case (("GET" | "POST"), "secure", attempt, stage):
                numbers = {"attempt": attempt, "stage": stage}
                number, at = whole_in(numbers, "attempt"), whole_in(numbers, "stage")
                client = await self._who(scope, headers)
                if scope["method"] == "GET":
                    secure_attempt = self.server.secure_attempt
                    found = await self._polled(lambda: secure_attempt(number).message_for(client, at))
                    return (204, _BYTES, b"") if found is None else (200, _BYTES, found)
                limit = await self._run(lambda: self.server.secure_attempt(number).most_bytes)
                body = await self._signed_body(client, headers, receive, limit)
                await self._run(self.server.secure_message, client, number, at, body, self._clock())
                return 200, _JSON, _json({})
            case "GET", "plan":
                await self._who(scope, headers)
                return 200, _JSON, _json(self.server.plan)
            case "GET", "model":
                await self._who(scope, headers)
                return 200, _BYTES, await self._run(lambda: self.server.model_body)
            case "GET", "work":
                client = await self._who(scope, headers)
                values = parse_qs(scope["query_string"].decode("latin-1"))
                query = {name: found[0] for name, found in values.items()}
                have, after = whole_in(query, "have") - 1, whole_in(query, "after")  # 0: it has no model yet
                work = await self._polled(lambda: self.server.work(client, have, after, self._clock()))
                if work["state"] == "done" and have == work["rounds"]:
                    self.with_last_model.add(client)
                return 200, _JSON, _json(work)
        raise MessageRejected(404, "this address does not exist; see docs/federated-deployment.md")

    async def _who(self, scope: Mapping[str, Any], headers: Mapping[str, str]) -> int:
        path, query = (scope[name].decode("latin-1") for name in ("raw_path", "query_string"))
        path = path.partition("?")[0]  # as the client wrote and signed it
        target = f"{path}?{query}" if query else path
        return await self._run(self.server.authenticated, headers, scope["method"], target)

    async def _signed_body(
        self, client: int, headers: Mapping[str, str], receive: _Receive, most_bytes: int
    ) -> bytes:
        if self._reading[client] >= _BODIES:
            raise MessageRejected(429, f"client {client} is sending {_BODIES} requests; send one at a time")
        self._reading[client] += 1
        try:
            body = await _body(receive, headers, most_bytes)
        finally:
            self._reading[client] -= 1
        if protocol.body_hash(body) != headers.get(protocol.BODY):
            raise MessageRejected(401, f"the body does not match the signature of client {client}")
        return body

    async def _polled(self, call: Callable[[], tuple[_Made, bool]]) -> _Made:
        """Long polling: an answer, held back until it should be known at once, or `hold_s` have passed."""
        until = self._clock() + self._hold_s
        while True:
            changed = self._changed
            answer, at_once = await self._run(call)
            if at_once or self._clock() >= until:
                return answer
            with contextlib.suppress(TimeoutError):  # the server is asked again
                await asyncio.wait_for(changed.wait(), max(_LOOK_S, until - self._clock()))


async def _body(receive: _Receive, headers: Mapping[str, str], most_bytes: int) -> bytes:
    """The body, of the declared length; MessageRejected before more than `most_bytes` are read, or if it is slow."""
    declared = headers.get("content-length", "")
    if not (declared.isascii() and declared.isdigit() and len(declared) < 20):
        raise MessageRejected(411, "the request has no valid Content-Length")
    length = int(declared)
    if length > most_bytes:
        raise MessageRejected(413, f"the request has {length} bytes; at most {most_bytes} are allowed")
    body, more = bytearray(), True
    try:
        async with asyncio.timeout(_BODY_S):
            while more:
                message = await receive()
                if message["type"] != "http.request":
                    raise MessageRejected(400, "the request ended before its body")
                body += message.get("body", b"")
                more = message.get("more_body", False)
                if len(body) > length:
                    raise MessageRejected(413, f"the request is longer than its Content-Length, {length}")
    except TimeoutError:
        raise MessageRejected(408, f"the request took more than {_BODY_S:g} s") from None
    if len(body) != length:
        raise MessageRejected(400, "the request is shorter than its Content-Length")
    return bytes(body)


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingPlace:
    """Where and how the server runs: run directory, address, TLS certificate, and how long it lingers at the end."""

    out: Path
    resume: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    tls: Path | None = None  # a folder with cert.pem and key.pem; None: one is made for `host`
    linger_s: float = 30.0  # how long devices are waited for after the last round, to fetch the model


def serve_devices(job: FederatedJob, place: ServingPlace, notify: Callable[[str], None]) -> None:
    """Hold all rounds; ManyhandsError where it gave up. `notify` hears what happens, a sentence each."""
    try:
        import uvicorn  # noqa: F401
    except ImportError:
        raise UserError("serving devices needs the web extra: pip install 'manyhands[web,tls]'") from None
    need_cryptography()
    if place.tls is not None:
        _check_tls(place.tls)
    shapes = parameter_shapes(initial_model(job.task, job.seed).named_parameters())
    config = job.config(shapes, secrets.token_hex(16))
    with (
        _listening(place.host, place.port) as listener,
        ServerFiles.begin(place.out, config, resume=place.resume) as files,
    ):
        folder = place.tls or place.out / _CERTIFICATES / place.host
        if not folder.is_dir():
            make_certificates(place.out / _CERTIFICATES, [place.host], days=_CERTIFICATE_DAYS)
        _check_tls(folder)  # they may have been made a year ago
        app = DeviceApp(lambda: RoundServer(job, files, time.monotonic(), notify), job.settings.hold_s)
        try:
            host = f"[{place.host}]" if ":" in place.host else place.host
            notify(f"listening at https://{host}:{listener.getsockname()[1]}")
            notify(f"devices verify the server with {folder / AUTHORITY}")
            if app.server.new_tokens is not None:
                notify(f"{app.server.new_tokens}: a token for each device, to enrol once")
            asyncio.run(_serve(app, listener, folder, place))
            if app.server.failed is not None:
                raise ManyhandsError(f"the server has failed: {app.server.failed}") from app.server.failed
            if app.server.state.phase is RoundPhase.GIVEN_UP:
                raise ManyhandsError(
                    f"the server gave up after {app.server.state.done} rounds: too few devices connected or reported; "
                    "start it again with --resume"
                )
        finally:
            app.close()


async def _serve(app: DeviceApp, listener: socket.socket, folder: Path, place: ServingPlace) -> None:
    import uvicorn

    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        log_level="critical",
        lifespan="off",
        ws="none",
        server_header=False,
        http="h11",
        ssl_certfile=str(folder / CERTIFICATE),
        ssl_keyfile=str(folder / KEY),
        timeout_keep_alive=_IDLE_S,
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        timeout_graceful_shutdown=1,
        backlog=_WAITING,
    )
    config.load()
    assert config.ssl is not None, "a certificate was given"
    config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    ticking = asyncio.create_task(_tick(app, place.linger_s))
    try:
        await asyncio.wait({serving, ticking}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.should_exit = True
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking
        await serving


async def _tick(app: DeviceApp, linger_s: float) -> None:
    """Until the run is over and every device that was present has the last model, or has had time enough."""
    while not app.server.state.is_over:
        await app.tick()
        await asyncio.sleep(_TICK_S)
    if app.server.failed is not None:  # as it saved the last round
        return
    complete = app.server.state.phase is RoundPhase.FINISHED
    until = time.monotonic() + (linger_s if complete else 0.0)
    there = set(app.server.state.present)
    while time.monotonic() < until and not (there and there <= app.with_last_model):
        await asyncio.sleep(_TICK_S)
    await asyncio.sleep(_TICK_S)  # the answer to the last one leaves


def _check_tls(folder: Path) -> None:
    for name in (CERTIFICATE, KEY):
        if not (folder / name).is_file():
            why = f"has no {name}; give the folder that `manyhands certificates` made for this host"
            raise UserError(f"--tls {folder}: {why}")
    key = folder / KEY
    if key.stat().st_mode & stat.S_IRWXO:
        raise UserError(f"--tls {folder}: every user of this host can read {KEY}; chmod 600 {key}")

    def refuse() -> str:  # or the terminal would be asked
        raise UserError(f"--tls {folder}: {KEY} is encrypted; write it without a password, mode 0600")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / CERTIFICATE, key, refuse)
        complaint = validity((folder / CERTIFICATE).read_text("ascii")).complaint(datetime.now(UTC))
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        why = f"{CERTIFICATE} and {KEY} are not a certificate and its key: {error}"
        raise UserError(f"--tls {folder}: {why}") from error
    if complaint is not None:
        raise UserError(f"--tls {folder}: {CERTIFICATE}: {complaint}")


def _listening(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: must be between 0 (any free port) and 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_WAITING)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: cannot listen here: {error.strerror}") from error
