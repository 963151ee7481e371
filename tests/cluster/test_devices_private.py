"""Devices in private runs, and with robust and stateful algorithms: against closed forms and the accountant."""

from __future__ import annotations

import json
import math
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import manyhands as mh
from devices import TOY, Served, job_for, make_device, offer, serving, tokens, write_parts
from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import DataError, UserError
from manyhands.strategies.federated import privacy_noise
from manyhands.strategies.federated.deployed import device_client
from manyhands.strategies.federated.deployed.device_client import Device
from manyhands.strategies.federated.privacy_noise import RoundNoise, clipped, seeded_draws
from manyhands.strategies.federated.private_rounds import RoundKind, epsilon_of
from manyhands.strategies.federated.simulation import models_kept


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, TOY)


def devices_of(served: Served, folder: Path, count: int) -> list[Device]:
    given = tokens(folder / "run") if (folder / "run" / "enrolment-tokens.txt").exists() else [None] * count
    return [make_device(served, folder, number, given[number]) for number in range(count)]


def to_the_end(devices: list[Device]) -> None:
    threads = [threading.Thread(target=device.run) for device in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for device in devices:
        device._state.close()


def flat(path: Path) -> torch.Tensor:
    return torch.cat([one.detach().double().flatten() for one in mh.load(path).parameters()])


def first_weights() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.cat([one.detach().double().flatten() for one in TOY.build().model().parameters()])


def updates(devices: list[Device]) -> list[torch.Tensor]:
    """What each device made last, in one row."""
    made = [device._made for device in devices]
    return [torch.cat([one.double().flatten() for one in found[1].change]) for found in made if found]


def test_the_servers_noise_is_added_to_the_sum_of_clipped_updates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(privacy_noise, "system_draws", seeded_draws(7))
    write_parts(tmp_path, 4)
    with serving(job_for("clients=4 clip=0.1 noise=0.7 delta=1e-4", rounds=1), tmp_path / "run") as served:
        devices = devices_of(served, tmp_path, 4)
        to_the_end(devices)
    row = torch.stack([clipped([one], 0.1)[0] for one in updates(devices)]).sum(0)
    assert min(float(one.norm()) for one in updates(devices)) > 0.1, "or nothing was clipped"
    clean = row.clone()
    RoundNoise.of(0.7, 4, bound=0.1, adapts=False).add(row, seeded_draws(7))
    assert float((row - clean).norm()) > 0.01
    torch.testing.assert_close(flat(tmp_path / "run"), first_weights() + row / 4, rtol=0, atol=1e-6)
    stored = (tmp_path / "run" / "federated" / "state.json").read_text()
    assert all(f"{float(one.norm()):.4f}" not in stored for one in updates(devices)), "norms are not kept"


def test_epsilon_alone_is_kept_over_a_restart_of_the_server(tmp_path: Path) -> None:
    """Asked and spent, by the accountant's count of the rounds of the device that was in most of them."""
    write_parts(tmp_path, 4)
    strategy = "clients=4 fraction=0.5 epsilon=6"
    with serving(job_for(strategy, rounds=3), tmp_path / "run") as served:
        assert any(one.startswith("epsilon=6 with noise=") for one in served.reported)
        to_the_end(devices_of(served, tmp_path, 4))
    before = json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]
    assert 0 < before["epsilon"] <= 6 == before["budget"]
    again = f"{strategy} noise={before['noise']:g} clip=adaptive:0.5 delta=1e-5"
    with pytest.raises(
        UserError, match="is spent after 3 rounds of a device, and --rounds 5 may ask it in all"
    ):
        job_for(again, rounds=5)
    longer = again.replace("epsilon=6 ", "")
    # two devices a round: after 8 rounds one of the four is in at least 4, and was in at most 3 before
    with serving(job_for(longer, rounds=8), tmp_path / "run", resume=True) as served:
        to_the_end(devices_of(served, tmp_path, 4))
        said = " ".join(served.reported)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    counted = [row["counted"] for row in rows if "counted" in row]
    most = max(sum(client in one for one in counted) for client in range(4))
    after = json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]
    kind = RoundKind(noise=before["noise"], probability=1.0)
    assert after["epsilon"] == epsilon_of({kind: most}, 1e-5) > before["epsilon"]
    assert f"after {most} rounds of the client with the most rounds" in said
    assert [row["loss"] for row in rows if "loss" in row] == [None] * 8
    with pytest.raises(UserError, match="without noise, so no epsilon would hold"):
        _resumed_with_noise(tmp_path)


