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

from manyhands.data.store.rundir import parameter_shapes
from manyhands.errors import DataError, ManyhandsError, UserError, printable
from manyhands.strategies.federated.algorithms import FederatedFacts, algorithm_named
from manyhands.strategies.federated.client_updates import ClientAssignment, ClientUpdate
from manyhands.strategies.federated.clients import ClientTrainer, held, held_names, work_of
from manyhands.strategies.federated.deployed import protocol
from manyhands.strategies.federated.deployed.device_job import DataSchema, initial_model, read_columns
from manyhands.strategies.federated.deployed.protocol import MessageRejected, Reply, Unreached, whole_in
from manyhands.strategies.federated.deployed.run_files import DeviceState, from_hex
from manyhands.strategies.federated.privacy_noise import RoundNoise, clipped, system_draws
from manyhands.strategies.federated.private_rounds import CLIENTS
from manyhands.strategies.federated.secure import primitives as crypto
from manyhands.strategies.federated.secure.fixedpoint import LOSS_ITEMS, words_of
from manyhands.strategies.federated.secure.primitives import ProtocolRefused, public_identity
from manyhands.strategies.federated.secure.secure_messages import SecureTerms
from manyhands.strategies.federated.secure.secure_protocol import SecureClient, SecureStage
from manyhands.strategies.federated.strategy import Federated
from manyhands.strategies.federated.update_tally import hash_of
from manyhands.strategy import Strategy
from manyhands.task import Task
from manyhands.workloads.registry import WORKLOADS, load

_MOST_PLAN_BYTES = 1 << 24
_MOST_MESSAGE_BYTES = 1 << 24
_MOST_WORK_BYTES = 1 << 20  # with secure=yes it names all who are asked
_GONE = 409
_COMING, _ROUND = "coming/", "round"  # in what a device keeps: of the report that is under way
_Made = TypeVar("_Made")


@dataclass(frozen=True, kw_only=True)
class DevicePlan:
    """The server's plan, built from code that is on the device: no code comes from the server."""

    task: Task
    strategy: Federated
    seed: int
    hold_s: float  # how long the server holds back a question for work
    form: protocol.TensorForm
    config: Mapping[str, Any]

    @classmethod
    def read(cls, sent: Mapping[str, Any], data: Path, own: Task | None = None) -> DevicePlan:
        """`own` is this device's, where the server trains one that is not built in."""
        name, text = str(sent.get("task")), str(sent.get("strategy"))
        strategy = Strategy.parse(text)
        if not isinstance(strategy, Federated):
            raise UserError(f"the server trains with {text!r}, which is not a federated strategy")
        hold_s = sent.get("hold_s")
        if not isinstance(hold_s, int | float) or not 0 < hold_s < protocol.MOST_HOLD_S:
            raise MessageRejected(400, f"hold_s is {hold_s!r:.40}; it must be a number of seconds")
        schema = DataSchema.parse(str(sent.get("schema")))
        task = _task_over(name, sent.get("task_options"), data, schema, own)
        seed = whole_in(sent, "seed")
        model = initial_model(task, seed)
        form = protocol.TensorForm.of(model)
        if form.as_json != sent.get("model"):
            here = "this release's" if own is None else "this device's"
            why = f"the server's model has other tensors than {here} model of the task"
            raise UserError(why)
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
        return cls(task=task, strategy=strategy, seed=seed, hold_s=float(hold_s), form=form, config=config)


