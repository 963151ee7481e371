"""The device server as a process: serves HTTPS until all rounds count and devices have the last model."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from manyhands.errors import UserError
from manyhands.strategies.federated.deployed.app import DeviceApp
from manyhands.strategies.federated.deployed.device_job import FederatedJob
from manyhands.strategies.federated.deployed.rounds_server import RoundServer, require_complete, shapes_of
from manyhands.strategies.federated.deployed.server_files import ServerFiles, new_run
from manyhands.strategies.federated.rounds.round_core import RoundPhase
from manyhands.strategies.federated.secure.primitives import need_cryptography
from manyhands.transport.certificates import make_certificates
from manyhands.transport.security import AUTHORITY, CERTIFICATE, KEY, validity

__all__ = ["ServingPlace", "serve_devices"]

_TICK_S = 0.05
_WAITING = 1024
_MAX_HEADER_BYTES = 16 << 10
_CERTIFICATES = "certificates"
_CERTIFICATE_DAYS = 365.0
_IDLE_S = 75


@dataclass(frozen=True, kw_only=True, slots=True)
class ServingPlace:
    """Where and how the server runs: run directory, address, TLS certificate, and how long it lingers at the end."""

    out: Path
    resume: bool = False
    host: str = "127.0.0.1"
    port: int = 0
    tls: Path | None = None
    """A folder with cert.pem and key.pem; None: one is made in the run directory, for `host`."""
    linger_s: float = 30.0
    """How long devices are waited for after the last round, to fetch the model."""


def serve_devices(job: FederatedJob, place: ServingPlace, tell: Callable[[str], None]) -> None:
    """Hold all rounds; ManyhandsError where it gave up. `tell` hears what happens, a sentence each."""
    _need_web()
    need_cryptography()
    if place.tls is not None:
        _check_tls(place.tls)
    with (
        _listening(place.host, place.port) as listener,
        ServerFiles.begin(place.out, job.config(shapes_of(job), new_run()), resume=place.resume) as files,
    ):
        folder = _certificates(place)
        _check_tls(folder)  # they may have been made a year ago
        app = DeviceApp(lambda: RoundServer(job, files, time.monotonic(), tell), job.settings.hold_s)
        try:
            host = f"[{place.host}]" if ":" in place.host else place.host
            tell(f"listening at https://{host}:{listener.getsockname()[1]}")
            tell(f"devices know the server by {folder / AUTHORITY}")
            if app.server.new_tokens is not None:
                tell(f"{app.server.new_tokens}: a token for each device, to enrol once")
            asyncio.run(_serve(app, listener, folder, place))
            require_complete(app.server)
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
        if not ticking.done():
            ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking
        await serving


async def _tick(app: DeviceApp, linger_s: float) -> None:
    """Until the run is over and everybody who was there has the last model, or has had time enough."""
    while not app.server.is_over:
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


def _certificates(place: ServingPlace) -> Path:
    """The folder of what the server shows."""
    if place.tls is not None:
        return place.tls
    made = place.out / _CERTIFICATES
    if not (made / place.host).is_dir():
        make_certificates(made, [place.host], days=_CERTIFICATE_DAYS)
    return made / place.host


def _check_tls(folder: Path) -> None:
    """UserError where the folder holds no certificate and its key, or devices would refuse it."""
    for name in (CERTIFICATE, KEY):
        if not (folder / name).is_file():
            raise UserError(
                f"--tls {folder}: has no {name}; give this host's folder of `manyhands certificates`"
            )
    key = folder / KEY
    if key.stat().st_mode & stat.S_IRWXO:
        raise UserError(f"--tls {folder}: every user of this host can read {KEY}; chmod 600 {key}")

    def refuse() -> str:  # or the terminal would be asked
        raise UserError(f"--tls {folder}: {KEY} is encrypted; write it without a password, mode 0600")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(folder / CERTIFICATE, key, refuse)
        complaint = validity((folder / CERTIFICATE).read_text("ascii")).complaint(datetime.now(UTC))
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(
            f"--tls {folder}: {CERTIFICATE} and {KEY} are no certificate and its key: {error}"
        ) from error
    if complaint is not None:
        raise UserError(f"--tls {folder}: {CERTIFICATE}: {complaint}")


def _listening(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: must be from 0 (any free one) to 65535")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_WAITING)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: cannot be listened on: {error.strerror}") from error


def _need_web() -> None:
    try:
        import uvicorn  # noqa: F401
    except ImportError:
        raise UserError("serving devices needs the web extra: pip install 'manyhands[web,tls]'") from None
