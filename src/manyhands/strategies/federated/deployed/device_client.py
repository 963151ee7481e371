"""The client that runs on a device: asks for work, trains on the local data, reports, and keeps the current model.

It may sleep, lose its network or be killed at any moment. Requests that were not answered are retried with growing
back-off; a report that comes too late is rejected by the server and dropped here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from manyhands.data.randomness import preserved, seed_all
from manyhands.data.store.fingerprint import parameter_shapes
from manyhands.errors import DataError, ManyhandsError, UserError, printable
from manyhands.strategies.federated.algorithms import algorithm_named
from manyhands.strategies.federated.client_updates import ClientAssignment, ClientUpdate
from manyhands.strategies.federated.clients import ClientTrainer, held, work_of
from manyhands.strategies.federated.deployed.device_job import DataSchema, read_columns
from manyhands.strategies.federated.deployed.device_state import DeviceState
from manyhands.strategies.federated.deployed.http_client import Asker, BackOff, HttpsAsker, Reply, Unreached
from manyhands.strategies.federated.deployed.protocol import (
    MOST_HOLD_S,
    SMALL_BYTES,
    MessageRejected,
    TensorForm,
    UpdateForm,
    enrolment_text,
    read_object,
    whole_in,
)
from manyhands.strategies.federated.deployed.stages import terms_from
from manyhands.strategies.federated.secure.fixedpoint import words_of
from manyhands.strategies.federated.secure.primitives import (
    ProtocolRefused,
    need_cryptography,
    public_identity,
    sign,
)
from manyhands.strategies.federated.secure.secure_client import SecureClient, SecureStage
from manyhands.strategies.federated.secure.secure_tally import hash_of
from manyhands.strategies.federated.strategy import Federated
from manyhands.strategy import Strategy
from manyhands.task import Task
from manyhands.workloads.registry import WORKLOADS, load

__all__ = ["JoiningDevice", "join_rounds"]

_MOST_PLAN_BYTES = 1 << 24
_MOST_LETTER_BYTES = 1 << 24
_MOST_WORK_BYTES = 1 << 20  # with secure=yes it names all who are asked
_GONE = 409
_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """The server's plan, built from code that is on the device: no code comes from the server."""

    task: Task
    strategy: Federated
    seed: int
    hold_s: float
    """How long the server holds back a question for work."""
    form: TensorForm
    config: Mapping[str, Any]

    @classmethod
    def read(cls, reply: Mapping[str, Any], data: Path) -> DevicePlan:
        """UserError where the task is not one that this device has, or its data do not fit."""
        name, options, text = reply.get("task"), reply.get("task_options"), reply.get("strategy")
        known = isinstance(name, str) and name in WORKLOADS and WORKLOADS[name].task
        if not known or not isinstance(options, dict) or not isinstance(text, str):
            raise UserError(
                f"the server trains {name!r}, which this release has not; use the server's release"
            )
        strategy = Strategy.parse(text)
        if not isinstance(strategy, Federated):
            raise UserError(f"the server trains by {text!r}, which is not federated")
        hold_s = reply.get("hold_s")
        if not isinstance(hold_s, int | float) or not 0 < hold_s < MOST_HOLD_S:
            raise MessageRejected(400, f"hold_s is {hold_s!r:.40}; it must be a number of seconds")
        schema = DataSchema.parse(str(reply.get("schema")))
        task = _task_over(str(name), options, data, schema)
        seed = whole_in(reply, "seed")
        with preserved():
            seed_all(seed)
            model = task.model()
        form = TensorForm.of(model)
        if form.as_json != reply.get("model"):
            raise UserError(
                "the server's model has other tensors than the one that this release makes of its task"
            )
        config = {
            "task": name,
            "task_options": task.options,
            "strategy": text,
            "workers": 1,
            "seed": seed,
            "batch_size": task.batch_size,
            "samples": task.samples,
            "parameters": parameter_shapes(model.named_parameters()),
            "schema": str(schema),
        }
        return cls(
            task=task,
            strategy=strategy,
            seed=seed,
            hold_s=float(hold_s),
            form=form,
            config=config,
        )


def _task_over(name: str, options: Mapping[str, Any], data: Path, schema: DataSchema) -> Task:
    """The built-in task with this device's data in the place of its own; no path of the server's is opened."""
    entry = load(WORKLOADS[name].task)
    paths = [option.name for option in entry.options if option.kind is Path]
    chosen = {key: value for key, value in options.items() if key not in paths}
    if not data.exists():
        raise DataError(f"--data {data}: is not there")
    if data.suffix == ".safetensors" and not paths:
        return read_columns(data, schema, entry.build(**chosen))
    if not paths:
        raise UserError(f"--data {data}: task {name} takes a .safetensors file with the columns {schema}")
    task: Task = entry.build(**chosen, **{paths[0]: data})
    schema.require_like(DataSchema.of(task), f"--data {data}")
    return task


