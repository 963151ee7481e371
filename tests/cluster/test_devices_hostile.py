"""What is read of whom, and what a server does that cannot go on: nobody unknown has anything read, nothing is lost."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from devices import TOY, Hostile, ask_work, job_for, make_device, offer, points, serving, tokens, write_parts
from manyhands.data.store.atomic import WriteFailed
from manyhands.data.store.rundir import parameter_shapes
from manyhands.errors import ManyhandsError, NonFinite
from manyhands.strategies.federated.clients import held
from manyhands.strategies.federated.deployed.device_job import initial_model
from manyhands.strategies.federated.deployed.protocol import Reply, enrolment_text
from manyhands.strategies.federated.deployed.rounds_server import RoundServer
from manyhands.strategies.federated.deployed.run_files import ServerFiles
from manyhands.strategies.federated.secure.primitives import public_identity, sign
from manyhands.task import Task


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, TOY)


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Hostile]:
    write_parts(tmp_path, 2)
    job = job_for("clients=2 epochs=1 batch=8", min_reports=1, rounds=2)
    with serving(job, tmp_path / "run") as served:
        found = Hostile(served, tmp_path)
        yield found
        for device in (found.honest, found.device):
            device._state.close()


class Pieces:
    """A body that goes on for ever; how many pieces of it were read."""

    def __init__(self, piece: bytes) -> None:
        self.piece, self.read = piece, 0

    async def __call__(self) -> dict[str, Any]:
        self.read += 1
        return {"type": "http.request", "body": self.piece, "more_body": True}


@pytest.mark.parametrize("target", ["/report/1", "/secure/1/0"])
def test_nothing_is_read_of_whom_is_not_known(hostile: Hostile, target: str) -> None:
    body = hostile.body()
    other = hostile.served.headers(1, os.urandom(32), "POST", target, body, hostile.model)
    for headers in (other, {**other, "x-client": "77"}, {**other, "x-signature": "zz"}):
        endless = Pieces(b"x" * 1000)
        said = {**headers, "content-length": str(len(body))}
        assert hostile.served.ask("POST", target, b"", said, endless).status == 401
        assert endless.read == 0
    assert hostile.served.server.state.waits_for == (0, 1)


@pytest.mark.parametrize(
    ("said", "status", "pieces"),
    [
        ({"content-length": "5"}, 413, 1),
        ({"content-length": "5", "transfer-encoding": "chunked"}, 411, 0),
        ({"content-length": "\u00b2"}, 411, 0),
        ({"content-length": "0" * 25 + "5"}, 411, 0),
        ({"content-length": "-5"}, 411, 0),
        ({"content-length": "99999999"}, 413, 0),
    ],
    ids=str,
)
def test_no_more_is_read_than_was_announced(
    hostile: Hostile, said: dict[str, str], status: int, pieces: int
) -> None:
    """Of an enrolment, which anybody may send; a body in chunks can say what it likes about its length."""
    endless = Pieces(b"x" * 1000)
    assert hostile.served.ask("POST", "/enrol", b"", said, endless).status == status
    assert endless.read == pieces


def test_a_body_other_than_the_signed_one_is_refused(hostile: Hostile) -> None:
    body = hostile.body()
    headers = hostile.served.headers(1, hostile.secret, "POST", "/report/1", body, hostile.model)
    reply = hostile.served.ask("POST", "/report/1", hostile.body(samples="6"), headers)
    assert (reply.status, b"signature of client 1" in reply.body) == (401, True)
    assert hostile.served.server.state.waits_for == (0, 1)
    assert hostile.report(body)[0] == 200


def test_one_client_does_not_fill_the_servers_memory(hostile: Hostile) -> None:
    body = hostile.body()
    headers = hostile.served.headers(1, hostile.secret, "POST", "/report/1", body, hostile.model)
    said = {**headers, "content-length": str(len(body))}
    goes_on = asyncio.run_coroutine_threadsafe(_event(), hostile.served.loop).result(240)

    async def slow() -> dict[str, Any]:
        await goes_on.wait()
        return {"type": "http.disconnect"}

    held = [hostile.served.begin("POST", "/report/1", b"", said, slow) for _ in range(4)]
    for _ in range(1000):
        answered = [one.result().status for one in held if one.done()]
        if len(answered) == 2:
            break
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.005), hostile.served.loop).result(240)
    assert answered == [429, 429]
    hostile.served.loop.call_soon_threadsafe(goes_on.set)
    assert sorted(one.result(240).status for one in held) == [400, 400, 429, 429]
    assert hostile.report(body)[0] == 200, "its connections were lost, and it comes back"


async def _event() -> asyncio.Event:
    return asyncio.Event()


def test_where_the_numbers_of_a_header_are_other_types_its_own_are_used(hostile: Hostile) -> None:
    """JSON has 0.0 for 0, and Python says that they are equal."""
    body = hostile.body([one + 1 for one in hostile.zeros])
    length = int.from_bytes(body[:8], "little")
    header = json.loads(body[8 : 8 + length])
    for name in header.keys() - {"__metadata__"}:
        header[name]["data_offsets"] = [float(one) for one in header[name]["data_offsets"]]
    text = json.dumps(header).encode()
    status, _ = hostile.report(len(text).to_bytes(8, "little") + text + body[8 + length :])
    assert status == 200
    for total in hostile.served.server._sum.total().sums:
        assert torch.equal(total, torch.full_like(total, 5.0))


@pytest.mark.parametrize("token", ["\ud800", "ä", "", 3, None])
def test_a_token_that_is_none_is_refused(hostile: Hostile, token: Any) -> None:
    secret = os.urandom(32)
    key = public_identity(secret)
    asked = {"token": token, "key": key.hex(), "signature": sign(secret, enrolment_text("", key)).hex()}
    assert hostile.served.ask("POST", "/enrol", json.dumps(asked).encode()).status == 403


def test_a_header_that_is_nested_far_too_deep_is_refused(hostile: Hostile) -> None:
    """An error that shows a part of it would not come to its end."""
    body = hostile.body()
    header = b'{"weight": {"dtype": ' + b"[" * 900 + b"]" * 900 + b"}}"
    status, said = hostile.report(len(header).to_bytes(8, "little") + header + body[-40:])
    assert (status, "nested more than 64 deep" in said) == (400, True), said


def test_a_request_with_two_lengths_is_refused_also_where_no_body_is_read(hostile: Hostile) -> None:
    device_state, both = hostile.honest._state, {"content-length": "0", "transfer-encoding": "chunked"}
    target = "/model"
    signed = hostile.served.headers(device_state.client, device_state.secret, "GET", target)
    assert hostile.served.ask("GET", target, b"", signed).status == 200
    assert hostile.served.ask("GET", target, b"", {**signed, **both}).status == 411


def test_a_number_that_would_spoil_the_model_is_refused(hostile: Hostile) -> None:
    status, said = hostile.report(hostile.body([hostile.zeros[0] + 1e30, hostile.zeros[1]]))
    assert (status, "too large" in said) == (422, True)


@pytest.fixture
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The points with two layers: weights of 1e19 are finite, and what they come to is not."""

    def two_layers(_: Any = None) -> Task:
        return replace(points(), model=lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))

    offer(monkeypatch, replace(TOY, make=two_layers))


