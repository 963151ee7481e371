"""Devices and their server as processes over HTTPS: killed, stopped, started again, and every round counts once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from fleet import Fleet
from manyhands.errors import ManyhandsError
from manyhands.serving.opening import open_predictor
from manyhands.strategies.federated.deployed.protocol import HttpsClient
from manyhands.workloads.tasks import build

STRATEGY = "epochs=1 batch=32"
OPTIONS = ("--min-reports", "3", "--deadline", "10", "--select", "3", "--hold", "1", "--linger", "10")


@pytest.mark.timeout(120)
def test_every_device_and_the_server_are_killed_and_every_round_counts_once(tmp_path: Path) -> None:
    rounds, killed = 4, ((0, 1), (2, 3), (4,))
    with Fleet(tmp_path, STRATEGY, devices=5, rounds=rounds, options=OPTIONS) as fleet:
        for done, numbers in enumerate(killed):
            fleet.until_round(done, 40)
            for number in numbers:
                fleet.strike(number)
            if done == 1:
                fleet.strike_server()
        fleet.until_end(60)
        rows = fleet.rows()
        assert [row["step"] for row in rows] == list(range(1, rounds + 1))
        assert len({row["attempt"] for row in rows}) == rounds
        assert all(len(row["counted"]) >= 3 for row in rows)
        simulated = mh.fit(build("digits"), f"federated clients=5 {STRATEGY}", rounds=rounds)
        expected = simulated.history.evaluations[-1]["metrics"]["accuracy"]
        assert fleet.accuracy() > expected - 0.05
        own = load_file(tmp_path / "3.safetensors")
        labels = own.pop("labels").tolist()
        [images] = own.values()
        predictor = open_predictor(fleet.device_state(3))
        asked = [image.reshape(8, 8).tolist() for image in images]
        predicted = [one["label"] for one in predictor.answers(predictor.inputs(asked))]
        assert sum(map(int.__eq__, predicted, labels)) / len(labels) > 0.9
        final = mh.load(fleet.run).state_dict()
        for number in range(5):
            for name, tensor in mh.load(fleet.device_state(number)).state_dict().items():
                assert torch.equal(tensor, final[name]), f"device {number} has not the last model"


@pytest.mark.timeout(60)
def test_a_server_that_is_not_known_gets_nothing(tmp_path: Path) -> None:
    with Fleet(tmp_path, STRATEGY, devices=1, rounds=1000, options=OPTIONS[2:]) as fleet:
        foreign_row = HttpsClient(
            f"https://127.0.0.1:{fleet._port}", None
        )  # of the authorities that this host trusts
        with pytest.raises(ManyhandsError, match="is not a server"):
            foreign_row("GET", "/plan")
