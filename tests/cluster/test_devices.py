"""A server and devices in one process: they end with the weights of the simulation, whatever is sent besides."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import manyhands as mh
from devices import TOY, Hostile, Served, ask_work, job_for, make_device, offer, serving, tokens, write_parts
from manyhands.errors import UserError
from manyhands.strategies.federated.deployed.protocol import body_hash, enrolment_text, request_text
from manyhands.strategies.federated.secure.primitives import public_identity, sign


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, TOY)


def play(served: Served, folder: Path, numbers: range) -> list[int]:
    """Devices side by side, to the end of the run."""
    given = tokens(folder / "run")
    devices = [make_device(served, folder, number, given[number]) for number in numbers]
    rounds: list[int] = []
    threads = [threading.Thread(target=lambda one=device: rounds.append(one.run())) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for device in devices:
        device._state.close()
    return rounds


def weights(path: Path) -> list[torch.Tensor]:
    return list(mh.load(path).parameters())


@pytest.mark.parametrize(
    "words",
    [
        "algorithm=fedavg",
        "algorithm=fedprox:0.1",
        "algorithm=fedadam:0.05",
        "algorithm=fednova",
        "algorithm=scaffold",
        "algorithm=median",
        "algorithm=trimmed:0.3",
        "algorithm=ditto:0.2",
        "clip=0.05",
        "clip=adaptive:0.5",
        "codec=bf16",
        "codec=int8",
        "codec=topk:0.3",
        "codec=topk:0.3 feedback=no",
        "codec=qsgd",
    ],
)
def test_devices_end_with_the_weights_of_the_simulation(tmp_path: Path, words: str) -> None:
    strategy = f"clients=3 epochs=2 batch=8 {words}"
    write_parts(tmp_path, 3)
    with serving(job_for(strategy), tmp_path / "run") as served:
        assert play(served, tmp_path, range(3)) == [3, 3, 3]
        assert served.server.updates.is_coded == ("codec" in words)
        assert served.server.updates.keeps == (tmp_path / "device-1" / "left.safetensors").exists()
    simulated = mh.fit(TOY.build(), f"federated {strategy}", rounds=3)
    for place in ("run", "device-0", "device-2"):
        for mine, theirs in zip(weights(tmp_path / place), simulated.model.parameters(), strict=True):
            assert torch.allclose(mine, theirs, atol=1e-6)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    for row, loss in zip((row for row in rows if "loss" in row), simulated.history.loss, strict=True):
        assert row["loss"] == (None if "clip" in words else pytest.approx(loss, abs=1e-6))
        assert row["counted"] == [0, 1, 2]
    assert (tmp_path / "device-1" / "own.safetensors").exists() == ("ditto" in words or "scaffold" in words)


def test_a_secure_run_ends_with_the_weights_of_a_plain_one(tmp_path: Path) -> None:
    strategy = "clients=4 epochs=1 batch=8 secure=yes range=2"
    write_parts(tmp_path, 4)
    with serving(job_for(strategy, rounds=2), tmp_path / "run") as served:
        assert play(served, tmp_path, range(4)) == [2, 2, 2, 2]
    simulated = mh.fit(TOY.build(), "federated clients=4 epochs=1 batch=8", rounds=2)
    for mine, theirs in zip(weights(tmp_path / "run"), simulated.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=2e-6)


def test_a_server_that_is_started_again_goes_on_and_counts_no_round_twice(tmp_path: Path) -> None:
    write_parts(tmp_path, 3)
    strategy = "clients=3 epochs=1 batch=8 algorithm=fedadam:0.05"
    with serving(job_for(strategy, rounds=2), tmp_path / "run") as served:
        play(served, tmp_path, range(3))
        assert served.server.state.done == 2
    out = tmp_path / "run"
    printed = json.loads((out / "federated" / "state.json").read_text())
    # as if it had been killed between the checkpoint of round 2 and everything after it
    behind = {**printed, "done": 1, "phase": "reporting", "asked": [0, 1, 2], "reported": [[0, "a"]]}
    (out / "federated" / "state.json").write_text(json.dumps(behind))
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] < 2))
    with serving(job_for(strategy, rounds=4), out, resume=True) as served:
        assert served.server.state.done == 2
        assert served.server.state.attempt == 2
        assert play(served, tmp_path, range(3)) == [4, 4, 4]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4]
    simulated = mh.fit(TOY.build(), f"federated {strategy}", rounds=4)
    for mine, theirs in zip(weights(out), simulated.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_what_a_codec_leaves_out_is_kept_over_a_restart_of_the_device_and_sent_later(tmp_path: Path) -> None:
    """Half of the rounds, then other processes: the same as in one simulation, whose clients keep it in memory."""
    strategy = "clients=2 epochs=1 batch=8 codec=topk:0.2"
    write_parts(tmp_path, 2)
    out = tmp_path / "run"
    with serving(job_for(strategy, rounds=2), out) as served:
        play(served, tmp_path, range(2))
    kept = [tmp_path / f"device-{number}" / "left.safetensors" for number in range(2)]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in kept)
    with serving(job_for(strategy, rounds=4), out, resume=True) as served:
        assert play(served, tmp_path, range(2)) == [4, 4]
    simulated = mh.fit(TOY.build(), f"federated {strategy}", rounds=4)
    for mine, theirs in zip(weights(out), simulated.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_an_open_round_is_tried_again_after_a_restart(tmp_path: Path) -> None:
    write_parts(tmp_path, 2)
    job = job_for("clients=2 epochs=1 batch=8", rounds=1)
    out = tmp_path / "run"
    with serving(job, out) as served:
        given = tokens(out)
        first, second = (make_device(served, tmp_path, number, given[number]) for number in range(2))
        ask_work(served, first, second)
        first._fetch(served.server.model_hash, 0)
        first._report(1, first._update())
        assert served.server.state.reported.keys() == {0}
        assert not any(b"F32" in path.read_bytes() for path in (out / "federated").iterdir())
        for device in (first, second):
            device._state.close()
    with serving(job, out, resume=True) as served:
        assert (served.server.state.done, served.server.state.abandoned) == (0, 1)
        assert play(served, tmp_path, range(2)) == [1, 1]
        assert served.server.state.attempt == 2
    simulated = mh.fit(TOY.build(), "federated clients=2 epochs=1 batch=8", rounds=1)
    for mine, theirs in zip(weights(out), simulated.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


@pytest.fixture
def hostile(tmp_path: Path) -> Iterator[Hostile]:
    write_parts(tmp_path, 2)
    with serving(
        job_for("clients=2 epochs=1 batch=8 max_samples=20", min_reports=1), tmp_path / "run"
    ) as served:
        found = Hostile(served, tmp_path)
        yield found
        for device in (found.honest, found.device):
            device._state.close()


def wrong_update(kind: str, hostile: Hostile) -> bytes:
    form, zeros = hostile.form, hostile.zeros
    match kind:
        case "shape":
            rows = tuple((name, dtype, (*shape[::-1],)) for name, dtype, shape in form.rows)
            return type(form)(rows).encode([one.t() if one.ndim > 1 else one for one in zeros], {})
        case "dtype":
            rows = tuple((name, "float64", shape) for name, _, shape in form.rows)
            return type(form)(rows).encode([one.double() for one in zeros], {})
        case "name":
            rows = tuple((f"{name}x", dtype, shape) for name, dtype, shape in form.rows)
            return type(form)(rows).encode(zeros, {})
        case "missing":
            return type(form)(form.rows[:1]).encode(zeros[:1], {})
        case "nan":
            return hostile.body([zeros[0], torch.full_like(zeros[1], torch.nan)])
        case "infinity":
            return hostile.body([zeros[0] - torch.inf, zeros[1]])
        case "short":
            return hostile.body()[:-1]
        case "long":
            return hostile.body() + b"\0"
        case "huge":
            return hostile.body() + bytes(1 << 20)
        case "header":
            return b"\xff" * 8 + hostile.body()[8:]
        case "pickle":
            return b"\x80\x04N." * 40
        case "empty":
            return b""
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("kind", "status", "sentence"),
    [
        ("shape", 422, "has the shape"),
        ("dtype", 422, "has the dtype F64"),
        ("name", 422, "is missing"),
        ("missing", 422, "is missing"),
        ("nan", 422, "not finite"),
        ("infinity", 422, "not finite"),
        ("short", 422, "bytes"),
        ("long", 422, "bytes"),
        ("huge", 413, "at most"),
        ("header", 400, "ends within its header"),
        ("pickle", 400, "ends within its header"),
        ("empty", 400, "ends before its header"),
    ],
)
def test_a_wrong_update_is_refused_and_the_round_goes_on_without_it(
    hostile: Hostile, kind: str, status: int, sentence: str
) -> None:
    before = [one.clone() for one in hostile.served.server._sum.total().sums]
    found, said = hostile.report(wrong_update(kind, hostile))
    assert (found, sentence in said) == (status, True), said
    assert said.count("\n") == 1
    for mine, theirs in zip(hostile.served.server._sum.total().sums, before, strict=True):
        assert torch.equal(mine, theirs)
    assert hostile.served.server.state.reported == {}
    if status != 413:  # who is refused before it is read may try again
        assert hostile.served.server.state.waits_for == (0,)
        hostile.honest._fetch(hostile.model, 0)
        hostile.honest._report(1, hostile.honest._update())
        assert hostile.served.server.state.done == 1


@pytest.mark.parametrize(
    "about",
    [
        {"samples": "0"},
        {"samples": "-3"},
        {"samples": "1e9"},
        {"loss": "nan"},
        {"steps": "x"},
        {"loss": "1e300"},
    ],
)
def test_what_an_update_says_of_itself_must_make_sense(hostile: Hostile, about: dict[str, str]) -> None:
    status, said = hostile.report(hostile.body(**about))
    assert status in (400, 422), said
    assert next(iter(about)) in said


def test_a_lie_about_samples_weighs_no_more_than_the_bound(hostile: Hostile) -> None:
    status, _ = hostile.report(hostile.body([one + 1 for one in hostile.zeros], samples="1000000"))
    assert status == 200
    assert hostile.served.server._sum.total().weight == 20


def test_reports_sent_again_late_or_for_another_model_do_not_count(hostile: Hostile) -> None:
    body = hostile.body()
    assert hostile.report(body, model="00" * 32) == (
        409,
        "the update was not trained from the current model\n",
    )
    # that was its chance: a client whose report is refused is out of the round
    assert hostile.report(body)[0] == 409
    server = hostile.served.server
    hostile.honest._fetch(hostile.model, 0)
    hostile.honest._report(1, hostile.honest._update())
    assert (server.state.done, server.state.attempt) == (1, 1)
    assert hostile.report(body)[0] == 409
    ask_work(hostile.served, hostile.device, hostile.honest)
    assert server.state.attempt == 2
    assert hostile.report(body, attempt=1)[0] == 409  # the one before, sent again
    assert hostile.report(body, attempt=3)[0] == 409
    assert hostile.report(body, attempt=2)[0] == 409  # for the model of round 1
    assert server.state.reported == {}


def test_a_report_whose_answer_was_lost_is_summed_once(hostile: Hostile) -> None:
    body = hostile.body([one + 1 for one in hostile.zeros])
    assert hostile.report(body)[0] == 200
    assert hostile.report(body)[0] == 200
    assert hostile.served.server._sum.total().weight == 5
    assert hostile.report(hostile.body())[0] == 409
    assert hostile.served.server._sum.total().weight == 5


def test_nobody_reports_in_the_name_of_another(hostile: Hostile) -> None:
    body, other = hostile.body(), os.urandom(32)
    assert hostile.report(body, secret=other)[0] == 401
    assert hostile.report(body, client=0)[0] == 401  # signed by client 1
    served = hostile.served
    assert served.signed(7, hostile.secret, "POST", "/report/1", body, hostile.model).status == 401
    assert served.ask("POST", "/report/1", body, {"x-client": "1", "x-model": hostile.model}).status == 401
    assert served.ask("POST", "/report/1", body).status == 400
    for target in ("/work?have=0&after=0", "/model", "/plan", "/secure/1/1"):
        assert served.ask("GET", target, b"", {"x-client": "1", "x-signature": "zz"}).status == 401
    # a good signature under another body, target or model
    run = served.server.plan["run"]
    said = body_hash(body)
    for signed in (
        request_text(run, 1, "POST", "/report/1", hostile.model, body_hash(body + b"x")),
        request_text(run, 1, "POST", "/report/2", hostile.model, said),
        request_text(run, 1, "POST", "/report/1", "", said),
        request_text("0" * 32, 1, "POST", "/report/1", hostile.model, said),
    ):
        headers = {
            "x-client": "1",
            "x-model": hostile.model,
            "x-body": said,
            "x-signature": sign(hostile.secret, signed).hex(),
        }
        assert served.ask("POST", "/report/1", body, headers).status == 401
    assert served.server.state.reported == {}
    assert served.server.state.waits_for == (0, 1)  # a forger takes nobody out of the round


def test_a_token_enrols_one_key_once(hostile: Hostile, tmp_path: Path) -> None:
    token = tokens(hostile.folder / "run")[1]

    def enrolled(secret: bytes, token: str, signer: bytes | None = None) -> int:
        key = public_identity(secret)
        asked = {
            "token": token,
            "key": key.hex(),
            "signature": sign(signer or secret, enrolment_text(token, key)).hex(),
        }
        return hostile.served.ask("POST", "/enrol", json.dumps(asked).encode()).status

    assert enrolled(hostile.secret, token) == 200  # its answer was lost
    assert enrolled(os.urandom(32), token) == 403  # the token is used
    assert enrolled(os.urandom(32), "guessed") == 403
    assert enrolled(hostile.secret, token, signer=os.urandom(32)) == 403  # somebody else's key
    for wrong in (b"", b"[]", b"{}", b"{" * 5000, b'{"token": 3, "key": "zz"}'):
        assert hostile.served.ask("POST", "/enrol", wrong).status in (400, 403)
    kept = (hostile.folder / "run" / "federated" / "clients.json").read_text()
    assert token not in kept


@pytest.mark.parametrize(
    ("method", "target"),
    [
        ("GET", "/"),
        ("PUT", "/report/1"),
        ("GET", "/report/1"),
        ("POST", "/work"),
        ("GET", "/secure/1"),
        ("GET", "/a/b/c/d"),
    ],
)
def test_there_is_nothing_else(hostile: Hostile, method: str, target: str) -> None:
    assert hostile.served.ask(method, target).status == 404


@pytest.mark.parametrize(
    "target", ["/work?have=x&after=0", "/work?have=0", "/work?have=-1&after=0", "/report/x", "/secure/1/x"]
)
def test_numbers_must_be_numbers(hostile: Hostile, target: str) -> None:
    method = "POST" if "report" in target else "GET"
    assert hostile.served.signed(1, hostile.secret, method, target).status == 400


@pytest.mark.parametrize(
    ("strategy", "settings", "sentence"),
    [
        ("clients=2", {"min_reports": 3}, "minimum=3"),
        ("clients=2", {"over": 0.5}, "over=0.5"),
        ("clients=2 over=2", {}, "over=2: is for simulated clients; for devices, give --over"),
        ("clients=4 min_reports=2", {}, "min_reports=2: is for simulated .* --min-reports"),
        ("clients=2 deadline=3", {}, "deadline=3: is for simulated"),
        ("clients=2 dropout=0.1", {}, "dropout=0.1: is for simulation"),
        ("clients=2 personal=finetune:1", {}, "personal=finetune:1: is for simulation"),
        ("clients=2 held_out=0.2", {}, "held_out=0.2: is for simulation"),
        ("clients=2 partition=shards:2", {}, "partition=shards:2: is for simulation"),
        ("clients=2 together=4", {}, "together=4: is for simulation"),
        ("clients=2", {"deadline_s": float("inf")}, "deadline_s=inf"),
        ("clients=2", {"hold_s": 3600.0}, "hold_s=3600: must be below 3600"),
        ("clients=2 keep=bias", {}, "keep=bias: is for simulation"),
        ("clients=4 algorithm=scaffold codec=int8", {}, "algorithm=scaffold: devices send their control var"),
        ("clients=4 algorithm=fedbuff:2", {}, "algorithm=fedbuff:2: not with devices, .* simulated time"),
        ("clients=4 algorithm=fednova secure=yes", {}, "algorithm=fednova: devices send their numbers"),
        ("clients=6 algorithm=krum:1", {"min_reports": 4}, "krum:1: needs 5 clients a round .* there are 4"),
        ("clients=4 clip=1 noise=1 delta=1e-4 sampling=poisson", {}, "sampling=poisson: is for simulation"),
        ("clients=4 clip=1 noise=1 delta=1e-4 randomness=seed", {}, "randomness=seed: is for simulation"),
        (
            "clients=4 clip=1 noise=1 delta=1e-4 epsilon=2",
            {},
            "epsilon=2: .* spent after 0 rounds of a device",
        ),
        ("clients=4 secure=yes epsilon=8", {}, "clip=adaptive:0.5: with secure=yes devices clip"),
        ("clients=4 secure=yes", {"min_reports": 2}, "protects none"),
        ("clients=2", {"hold_s": 0.0}, "hold_s=0"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(
    strategy: str, settings: dict[str, float], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        job_for(strategy, **settings)
