"""Secure sums over requests: devices that leave at every stage, and a server that lies."""

from __future__ import annotations

import gc
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from threading import Thread
from types import FrameType, FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from devices import TOY, Served, job_for, make_device, offer, serving, write_parts
from manyhands.errors import UserError
from manyhands.strategies.federated.client_updates import ClientUpdate
from manyhands.strategies.federated.deployed.device_client import Device, terms_from
from manyhands.strategies.federated.deployed.protocol import Reply
from manyhands.strategies.federated.deployed.rounds_server import RoundServer, SecureAttempt
from manyhands.strategies.federated.deployed.run_files import TOKENS, DeviceState
from manyhands.strategies.federated.secure.fixedpoint import FixedPoint, words_of
from manyhands.strategies.federated.secure.primitives import ProtocolRefused
from manyhands.strategies.federated.secure.secure_messages import SurvivorList, UnmaskRequest
from manyhands.strategies.federated.secure.secure_protocol import SecureStage
from manyhands.strategies.federated.strategy import Federated

DEVICES = 5  # of which 4 must stay
STAGE_S = 30.0  # more than a busy machine takes for what devices do; tests that need its end let time pass
FIXED = FixedPoint(clip=2.0)


class Died(Exception):
    """A device's process is gone."""


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, TOY)