def _task_over(name: str, options: Any, data: Path, schema: DataSchema, own: Task | None) -> Task:
    """The task with this device's data in the place of its own; no path of the server's is opened."""
    if not data.exists():
        raise DataError(f"--data {data}: does not exist")
    if options is None:
        if own is None or own.name != name:
            has = "" if own is None else f", and --task names {own.name!r}"
            raise UserError(
                f"the server trains {name!r}, a Task of its own{has}; give this device's module with it: "
                "--task MODULE:NAME"
            )
        return read_columns(data, schema, own)
    if own is not None:
        raise UserError(f"the server trains {name!r}, which is built in; leave --task out")
    if not isinstance(options, dict) or name not in WORKLOADS or not WORKLOADS[name].task:
        raise UserError(f"the server trains {name!r}, which this release lacks; install the server's release")
    entry = load(WORKLOADS[name].task)
    paths = [option.name for option in entry.options if option.kind is Path]
    chosen = {key: value for key, value in options.items() if key not in paths}
    if data.suffix == ".safetensors" and not paths:
        return read_columns(data, schema, entry.build(**chosen))
    if not paths:
        raise UserError(f"--data {data}: task {name} needs a .safetensors file with the columns {schema}")
    task: Task = entry.build(**chosen, **{paths[0]: data})
    schema.require_like(DataSchema.of(task), f"--data {data}")
    return task


def enrol(send: protocol.SendRequest, state: DeviceState, token: str | None, address: str) -> None:
    if state.client is not None:
        return
    if not token:
        why = f"--enrol: {state.path} is not enrolled yet; give it the token that the server's owner gave you"
        raise UserError(why)
    key = public_identity(state.secret)
    signature = crypto.sign(state.secret, protocol.enrolment_text(token, key))
    request = {"token": token, "key": key.hex(), "signature": signature.hex()}
    reply = send("POST", "/enrol", json.dumps(request).encode(), "", protocol.SMALL_BYTES)
    answer = _answer(reply, "--enrol: the server refused")
    state.remember(server=address, run=str(answer.get("run")), client=whole_in(answer, "client"))


def terms_from(sent: Any, items: int, strategy: Federated) -> tuple[SecureTerms, dict[int, bytes]]:
    """What a device makes of `terms_as_json`, and the roster; ProtocolRefused where it would not be safe.

    How numbers become words it knows from the plan: a server that could choose that could cut off a device's noise.
    """
    if sent is None:
        raise ProtocolRefused("the server asks for the update itself, and not for its part of a secure sum")
    try:
        roster = {int(client): from_hex(key, crypto.KEY_BYTES) for client, key in sent["roster"].items()}
        terms = SecureTerms(
            round_id=from_hex(sent["round_id"], crypto.KEY_BYTES),
            clients=len(roster),
            threshold=int(sent["threshold"]),
            length=int(sent["length"]),
            fixed=strategy.fixed_point,
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError, MessageRejected) as error:
        raise ProtocolRefused(f"the terms of the secure sum are invalid: {error}") from error
    if terms.length != items + LOSS_ITEMS + 1:
        raise ProtocolRefused(f"the terms are for {terms.length} words, but the model has {items} numbers")
    if any(not 0 <= client < strategy.clients for client in roster):
        raise ProtocolRefused(f"the roster names a client that is not one of the {strategy.clients}")
    if len(set(roster.values())) < len(roster):
        raise ProtocolRefused("the roster names an identity twice")
    return terms, roster


def private_update(strategy: Federated, update: ClientUpdate, terms: SecureTerms) -> ClientUpdate:
    """What a device gives to a secure sum in a private run: clipped, with its share of the noise, and no loss."""
    privacy = strategy.privacy
    assert privacy.rule is not None, "asked for where there is a clip"
    flat, _ = clipped(update.change, privacy.rule.bound)
    noise = RoundNoise.of(privacy.noise, 1.0, bound=privacy.rule.bound, adapts=False)
    draws = system_draws if privacy.noise_by == CLIENTS else None
    steps = noise.in_steps(flat, terms.fixed.step, terms.threshold, draws)
    return replace(update, change=[torch.from_numpy(steps * terms.fixed.step)], samples=1, loss=0.0)


