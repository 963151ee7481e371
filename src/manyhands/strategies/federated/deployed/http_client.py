"""A device's HTTPS requests: signed, each with a deadline, over a connection that is reopened when it is lost.

Needs only the standard library (and `cryptography` for the signature).
"""

from __future__ import annotations

import http.client
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from manyhands.errors import ManyhandsError, UserError
from manyhands.strategies.federated.deployed import protocol
from manyhands.strategies.federated.deployed.protocol import SMALL_BYTES, MessageRejected
from manyhands.strategies.federated.secure.primitives import sign

__all__ = ["BackOff", "HttpsClient", "Reply", "SendRequest", "Unreached"]

_TIMEOUT_S: Final = 30.0
_SLOWEST: Final = 4096  # bytes a second; an answer that comes more slowly is waited for no longer
_PIECE: Final = 1 << 16


class Unreached(ManyhandsError):
    """The server could not be reached, or did not answer in time: retry later."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The server's response."""

    status: int
    body: bytes


class BackOff:
    """Exponential back-off with jitter: waits grow, and differ between devices."""

    def __init__(self, first_s: float = 0.2, most_s: float = 30.0, seed: int | None = None) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._random = random.Random(seed)
        self._tries = 0

    def next_s(self) -> float:
        """The next wait in seconds: half to all of the current maximum, at random; the maximum doubles each time."""
        longest = min(self._most_s, self._first_s * 2.0 ** min(self._tries, 40))
        self._tries += 1
        return longest * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        self._tries = 0


SendRequest = Callable[[str, str, bytes, str, int], Reply]
"""(method, target, body, hash of the model, most bytes of the answer) -> Reply; Unreached where there is none."""


class HttpsClient:
    """Sends requests to one server; nothing is sent unless its certificate is valid."""

    def __init__(self, address: str, authority: Path | None) -> None:
        """UserError for an address that is none. Without `authority` the certificates count that this host trusts."""
        try:
            parts = urlsplit(address if "://" in address else f"https://{address}")
            host, port = parts.hostname, parts.port
            besides = parts.username, parts.path.strip("/"), parts.query, parts.fragment
        except ValueError:
            host = None
        if host is None or port == 0 or parts.scheme != "https" or any(besides):
            raise UserError(f"address {address!r}: must be https://HOST:PORT")
        self._host, self._port = host, port or 443
        try:
            self._context = ssl.create_default_context(cafile=str(authority) if authority else None)
        except OSError as error:
            raise UserError(f"--ca {authority}: cannot be read as PEM certificates: {error}") from error
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._connection: http.client.HTTPSConnection | None = None
        self._timeout_s = _TIMEOUT_S
        self.signer: tuple[str, int, bytes] | None = None  # the run, the client's number and its secret

    def allow(self, hold_s: float) -> None:
        self._timeout_s = _TIMEOUT_S + hold_s
        self.close()

    def __call__(
        self, method: str, target: str, body: bytes = b"", model: str = "", most_bytes: int = SMALL_BYTES
    ) -> Reply:
        digest = protocol.body_hash(body)
        headers = {"content-length": str(len(body)), protocol.MODEL: model, protocol.BODY: digest}
        if self.signer is not None:
            run, client, secret = self.signer
            text = protocol.request_text(run, client, method, target, model, digest)
            headers |= {protocol.CLIENT: str(client), protocol.SIGNATURE: sign(secret, text).hex()}
        try:
            if self._connection is None:
                self._connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout_s, context=self._context
                )
            longest_s = 2 * self._timeout_s + (len(body) + most_bytes) / _SLOWEST
            with _cut_after(self._connection, longest_s):
                self._connection.request(method, target, body, headers)
                response = self._connection.getresponse()
                content = self._content(response, most_bytes)
            if response.will_close:
                self.close()
            return Reply(response.status, content)
        except BaseException as error:
            self.close()
            server = f"https://{self._host}:{self._port}"
            if isinstance(error, ssl.SSLCertVerificationError):
                why = f"{server} is not the server that --ca knows: {error.verify_message}"
                raise ManyhandsError(why) from error
            lost = isinstance(error, OSError | http.client.HTTPException | ValueError)
            if lost and not isinstance(error, UserError):
                raise Unreached(f"{server} did not answer: {error or type(error).__name__}") from error
            raise

    def _content(self, response: http.client.HTTPResponse, most_bytes: int) -> bytes:
        """An answer's body; MessageRejected where it is too long, TimeoutError where it trickles."""
        declared = response.headers.get("content-length") or ("0" if response.status == 204 else "")
        if response.chunked or not (declared.isascii() and declared.isdigit() and len(declared) < 20):
            raise http.client.HTTPException("it does not say how long its answer is")
        length = int(declared)
        if length > most_bytes:
            why = f"the server's answer has {length} bytes; at most {most_bytes} make sense"
            raise MessageRejected(413, why)
        until, content = time.monotonic() + self._timeout_s + length / _SLOWEST, bytearray()
        while len(content) < length:
            piece = response.read1(min(_PIECE, length - len(content)))
            if not piece:
                raise http.client.IncompleteRead(bytes(content), length - len(content))
            content += piece
            if time.monotonic() > until:
                raise TimeoutError("its answer comes too slowly")
        response.read()  # nothing is left, and http.client learns it
        return bytes(content)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@contextmanager
def _cut_after(connection: http.client.HTTPSConnection, seconds: float) -> Iterator[None]:
    """End what is read and written after so long; a socket's own timeout begins anew with every byte."""

    def cut() -> None:
        if connection.sock is not None:
            with suppress(OSError):  # it is closed already
                # not the method of a TLS socket, which would take its session from under the thread that reads
                socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