class Party:
    """A server and devices, one of which asks by way of `meddle`."""

    def __init__(self, served: Served, folder: Path) -> None:
        self.served, self.folder = served, folder
        self.over = threading.Event()
        self.asked: list[tuple[int, str, str]] = []
        self.sent: list[bytes] = []
        self.waits: dict[int, tuple[object, int]] = {}
        self.broken = -1
        self.devices: list[Device] = []

    def start(self, meddle: Callable[[int, str, str, Reply | None], Reply | None]) -> None:
        """`meddle` may change what device n is answered, or raise Died before it asks (then it is given None)."""
        tokens = (self.folder / "run" / TOKENS).read_text().split()
        for number in range(DEVICES):
            device = make_device(
                self.served, self.folder, number, tokens[number], self.sender(number, meddle)
            )
            if number == self.broken:
                nothing = ClientUpdate(client=number, change=[], samples=1, steps=1, loss=float("nan"))
                device._update = lambda nothing=nothing: nothing  # type: ignore[method-assign]
            self.devices.append(device)
        self.threads = [threading.Thread(target=self.run, args=(one,)) for one in self.devices]
        for thread in self.threads:
            thread.start()

    def sender(self, number: int, meddle: Any) -> Any:
        device_state = DeviceState(self.folder / f"device-{number}")

        def send(method: str, target: str, body: bytes, model: str, most: int) -> Reply:
            if self.over.is_set():
                raise Died
            self.asked.append((number, method, target))
            if number == 3 and method == "POST":
                self.sent.append(body)
            meddle(number, method, target, None)
            client = json.loads((device_state.path / "device.json").read_text())["client"]
            reply = self.served.signed(client, device_state.secret, method, target, body, model)
            self.note(number, target, reply)
            return meddle(number, method, target, reply) or reply

        return send

    def note(self, number: int, target: str, reply: Reply) -> None:
        """How often in a row a device was told that there is nothing for it, with nothing changed between."""
        nothing = reply.status == 204 or (
            target.startswith("/work") and json.loads(reply.body).get("state") == "wait"
        )
        place = (self.served.app._version, target)
        before, times = self.waits.get(number, (None, 0))
        self.waits[number] = (place, times + 1 if before == place else 1) if nothing else (None, 0)

    def all_wait(self) -> bool:
        """Whether every device that is left has been told so twice: none of them will send anything by itself."""
        now = self.served.app._version
        for number, thread in enumerate(self.threads):
            place, times = self.waits.get(number, (None, 0))
            if thread.is_alive() and (times < 2 or place[0] != now):  # type: ignore[index]
                return False
        return True

    def run(self, device: Device) -> None:
        try:
            device.run()
        except Died:
            pass

    def end(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(30)
        for device in self.devices:
            device._state.close()

    def until_reported(self, word: str, *, past_deadlines: bool = False) -> None:
        """Wait until the server has said something with this word.

        With `past_deadlines` its time passes, by no sleep, whenever all that are left wait for those who are not.
        """
        for _ in range(3000):
            if any(word in sentence for sentence in self.served.reported):
                return
            if past_deadlines and self.all_wait():
                self.served.clock.ahead_s += STAGE_S / 4
            threading.Event().wait(0.01)
        raise AssertionError(f"it did not come: {self.served.reported}")


@pytest.fixture
def party(tmp_path: Path) -> Iterator[Party]:
    write_parts(tmp_path, DEVICES)
    job = job_for(
        f"clients={DEVICES} epochs=1 batch=8 secure=yes range=2",
        rounds=1,
        deadline_s=4 * STAGE_S,
        stage_s=STAGE_S,
        hold_s=0.05,
    )
    with serving(job, tmp_path / "run") as served:
        found = Party(served, tmp_path)
        yield found
        found.end()


def mean_of(party: Party, counted: list[int], start: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the model must be: the start, and the mean of these devices' updates by their samples."""
    updates = [party.devices[number]._made[1] for number in counted]  # type: ignore[index]
    total = sum(one.samples for one in updates)
    return [
        begun + sum(one.change[place] * one.samples for one in updates) / total
        for place, begun in enumerate(start)
    ]


@pytest.mark.parametrize("stage", [stage for stage in SecureStage if stage < SecureStage.DONE])
def test_a_device_that_leaves_at_a_stage_does_not_hold_up_the_others(
    party: Party, stage: SecureStage
) -> None:
    start = [one.clone() for one in party.served.server._weights]

    def meddle(number: int, method: str, target: str, reply: Reply | None) -> None:
        if number == 2 and method == "POST" and target == f"/secure/1/{int(stage)}" and reply is None:
            raise Died

    party.start(meddle)
    party.until_reported("have counted", past_deadlines=True)
    [row] = [row for row in party.served.server._files.directory.metrics.read() if "loss" in row]
    expected = [0, 1, 2, 3, 4] if stage > SecureStage.MASK else [0, 1, 3, 4]
    assert row["counted"] == expected
    wanted = mean_of(party, expected, start)
    for mine, theirs in zip(party.served.server._weights, wanted, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("stage", [SecureStage.ADVERTISE, SecureStage.MASK, SecureStage.UNMASK])
def test_with_too_few_left_the_round_is_abandoned_and_the_model_stays(
    party: Party, stage: SecureStage
) -> None:
    start = [one.clone() for one in party.served.server._weights]

    def meddle(number: int, method: str, target: str, reply: Reply | None) -> None:
        if number in (1, 2) and method == "POST" and target == f"/secure/1/{int(stage)}" and reply is None:
            raise Died

    party.start(meddle)
    party.until_reported("abandoned", past_deadlines=True)
    server = party.served.server
    assert server.state.done == 0
    assert any("abandoned" in sentence and "4 are needed" in sentence for sentence in party.served.reported)
    assert all(torch.equal(mine, begun) for mine, begun in zip(server._weights, start, strict=True))
    assert server._sum.total().weight == 0


def other_survivors(body: bytes) -> bytes:
    """The request to unmask, with one of those whose inputs count said to be gone."""
    request = UnmaskRequest.decode(body)
    lists = SurvivorList(survivors=request.lists.survivors[1:], dropped=request.lists.survivors[:1])
    return UnmaskRequest(lists=lists, signatures=request.signatures).encode()


def test_a_device_asked_for_two_lists_of_survivors_answers_nothing_more(party: Party) -> None:
    def meddle(number: int, method: str, target: str, reply: Reply | None) -> Reply | None:
        if (
            number == 4
            and method == "GET"
            and target == "/secure/1/4"
            and reply is not None
            and reply.status == 200
        ):
            return replace(reply, body=other_survivors(reply.body))
        return None

    party.start(meddle)
    party.until_reported("have counted", past_deadlines=True)  # without its shares, by those of the others
    assert (4, "POST", "/secure/1/3") in party.asked
    assert (4, "POST", "/secure/1/4") not in party.asked


def test_a_device_whose_own_signed_keys_are_changed_on_the_way_leaves(party: Party) -> None:
    def meddle(number: int, method: str, target: str, reply: Reply | None) -> Reply | None:
        if (
            number == 4
            and method == "GET"
            and target == "/secure/1/1"
            and reply is not None
            and reply.status == 200
        ):
            return replace(reply, body=reply.body[:-1] + bytes([reply.body[-1] ^ 1]))
        return None

    party.start(meddle)
    party.until_reported("have counted", past_deadlines=True)
    assert (4, "POST", "/secure/1/1") not in party.asked


def test_a_message_that_is_sent_again_counts_once_and_another_one_not_at_all(party: Party) -> None:
    again: list[int] = []

    def meddle(number: int, method: str, target: str, reply: Reply | None) -> None:
        if number == 3 and method == "POST" and target == "/secure/1/0" and reply is not None:
            client, secret = party.devices[3]._state.client, party.devices[3]._state.secret
            for body in (sent[-1], b"x" * 228, b"x" * 9999):
                again.append(party.served.signed(client, secret, "POST", target, body).status)

    sent: list[bytes] = []
    party.sent = sent
    party.start(meddle)
    party.until_reported("have counted")
    assert again == [200, 409, 413]
    [row] = [row for row in party.served.server._files.directory.metrics.read() if "loss" in row]
    assert row["counted"] == [0, 1, 2, 3, 4], "what it sent first counts"


TERMS = {
    "round_id": "ab" * 32,
    "threshold": 3,
    "length": 13,
    "roster": {str(number): f"{number + 1:02x}" * 32 for number in range(4)},
}


@pytest.mark.parametrize(
    "change",
    [
        {"threshold": 2},
        {"threshold": 5},
        {"length": 14},
        {"round_id": "ab"},
        {"roster": {"0": "01" * 32}},
        {"roster": {**TERMS["roster"], "3": "01" * 32}},  # type: ignore[dict-item]
        {"roster": None},
        {"roster": {**TERMS["roster"], "4": "05" * 32}},  # type: ignore[dict-item]
        {"roster": {**TERMS["roster"], "-1": "05" * 32}},  # type: ignore[dict-item]
        {"roster": {**TERMS["roster"], str(1 << 40): "05" * 32}},  # type: ignore[dict-item]
    ],
    ids=str,
)
def test_terms_under_which_a_device_would_not_be_hidden_are_refused(change: dict[str, Any]) -> None:
    strategy = Federated(clients=4, secure=True)
    terms, roster = terms_from(TERMS, 10, strategy)
    assert (terms.clients, len(roster)) == (4, 4)
    with pytest.raises(ProtocolRefused):
        terms_from({**TERMS, **change}, 10, strategy)


def test_a_server_does_not_choose_how_numbers_become_words() -> None:
    """By a small range it would cut off the noise that protects a device from it."""
    strategy = Federated(clients=4, secure=True, range=2.0)
    for change in ({"clip": 1e-6}, {"bits": 2}, {"ring": 16}):
        assert terms_from({**TERMS, **change}, 10, strategy)[0].fixed == strategy.fixed_point


def test_a_device_sends_no_update_to_a_server_that_gives_up_its_secure_sum(
    party: Party,
) -> None:
    def meddle(number: int, method: str, target: str, reply: Reply | None) -> Reply | None:
        if number != 4 or not target.startswith("/work") or reply is None:
            return None
        work = json.loads(reply.body)
        work.pop("secure", None)
        return replace(reply, body=json.dumps(work).encode())

    party.start(meddle)
    party.until_reported("have counted", past_deadlines=True)
    assert not any(number == 4 and method == "POST" for number, method, _ in party.asked)
    [row] = [row for row in party.served.server._files.directory.metrics.read() if "loss" in row]
    assert row["counted"] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("before", "now", "gone"),
    [
        ("secure=yes", "", "secure=yes"),
        ("secure=yes clip=1 noise=1 delta=1e-4 noise_by=clients", "", "secure=yes"),
        ("secure=yes clip=1 noise=1 delta=1e-4 noise_by=clients", "secure=yes clip=1", "noise_by=clients"),
        ("secure=yes", "secure=yes clip=1 noise=1 delta=1e-4 noise_by=clients", ""),
        ("", "algorithm=median", ""),
    ],
)
def test_a_device_holds_the_server_to_what_protects_it(
    tmp_path: Path, before: str, now: str, gone: str
) -> None:
    about = {"task": "points", "seed": 0, "batch_size": 32, "samples": 9, "parameters": {"w": "float32 1"}}
    device_state = DeviceState(tmp_path)
    device_state.begin({**about, "strategy": f"federated clients=4 {before}"})
    device_state.close()
    with pytest.raises(UserError, match=f"has given up {gone}") if gone else nullcontext():
        device_state.begin({**about, "strategy": f"federated clients=4 {now}"})
    device_state.close()


def test_a_number_that_the_server_gives_to_another_key_is_refused(tmp_path: Path) -> None:
    device_state = DeviceState(tmp_path / "device")
    device_state.require_known({0: bytes(32), 1: b"1" * 32})
    device_state.require_known({1: b"1" * 32, 2: b"2" * 32})
    again = DeviceState(tmp_path / "device")
    with pytest.raises(ProtocolRefused, match="the server gives client 1 another key"):
        again.require_known({1: b"3" * 32})
    told = DeviceState(tmp_path / "told")
    told.remember(known={"0": "00" * 32})
    enrolled = DeviceState(tmp_path / "told")
    enrolled.remember(server="https://test", run="run", client=1)
    with pytest.raises(ProtocolRefused, match="the server gives client 0 another key"):
        enrolled.require_known({0: b"3" * 32, 1: bytes(32)})


def reachable(root: object) -> list[object]:
    """Everything that an object holds, directly or not, apart from code."""
    found: dict[int, object] = {}
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in found or isinstance(one, type | ModuleType | FunctionType | Thread | FrameType):
            continue
        found[id(one)] = one
        waiting += gc.get_referents(one)
    return list(found.values())


def holds(root: object, update: ClientUpdate) -> bool:
    """Whether a tensor of an update, or the words that it is before it is masked, are in what an object holds."""
    first = update.change[0]
    words = words_of(FIXED, update, update.samples)
    needles = [first.numpy().tobytes(), first.double().numpy().tobytes(), words[:-1].tobytes()]
    for one in reachable(root):
        if isinstance(one, torch.Tensor):
            one = one.detach().contiguous().numpy()
        found = one.tobytes() if isinstance(one, np.ndarray) else one
        if isinstance(found, bytes | bytearray) and any(needle in found for needle in needles):
            return True
    return False


def form_of(server: RoundServer, update: ClientUpdate) -> bytes:
    return server.form.encode(update.change, {})


def test_a_server_that_sums_securely_never_holds_an_update(party: Party) -> None:
    """Looked for after every message, in all that the server can reach."""
    server, found = party.served.server, []

    def everything() -> list[object]:
        return [vars(server), vars(party.served.app)]

    def meddle(number: int, method: str, target: str, reply: Reply | None) -> None:
        if method == "POST" and reply is not None:
            found.append(holds(everything(), party.devices[number]._made[1]))  # type: ignore[index]

    party.start(meddle)
    party.until_reported("have counted")
    for thread in party.threads:  # each ends with the run, after its own last look
        thread.join(30)
    assert len(found) >= 5 * DEVICES
    assert not any(found)
    update = party.devices[0]._made[1]  # type: ignore[index]
    for planted in (
        [update.change[0].clone()],
        [words_of(FIXED, update, update.samples)],
        form_of(server, update),
    ):
        vars(server)["kept"] = planted
        assert holds(everything(), update), "the search finds what is there"
        del vars(server)["kept"]
    assert not holds(everything(), update)
    device_state = party.devices[0]._state
    body = server.form.encode([torch.zeros(2, 4), torch.zeros(2)], {})
    assert (
        party.served.signed(device_state.client, device_state.secret, "POST", "/report/1", body).status == 409
    )


def test_a_device_that_leaves_is_not_waited_for(party: Party) -> None:
    """What it trained is not finite: the others need not wait until the deadline of the round."""
    party.served.server._job = replace(
        party.served.server._job,
        settings=replace(party.served.server._job.settings, deadline_s=3000.0, stage_s=3000.0),
    )
    party.served.server._terms = party.served.server._job.terms
    party.broken = 2
    party.start(lambda *_: None)
    party.until_reported("have counted")
    [row] = [row for row in party.served.server._files.directory.metrics.read() if "loss" in row]
    assert row["counted"] == [0, 1, 3, 4]
    assert (2, "POST", "/leave/1") in party.asked


@pytest.mark.parametrize(("least", "threshold"), [(3, 4), (5, 5)])
def test_no_sum_is_unmasked_that_would_not_count(least: int, threshold: int) -> None:
    """Else the next attempt's sum, of others, would tell by its difference what one device has sent."""
    job = job_for(f"clients={DEVICES} secure=yes", min_reports=least)
    roster = {client: bytes([client]) * 32 for client in range(DEVICES)}
    attempt = SecureAttempt(job, roster, [torch.zeros(3)], 0.0)
    assert attempt.terms_as_json["threshold"] == threshold
