"""Devices and their server as processes over HTTPS: killed, stopped, started again, and every round counts once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from dp_accounting import GaussianDpEvent
from dp_accounting.rdp import RdpAccountant
from safetensors.torch import load_file

import manyhands as mh
from fleet import Fleet
from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import ManyhandsError
from manyhands.serving.opening import open_predictor
from manyhands.strategies.federated.deployed.protocol import HttpsClient
from manyhands.workloads.tasks import build

STRATEGY = "epochs=1 batch=32"
OPTIONS = ("--min-reports", "3", "--deadline", "10", "--select", "3", "--hold", "1", "--linger", "10")


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


def test_control_variates_are_consistent_after_kills_of_devices_and_server(tmp_path: Path) -> None:
    """The server's is the mean of the devices' own, by their samples: no change is lost, and none is there twice."""
    rounds, options = 4, ("--min-reports", "3", *OPTIONS[2:])
    with Fleet(
        tmp_path, f"{STRATEGY} algorithm=scaffold", devices=3, rounds=rounds, options=options
    ) as fleet:
        for done in range(rounds - 1):
            fleet.until_round(done, 60)
            fleet.strike(done)
            if done == 1:
                fleet.strike_server()
        fleet.until_end(90)
        assert [row["counted"] for row in fleet.rows()] == [[0, 1, 2]] * rounds
        with RunDirectory.open(fleet.run, lock=False) as directory:
            common = directory.checkpoints().load().extra["algorithm"]["server"]
        own, samples = [], []
        for number in range(3):
            kept = load_file(fleet.device_state(number) / "own.safetensors")
            assert not any(name.startswith("coming/") for name in kept)
            own.append([kept[name].double() for name, _ in mh.load(fleet.run).named_parameters()])
            samples.append(len(load_file(tmp_path / f"{number}.safetensors")["labels"]))
        for place, theirs in enumerate(common):
            mean = sum(one[place] * count for one, count in zip(own, samples, strict=True)) / sum(samples)
            torch.testing.assert_close(mean, theirs.double(), rtol=0, atol=1e-5)
            assert float(mean.abs().max()) > 1e-4


def test_epsilon_counts_every_round_that_was_told_whatever_is_killed(tmp_path: Path) -> None:
    """Asked and spent by dp-accounting's own count; rounds that the killed server had not told are not in it."""
    rounds, options = 4, ("--min-reports", "3", *OPTIONS[2:])
    with Fleet(tmp_path, f"{STRATEGY} epsilon=8", devices=3, rounds=rounds, options=options) as fleet:
        for done in range(3):
            fleet.until_round(done, 60)
            fleet.strike_server()
            fleet.strike(done)
        fleet.until_end(90)
        assert [row["step"] for row in fleet.rows()] == list(range(1, rounds + 1))
        privacy = json.loads((fleet.run / "summary.json").read_text())["privacy"]
    accountant = RdpAccountant()
    accountant.compose(GaussianDpEvent(privacy["noise"]), rounds)
    assert privacy["rounds"] == rounds
    assert privacy["epsilon"] == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
    assert 0.98 * 8 < privacy["epsilon"] <= 8


def test_a_server_that_is_not_known_gets_nothing(tmp_path: Path) -> None:
    with Fleet(tmp_path, STRATEGY, devices=1, rounds=1000, options=OPTIONS[2:]) as fleet:
        foreign_row = HttpsClient(
            f"https://127.0.0.1:{fleet._port}", None
        )  # of the authorities that this host trusts
        with pytest.raises(ManyhandsError, match="is not a server"):
            foreign_row("GET", "/plan")
