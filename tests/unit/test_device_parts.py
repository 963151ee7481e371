"""The parts of a deployment by themselves: schemas, files of devices, enrolment, pauses, addresses, folders."""

from __future__ import annotations

import http.client
import io
import json
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from safetensors.torch import save_file
from torch import nn

from commands import run_command
from devices import POINTS, TOY, offer, points, write_parts
from manyhands.errors import DataError, UserError
from manyhands.strategies.federated.deployed.device_client import DevicePlan
from manyhands.strategies.federated.deployed.device_job import (
    DataSchema,
    FederatedJob,
    RoundSettings,
    initial_model,
    read_columns,
)
from manyhands.strategies.federated.deployed.device_server import _check_tls
from manyhands.strategies.federated.deployed.protocol import (
    BackOff,
    HttpsClient,
    MessageRejected,
    TensorForm,
    Unreached,
)
from manyhands.strategies.federated.deployed.run_files import DeviceState, Enrolment, _identity
from manyhands.transport.certificates import make_certificates
from manyhands.workloads.tasks import TASKS

SCHEMA = "inputs=float32:4,labels=int64"


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, TOY)


def test_a_schema_reads_back_as_it_prints() -> None:
    for text in (SCHEMA, "a=uint8:1x8x8", "x=bfloat16:3,y=int64,z=bool:2x2"):
        assert str(DataSchema.parse(text)) == text
    assert str(DataSchema.of(TOY.build())) == "0=float32:4,1=int64"


@pytest.mark.parametrize(
    "text", ["", "a", "a=", "=int64", "a=int65", "a=int64:0", "a=int64:2y", "a=int64,a=int8"]
)
def test_a_schema_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--data-schema"):
        DataSchema.parse(text)


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"inputs": torch.zeros(3, 4)}, "no tensor 'labels'"),
        ({"inputs": torch.zeros(3, 4), "labels": torch.zeros(2).long()}, "rows"),
        ({"inputs": torch.zeros(0, 4), "labels": torch.zeros(0).long()}, "rows"),
        ({"inputs": torch.zeros(3, 5), "labels": torch.zeros(3).long()}, "inputs=float32:5"),
        ({"inputs": torch.zeros(3, 4).double(), "labels": torch.zeros(3).long()}, "inputs=float64:4"),
        ({"inputs": torch.tensor(1.0), "labels": torch.tensor(1)}, "rows"),
    ],
)
def test_a_devices_data_that_do_not_fit_are_refused(
    tmp_path: Path, columns: dict[str, torch.Tensor], sentence: str
) -> None:
    save_file(columns, tmp_path / "mine.safetensors")
    with pytest.raises(DataError, match=sentence):
        read_columns(tmp_path / "mine.safetensors", DataSchema.parse(SCHEMA), TOY.build())


def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.safetensors").write_bytes(b"\x80\x04N.")
    with pytest.raises(DataError, match="is not a safetensors file"):
        read_columns(tmp_path / "mine.safetensors", DataSchema.parse(SCHEMA), TOY.build())


def test_a_devices_data_take_the_place_of_the_tasks_own(tmp_path: Path) -> None:
    save_file({"labels": torch.ones(3).long(), "inputs": torch.ones(3, 4)}, tmp_path / "mine.safetensors")
    task = read_columns(tmp_path / "mine.safetensors", DataSchema.parse(SCHEMA), TOY.build())
    assert task.samples == 3
    assert torch.equal(task.data[0], torch.ones(3, 4))


def test_places_are_kept_without_their_tokens() -> None:
    grown, tokens = Enrolment().grown(3)
    assert len(set(tokens)) == 3
    assert not any(token in json.dumps(grown.as_json) for token in tokens)
    assert Enrolment.of(json.loads(json.dumps(grown.as_json))) == grown
    more, others = grown.grown(5)
    assert more.places[:3] == grown.places
    assert len(others) == 2
    assert grown.grown(2) == (grown, [])
    for damaged in (None, [{}], [{"token": "a", "key": "zz"}], 7):
        with pytest.raises(DataError):
            Enrolment.of(damaged)
    for client in (-1, 0, 3):
        with pytest.raises(MessageRejected, match="not enrolled"):
            grown.key_of(client)


def test_pauses_grow_up_to_a_bound_and_begin_anew() -> None:
    pauses = BackOff(first_s=1.0, most_s=8.0, seed=1)
    found = [pauses.next_s() for _ in range(60)]
    for tries, pause in enumerate(found):
        longest = min(8.0, 2.0**tries)
        assert longest / 2 <= pause <= longest
    pauses.reset()
    assert pauses.next_s() <= 1.0
    assert BackOff(seed=1).next_s() != BackOff(seed=2).next_s(), "devices do not all come at once"


@pytest.mark.parametrize(
    "address",
    [
        "http://host",
        "ftp://host",
        "https://",
        "https://host/path",
        "https://host:99999",
        "https://host:x",
        "https://host:0",
        "https://[::1",
        "https://me:secret@host",
        "https://host?a=b",
        "https://host#a",
    ],
)
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="must be https://HOST:PORT"):
        HttpsClient(address, None)


