"""What devices and the server send each other over HTTPS: signed requests, and tensors whose every byte is expected.

| request | by | body | answer |
|---|---|---|---|
| `POST /enrol` | whoever has a token | JSON: token, public key, signature | JSON: the client's number, the run |
| `GET /plan` | a client | | JSON: task, settings, the form of data and model |
| `GET /work?have=R&after=A` | a client | | JSON: what to do; held back for a while if that is nothing |
| `GET /model` | a client | | safetensors: the current model |
| `POST /report/A` | a client | safetensors: its update | JSON |
| `POST /leave/A` | a client | | JSON: it will not report in this attempt |
| `GET /secure/A/S` · `POST /secure/A/S` | a client | a message of the secure sum | the next one, or 204: not yet |

A request of a client has its number in `x-client`, the hash of its body in `x-body`, and in `x-signature` an Ed25519
signature under run, client, method, target, the hash of the model it is about (`x-model`) and `x-body`: so it is known
whose it is before any of the body is read. Errors are one sentence as text, with status 4xx.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import math
import random
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from manyhands.data.store.tensorfile import encode_tensors
from manyhands.errors import ManyhandsError, UserError, printable
from manyhands.native.dtypes import NAMED, STORED
from manyhands.strategies.federated.client_updates import Tensors
from manyhands.strategies.federated.clients import held, held_names
from manyhands.strategies.federated.secure.primitives import digest_of, sign
from manyhands.strategies.federated.strategy import Federated
from manyhands.wire.codec import BadBytes, ParcelCodec, codec_named, encodes
from manyhands.wire.names import has_feedback
from manyhands.wire.nesting import MOST_NESTED, json_depth
from manyhands.wire.parcels import Parcel

LABEL: Final = b"manyhands federated 1"
CLIENT, SIGNATURE, MODEL, BODY = "x-client", "x-signature", "x-model", "x-body"
SMALL_BYTES: Final = 1 << 16
MOST_HOLD_S: Final = 3600.0  # more than any body needs that has no tensors in it
_ABOUT_BYTES: Final = 4096
_LENGTH: Final = struct.Struct("<Q")


class MessageRejected(ManyhandsError):
    """A message violates the protocol; `status` is the HTTP status, and nothing of the message was used."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status


