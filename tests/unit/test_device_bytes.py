"""What docs/federated-deployment.md says that a device sends, made by hand from that page, beside what it does send."""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import nn

from manyhands.strategies.federated.deployed.protocol import HttpsClient, TensorForm, enrolment_text
from manyhands.strategies.federated.secure.secure_protocol import SecureStage
from manyhands.strategies.federated.update_tally import hash_of
from securely import Party

PAGE = (Path(__file__).parents[2] / "docs" / "federated-deployment.md").read_text()


def signed_hash(*parts: bytes) -> bytes:
    """Every part after its length in 8 bytes, big-endian."""
    return hashlib.sha256(b"".join(struct.pack(">Q", len(part)) + part for part in parts)).digest()


class Wire:
    """A connection that keeps what is sent, and answers nothing of interest."""

    def __init__(self) -> None:
        self.sent = b""

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def makefile(self, _: str) -> io.BytesIO:
        return io.BytesIO(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

    def close(self) -> None:
        """Nothing to let go of."""


def test_a_request_is_what_the_page_shows_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, secret, body, model = Wire(), bytes(range(32)), b"an update", "ab" * 32
    monkeypatch.setattr("http.client.HTTPSConnection.connect", lambda self: setattr(self, "sock", wire))
    ask = HttpsClient("https://192.0.2.7:8443", None)
    ask.signer = "the run", 4, secret
    assert ask("POST", "/report/3", body, model).body == b"{}"
    head, _, rest = wire.sent.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    [shown] = re.findall(r"```http\n(.*?)```", PAGE, re.DOTALL)
    documented = shown.strip().split("\n")
    assert lines[:3] == documented[:3]
    names = [line.partition(":")[0] for line in lines[3:]]
    assert names == [line.partition(":")[0] for line in documented[3:]]
    found = dict(line.split(": ") for line in lines[1:])
    assert rest == body
    assert found["content-length"] == str(len(body))
    assert found["x-model"] == model
    assert found["x-body"] == hashlib.sha256(body).hexdigest()
    parts = ("request", "manyhands federated 1", "the run", "4", "POST", "/report/3", model, found["x-body"])
    public = Ed25519PrivateKey.from_private_bytes(secret).public_key()
    public.verify(bytes.fromhex(found["x-signature"]), signed_hash(*(part.encode() for part in parts)))


def test_an_enrolment_is_signed_as_the_page_says() -> None:
    key = bytes(range(32))
    assert enrolment_text("token", key) == signed_hash(b"enrolment", b"manyhands federated 1", b"token", key)


def test_an_update_and_the_hash_of_a_model_have_the_bytes_of_the_page() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1).double())
    form = TensorForm.of(model)
    tensors = [
        *(one.detach() for one in model.parameters()),
        *(one for one in model.buffers() if one.is_floating_point()),
    ]
    about = {"samples": "288", "steps": "18", "loss": "0.41"}
    named = dict(zip((row[0] for row in form.rows), tensors, strict=True))
    ordered = sorted(named, key=lambda name: (-named[name].element_size(), name))
    header: dict[str, object] = {"__metadata__": {"format": "pt", **about}}
    data = b""
    for name in ordered:
        one = named[name]
        end = len(data) + one.numel() * one.element_size()
        kind = "F64" if one.dtype == torch.float64 else "F32"
        header[name] = {"dtype": kind, "shape": list(one.shape), "data_offsets": [len(data), end]}
        data += one.numpy().tobytes()
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    assert form.encode(tensors, about) == struct.pack("<Q", len(text)) + text + data
    hashed = hashlib.sha256()
    for one in tensors:
        hashed.update(f"{one.dtype} {tuple(one.shape)};".encode() + one.numpy().tobytes())
    assert hash_of(tensors) == hashed.digest()
    assert "`torch.float32 (10, 64);`" in PAGE
    assert f"{torch.float32} {(10, 64)};" == "torch.float32 (10, 64);"


def test_messages_of_a_secure_sum_have_the_sizes_of_the_page() -> None:
    clients, items = 5, 7
    party = Party(clients, items)
    sizes: dict[SecureStage, set[int]] = {}
    while party.server.stage < SecureStage.DONE:
        stage = party.server.stage
        for number, message in party.messages.items():
            answer = party.answer(number, message)
            sizes.setdefault(stage, set()).add(len(answer))
            party.server.receive(number, answer)
        party.messages = party.server.advance()
    assert list(sizes.values()) == [
        {4 + 32 + 32 + 64 + 32 + 64},
        {4 + (clients - 1) * (4 + 160)},
        {8 * (items + 1)},
        {64},
        {8 + clients * (4 + 66)},
    ]
    rows = dict(re.findall(r"^\| ([0-4]) \| (.*?) \|", PAGE, re.MULTILINE))
    for stage, words in zip(
        "01234", ("two public keys 64", "4 + 160", "8 for each", "64", "4 + 66"), strict=True
    ):
        assert words in rows[stage]