def test_an_authority_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    for path in (tmp_path / "ca.pem", tmp_path / "missing.pem"):
        with pytest.raises(UserError, match="--ca"):
            HttpsClient("https://127.0.0.1:1", path)


def test_certificates_that_devices_would_refuse_are_refused_before_a_port_is_opened(tmp_path: Path) -> None:
    [good] = make_certificates(tmp_path / "good", ["127.0.0.1"]).folders
    [other] = make_certificates(tmp_path / "other", ["127.0.0.1"]).folders
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    [old] = make_certificates(tmp_path / "old", ["127.0.0.1"], now=long_ago).folders
    _check_tls(good)
    with pytest.raises(UserError, match=r"old.*cert\.pem: .*2020"):
        _check_tls(old)
    key, right = good / "key.pem", (good / "key.pem").read_bytes()
    key.write_bytes((other / "key.pem").read_bytes())
    with pytest.raises(UserError, match="not a certificate and its key"):
        _check_tls(good)
    private = load_pem_private_key(right, None)
    locked = BestAvailableEncryption(b"secret")
    key.write_bytes(private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))
    with pytest.raises(UserError, match="is encrypted"):
        _check_tls(good)
    key.write_bytes(right)
    key.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        _check_tls(good)


def test_a_devices_key_is_its_own_and_stays(tmp_path: Path) -> None:
    device_state = DeviceState(tmp_path / "device")
    key = tmp_path / "device" / "identity.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert DeviceState(tmp_path / "device").secret == device_state.secret
    key.chmod(0o644)
    with pytest.raises(UserError, match="chmod 600"):
        DeviceState(tmp_path / "device")
    key.chmod(0o600)
    key.write_text("abc")
    with pytest.raises(DataError, match="damaged"):
        DeviceState(tmp_path / "device")


def test_a_key_is_made_once_whatever_a_killed_process_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "device"
    folder.mkdir()
    (folder / ".identity.key.writing").write_text("half of a k")
    first = DeviceState(folder).secret
    with monkeypatch.context() as patched:  # a process that looked before the first had written
        patched.setattr(Path, "exists", lambda _: False)
        assert _identity(folder / "identity.key") == first
    assert DeviceState(folder).secret == first
    assert sorted(path.name for path in folder.iterdir()) == ["identity.key"]