def body_hash(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def request_text(run: str, client: int, method: str, target: str, model: str, body: str) -> bytes:
    """What a client signs of a request; `model` and `body` are hashes, as its headers have them."""
    parts = (run, str(client), method, target, model, body)
    return digest_of(b"request", LABEL, *(part.encode() for part in parts))


def enrolment_text(token: str, key: bytes) -> bytes:
    """What a device signs to show that it has the secret of the key that it enrols."""
    return digest_of(b"enrolment", LABEL, token.encode(), key)


def read_object(body: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise MessageRejected(400, f"{what} is not a JSON object")
    if json_depth(body) > MOST_NESTED:  # which an error that shows a part of it could not
        raise MessageRejected(400, f"{what} is nested more than {MOST_NESTED} deep")
    return found


def whole_in(values: Mapping[str, Any], name: str, least: int = 0) -> int:
    """Read an integer from a received value, or raise MessageRejected; text is allowed, since headers are text."""
    value = values.get(name)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        value = int(value)
    if type(value) is not int or not least <= value < 1 << 53:
        shown = printable(repr(values.get(name))[:40])
        raise MessageRejected(400, f"{name} is {shown}; it must be an integer of at least {least}")
    return value


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The tensors that are sent, known to both ends: the header of a body is compared with them and never trusted."""

    rows: tuple[tuple[str, str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, model: nn.Module) -> TensorForm:
        kinds = [(str(one.dtype).removeprefix("torch."), tuple(one.shape)) for one in held(model)]
        return cls(tuple((name, *kind) for name, kind in zip(held_names(model), kinds, strict=True)))

    def with_more(self, sent: Tensors) -> TensorForm:
        """The form of updates, which have these tensors: the model's, and what an algorithm sends besides."""
        more = [
            (f"sent.{place}", str(one.dtype).removeprefix("torch."), tuple(one.shape))
            for place, one in enumerate(sent[len(self.rows) :])
        ]
        return TensorForm((*self.rows, *more))

    @property
    def as_json(self) -> list[Any]:
        return [[name, dtype, list(shape)] for name, dtype, shape in self.rows]

    @property
    def items(self) -> list[int]:
        return [math.prod(shape) for _, _, shape in self.rows]

    @property
    def num_bytes(self) -> int:
        return sum(math.prod(shape) * NAMED[dtype].itemsize for _, dtype, shape in self.rows)

    @property
    def most_bytes(self) -> int:
        return self.num_bytes + len(json.dumps(self._header())) + _ABOUT_BYTES

    def encode(self, tensors: Tensors, about: Mapping[str, str]) -> bytes:
        named = {row[0]: one.detach() for row, one in zip(self.rows, tensors, strict=True)}
        return b"".join(encode_tensors(named, about))

    def decode(self, body: bytes) -> tuple[list[Tensor], dict[str, Any]]:
        if len(body) > self.most_bytes:
            why = f"the body has {len(body)} bytes; at most {self.most_bytes} are allowed"
            raise MessageRejected(413, why)
        if len(body) < _LENGTH.size:
            raise MessageRejected(400, "the body is not a safetensors file: it ends before its header")
        [length] = _LENGTH.unpack_from(body)
        begin = _LENGTH.size + length
        if begin > len(body):
            raise MessageRejected(400, "the body is not a safetensors file: it ends within its header")
        header = read_object(body[_LENGTH.size : begin], "the header of the body")
        about = header.pop("__metadata__", {})
        expected = self._header()
        _require_same(header, expected)
        if len(body) - begin != self.num_bytes:
            why = f"the tensors have {len(body) - begin} bytes, but those of the model have {self.num_bytes}"
            raise MessageRejected(422, why)
        content = bytearray(body)
        tensors = []
        for name, dtype, shape in self.rows:
            start, kind = begin + expected[name]["data_offsets"][0], NAMED[dtype]
            flat = torch.empty(0, dtype=kind)
            if count := math.prod(shape):
                flat = torch.frombuffer(content, dtype=kind, count=count, offset=start).clone()
            tensors.append(flat.view(shape))
        return tensors, about if isinstance(about, dict) else {}

    def _header(self) -> dict[str, Any]:
        """As safetensors writes it: the largest items first."""
        offset, table = 0, {}
        for name, dtype, shape in sorted(self.rows, key=lambda row: (-NAMED[row[1]].itemsize, row[0])):
            end = offset + math.prod(shape) * NAMED[dtype].itemsize
            table[name] = {"dtype": STORED[NAMED[dtype]], "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        return table


def _require_same(header: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name in [*expected, *header]:
        if name not in header:
            raise MessageRejected(422, f"tensor {printable(repr(name))} is missing")
        if name not in expected:
            raise MessageRejected(422, f"the model has no tensor {printable(repr(name)[:80])}")
        for field in ("dtype", "shape", "data_offsets"):
            found = header[name].get(field) if isinstance(header[name], dict) else None
            if found != expected[name][field]:
                shown, wanted = printable(str(found)[:60]), expected[name][field]
                sentence = (
                    f"tensor {printable(repr(name))} has the {field} {shown}, but the model has {wanted}"
                )
                raise MessageRejected(422, sentence)


_NAME: Final = "update"


class UpdateForm:
    """How updates of a model are encoded in a run; both ends build it from the plan."""

    def __init__(self, form: TensorForm, strategy: Federated, seed: int) -> None:
        self._form, self._text, self._seed = form, strategy.codec, seed
        self.rows: Final = form.rows
        wide = any(NAMED[dtype] == torch.float64 for _, dtype, _ in form.rows)
        self.parcel = Parcel.whole(0, sum(form.items), torch.float64 if wide else torch.float32)
        codec = self._codec(0)
        self.is_coded: Final = encodes(codec, self.parcel)  # for a few numbers some codecs are not worth it
        # whether a device keeps what was left out of its updates
        self.keeps: Final = self.is_coded and strategy.feedback and has_feedback(strategy.codec)
        self._most = codec.size(self.parcel) if codec is not None and self.is_coded else 0

    def _codec(self, client: int) -> ParcelCodec | None:
        return codec_named(self._text, feedback=False, seed=self._seed, worker=client)

    @property
    def most_bytes(self) -> int:
        return _coded_form(self._most).most_bytes if self.is_coded else self._form.most_bytes

    def encode(
        self, change: Tensors, about: Mapping[str, str], left: Tensor | None, *, client: int, number: int
    ) -> tuple[bytes, Tensor | None]:
        if not self.is_coded:
            return self._form.encode(change, about), None
        codec = self._codec(client)
        assert codec is not None, "raw has none"
        codec.at(number)
        row = torch.cat([one.detach().flatten().to("cpu", self.parcel.dtype) for one in change])
        if left is not None:
            row += left
        room = torch.empty(self._most, dtype=torch.uint8)
        encoded = room[: codec.encode(self.parcel, row, room)]
        body = _coded_form(len(encoded)).encode([encoded], about)
        if not self.keeps:
            return body, None
        read = torch.empty_like(row)
        codec.decode(self.parcel, encoded, read)
        return body, row - read

    def decode(self, body: bytes, *, client: int) -> tuple[list[Tensor], dict[str, Any]]:
        if not self.is_coded:
            return self._form.decode(body)
        length = _LENGTH.unpack_from(body)[0] if len(body) >= _LENGTH.size else 0
        num_bytes = min(self._most, max(0, len(body) - _LENGTH.size - length))
        [encoded], about = _coded_form(num_bytes).decode(body)
        codec = self._codec(client)
        assert codec is not None, "raw has none"
        row = torch.empty(self.parcel.count, dtype=self.parcel.dtype)
        try:
            codec.decode(self.parcel, encoded, row)
        except BadBytes as error:
            raise MessageRejected(422, f"the update is not {self._text}: {error}") from error
        pieces = torch.split(row, self._form.items)
        rows = zip(pieces, self._form.rows, strict=True)
        return [piece.view(shape).to(NAMED[dtype]) for piece, (_, dtype, shape) in rows], about


def _coded_form(num_bytes: int) -> TensorForm:
    return TensorForm(((_NAME, "uint8", (num_bytes,)),))


# A device's requests: signed, each with a deadline, over a connection that is reopened when it is lost.

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
        digest = body_hash(body)
        headers = {"content-length": str(len(body)), MODEL: model, BODY: digest}
        if self.signer is not None:
            run, client, secret = self.signer
            text = request_text(run, client, method, target, model, digest)
            headers |= {CLIENT: str(client), SIGNATURE: sign(secret, text).hex()}
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
                why = f"{server} is not a server that --ca certifies: {error.verify_message}"
                raise ManyhandsError(why) from error
            lost = isinstance(error, OSError | http.client.HTTPException | ValueError)
            if lost and not isinstance(error, UserError):
                raise Unreached(f"{server} did not answer: {error or type(error).__name__}") from error
            raise

    def _content(self, response: http.client.HTTPResponse, most_bytes: int) -> bytes:
        """An answer's body; MessageRejected where it is too long, TimeoutError where it trickles."""
        declared = response.headers.get("content-length") or ("0" if response.status == 204 else "")
        if response.chunked or not (declared.isascii() and declared.isdigit() and len(declared) < 20):
            raise http.client.HTTPException("its answer has no valid Content-Length")
        length = int(declared)
        if length > most_bytes:
            why = f"the server's answer has {length} bytes; at most {most_bytes} are allowed"
            raise MessageRejected(413, why)
        until, content = time.monotonic() + self._timeout_s + length / _SLOWEST, bytearray()
        while len(content) < length:
            piece = response.read1(min(_PIECE, length - len(content)))
            if not piece:
                raise http.client.IncompleteRead(bytes(content), length - len(content))
            content += piece
            if time.monotonic() > until:
                raise TimeoutError("its answer is too slow")
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