def hostile_round(tmp_path: Path, clients: int, words: str = "") -> tuple[int, str, list[str], RoundServer]:
    """A round of devices that all report; client 0 sends a number that is finite, and too large for any model."""
    write_parts(tmp_path, clients)
    job = job_for(f"clients={clients} epochs=1 batch=8 {words}", rounds=2)
    with serving(job, tmp_path / "run") as served:
        server, given = served.server, tokens(tmp_path / "run")
        devices = [make_device(served, tmp_path, number, given[number]) for number in range(clients)]
        ask_work(served, *devices)
        for number, device in enumerate(devices):
            size = 1.8e19 if number == 0 else 0.01
            change = [torch.full(shape, size) for _, _, shape in server.form.rows]
            body = server.form.encode(change, {"samples": "5", "steps": "1", "loss": "0.5"})
            own = device._state
            reply = served.signed(own.client, own.secret, "POST", "/report/1", body, server.model_hash)
        for device in devices:
            device._state.close()
        return reply.status, reply.body.decode(), list(served.reported), server


@pytest.mark.usefixtures("deep")
def test_one_update_that_is_too_large_beside_the_others_does_not_count(tmp_path: Path) -> None:
    status, _, reported, server = hostile_round(tmp_path, 3)
    assert (status, server.state.done, server.state.rejected) == (200, 1, 1)
    row = server._files.directory.metrics.read()[0]
    assert (row["counted"], list(row["rejected"])) == ([1, 2], ["0"])
    assert row["rejected"]["0"] == pytest.approx(1.8e19 * math.sqrt(23))
    assert any(": larger than norm_ratio=100 times the median of 0.048" in one for one in reported)
    assert any("client 0 (norm 8.6e+19)" in one for one in reported)
    moved = [
        after - mine
        for after, mine in zip(
            server._weights, held(initial_model(server._job.task, server._job.seed)), strict=True
        )
    ]
    for one in moved:
        torch.testing.assert_close(one, torch.full_like(one, 0.01))