def test_tensors_travel_unchanged_whatever_their_types() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(3, 2).double())
            self.b = nn.Parameter(torch.randn(5).bfloat16())
            self.empty = nn.Parameter(torch.randn(0, 4))
            self.scalar = nn.Parameter(torch.tensor(2.5))
            self.norm = nn.BatchNorm1d(2)

    model = Mixed()
    form = TensorForm.of(model)
    assert [row[0] for row in form.rows][-2:] == ["norm.running_mean", "norm.running_var"]
    tensors = [*(one.detach() for one in model.parameters()), model.norm.running_mean, model.norm.running_var]
    found, about = form.decode(form.encode(tensors, {"samples": "3"}))
    for mine, theirs in zip(found, tensors, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.dtype == theirs.dtype
    assert about["samples"] == "3"


def test_what_only_a_simulation_can_do_is_refused() -> None:
    with pytest.raises(UserError, match="receive no code"):
        FederatedJob.make(replace(TOY.build(), name="mine"), "federated", RoundSettings(rounds=1))


def test_a_device_builds_an_own_task_from_its_own_module_or_not_at_all(tmp_path: Path) -> None:
    own = replace(points(), name="mine")
    job = FederatedJob.make(own, "federated clients=2", RoundSettings(rounds=1))
    plan = job.plan("run", TensorForm.of(initial_model(own, 0)))
    assert (plan["task"], plan["task_options"]) == ("mine", None)
    write_parts(tmp_path, 2, own, ("0", "1"))
    data = tmp_path / "1.safetensors"
    read = DevicePlan.read(plan, data, own)
    assert (read.task.name, read.task.samples, read.config["task_options"]) == ("mine", POINTS // 2, None)
    wider = replace(own, model=lambda: nn.Linear(4, 2, bias=False))
    for given, said in (
        (None, "'mine', a Task of its own; give this device's module with it: --task MODULE:NAME"),
        (replace(own, name="other"), "and --task names 'other'"),
        (wider, "other tensors than this device's model"),
    ):
        with pytest.raises(UserError, match=said):
            DevicePlan.read(plan, data, given)
    with pytest.raises(UserError, match="which is built in; leave --task out"):
        DevicePlan.read({**plan, "task": "digits", "task_options": {}}, data, own)


def test_devices_are_not_reported_where_the_servers_files_are(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a b c d e f g h " * 200)
    job = FederatedJob.make(
        TASKS["gpt"].build(path=text, context=8, evaluation_bytes=100),
        "federated clients=2",
        RoundSettings(rounds=1),
    )
    assert str(tmp_path) in json.dumps(job.config({}, "run"))
    assert str(tmp_path) not in json.dumps(job.plan("run", TensorForm(())))
    assert "path" not in job.plan("run", TensorForm(()))["task_options"]


def answer(raw: bytes) -> http.client.HTTPResponse:
    """What came over a connection."""

    class Connection:
        def makefile(self, _: str) -> io.BytesIO:
            return io.BytesIO(raw)

    response = http.client.HTTPResponse(Connection())  # type: ignore[arg-type]
    response.begin()
    return response


@pytest.mark.parametrize(
    ("head", "error", "why"),
    [
        (b"Content-Length: -5", http.client.HTTPException, "Content-Length"),
        (b"Content-Length: 5, 6", http.client.HTTPException, "Content-Length"),
        (b"X: y", http.client.HTTPException, "Content-Length"),
        (b"Content-Length: 5\r\nTransfer-Encoding: chunked", http.client.HTTPException, "Content-Length"),
        (b"Content-Length: 101", MessageRejected, "at most 100"),
        (b"Content-Length: 50", http.client.IncompleteRead, "9 bytes read"),
    ],
)
def test_a_device_reads_no_more_than_makes_sense(head: bytes, error: type[Exception], why: str) -> None:
    ask = HttpsClient("https://127.0.0.1:1", None)
    raw = b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n4\r\nabcd\r\n"
    with pytest.raises(error, match=why):
        ask._content(answer(raw), 100)


def test_an_answer_is_read_whole_and_one_that_trickles_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = HttpsClient("https://127.0.0.1:1", None)
    raw = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabcdefgh"
    found = answer(raw)
    assert ask._content(found, 100) == b"abcd"
    assert found.isclosed(), "the connection is free for the next request"
    assert ask._content(answer(b"HTTP/1.1 204 No Content\r\n\r\n"), 100) == b""
    times = iter([0.0, 31.0, 32.0])
    monkeypatch.setattr(
        "manyhands.strategies.federated.deployed.protocol.time.monotonic", lambda: next(times)
    )
    with pytest.raises(TimeoutError, match="too slow"):
        ask._content(answer(raw), 100)


def test_a_server_whose_headers_trickle_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte comes in time, and the answer never does."""
    make_certificates(tmp_path, ["localhost"])
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    served.load_cert_chain(tmp_path / "localhost" / "cert.pem", tmp_path / "localhost" / "key.pem")
    monkeypatch.setattr("manyhands.strategies.federated.deployed.protocol._SLOWEST", 1 << 30)
    listener = socket.create_server(("127.0.0.1", 0))

    def trickle() -> None:
        with listener, suppress(OSError), served.wrap_socket(listener.accept()[0], server_side=True) as peer:
            peer.recv(1 << 16)
            peer.sendall(b"HTTP/1.1 200 OK\r\n")
            while True:
                peer.sendall(b"X")
                time.sleep(0.01)

    server = threading.Thread(target=trickle)
    server.start()
    ask = HttpsClient(f"https://localhost:{listener.getsockname()[1]}", tmp_path / "localhost" / "ca.pem")
    ask._timeout_s = 0.25
    with pytest.raises(Unreached, match="did not answer"):
        ask("GET", "/work")
    server.join(timeout=240)
    assert not server.is_alive(), "the connection was let go"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["join", "ftp://x", "--data", "a"], "must be https://HOST:PORT"),
        (["join", "https://127.0.0.1:1", "--data", "a", "--out", "d"], "--enrol"),
        (["join", "https://127.0.0.1:1", "--data", "a", "--max-pause", "0"], "--max-pause 0"),
        (["serve", "digits", "--rounds", "0"], "rounds=0"),
        (["serve", "digits", "--rounds", "1", "--strategy", "local"], "federated"),
        (["serve", "digits", "--rounds", "1", "--strategy", "federated clients=2 fraction=2"], "fraction=2"),
        (["serve", "digits", "--rounds", "1", "--data-schema", "images=uint8"], "columns"),
        (["serve", "digits", "--rounds", "1", "--data-schema", "a=uint8:9,b=int64"], "expected:"),
        (["serve", "digits", "--rounds", "1", "--resume"], "--resume needs --out"),
        (["serve", "digits", "--rounds", "1", "--port", "70000"], "--port 70000"),
        (["serve", "digits", "--rounds", "1", "--out", "x", "--tls", "nowhere"], "has no cert.pem"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_sentence(
    words: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(monkeypatch, "federated", *words) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "x").exists(), "what was refused leaves no run behind"


def test_a_server_to_which_nobody_comes_gives_up_and_can_be_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["federated", "serve", "digits", "--rounds", "1", "--patience", "0.2", "--out", "run"]
    assert run_command(monkeypatch, *words) == 1
    assert "the server gave up after 0 rounds" in capsys.readouterr().err
    assert run_command(monkeypatch, *words) == 2
    assert "add --resume" in capsys.readouterr().err
    assert run_command(monkeypatch, *words, "--resume") == 1
    assert "enrol once" not in capsys.readouterr().out, "the places are those of the first start"
    assert len((tmp_path / "run" / "enrolment-tokens.txt").read_text().split()) == 10
    assert (tmp_path / "run" / "enrolment-tokens.txt").stat().st_mode & 0o777 == 0o600
