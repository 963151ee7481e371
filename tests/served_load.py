"""Clients of a model server that ask all at once, while its processes are killed."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from manyhands.serving.model_server import ModelServer

__all__ = ["asked", "connected", "ready", "under_load"]

CLIENTS = 12


def asked(server: ModelServer, values: list[Any], connection: http.client.HTTPConnection) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {server.token}"}
    connection.request("POST", "/predict", json.dumps({"inputs": values}), headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def connected(server: ModelServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=60)


def under_load(
    server: ModelServer, requests: list[list[Any]], kills: int, victim: Callable[[], int] | None = None
) -> list[list[Any]]:
    """The answers to each request, of many clients at once, while workers are killed now and then."""
    answers: dict[int, list[Any]] = {}
    failures: list[BaseException] = []

    def ask_some(first: int) -> None:
        connection = connected(server)
        try:
            for number in range(first, len(requests), CLIENTS):
                status, said = asked(server, requests[number], connection)
                assert status == 200, said
                answers[number] = said["answers"]
        except BaseException as failure:
            failures.append(failure)
        finally:
            connection.close()

    clients = [threading.Thread(target=ask_some, args=(first,)) for first in range(CLIENTS)]
    for client in clients:
        client.start()
    for kill in range(1, kills + 1):
        until = time.monotonic() + 60
        due = len(requests) * kill // (kills + 2)
        while len(answers) < due or len(ready(server)) < 2:
            assert time.monotonic() < until, f"{len(answers)} answers"
            assert not failures, failures
            time.sleep(0.002)
        os.kill(victim() if victim is not None else ready(server)[0], signal.SIGKILL)
    for client in clients:
        client.join(90)
    assert failures == []
    assert server.view().deaths == kills
    return [answers[number] for number in range(len(requests))]


def ready(server: ModelServer) -> list[int]:
    return [one.pid for one in server.view().workers if one.state != "starting"]