def enrol(ask: Asker, home: DeviceState, token: str | None, address: str) -> None:
    """Take the token's place, if this device has none yet; UserError where the server refuses."""
    if home.client is not None:
        return
    if not token:
        raise UserError(
            f"--enrol: {home.path} is not enrolled yet; give it the token that the server's owner gave you"
        )
    key = public_identity(home.secret)
    asked = {
        "token": token,
        "key": key.hex(),
        "signature": sign(home.secret, enrolment_text(token, key)).hex(),
    }
    reply = _answered(ask("POST", "/enrol", json.dumps(asked).encode(), "", SMALL_BYTES))
    if reply.status != 200:
        raise UserError(f"--enrol: the server refused: {_sentence(reply)}")
    enrolled = _object(reply)
    home.remember(server=address, run=str(enrolled.get("run")), client=whole_in(enrolled, "client"))


class Device:
    """One device in one run; `clock` and `sleep` can be replaced in tests."""

    def __init__(
        self,
        ask: Asker,
        home: DeviceState,
        plan: DevicePlan,
        *,
        tell: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        patience_s: float = 86400.0,
        most_pause_s: float = 30.0,
    ) -> None:
        assert home.client is not None, "a device is enrolled first"
        self._ask, self._home, self._plan, self._tell = ask, home, plan, tell
        self._clock, self._sleep, self._patience_s = clock, sleep, patience_s
        self._client = home.client
        self._back_off = BackOff(most_s=most_pause_s, seed=self._client)
        with preserved():
            seed_all(plan.seed)
            self._model = plan.task.model()
        self._weights = held(self._model)
        self._optimizer = plan.task.optimizer(self._model.parameters())
        self._algorithm = algorithm_named(plan.strategy.algorithm)
        self._trainer = ClientTrainer(
            plan.task, self._model, self._algorithm, work_of(plan.strategy), plan.seed
        )
        self._samples = np.arange(plan.task.samples)
        self._rounds = -1
        self._hash = ""
        self._after = 0
        self._made: tuple[str, ClientUpdate] | None = None
        self._updates = UpdateForm(plan.form, plan.strategy, plan.seed)
        self._left = home.left(self._updates.require_left) if self._updates.keeps else None
        self._body: tuple[str, bytes, torch.Tensor | None] | None = None
        found = home.load()
        if found is not None:
            self._model.load_state_dict(found.model)
            self._rounds, self._hash = found.step, hash_of(self._weights).hex()

    def run(self) -> int:
        """Take part until the server says that the run is done; how many rounds the last model has seen."""
        while True:
            target = f"/work?have={self._rounds + 1}&after={self._after}"
            reply = self._asked("GET", target, most=_MOST_WORK_BYTES)
            if reply is None:
                self._sleep(self._back_off.next_s())
                continue
            work = _object(reply)
            expected, rounds = str(work.get("model")), whole_in(work, "rounds")
            if (expected, rounds) != (self._hash, self._rounds) and not self._fetch(expected, rounds):
                self._sleep(self._back_off.next_s())  # the server has gone on since, or has lost its way
                continue
            if work.get("state") == "done":
                # The server waits a while to hear that it has the model; it may have ended.
                with suppress(Unreached):
                    target = f"/work?have={self._rounds + 1}&after={self._after}"
                    self._ask("GET", target, b"", self._hash, SMALL_BYTES)
                return self._rounds
            if work.get("state") == "train":
                attempt = whole_in(work, "attempt", self._after + 1)
                if "secure" in work:
                    self._take_part(attempt, work["secure"])
                else:
                    self._report(attempt)
                self._after = max(self._after, attempt)

    def _asked(self, method: str, target: str, body: bytes = b"", most: int = SMALL_BYTES) -> Reply | None:
        """An answer, asked for until there is one; None where the server will have none of it (409, 422).

        ManyhandsError where there was none for too long, or the server refuses this device.
        """
        since = self._clock()
        while True:
            try:
                reply = self._ask(method, target, body, self._hash, most)
            except Unreached as lost:
                why = str(lost)
            else:
                if reply.status in (200, 204):
                    self._back_off.reset()
                    return reply
                if reply.status in (_GONE, 422):
                    self._tell(f"was told: {_sentence(reply)}")
                    return None
                why = f"the server refused {method} {target}: {reply.status} {_sentence(reply)}"
                if not _comes_back(reply):
                    raise ManyhandsError(why)
            if self._clock() - since > self._patience_s:
                raise ManyhandsError(f"{why}; it was tried for {self._patience_s:g} s")
            self._sleep(self._back_off.next_s())

    def _fetch(self, expected: str, rounds: int) -> bool:
        reply = self._asked("GET", "/model", most=self._plan.form.most_bytes)
        if reply is None:
            return False
        tensors, _ = self._plan.form.decode(reply.body)
        found = hash_of(tensors).hex()
        if found != expected:
            return False
        for name, one in zip(self._plan.form.rows, tensors, strict=True):
            if not bool(one.isfinite().all()):
                raise ManyhandsError(f"tensor {name[0]!r} of the server's model is not finite")
        with torch.no_grad():
            for mine, one in zip(self._weights, tensors, strict=True):
                mine.copy_(one)
        self._home.save(rounds, self._model.state_dict())
        self._rounds, self._hash = rounds, found
        self._tell(f"has the model after {rounds} rounds")
        return True

    def _update(self) -> ClientUpdate | None:
        if self._made is None or self._made[0] != self._hash:
            assigned = ClientAssignment(
                client=self._client, samples=self._samples, weights=self._weights, number=self._rounds
            )
            [made] = self._trainer.play([assigned], self._optimizer)
            samples = min(made.samples, self._plan.strategy.max_samples)
            self._made = self._hash, replace(made, samples=samples)
        update = self._made[1]
        return update if update.is_finite else None

    def _report(self, attempt: int) -> None:
        update = self._update()
        if update is None:
            self._tell("what it trained is not finite, and is not sent")
            self._asked("POST", f"/leave/{attempt}")
            return
        if self._body is None or self._body[0] != self._hash:
            about = {"samples": str(update.samples), "steps": str(update.steps), "loss": repr(update.loss)}
            made = self._updates.encode(
                update.change, about, self._left, client=self._client, number=self._rounds
            )
            self._body = self._hash, *made
        _, body, left = self._body
        if self._asked("POST", f"/report/{attempt}", body) is None:
            return
        if left is not None and left is not self._left:
            self._home.keep_left(left)
            self._left = left
        self._tell(f"has reported to attempt {attempt}")

    def _take_part(self, attempt: int, reply: Any) -> None:
        """A secure sum; whatever the server asks that it must not, ends this device's part in the attempt."""
        update = self._update()
        if update is None:
            self._asked("POST", f"/leave/{attempt}")
            return
        try:
            items = sum(one.numel() for one in self._weights)
            terms, roster = terms_from(reply, items, self._plan.strategy)
            self._home.require_known(roster)
            if roster.get(self._client) != public_identity(self._home.secret):
                raise ProtocolRefused("the server has another key for this device than its own")
            party = SecureClient(self._client, self._home.secret, roster, terms, bytes.fromhex(self._hash))
            words = words_of(terms.fixed, update, self._algorithm.weight(update))
            self._exchange(party, attempt, lambda letter: party.mask(letter, words))
        except ProtocolRefused as refused:
            self._tell(f"leaves attempt {attempt}: {refused}")

    def _exchange(self, party: SecureClient, attempt: int, mask: Callable[[bytes], bytes]) -> None:
        answers: dict[SecureStage, Callable[[bytes], bytes]] = {
            SecureStage.ADVERTISE: lambda _: party.advertise(),
            SecureStage.SHARE: party.share,
            SecureStage.MASK: mask,
            SecureStage.CONFIRM: party.confirm,
            SecureStage.UNMASK: party.unmask,
        }
        for stage, answer in answers.items():
            letter: bytes | None = b""
            if stage is not SecureStage.ADVERTISE:
                since, letter = self._clock(), None
                while letter is None and self._clock() - since < self._patience_s:
                    reply = self._asked("GET", f"/secure/{attempt}/{int(stage)}", most=_MOST_LETTER_BYTES)
                    if reply is None:
                        return
                    letter = reply.body if reply.status == 200 else None
            if letter is None:
                return
            if self._asked("POST", f"/secure/{attempt}/{int(stage)}", answer(letter)) is None:
                return
        self._tell(f"has taken part in attempt {attempt}")


def plan_for(ask: Asker, data: Path) -> DevicePlan:
    """The server's plan for a device that is enrolled; Unreached where it was not reached."""
    reply = _answered(ask("GET", "/plan", b"", "", _MOST_PLAN_BYTES))
    if reply.status != 200:
        raise UserError(f"the server refused this device: {_sentence(reply)}")
    try:
        return DevicePlan.read(_object(reply), data)
    except MessageRejected as refused:
        raise ManyhandsError(f"the server's plan makes no sense: {refused}") from refused


def _comes_back(reply: Reply) -> bool:
    """Whether to retry: the server, or a proxy in front of it, has a temporary failure."""
    return reply.status >= 500 or reply.status in (408, 429)


def _answered(reply: Reply) -> Reply:
    if _comes_back(reply):
        raise Unreached(f"the server answered {reply.status}: {_sentence(reply)}")
    return reply


def _object(reply: Reply) -> dict[str, Any]:
    try:
        return read_object(reply.body, "the server's answer")
    except MessageRejected as refused:
        raise ManyhandsError(f"{refused}: it is another server, or another release") from refused


def _sentence(reply: Reply) -> str:
    return printable(reply.body[:300].decode(errors="replace").strip().partition("\n")[0])


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
