"""Strike at a live elastic run: kill, stop or add workers at random moments, by what its members.jsonl says."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_PATIENCE_S = 180.0


@dataclass(frozen=True)
class Members:
    """A run's members.jsonl."""

    path: Path

    def events(self) -> list[dict[str, Any]]:
        """What has been told so far."""
        try:
            lines = (self.path / "members.jsonl").read_text().splitlines()
        except OSError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def pids(self) -> dict[int, int]:
        """The processes that live, by member."""
        events = self.events()
        gone = {one["member"] for one in events if one["event"] in ("died", "left")}
        return {
            one["member"]: one["pid"]
            for one in events
            if one["event"] == "started" and one["member"] not in gone
        }

    def at_work(self) -> list[int]:
        """Members of the newest view that live and, if new, have joined; their number is the epoch's own."""
        events = self.events()
        views = [one for one in events if one["event"] == "view"]
        joined = {one["member"] for one in events if one["event"] == "joined"}
        living = self.pids()
        return (
            [
                seat["member"]
                for seat in views[-1]["slots"]
                if seat["member"] in living and seat["member"] in joined
            ]
            if views
            else []
        )

    def count(self, what: str) -> int:
        """How often this has happened."""
        return sum(one["event"] == what for one in self.events())


class Striker:
    """Chooses by a seed whom to hit; `strike` waits until the run can bear it."""

    def __init__(self, members: Members, seed: int, keep: int = 2) -> None:
        self._members = members
        self._dice = random.Random(seed)
        self._keep = keep
        self._hit: set[int] = set()  # the launcher may not have told yet
        self.hits = 0

    def strike(self, number: signal.Signals = signal.SIGKILL, *, pause_s: float = 0.3) -> bool:
        """Hit one of those at work, or sometimes one that is just coming; False where the run has ended."""
        deadline = time.monotonic() + _PATIENCE_S
        time.sleep(self._dice.uniform(0.0, pause_s))  # the random moment itself
        rather_new = self._dice.random() < 0.15
        while time.monotonic() < deadline:
            living = {member: pid for member, pid in self._members.pids().items() if member not in self._hit}
            at_work = [member for member in self._members.at_work() if member in living]
            coming = [member for member in living if member not in at_work]
            able = len(at_work) > self._keep
            victims = coming if coming and rather_new else at_work if able else []
            if victims and at_work:
                victim = self._dice.choice(victims)
                self._hit.add(victim)
                try:
                    os.kill(living[victim], number)
                    self.hits += 1
                except ProcessLookupError:  # it has just ended by itself
                    continue
                return True
            if self._members.count("view") and not living:
                return False
            time.sleep(0.02)
        raise AssertionError(
            f"the run was not whole again within {_PATIENCE_S:g} s: {self._members.events()[-5:]}"
        )
