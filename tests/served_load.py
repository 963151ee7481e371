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

CLIENTS = 12


def asked(server: ModelServer, values: list[Any], connection: http.client.HTTPConnection) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {server.token}"}
    connection.request("POST", "/predict", json.dumps({"inputs": values}), headers)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def connected(server: ModelServer) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=240)


def under_load(
    server: ModelServer, requests: list[list[Any]], kills: int, victim: Callable[[], int] | None = None
) -> list[tuple[int, list[Any]]]:
    """Every answer with the number of its request; clients ask for all of them, and on until workers were killed."""
    given: list[tuple[int, list[Any]]] = []
    failures: list[BaseException] = []
    killed = threading.Event()

    def ask_some(first: int) -> None:
        connection, is_first = connected(server), True
        try:
            while is_first or not killed.is_set():
                is_first = False
                for number in range(first, len(requests), CLIENTS):
                    status, said = asked(server, requests[number], connection)
                    assert status == 200, said
                    given.append((number, said["answers"]))
        except BaseException as failure:
            failures.append(failure)
        finally:
            connection.close()

    def until(holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 180
        while not holds():
            assert time.monotonic() < deadline, f"{what}, after {len(given)} answers"
            assert not failures, failures
            time.sleep(0.002)

    def strike(deaths: int) -> None:
        more = len(given) + CLIENTS
        until(lambda: len(ready(server)) == 2 and len(given) >= more, "two workers under load")
        os.kill(victim() if victim is not None else ready(server)[0], signal.SIGKILL)
        until(lambda: server.view().deaths == deaths, "a death that is noticed")

    clients = [threading.Thread(target=ask_some, args=(first,)) for first in range(CLIENTS)]
    for client in clients:
        client.start()
    try:
        for kill in range(kills):
            strike(kill + 1)
    finally:
        killed.set()
        for client in clients:
            client.join(90)
    assert failures == []
    assert server.view().deaths == kills
    assert {number for number, _ in given} == set(range(len(requests))), "none is lost"
    return given


def ready(server: ModelServer) -> list[int]:
    return [one.pid for one in server.view().workers if one.state != "starting"]
