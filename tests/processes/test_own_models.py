"""An own CNN and an own transformer: trained by three strategies, asked, served under load with kills, on devices."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import manyhands as mh
import own_models
from commands import run_command
from fleet import Fleet
from manyhands.serving.batching import BatchLimits
from manyhands.serving.model_server import ModelServer, ServeOptions
from manyhands.serving.opening import open_predictor
from manyhands.task import Task

pytestmark = pytest.mark.timeout(150)

HERE = Path(own_models.__file__)
REQUESTS, CLIENTS = 240, 12


def asked(server: ModelServer, values: list[Any], connection: http.client.HTTPConnection) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {server.token}"}
    connection.request("POST", "/predict", json.dumps({"inputs": values}), headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def connected(server: ModelServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=60)


def under_load(server: ModelServer, values: list[Any], kills: int) -> list[Any]:
    """The answer to each value, asked for by many clients at once while workers are killed now and then."""
    answers: dict[int, Any] = {}
    failures: list[BaseException] = []

    def ask_some(first: int) -> None:
        connection = connected(server)
        try:
            for number in range(first, len(values), CLIENTS):
                status, said = asked(server, [values[number]], connection)
                assert status == 200, said
                (answers[number],) = said["answers"]
        except BaseException as failure:
            failures.append(failure)
        finally:
            connection.close()

    clients = [threading.Thread(target=ask_some, args=(first,)) for first in range(CLIENTS)]
    for client in clients:
        client.start()
    for kill in range(1, kills + 1):
        until = time.monotonic() + 60
        due = len(values) * kill // (kills + 2)
        while len(answers) < due or len(ready(server)) < 2:
            assert time.monotonic() < until, f"{len(answers)} answers"
            assert not failures, failures
            time.sleep(0.002)
        os.kill(ready(server)[0], signal.SIGKILL)
    for client in clients:
        client.join(90)
    assert failures == []
    assert server.view().deaths == kills
    return [answers[number] for number in range(len(values))]


def ready(server: ModelServer) -> list[int]:
    return [one.pid for one in server.view().workers if one.state != "starting"]


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (own_models.cnn, "mirrored"),
        (own_models.cnn, "ps"),
        (own_models.cnn, "pipeline stages=2"),
        (own_models.transformer, "allreduce"),
        (own_models.transformer, "sharded"),
        (own_models.transformer, "pipeline stages=2"),
    ],
)
def test_trained_by_three_strategies_and_asked_alike(make: Any, strategy: str, tmp_path: Path) -> None:
    task: Task = make()
    run = mh.fit(task, strategy, workers=2, steps=12, out=tmp_path / "run")
    predictor = open_predictor(tmp_path / "run", task)
    values = (
        ["ABC", "XY", "LMNOP"]
        if make is own_models.transformer
        else (own_models.images(3)[0].float() / 16).tolist()
    )
    write = task.write_answer or torch.Tensor.tolist
    read = task.read_input or torch.tensor
    with torch.inference_mode():
        expected = [write(run.model.eval()(read(value)[None])[0]) for value in values]
    found = predictor.answers(predictor.inputs(values))
    if make is own_models.transformer:
        assert found == expected
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_texts_under_load_with_kills_are_neither_lost_nor_mixed(tmp_path: Path) -> None:
    task = own_models.transformer()
    mh.fit(task, "single", steps=60, out=tmp_path / "run")
    predictor = open_predictor(tmp_path / "run", task)
    drawn = np.random.default_rng(0)
    texts = [
        "".join(chr(65 + (start + place) % 26) for place in range(length))
        for start, length in zip(
            drawn.integers(0, 26, REQUESTS), drawn.integers(2, own_models.CONTEXT, REQUESTS), strict=True
        )
    ]
    expected = [chr(65 + (ord(text[-1]) - 64) % 26) for text in texts]
    options = ServeOptions(workers=2, batches=BatchLimits(wait_s=0.001, deadline_s=30.0))
    with ModelServer(predictor, "letters", options) as server:
        answers = under_load(server, texts, kills=2)
        assert [answer["next"] for answer in answers] == expected, "each text has the letter after its own"
        connection = connected(server)
        status, said = asked(server, ["A" * (own_models.CONTEXT + 1)], connection)
        assert (status, "it was trained with 5" in said["error"]) == (400, True), said
        status, said = asked(server, ["AB", 7], connection)
        assert (status, said["error"][:7]) == (400, "input 1")
        for path in ("/healthz", "/readyz"):
            connection.close()
            connection.request("GET", path)
            assert connection.getresponse().status == 200
        connection.close()
        connection.request("GET", "/openapi.json", headers={"Authorization": f"Bearer {server.token}"})
        described = json.loads(connection.getresponse().read())
        sent = described["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]
        assert sent["example"] == {"inputs": ["HELLO"]}
        connection.close()


def test_an_own_cnn_on_three_devices_over_https(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = f"{HERE}:cnn"
    options = ("--min-reports", "3", "--deadline", "20", "--select", "5", "--hold", "1", "--linger", "10")
    strategy = "epochs=2 batch=8"
    with Fleet(
        tmp_path, strategy, devices=3, rounds=3, options=("--over", "1", *options), own=named
    ) as fleet:
        fleet.until_end(90)
        assert [len(row["counted"]) for row in fleet.rows()] == [3, 3, 3]
        simulated = mh.fit(own_models.cnn(), f"federated clients=3 {strategy}", rounds=3)
        final = mh.load(fleet.run, own_models.cnn()).state_dict()
        for name, tensor in simulated.model.state_dict().items():
            torch.testing.assert_close(final[name], tensor, rtol=1e-4, atol=1e-5)
        for number in range(3):
            predictor = open_predictor(fleet.device_state(number), own_models.cnn())
            for name, tensor in predictor.model.state_dict().items():
                assert torch.equal(tensor, final[name]), f"device {number} has not the last model"
    np.save(tmp_path / "image.npy", own_models.images(2, seed=5)[0].numpy() / np.float32(16))
    words = ("predict", fleet.device_state(1), tmp_path / "image.npy", "--task", named)
    assert run_command(monkeypatch, *words) == 0
    assert [len(json.loads(line)) for line in capsys.readouterr().out.splitlines()] == [2, 2]
