"""Twenty devices over HTTPS, a third of them killed or stopped at random, and the server killed twice."""

from __future__ import annotations

import json
import os
import random
import threading
from pathlib import Path

import pytest

import manyhands as mh
from fleet import Fleet
from manyhands.workloads.tasks import build

DEVICES, ROUNDS = 20, 16
STRATEGY = "fraction=0.5 epochs=2 batch=16"
OPTIONS = (
    "--deadline",
    "20",
    "--stage",
    "5",
    "--select",
    "5",
    "--present",
    "20",
    "--hold",
    "2",
    "--linger",
    "30",
)


class Trouble:
    """Kills devices and starts them again, or stops them for a while, until told to end.

    Each time a third of all; or, where a device that was killed is out of its round, always of the same third.
    """

    def __init__(self, fleet: Fleet, seed: int, *, same: bool) -> None:
        self._fleet, self._random = fleet, random.Random(seed)
        self._victims = self._random.sample(range(DEVICES), DEVICES // 3 if same else DEVICES)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._make)
        self.kills = self.stops = 0
        self._thread.start()

    def _make(self) -> None:
        while not self._ends.wait(self._random.uniform(1.0, 3.0)):
            struck = self._random.sample(self._victims, DEVICES // 3)
            stopped = struck[::2]
            for number in stopped:
                self._fleet.stop(number)
                self.stops += 1
            for number in struck[1::2]:
                self._fleet.strike(number)
                self.kills += 1
            self._ends.wait(self._random.uniform(1.0, 5.0))
            for number in stopped:
                self._fleet.wake(number)

    def end(self) -> None:
        self._ends.set()
        self._thread.join(60)


@pytest.mark.soak
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("secure", ["", " secure=yes range=2"], ids=["plain", "secure"])
def test_rounds_of_twenty_devices_survive_trouble(tmp_path: Path, secure: str) -> None:
    seed = int(os.environ.get("SOAK_SEED", "0")) or random.randrange(1, 1 << 30)
    print(f"SOAK_SEED={seed}")
    with Fleet(tmp_path, STRATEGY + secure, DEVICES, ROUNDS, OPTIONS) as fleet:
        fleet.until_round(1, 300)
        trouble = Trouble(fleet, seed, same=bool(secure))
        try:
            for number in (ROUNDS // 3, 2 * ROUNDS // 3):
                fleet.until_round(number, 600)
                fleet.strike_server()
            fleet.until_round(ROUNDS, 600)
        finally:
            trouble.end()
        fleet.until_end(180)
        rows = fleet.rows()
        assert [row["step"] for row in rows] == list(range(1, ROUNDS + 1)), "each round counts once"
        attempts = [row["attempt"] for row in rows]
        assert attempts == sorted(set(attempts))
        assert min(trouble.kills, trouble.stops) > 0
        assert all(5 <= len(row["counted"]) <= 13 for row in rows)
        said = [
            line for line in fleet.log.splitlines() if line.startswith("round ") and f" of {ROUNDS}:" in line
        ]
        report = [int(line.split()[1]) for line in said]
        assert len(report) == len(set(report)), "no round was closed twice, by any of the three servers"
        assert json.loads((fleet.run / "federated" / "state.json").read_text())["done"] == ROUNDS
        simulated = mh.fit(build("digits"), f"federated clients={DEVICES} {STRATEGY}", rounds=ROUNDS)
        expected = simulated.history.evaluations[-1]["metrics"]["accuracy"]
        print(
            f"accuracy {fleet.accuracy():.4f}, simulated {expected:.4f}; {trouble.kills} kills, {trouble.stops} stops"
        )
        assert fleet.accuracy() > expected - 0.03
