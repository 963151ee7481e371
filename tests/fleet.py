"""A server and devices as processes, over HTTPS, that are killed, stopped and started again while rounds go on."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import warm
from devices import write_parts
from manyhands.strategies.federated.deployed.run_files import TOKENS
from manyhands.workloads.own_task import own_task
from manyhands.workloads.tasks import build

_LOOK_S = 0.05
_PROGRAM = Path(__file__).with_name("fleet_program.py")
SCHEMA = "images=uint8:1x8x8,labels=int64"


class Fleet:
    """Digits, or the `own` Task of a module, on so many devices; a context manager, which leaves no process behind."""

    def __init__(
        self,
        folder: Path,
        strategy: str,
        devices: int,
        rounds: int,
        options: Sequence[str] = (),
        own: str | None = None,
    ) -> None:
        self.folder, self.run = folder, folder / "run"
        self._devices, self._rounds = devices, rounds
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._serve = [
            "serve",
            *(["digits"] if own is None else ["own", own]),
            "--rounds",
            str(rounds),
            "--strategy",
            f"federated clients={devices} {strategy}",
        ]
        self._serve += ["--out", str(self.run), "--port", str(self._port), *options]
        self._serve += ["--data-schema", SCHEMA] if own is None else []
        self.server: subprocess.Popen[bytes] | None = None
        self.devices: dict[int, subprocess.Popen[bytes]] = {}
        self._log = (folder / "log.txt").open("wb")
        self._own = own
        task = build("digits") if own is None else own_task(own)
        write_parts(folder, devices, task, ("images", "labels") if own is None else ("0", "1"))

    def __enter__(self) -> Fleet:
        self.start_server()
        self._until(lambda: self._tokens_there() and "enrol once" in self.log, 60, "the server's tokens")
        for number in range(self._devices):
            self.start_device(number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in [self.server, *self.devices.values()]:
            if process is not None:
                process.kill()
                process.wait(240)
        self._log.close()

    @property
    def log(self) -> str:
        """What all of them have said."""
        return (self.folder / "log.txt").read_text()

    def start_server(self, *more: str) -> None:
        self.server = self._started([*self._serve, *more])

    def start_device(self, number: int) -> None:
        token = (self.run / TOKENS).read_text().split()[number]
        words = [
            "join",
            f"https://127.0.0.1:{self._port}",
            "--data",
            str(self.folder / f"{number}.safetensors"),
        ]
        words += [
            "--out",
            str(self.device_state(number)),
            "--enrol",
            token,
            "--max-pause",
            "0.5",
            "--patience",
            "120",
        ]
        words += ["--task", self._own] if self._own is not None else []
        words += ["--ca", str(self.run / "certificates" / "127.0.0.1" / "ca.pem")]
        self.devices[number] = self._started(words)

    def device_state(self, number: int) -> Path:
        """A device's folder."""
        return self.folder / f"device-{number}"

    def _started(self, words: list[str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(_PROGRAM), "federated", *words]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # there are more of them than cores
        return warm.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, env=environment)

    def strike(self, number: int) -> None:
        """Kill a device, and start it again."""
        self.devices[number].kill()
        self.devices[number].wait(240)
        self.start_device(number)

    def strike_in_a_round(self, number: int, timeout_s: float) -> None:
        """Kill a device while a round waits for its update alone, and start it again."""
        client = json.loads((self.device_state(number) / "device.json").read_text())["client"]
        self.stop(number)

        def awaited() -> bool:
            reports = [
                (int(attempt), int(by))
                # two processes may write their lines before either ends one
                for by, attempt in re.findall(r"client (\d+) has reported to attempt (\d+)", self.log)
            ]
            last = max(reports)[0]
            came = {by for attempt, by in reports if attempt == last}
            return len(came) == self._devices - 1 and client not in came

        self._until(awaited, timeout_s, f"a round that waits for device {number}")
        self.strike(number)

    def stop(self, number: int) -> None:
        """A device sleeps."""
        self.devices[number].send_signal(signal.SIGSTOP)

    def wake(self, number: int) -> None:
        self.devices[number].send_signal(signal.SIGCONT)

    def strike_server(self) -> None:
        assert self.server is not None
        self.server.kill()
        self.server.wait(240)
        self.start_server("--resume")

    def rows(self) -> list[dict[str, Any]]:
        """The rows of rounds that count."""
        try:
            lines = (self.run / "metrics.jsonl").read_text().split("\n")[:-1]
        except FileNotFoundError:
            return []
        return [row for row in map(json.loads, lines) if "loss" in row]

    def accuracy(self) -> float:
        """After the last round."""
        summary = json.loads((self.run / "summary.json").read_text())
        return float(summary["final"]["accuracy"])

    def until_round(self, number: int, timeout_s: float) -> None:
        """Wait until so many rounds count."""
        self._until(lambda: len(self.rows()) >= number, timeout_s, f"round {number}")

    def until_end(self, timeout_s: float) -> None:
        """Wait for the server and all devices; AssertionError unless each has done its work."""
        until = time.monotonic() + timeout_s
        assert self.server is not None
        for process in [self.server, *self.devices.values()]:
            try:
                status = process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(
                    f"a process had not ended after {timeout_s} s:\n{self.log[-3000:]}"
                ) from None
            assert status == 0, self.log[-3000:]

    def _tokens_there(self) -> bool:
        return (self.run / TOKENS).exists()

    def _until(self, holds: Any, timeout_s: float, what: str) -> None:
        until = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < until, f"{what} did not come in {timeout_s} s:\n{self.log[-3000:]}"
            time.sleep(_LOOK_S)
