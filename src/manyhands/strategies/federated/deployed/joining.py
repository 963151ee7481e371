"""Runs a device from its folder to the end of the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from manyhands.errors import ManyhandsError, UserError
from manyhands.strategies.federated.deployed.device_client import Device, enrol, plan_for
from manyhands.strategies.federated.deployed.device_state import DeviceState
from manyhands.strategies.federated.deployed.http_client import BackOff, HttpsAsker, Unreached
from manyhands.strategies.federated.secure.primitives import need_cryptography

__all__ = ["JoiningDevice", "join_rounds"]

_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class JoiningDevice:
    """The arguments of `manyhands federated join`."""

    address: str
    data: Path
    out: Path
    token: str | None = None
    authority: Path | None = None
    """The server's ca.pem; None: the authorities that this host trusts."""
    patience_s: float = 86400.0
    most_pause_s: float = 30.0

    def __post_init__(self) -> None:
        for name, value in (("--patience", self.patience_s), ("--max-pause", self.most_pause_s)):
            if not value > 0:
                raise UserError(f"{name} {value:g}: must be above 0")


def join_rounds(asked: JoiningDevice, tell: Callable[[str], None]) -> int:
    """Take part until the run is done; how many rounds the model has seen. ManyhandsError where the server is gone."""
    need_cryptography()
    ask = HttpsAsker(asked.address, asked.authority)
    home = DeviceState(asked.out)
    try:
        _until_reached(lambda: enrol(ask, home, asked.token, asked.address), asked)
        assert home.client is not None, "enrol raises where it fails"
        ask.sign_as(str(home.about.get("run")), home.client, home.secret)
        plan = _until_reached(lambda: plan_for(ask, asked.data), asked)
        ask.allow(plan.hold_s)
        home.begin(plan.config)
        tell(f"client {home.client}: {plan.task.samples} samples of {plan.task.name} stay here")
        device = Device(
            ask,
            home,
            plan,
            tell=lambda sentence: tell(f"client {home.client} {sentence}"),
            patience_s=asked.patience_s,
            most_pause_s=asked.most_pause_s,
        )
        return device.run()
    finally:
        home.close()
        ask.close()


def _until_reached(call: Callable[[], _Made], asked: JoiningDevice) -> _Made:
    pauses, since = BackOff(most_s=asked.most_pause_s), time.monotonic()
    while True:
        try:
            return call()
        except Unreached as lost:
            if time.monotonic() - since > asked.patience_s:
                raise ManyhandsError(f"{lost}; it was tried for {asked.patience_s:g} s") from lost
            time.sleep(pauses.next_s())