def spent_at(folder: Path) -> tuple[int, float]:
    """Rounds of the device with the most, and its epsilon."""
    privacy = json.loads((folder / "summary.json").read_text())["privacy"]
    return privacy["rounds"], privacy["epsilon"]


def test_a_resumed_server_stays_within_its_budget(tmp_path: Path) -> None:
    """Each start computes the noise of its own number of rounds; what was spent before is spent."""
    from dp_accounting import GaussianDpEvent
    from dp_accounting.rdp import RdpAccountant

    write_parts(tmp_path, 3)
    with serving(job_for("clients=3 epsilon=6", rounds=3), tmp_path / "run") as served:
        to_the_end(devices_of(served, tmp_path, 3))
        first = served.server._job.strategy.noise
    with (
        pytest.raises(
            UserError, match=r"epsilon=6: the run to resume has spent 6 of it, .* leaves 0 of 2 more"
        ),
        serving(job_for("clients=3 epsilon=6", rounds=5), tmp_path / "run", resume=True),
    ):
        pass
    with serving(job_for("clients=3 epsilon=9", rounds=5), tmp_path / "run", resume=True) as served:
        to_the_end(devices_of(served, tmp_path, 3))
        second = served.server._job.strategy.noise
    accountant = RdpAccountant()
    accountant.compose(GaussianDpEvent(first), 3)
    accountant.compose(GaussianDpEvent(second), 2)
    rounds, spent = spent_at(tmp_path / "run")
    assert (rounds, spent) == (5, pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9))
    assert 6 < spent <= 9


@pytest.mark.parametrize("noise_by", ["clients", "server"])
def test_a_sum_that_may_have_been_seen_and_is_lost_is_counted(tmp_path: Path, noise_by: str) -> None:
    """The server is killed with an open attempt, twice: it may have had the sum with the devices' noise already."""
    write_parts(tmp_path, 3)
    text, out = f"clients=3 secure=yes clip=0.1 noise=4 noise_by={noise_by} delta=1e-4", tmp_path / "run"
    with serving(job_for(text, rounds=1, over=1.0), out) as served:
        to_the_end(devices_of(served, tmp_path, 3))
    job, state = job_for(text, rounds=3, over=1.0), out / "federated" / "state.json"
    for attempt in (2, 3):
        killed = {"phase": "reporting", "asked": [0, 1, 2], "attempt": attempt}
        state.write_text(json.dumps({**json.loads(state.read_text()), **killed}))
        with serving(job, out, resume=True) as served:
            assert served.server.state.done == 1
    with serving(job, out, resume=True) as served:
        to_the_end(devices_of(served, tmp_path, 3))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "counted" in row] == [1, 2, 3]
    counted = 5 if noise_by == "clients" else 3
    kind = RoundKind(noise=4.0, probability=1.0)
    assert spent_at(out) == (counted, epsilon_of({kind: counted}, 1e-4))


def test_a_round_whose_checkpoint_is_damaged_is_counted_and_its_repetition_too(tmp_path: Path) -> None:
    write_parts(tmp_path, 3)
    text = "clients=3 clip=0.1 noise=4 delta=1e-4"
    with serving(job_for(text, rounds=2), tmp_path / "run") as served:
        to_the_end(devices_of(served, tmp_path, 3))
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    for file in newest.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-1])
    with serving(job_for(text, rounds=3), tmp_path / "run", resume=True) as served:
        assert served.server.state.done == 1
        to_the_end(devices_of(served, tmp_path, 3))
    assert spent_at(tmp_path / "run")[0] == 4


def test_without_its_package_the_server_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    for text in ("clip=1 noise=9 delta=1e-4 epsilon=50", "clip=1 noise=9 delta=1e-4", "epsilon=50"):
        with pytest.raises(UserError, match=r"needs the dp-accounting package.*manyhands\[privacy\]"):
            job_for(f"clients=3 {text}")