class Device:
    """One device in one run; `clock` and `sleep` can be replaced in tests."""

    def __init__(
        self,
        send: protocol.SendRequest,
        state: DeviceState,
        plan: DevicePlan,
        *,
        notify: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        patience_s: float = 86400.0,
        most_pause_s: float = 30.0,
    ) -> None:
        assert state.client is not None, "a device is enrolled first"
        self._send, self._state, self._plan, self._notify = send, state, plan, notify
        self._clock, self._sleep, self._patience_s = clock, sleep, patience_s
        self._client = state.client
        self._back_off = protocol.BackOff(most_s=most_pause_s, seed=self._client)
        self._model = initial_model(plan.task, plan.seed)
        self._weights = held(self._model)
        self._optimizer = plan.task.optimizer(self._model.parameters())
        self._algorithm = algorithm_named(plan.strategy.algorithm)
        parameters = len(list(self._model.parameters()))
        self._algorithm.facts = FederatedFacts(names=held_names(self._model), parameters=parameters)
        self._trained_from: int | None = None  # the rounds of the model that its last update began with
        self._load_own()
        work = work_of(plan.strategy)
        self._trainer = ClientTrainer(plan.task, self._model, self._algorithm, work, plan.seed)
        self._rounds, self._hash, self._after = -1, "", 0
        self._made: tuple[str, ClientUpdate] | None = None
        form = plan.form.with_more(self._algorithm.sent(self._weights))
        self._updates = protocol.UpdateForm(form, plan.strategy, plan.seed)
        self._left = state.left(self._updates.parcel) if self._updates.keeps else None
        self._body: tuple[str, bytes, torch.Tensor | None] | None = None
        found = state.load()
        if found is not None:
            self._model.load_state_dict(found.model)
            self._rounds, self._hash = found.step, hash_of(self._weights).hex()

    def run(self) -> int:
        """Take part until the server says that the run is done; how many rounds the last model has seen."""
        while True:
            target = f"/work?have={self._rounds + 1}&after={self._after}"
            reply = self._request("GET", target, most=_MOST_WORK_BYTES)
            if reply is None:
                self._sleep(self._back_off.next_s())
                continue
            work = _object(reply)
            expected, rounds = str(work.get("model")), whole_in(work, "rounds")
            if (expected, rounds) != (self._hash, self._rounds) and not self._fetch(expected, rounds):
                self._sleep(self._back_off.next_s())  # the server has advanced since, or is inconsistent
                continue
            self._settle(rounds, whole_in({"counted_in": 0, **work}, "counted_in"))
            if work.get("state") == "done":
                # The server waits a while to hear that it has the model; it may have ended.
                with suppress(Unreached):
                    target = f"/work?have={self._rounds + 1}&after={self._after}"
                    self._send("GET", target, b"", self._hash, protocol.SMALL_BYTES)
                return self._rounds
            if work.get("state") == "train":
                attempt, update = whole_in(work, "attempt", self._after + 1), self._update()
                if not update.is_finite:
                    self._notify("its update is not finite, and is not sent")
                    self._request("POST", f"/leave/{attempt}")
                elif self._plan.strategy.secure:
                    self._take_part(attempt, update, work.get("secure"))
                else:
                    self._report(attempt, update)
                self._after = max(self._after, attempt)

    def _request(
        self, method: str, target: str, body: bytes = b"", most: int = protocol.SMALL_BYTES
    ) -> Reply | None:
        """An answer, retried until there is one; None for 409 and 422, ManyhandsError where it is refused or late."""
        since = self._clock()
        while True:
            try:
                reply = self._send(method, target, body, self._hash, most)
            except Unreached as lost:
                why = str(lost)
            else:
                if reply.status in (200, 204):
                    self._back_off.reset()
                    return reply
                if reply.status in (_GONE, 422):
                    self._notify(f"was answered: {_sentence(reply)}")
                    return None
                why = f"the server refused {method} {target}: {reply.status} {_sentence(reply)}"
                if not _comes_back(reply):
                    raise ManyhandsError(why)
            if self._clock() - since > self._patience_s:
                raise ManyhandsError(f"{why}; gave up after {self._patience_s:g} s")
            self._sleep(self._back_off.next_s())

    def _fetch(self, expected: str, rounds: int) -> bool:
        form = self._plan.form.with_more([*self._weights, *self._algorithm.given_besides(self._weights)])
        reply = self._request("GET", "/model", most=form.most_bytes)
        if reply is None:
            return False
        tensors, _ = form.decode(reply.body)
        if hash_of(tensors).hex() != expected:
            return False
        for (name, _, _), one in zip(form.rows, tensors, strict=True):
            if not bool(one.isfinite().all()):
                raise ManyhandsError(f"tensor {name!r} of the server's model is not finite")
        with torch.no_grad():
            for mine, one in zip(self._weights, tensors, strict=False):
                mine.copy_(one)
        self._algorithm.take_besides(tensors[len(self._weights) :])
        self._state.save(rounds, self._model.state_dict())
        self._rounds, self._hash = rounds, expected
        self._notify(f"has the model after {rounds} rounds")
        return True

    def _update(self) -> ClientUpdate:
        if self._made is None or self._made[0] != self._hash:
            samples = np.arange(self._plan.task.samples)
            assigned = ClientAssignment(
                client=self._client, samples=samples, weights=self._weights, number=self._rounds
            )
            [made] = self._trainer.play([assigned], self._optimizer)
            self._trained_from = self._rounds
            self._keep_own()
            counted = min(made.samples, self._plan.strategy.max_samples)
            self._made = self._hash, replace(made, samples=counted)
        return self._made[1]

    def _load_own(self) -> None:
        """What the algorithm lets this device keep from round to round, and what it will once its report counts."""
        kept, algorithm = self._algorithm.kept(self._weights), self._algorithm
        self._own_names = held_names(self._model)[: len(kept)]
        like = dict(zip(self._own_names, kept, strict=True))
        coming = {f"{_COMING}{name}": one for name, one in like.items()}
        found = self._state.own({**like, **coming, _ROUND: torch.zeros(1, dtype=torch.int64)})
        for states, names in ((algorithm.states, like), (algorithm.coming, coming)):
            if names and names.keys() <= found.keys():
                states[self._client] = [found[name] for name in names]
        self._trained_from = int(found[_ROUND]) if _ROUND in found else None

    def _keep_own(self) -> None:
        """Before a report leaves: a device that is killed then knows later what it was to keep."""
        states, coming = (
            one.get(self._client, ()) for one in (self._algorithm.states, self._algorithm.coming)
        )
        named = dict(zip(self._own_names, states, strict=False))
        named |= {f"{_COMING}{name}": one for name, one in zip(self._own_names, coming, strict=False)}
        if coming and self._trained_from is not None:
            named[_ROUND] = torch.tensor([self._trained_from])
        if self._own_names:
            self._state.keep_own(named)

    def _settle(self, rounds: int, counted_in: int) -> None:
        """Once the round of its last update is over: whether the update is in it."""
        if self._trained_from is not None and rounds > self._trained_from:
            self._algorithm.settle(self._client, counted=counted_in == self._trained_from + 1)
            self._trained_from = None
            self._keep_own()

    def _report(self, attempt: int, update: ClientUpdate) -> None:
        if self._body is None or self._body[0] != self._hash:
            about = {"samples": str(update.samples), "steps": str(update.steps), "loss": repr(update.loss)}
            client, number = self._client, self._rounds
            made = self._updates.encode(update.change, about, self._left, client=client, number=number)
            self._body = self._hash, *made
        _, body, left = self._body
        if self._request("POST", f"/report/{attempt}", body) is None:
            return
        if left is not None and left is not self._left:
            self._state.keep_left(left)
            self._left = left
        self._notify(f"has reported to attempt {attempt}")

    def _take_part(self, attempt: int, update: ClientUpdate, secure: Any) -> None:
        """A secure sum; whatever the server asks that it must not, ends this device's part in the attempt."""
        try:
            items = sum(one.numel() for one in self._weights)
            terms, roster = terms_from(secure, items, self._plan.strategy)
            self._state.require_known(roster)
            if roster.get(self._client) != public_identity(self._state.secret):
                raise ProtocolRefused("the server has a different key for this device")
            party = SecureClient(self._client, self._state.secret, roster, terms, bytes.fromhex(self._hash))
            weight = self._algorithm.weight(update)
            if self._plan.strategy.privacy.rule is not None:
                update, weight = private_update(self._plan.strategy, update, terms), 1.0
            words = words_of(terms.fixed, update, weight)
            while party.stage < SecureStage.DONE:
                target, message = f"/secure/{attempt}/{int(party.stage)}", self._stage_message(attempt, party)
                if message is None or self._request("POST", target, party.answer(message, words)) is None:
                    return
            self._notify(f"has taken part in attempt {attempt}")
        except ProtocolRefused as refused:
            self._notify(f"leaves attempt {attempt}: {refused}")

    def _stage_message(self, attempt: int, party: SecureClient) -> bytes | None:
        since = self._clock()
        while party.stage is not SecureStage.ADVERTISE and self._clock() - since < self._patience_s:
            target = f"/secure/{attempt}/{int(party.stage)}"
            reply = self._request("GET", target, most=_MOST_MESSAGE_BYTES)
            if reply is None or reply.status == 200:
                return None if reply is None else reply.body
        return b"" if party.stage is SecureStage.ADVERTISE else None