@pytest.mark.usefixtures("deep")
@pytest.mark.parametrize(("clients", "words"), [(2, ""), (3, "norm_ratio=0")])
def test_a_server_whose_evaluation_is_not_finite_stops_and_names_the_round_and_what_came(
    tmp_path: Path, clients: int, words: str
) -> None:
    """Where there is no majority to judge by, or the bound is switched off; the round does not count."""
    status, _, reported, server = hostile_round(tmp_path, clients, words)
    assert status == 503
    assert isinstance(server.failed, NonFinite)
    said = str(server.failed)
    assert "round 1 broke the model: its evaluation_loss is" in said
    assert said.index("client 0 (norm 8.6e+19)") < said.index("client 1 (norm 0.048)")
    assert any(said in one for one in reported)
    state = json.loads((tmp_path / "run" / "federated" / "state.json").read_text())
    assert (state["done"], state["phase"]) == (0, "reporting")
    with serving(server._job, tmp_path / "run", resume=True) as served:
        assert served.server.state.done == 0
        assert all(
            map(torch.equal, served.server._weights, held(initial_model(server._job.task, server._job.seed)))
        )


def test_a_disk_that_is_full_ends_the_server_and_no_round_is_lost_or_counted_twice(
    hostile: Hostile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    served, server = hostile.served, hostile.served.server

    def full(*_: object) -> None:
        raise WriteFailed("checkpoints/step-1 could not be written: No space left on device")

    monkeypatch.setattr(server._files, "save_round", full)
    body = hostile.body([one + 1 for one in hostile.zeros])
    assert hostile.report(body)[0] == 200
    hostile.honest._fetch(hostile.model, 0)
    update = server.form.encode(hostile.zeros, {"samples": "5", "steps": "1", "loss": "0.5"})
    device_state = hostile.honest._state
    reply = served.signed(
        device_state.client, device_state.secret, "POST", "/report/1", update, hostile.model
    )
    assert (reply.status, reply.body.count(b"\n")) == (503, 1)
    assert isinstance(server.failed, WriteFailed)
    assert any("No space left" in sentence for sentence in served.reported)
    again = served.signed(device_state.client, device_state.secret, "GET", "/work?have=1&after=0")
    assert again.status == 503, "nothing is decided on a state that is ahead of the disk"
    state = json.loads((tmp_path / "run" / "federated" / "state.json").read_text())
    assert (state["done"], state["attempt"], state["phase"]) == (0, 1, "reporting")


def test_a_server_that_failed_goes_on_from_its_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_parts(tmp_path, 2)
    job = job_for("clients=2 epochs=1 batch=8", min_reports=1, rounds=1)
    with serving(job, tmp_path / "run") as served:
        monkeypatch.setattr(served.server._files, "save_round", lambda *_: 1 / 0)
        found = Hostile(served, tmp_path)
        assert found.report(found.body())[0] == 200
        own = found.honest._state
        assert (
            served.signed(own.client, own.secret, "POST", "/report/1", found.body(), found.model).status
            == 503
        )
        assert isinstance(served.server.failed, ZeroDivisionError)
        for device in (found.honest, found.device):
            device._state.close()
    monkeypatch.undo()
    offer(monkeypatch, TOY)
    with serving(job, tmp_path / "run", resume=True) as served:
        assert (served.server.state.done, served.server.state.attempt, served.server.state.abandoned) == (
            0,
            1,
            1,
        )
        found = Hostile(served, tmp_path)
        assert served.server.state.attempt == 2
        assert found.report(found.body(), attempt=2)[0] == 200
        for device in (found.honest, found.device):
            device._state.close()


def test_tokens_are_there_before_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is killed between the two makes others; those that open nothing are gone from the file."""
    job, out = job_for("clients=2"), tmp_path / "run"
    config = job.config(parameter_shapes(initial_model(job.task, job.seed).named_parameters()), "run")
    with ServerFiles.begin(out, config, resume=False) as files:
        monkeypatch.setattr(files, "save_enrolment", _killed)
        with pytest.raises(KeyboardInterrupt):
            files.enrolment(2)
    lost = tokens(out)
    (out / "enrolment-tokens.txt").chmod(0o644)
    with serving(job, out, resume=True) as served:
        found = tokens(out)
        assert len(found) == 2
        assert not set(found) & set(lost)
        hashes = {place.token for place in served.server.enrolment.places}
        assert {hashlib.sha256(token.encode()).hexdigest() for token in found} <= hashes
    assert (out / "enrolment-tokens.txt").stat().st_mode & 0o777 == 0o600
    with serving(job_for("clients=3"), out, resume=True):
        assert tokens(out)[:2] == found
        assert len(tokens(out)) == 3


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


class Elsewhere:
    """A device's time, and a server that answers what it likes."""

    def __init__(self, hostile: Hostile) -> None:
        self.now_s, self.device = 0.0, hostile.device
        self.device._clock, self.device._sleep = (lambda: self.now_s), self.sleep
        self.device._patience_s = 100.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_server_in_trouble_is_asked_again_and_not_for_ever(hostile: Hostile) -> None:
    there = Elsewhere(hostile)
    replies = iter([Reply(502, b""), Reply(429, b"one at a time"), Reply(500, b""), Reply(200, b"{}")])
    there.device._send = lambda *_: next(replies)
    assert there.device._request("GET", "/plan") == Reply(200, b"{}")
    there.device._send = lambda *_: Reply(503, b"\x1b[2Jbusy\nmore")
    with pytest.raises(ManyhandsError, match=r"503 \\x1b\[2Jbusy; gave up after 100 s") as told:
        there.device._request("GET", "/plan")
    assert "\x1b" not in str(told.value)
    assert 100 < there.now_s < 200
    for status in (400, 401, 404):
        there.device._send = lambda *_, status=status: Reply(status, b"no")
        with pytest.raises(ManyhandsError, match=f"{status} no$"):
            there.device._request("GET", "/plan")


def test_a_server_that_lies_about_its_model_is_not_asked_without_a_pause(hostile: Hostile) -> None:
    there, asked = Elsewhere(hostile), 0
    work = json.dumps({"rounds": 5, "model": "00" * 32, "state": "wait"}).encode()

    def lies(_: str, target: str, *__: object) -> Reply:
        nonlocal asked
        asked += 1
        if there.now_s > 60:
            raise KeyboardInterrupt
        return Reply(200, hostile.served.server.model_body if target == "/model" else work)

    there.device._send = lies
    with pytest.raises(KeyboardInterrupt):
        there.device.run()
    assert asked < 2 * 60 / 0.1
    assert there.device._rounds == -1, "nothing of it was kept"
