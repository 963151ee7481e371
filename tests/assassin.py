"""Strike the processes of a parameter-server run while it trains, one after the other, each after the last recovery.

The run's own members.jsonl says who is who: names, process ids, deaths and recoveries.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


def events(run: Path) -> list[dict[str, Any]]:
    """What happened to the members so far; a line that is being written is left out."""
    try:
        text = (run / "members.jsonl").read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.split("\n")[:-1]]


@dataclass
class Assassin:
    """Kills `kills` members of the run in `path`, drawn from `seed`, from a thread of its own."""

    path: Path
    kills: int
    seed: int = 0
    signal: int = signal.SIGKILL
    names: tuple[str, ...] = ("worker", "server")
    pause_s: float = 0.3
    done: Path | None = None
    """Is made when the last kill is made good."""
    struck: list[str] = field(default_factory=list)

    def __enter__(self) -> Assassin:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._strike_all, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)
        assert not self._thread.is_alive()

    def _strike_all(self) -> None:
        rng = random.Random(self.seed)
        for number in range(self.kills):
            if not self._await(lambda number=number: self._is_whole(number)):
                return
            time.sleep(self.pause_s * rng.random())
            living = {pid: name for name, pid in self._living().items() if name.startswith(self.names)}
            pid = rng.choice(sorted(living))
            self.struck.append(living[pid])
            os.kill(pid, self.signal)
        if self.done is not None and self._await(lambda: self._is_whole(self.kills)):
            self.done.touch()

    def _is_whole(self, strikes: int) -> bool:
        """Whether everybody is there again after so many strikes: no death that is not followed by a recovery."""
        seen = events(self.path)
        recovered = sum(event["event"] == "recovered" for event in seen)
        return any(event["event"] == "joined" for event in seen) and recovered >= strikes and self._trains()

    def _trains(self) -> bool:
        return (self.path / "metrics.jsonl").exists() and (self.path / "metrics.jsonl").stat().st_size > 0

    def _living(self) -> dict[str, int]:
        """The process of each name, as the newest start says."""
        living: dict[str, int] = {}
        for event in events(self.path):
            if event["event"] == "started":
                living[event["name"]] = event["pid"]
        return {name: pid for name, pid in living.items() if Path(f"/proc/{pid}").exists()}

    def _await(self, condition: Any, within_s: float = 120.0) -> bool:
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline and not self._over.is_set():
            if condition():
                return True
            time.sleep(0.02)
        return False