def _resumed_with_noise(folder: Path) -> None:
    write_parts(folder, 3)
    with serving(job_for("clients=3", rounds=1), folder / "plain") as served:
        given = tokens(folder / "plain")
        fresh = folder / "fresh"
        fresh.mkdir()
        write_parts(fresh, 3)
        to_the_end([make_device(served, fresh, number, given[number]) for number in range(3)])
    with serving(job_for("clients=3 clip=1 noise=9 delta=1e-4", rounds=2), folder / "plain", resume=True):
        raise AssertionError("a server without noise must not go on with it")


@pytest.mark.parametrize("noise_by", ["clients", "server"])
def test_secure_sums_of_clipped_updates_have_their_noise(
    tmp_path: Path, noise_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With noise by clients each brings its share, and the server none; within six deviations, and not without."""
    drawn: list[str] = []

    def draws(of: str) -> object:
        inside = seeded_draws(3)

        def counted(count: int) -> object:
            drawn.append(of)
            return inside(count)

        return counted

    monkeypatch.setattr(device_client, "system_draws", draws("device"))
    monkeypatch.setattr(privacy_noise, "system_draws", draws("server"))
    write_parts(tmp_path, 4)
    text = f"clients=4 secure=yes range=2 clip=0.1 noise=1 noise_by={noise_by} delta=1e-4"
    with serving(job_for(text, rounds=1, over=1.0), tmp_path / "run") as served:
        devices = devices_of(served, tmp_path, 4)
        to_the_end(devices)
    assert set(drawn) == {"device" if noise_by == "clients" else "server"}
    row = torch.stack([clipped([one], 0.1)[0] for one in updates(devices)]).sum(0)
    rest = (flat(tmp_path / "run") - first_weights()) * 4 - row
    deviation = 0.1 * (math.sqrt(4 / 3) if noise_by == "clients" else 1.0)
    assert 0.2 * deviation < float(rest.std()) < 3 * deviation
    assert float(rest.abs().max()) < 6 * deviation
    privacy = json.loads((tmp_path / "run" / "summary.json").read_text())["privacy"]
    assert privacy["epsilon"] == epsilon_of({RoundKind(noise=1.0, probability=1.0): 1}, 1e-4)
    against = "the server and everybody else" if noise_by == "clients" else "everybody but the server"
    assert f"against {against}" in privacy["sentence"]


def test_the_range_holds_the_noise_of_the_fewest_devices_that_make_a_sum() -> None:
    """Of three each adds a third of the variance: a range for the shares of 30 would cut it off."""
    text = "clients=30 secure=yes range=2 clip=0.5 noise=1 noise_by=clients delta=1e-4"
    assert job_for(text, min_reports=20).private_rounds() is not None
    with pytest.raises(UserError, match=r"clip=0\.5: with range=2 .* only up to clip=0\.252"):
        job_for(text, min_reports=3)


def test_a_model_with_averaged_buffers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    normed = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    task = replace(TOY.build(), model=lambda: normed)
    monkeypatch.setattr(type(TOY), "build", lambda self: task)
    with pytest.raises(UserError, match=r"buffer '0\.running_mean' is averaged over clients"):
        job_for("clients=3 clip=1 noise=9 delta=1e-4")


@pytest.mark.parametrize("algorithm", ["median", "trimmed:0.2", "krum:1", "multikrum:1"])
def test_a_robust_server_is_not_moved_by_a_hostile_device(
    tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong update of a usual norm: the closed form of each, of Krum an honest device's own."""
    write_parts(tmp_path, 5)
    with serving(job_for(f"clients=5 algorithm={algorithm}", rounds=1), tmp_path / "run") as served:
        devices = devices_of(served, tmp_path, 5)
        honest = devices[4]._update

        def lies() -> object:
            made = honest()
            wrong = replace(made, change=[-3 * one for one in made.change])
            devices[4]._made = (devices[4]._hash, wrong)
            return wrong

        monkeypatch.setattr(devices[4], "_update", lies)
        to_the_end(devices)
    moved = flat(tmp_path / "run") - first_weights()
    made = torch.stack(updates(devices))
    closed = {
        "median": made.median(0).values,
        "trimmed:0.2": made.sort(0).values[1:4].mean(0),
        "multikrum:1": made[:4].mean(0),
        "krum:1": min(made[:4], key=lambda one: float((moved - one).norm())),
    }
    torch.testing.assert_close(moved, closed[algorithm], rtol=0, atol=1e-6)
    assert float((moved - made[4]).norm()) > 0.1


def test_own_models_are_those_of_the_simulation_and_outlive_a_restart(tmp_path: Path) -> None:
    """Every device is killed in each round, once it has trained, and trains again."""
    write_parts(tmp_path, 3)
    strategy = "clients=3 epochs=2 batch=8 algorithm=ditto:0.2"
    for rounds in (2, 4):
        with serving(job_for(strategy, rounds=rounds), tmp_path / "run", resume=rounds > 2) as served:
            devices = devices_of(served, tmp_path, 3)
            to_the_end([_Forgetful(one, before_report=True) for one in devices])  # type: ignore[misc]
    simulated = mh.fit(TOY.build(), f"federated {strategy}", rounds=4, out=tmp_path / "simulated")
    with RunDirectory.open(tmp_path / "simulated", lock=False) as directory:
        kept = models_kept(directory.checkpoints().load().extra["exchange"])
    names = [name for name, _ in simulated.model.named_parameters()]
    assert sorted(kept) == [0, 1, 2]
    for client in range(3):
        own = load_file(tmp_path / f"device-{client}" / "own.safetensors")
        for name, theirs in zip(names, kept[client], strict=True):
            torch.testing.assert_close(own[name], theirs, rtol=0, atol=1e-6)
        common = mh.load(tmp_path / f"device-{client}").state_dict()
        assert not torch.allclose(own[names[0]], common[names[0]])
        assert (tmp_path / f"device-{client}" / "own.safetensors").stat().st_mode & 0o077 == 0
    (tmp_path / "device-0" / "own.safetensors").write_bytes(b"12345678")
    with (
        serving(job_for(strategy, rounds=5), tmp_path / "run", resume=True) as served,
        pytest.raises(DataError, match=r"own\.safetensors"),
    ):
        devices_of(served, tmp_path, 1)


def test_control_variates_follow_the_reports_that_count(tmp_path: Path) -> None:
    """Half of the devices a round, each killed after every report: the server's is the mean of the devices' own.

    That holds only if a device keeps its new one when its report is in the round, and the old one when it is not.
    """
    write_parts(tmp_path, 4)
    strategy = "clients=4 fraction=0.5 epochs=2 batch=all algorithm=scaffold"
    with serving(job_for(strategy, rounds=5, over=2.0), tmp_path / "run") as served:
        devices = devices_of(served, tmp_path, 4)
        to_the_end([_Forgetful(one) for one in devices])  # type: ignore[misc]
        common = torch.cat([one.flatten() for one in served.server._algorithm.memory()["server"]])
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    counted = [client for row in rows if "counted" in row for client in row["counted"]]
    assert len(counted) == 10
    own = []
    for client in range(4):
        kept = load_file(tmp_path / f"device-{client}" / "own.safetensors") if client in counted else {}
        assert not any(name.startswith("coming/") for name in kept), "it knows whether it counted"
        zeros = torch.zeros_like(common)
        own.append(torch.cat([kept["weight"].flatten(), kept["bias"]]) if "weight" in kept else zeros)
    torch.testing.assert_close(torch.stack(own).mean(0), common, rtol=0, atol=1e-6)


class _Forgetful:
    """A device that is started anew after every report, or once in every round before its report."""

    def __init__(self, device: Device, *, before_report: bool = False) -> None:
        self._device, self._state, self._before_report = device, device._state, before_report

    def run(self) -> int:
        send = self._device._send

        class Restart(Exception):
            pass

        asked, cut_at = [], set[str]()

        def cut(method: str, target: str, *more: object) -> object:
            if self._before_report and target.startswith("/report") and target not in cut_at:
                cut_at.add(target)
                raise Restart
            if (
                not self._before_report
                and target.startswith("/work")
                and any(one.startswith("/report") for one in asked)
            ):
                raise Restart
            asked.append(target)
            return send(method, target, *more)

        while True:
            fresh = Device(cut, self._state, self._device._plan, sleep=lambda _: None)
            asked.clear()
            try:
                return fresh.run()
            except Restart:
                continue