def plan_for(send: protocol.SendRequest, data: Path, own: Task | None = None) -> DevicePlan:
    try:
        sent = _answer(send("GET", "/plan", b"", "", _MOST_PLAN_BYTES), "the server refused this device")
        return DevicePlan.read(sent, data, own)
    except MessageRejected as refused:
        raise ManyhandsError(f"the server's plan is invalid: {refused}") from refused


def _answer(reply: Reply, refused: str) -> dict[str, Any]:
    """The answer to a device before it takes part; Unreached where it may try again, UserError where it may not."""
    if _comes_back(reply):
        raise Unreached(f"the server answered {reply.status}: {_sentence(reply)}")
    if reply.status != 200:
        raise UserError(f"{refused}: {_sentence(reply)}")
    return _object(reply)


def _comes_back(reply: Reply) -> bool:
    """Whether to retry: the server, or a proxy in front of it, has a temporary failure."""
    return reply.status >= 500 or reply.status in (408, 429)


def _object(reply: Reply) -> dict[str, Any]:
    try:
        return protocol.read_object(reply.body, "the server's answer")
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
    authority: Path | None = None  # the server's ca.pem; None: the authorities that this host trusts
    patience_s: float = 86400.0
    most_pause_s: float = 30.0
    task: Task | None = None  # this device's own, where the server trains one that is not built in

    def __post_init__(self) -> None:
        for name, value in (("--patience", self.patience_s), ("--max-pause", self.most_pause_s)):
            if not value > 0:
                raise UserError(f"{name} {value:g}: must be above 0")


