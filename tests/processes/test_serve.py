"""A model served by real processes: under load, while its workers are killed and stopped, and from the command line."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
import torch

import manyhands as mh
import warm
from kills import await_that
from manyhands.errors import ManyhandsError
from manyhands.serving.batching import BatchLimits
from manyhands.serving.model_server import ModelServer, ServeOptions
from manyhands.serving.torch_predictors import ImagePredictor
from manyhands.workloads.tasks.digits import ImageClassifier
from served_load import asked, connected

REQUESTS, CONNECTIONS = 1000, 50


def predictor() -> ImagePredictor:
    torch.manual_seed(0)
    made = ImagePredictor(ImageClassifier(side=8, white=16, width=4))
    made.task = "digits"
    return made


@pytest.fixture
def server() -> Iterator[ModelServer]:
    options = ServeOptions(workers=2, batches=BatchLimits(wait_s=0.001, deadline_s=20.0))
    with ModelServer(predictor(), "a model", options) as running:
        yield running


def answering(server: ModelServer) -> dict[int, int]:
    """The workers that answer, with their processes."""
    return {one.number: one.pid for one in server.view().workers if one.state != "starting"}


def test_a_thousand_requests_over_fifty_connections_with_a_worker_killed(server: ModelServer) -> None:
    await_that(lambda: len(answering(server)) == 2, "both workers")
    images = np.random.default_rng(0).integers(0, 17, (REQUESTS, 8, 8))
    expected = [one["label"] for one in predictor().answers(images.astype(np.float32))]
    answers: dict[int, tuple[int, Any]] = {}
    failures: list[BaseException] = []
    go_on, early = threading.Event(), REQUESTS // 5
    deaths = server.view().deaths

    def ask_some(first: int) -> None:
        connection = connected(server)
        try:
            for number in range(first, REQUESTS, CONNECTIONS):
                assert number < early or go_on.wait(240)
                answers[number] = asked(server, [images[number].tolist()], connection)
        except BaseException as failure:
            failures.append(failure)
        finally:
            connection.close()

    clients = [threading.Thread(target=ask_some, args=(first,)) for first in range(CONNECTIONS)]
    for client in clients:
        client.start()
    await_that(lambda: len(answers) == early or bool(failures), "a fifth of the answers")
    (killed, pid), (_, other) = sorted(answering(server).items())
    os.kill(other, signal.SIGSTOP)  # until requests wait for each other
    os.kill(pid, signal.SIGKILL)
    try:
        go_on.set()
        await_that(lambda: server.view().waiting > 1 or len(answers) > early, "several requests")
    finally:
        os.kill(other, signal.SIGCONT)
    for client in clients:
        client.join(60)
    assert failures == []
    assert {status for status, _ in answers.values()} == {200}, "none is lost"
    assert [answers[number][1]["answers"][0]["label"] for number in range(REQUESTS)] == expected
    await_that(lambda: len(answering(server)) == 2, "another in the place of the dead one")
    assert killed not in answering(server)
    view = server.view()
    assert view.deaths == deaths + 1
    assert any("SIGKILL" in note for note in view.notes), view.notes
    assert view.requests >= REQUESTS
    assert view.batch_mean > 1, "requests of several connections share batches"
    assert 0 < view.p50_ms <= view.p95_ms <= view.p99_ms


def test_the_requests_of_a_worker_that_dies_with_them_are_answered_by_another(server: ModelServer) -> None:
    """All workers are stopped, so that the one that is sent a request has it when it dies."""
    await_that(lambda: len(answering(server)) == 2, "both workers")
    pids = list(answering(server).values())
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    said: list[tuple[int, Any]] = []
    connection = connected(server)
    asking = threading.Thread(
        target=lambda: said.append(asked(server, [np.zeros((8, 8)).tolist()], connection))
    )
    asking.start()
    busy = 0
    try:
        await_that(lambda: any(one.state == "computing" for one in server.view().workers), "it to be sent")
        (busy,) = [one.pid for one in server.view().workers if one.state == "computing"]
        os.kill(busy, signal.SIGKILL)
    finally:
        for pid in pids:
            if pid != busy:
                os.kill(pid, signal.SIGCONT)
    asking.join(30)
    connection.close()
    assert [status for status, _ in said] == [200]


def test_who_has_asked_before_the_end_is_answered_and_who_asks_after_is_not() -> None:
    options = ServeOptions(workers=1, batches=BatchLimits(wait_s=0.0, deadline_s=60.0))
    image, later = np.zeros((8, 8)).tolist(), list[tuple[int, Any]]()

    def ask_once(server: ModelServer) -> tuple[int, Any]:
        with closing(connected(server)) as connection:
            return asked(server, [image], connection)

    def until_refused(pid: int, server: ModelServer) -> None:
        try:
            while not later:
                with closing(connected(server)) as connection:
                    connection.request("GET", "/readyz")
                    with closing(connection.getresponse()) as answer:
                        if answer.status == 503:
                            later.append(ask_once(server))
        finally:
            with suppress(
                ProcessLookupError
            ):  # on a slow machine it was silent for too long, and is replaced
                os.kill(pid, signal.SIGCONT)

    with ThreadPoolExecutor() as clients:
        with ModelServer(predictor(), "a model", options) as server:
            await_that(lambda: len(answering(server)) == 1, "the worker")
            ((_, pid),) = answering(server).items()
            os.kill(pid, signal.SIGSTOP)
            asking = clients.submit(ask_once, server)
            await_that(lambda: server.view().workers[0].state == "computing", "it has the request")
            refusing = clients.submit(until_refused, pid, server)
        refusing.result(timeout=60)
        assert asking.result(timeout=60)[0] == 200
    ((status, said),) = later
    assert (status, "The server is shutting down" in said["error"]) == (503, True)


def test_bad_requests_over_a_real_socket(server: ModelServer) -> None:
    connection = connected(server)
    status, said = asked(server, [[[0] * 8] * 7], connection)
    assert (status, "input 0: its shape is 7×8" in said["error"]) == (400, True)
    connection.close()
    connection = connected(server)
    connection.putrequest("POST", "/predict")
    for name, value in (("Authorization", f"Bearer {server.token}"), ("Content-Length", str(1 << 40))):
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()  # before a byte of it was sent
    assert answer.status == 413
    assert "at most 8.0 MiB" in json.loads(answer.read())["error"]
    connection.close()
    nested = b'{"inputs": ' + b"[" * 900 + b"1" + b"]" * 900 + b"}"
    for headers, body, said in (
        ({}, nested, "nested more than 64 deep"),
        ({"Host": "127.0.0.1:80@evil"}, b"{}", "The Host header is not a name and a port"),
        ({"Content-Length": "2", "Transfer-Encoding": "chunked"}, b"2\r\n{}\r\n0\r\n\r\n", "not both"),
    ):
        connection = connected(server)
        headers = {"Authorization": f"Bearer {server.token}", **headers}
        connection.request("POST", "/predict", body, headers)
        answer = connection.getresponse()
        error = json.loads(answer.read())["error"]
        assert (answer.status, said in error) == (400, True), error
        connection.close()


def test_who_sends_far_too_much_still_reads_why(server: ModelServer) -> None:
    """A client that looks for the answer when it has sent all of it, as most do."""
    connection = connected(server)
    body = b'{"inputs": [' + b" " * (20 << 20) + b"]}"
    connection.request("POST", "/predict", body, {"Authorization": f"Bearer {server.token}"})
    answer = connection.getresponse()
    assert answer.status == 413
    assert "at most 8.0 MiB" in json.loads(answer.read())["error"]
    connection.close()


def test_a_worker_that_computes_for_too_long_is_replaced_and_its_request_reported() -> None:
    options = ServeOptions(workers=1, batches=BatchLimits(wait_s=0.0, deadline_s=1.0))
    with ModelServer(predictor(), "a model", options) as server:
        await_that(lambda: len(answering(server)) == 1, "the worker")
        ((number, pid),) = answering(server).items()
        os.kill(pid, signal.SIGSTOP)
        connection = connected(server)
        begun = time.monotonic()
        status, said = asked(server, [np.zeros((8, 8)).tolist()], connection)
        assert (status, "not computed within 1 s" in said["error"]) == (503, True)
        assert time.monotonic() - begun > 0.9
        connection.close()
        await_that(lambda: bool(answering(server)) and number not in answering(server), "another worker")
        connection = connected(server)
        assert asked(server, [np.zeros((8, 8)).tolist()], connection)[0] == 200
        connection.close()
        assert server.view().deaths == 1


class Unloadable(ImagePredictor):
    """One that no worker can use."""

    def answers(self, inputs: Any) -> list[Any]:
        raise ArithmeticError("this model is broken")


def test_a_model_that_no_worker_can_serve_is_an_error() -> None:
    broken = Unloadable(ImageClassifier(side=8, white=16, width=4))
    server = ModelServer(broken, "broken", ServeOptions(workers=1))
    with (
        pytest.raises(ManyhandsError, match=r"no worker could serve the model.*this model is broken"),
        server,
    ):
        pass


def test_the_command_serves_and_ends_with_a_signal(tmp_path: Path) -> None:
    mh.fit(mh.tasks.build("digits", width=4), "single", steps=2, out=tmp_path / "run")
    command = [sys.executable, "-m", "manyhands", "serve", "run", "--workers", "1"]
    with warm.Popen(command, cwd=tmp_path, stderr=PIPE, text=True) as process:
        assert process.stderr is not None
        report = ""
        for line in process.stderr:
            report += line
            if line.startswith("Ctrl-C"):
                break
        found = re.search(r"curl -s http://(\S+)/predict -H 'Authorization: Bearer (\S+)' -d '(.*)'", report)
        assert found is not None, report
        connection = http.client.HTTPConnection(found[1], timeout=240)
        connection.request("POST", "/predict", found[3], {"Authorization": f"Bearer {found[2]}"})
        answer = connection.getresponse()
        assert (answer.status, list(json.loads(answer.read()))) == (200, ["answers"])
        connection.close()
        process.send_signal(signal.SIGINT)
        assert "the server has ended" in process.communicate(timeout=240)[1]
        assert process.returncode == 0


def test_the_page_brings_what_was_asked(server: ModelServer) -> None:
    """The events that a browser's page is made of, read without one."""
    connection = connected(server)
    assert asked(server, [np.zeros((8, 8)).tolist()] * 2, connection)[0] == 200
    connection.request("GET", "/events", headers={"Authorization": f"Bearer {server.token}"})
    stream = connection.getresponse()
    events: dict[str, Any] = {}
    while "sections" not in events:
        name, data = stream.readline().decode().strip(), stream.readline().decode().strip()
        assert stream.readline() == b"\n"
        events[name.removeprefix("event: ")] = json.loads(data.removeprefix("data: "))
    connection.close()
    assert events["title"] == "digits · served by 2 workers"
    assert list(events["sections"]) == ["now", "wrong", "latency", "throughput", "workers", "how", "notes"]
    assert "1 × 200" in events["sections"]["notes"]
    assert "/predict" in events["sections"]["how"]
