"""A device's requests: signed, with a deadline each, over a connection that is made anew when it is lost.

Needs nothing but the standard library (and `cryptography` for the signature).
"""

from __future__ import annotations

import http.client
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from manyhands.errors import ManyhandsError, UserError
from manyhands.federated.deployed.letters import (
    CLIENT,
    MODEL,
    SIGNATURE,
    SMALL_BYTES,
    LetterRefused,
    request_text,
)
from manyhands.federated.secure.primitives import sign

__all__ = ["Asker", "BackOff", "HttpsAsker", "Reply", "Unreached"]

_TIMEOUT_S: Final = 30.0


class Unreached(ManyhandsError):
    """The server was not reached, or did not answer in time: ask again later."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What the server answered."""

    status: int
    body: bytes


class BackOff:
    """How long to wait before the next try: longer each time, and never as long as somebody else's."""

    def __init__(self, first_s: float = 0.2, most_s: float = 30.0, seed: int | None = None) -> None:
        self._first_s, self._most_s = first_s, most_s
        self._random = random.Random(seed)
        self._tries = 0

    def next_s(self) -> float:
        """From half of the time to all of it."""
        longest = min(self._most_s, self._first_s * 2.0 ** min(self._tries, 40))
        self._tries += 1
        return longest * self._random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """It was reached."""
        self._tries = 0


Asker = Callable[[str, str, bytes, str, int], Reply]
"""(method, target, body, hash of the model, most bytes of the answer) -> Reply; Unreached where there is none."""


class HttpsAsker:
    """Asks one server; it is who its certificate says, or nothing is sent."""

    def __init__(self, address: str, authority: Path | None) -> None:
        """UserError for an address that is none, or a file that holds no certificate.

        Without `authority`, the certificates count that this host trusts.
        """
        parts = urlsplit(address if "://" in address else f"https://{address}")
        if parts.scheme != "https" or parts.hostname is None or parts.path.strip("/"):
            raise UserError(f"address {address!r}: must be https://HOST:PORT")
        self._host, self._port = parts.hostname, parts.port or 443
        try:
            self._context = ssl.create_default_context(cafile=str(authority) if authority else None)
        except OSError as error:
            raise UserError(f"--ca {authority}: cannot be read as PEM certificates: {error}") from error
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._connection: http.client.HTTPSConnection | None = None
        self._timeout_s = _TIMEOUT_S
        self._signer: tuple[str, int, bytes] | None = None

    def sign_as(self, run: str, client: int, secret: bytes) -> None:
        """From now on requests are this client's."""
        self._signer = run, client, secret

    def allow(self, hold_s: float) -> None:
        """The server may take so much longer to answer."""
        self._timeout_s = _TIMEOUT_S + hold_s
        self.close()

    def __call__(
        self, method: str, target: str, body: bytes = b"", model: str = "", most_bytes: int = SMALL_BYTES
    ) -> Reply:
        """One request and its answer."""
        headers = {"content-length": str(len(body)), MODEL: model}
        if self._signer is not None:
            run, client, secret = self._signer
            headers[CLIENT] = str(client)
            headers[SIGNATURE] = sign(secret, request_text(run, client, method, target, model, body)).hex()
        try:
            if self._connection is None:
                self._connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout_s, context=self._context
                )
            self._connection.request(method, target, body, headers)
            response = self._connection.getresponse()
            length = int(response.headers.get("content-length") or 0)
            if length > most_bytes:
                raise LetterRefused(
                    413, f"the server's answer has {length} bytes; at most {most_bytes} make sense"
                )
            content = response.read(length)
            if len(content) != length:
                raise http.client.IncompleteRead(content, length - len(content))
            if response.will_close:
                self.close()
            return Reply(response.status, content)
        except ssl.SSLCertVerificationError as error:
            self.close()
            raise ManyhandsError(
                f"https://{self._host}:{self._port} is not the server that --ca knows: {error.verify_message}"
            ) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            if isinstance(error, UserError):
                raise
            raise Unreached(
                f"https://{self._host}:{self._port} did not answer: {error or type(error).__name__}"
            ) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the connection; the next request makes another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