def join_rounds(asked: JoiningDevice, notify: Callable[[str], None]) -> int:
    """Take part until the run is done; how many rounds the model has seen. ManyhandsError where the server is gone."""
    crypto.need_cryptography()
    send = protocol.HttpsClient(asked.address, asked.authority)
    state = DeviceState(asked.out)
    try:
        _until_reached(lambda: enrol(send, state, asked.token, asked.address), asked)
        assert state.client is not None, "enrol raises where it fails"
        send.signer = str(state.about.get("run")), state.client, state.secret
        plan = _until_reached(lambda: plan_for(send, asked.data, asked.task), asked)
        send.allow(plan.hold_s)
        state.begin(plan.config)
        notify(f"client {state.client}: {plan.task.samples} samples of {plan.task.name} stay on this device")
        return Device(
            send,
            state,
            plan,
            notify=lambda sentence: notify(f"client {state.client} {sentence}"),
            patience_s=asked.patience_s,
            most_pause_s=asked.most_pause_s,
        ).run()
    finally:
        state.close()
        send.close()


def _until_reached(call: Callable[[], _Made], asked: JoiningDevice) -> _Made:
    pauses, since = protocol.BackOff(most_s=asked.most_pause_s), time.monotonic()
    while True:
        try:
            return call()
        except Unreached as lost:
            if time.monotonic() - since > asked.patience_s:
                raise ManyhandsError(f"{lost}; gave up after {asked.patience_s:g} s") from lost
            time.sleep(pauses.next_s())
