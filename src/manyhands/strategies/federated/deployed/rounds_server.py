"""The device server without its sockets: handles requests, feeds events to the round core and executes its decisions.

Everything here is called by one thread at a time. `at_s` is the time of the driver's clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from manyhands.data.randomness import preserved
from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.errors import ManyhandsError, num_of
from manyhands.strategies.federated import client_updates
from manyhands.strategies.federated import round_core as core
from manyhands.strategies.federated.algorithms import FederatedFacts, algorithm_named
from manyhands.strategies.federated.client_updates import (
    ClientUpdate,
    RoundPlace,
    RoundTally,
    TallySum,
    Tensors,
    shaped,
)
from manyhands.strategies.federated.clients import held, held_names
from manyhands.strategies.federated.deployed import protocol
from manyhands.strategies.federated.deployed.device_job import FederatedJob, initial_model
from manyhands.strategies.federated.deployed.protocol import MessageRejected, whole_in
from manyhands.strategies.federated.deployed.run_files import ServerFiles
from manyhands.strategies.federated.private_rounds import CLIENTS
from manyhands.strategies.federated.secure.fixedpoint import sum_of
from manyhands.strategies.federated.secure.primitives import ProtocolRefused, digest_of, verify
from manyhands.strategies.federated.secure.secure_messages import SEALED_BYTES, SecureTerms
from manyhands.strategies.federated.secure.secure_protocol import SecureServer, SecureStage
from manyhands.strategies.federated.update_tally import PlainTally, hash_of, private_sum, tally_for

_MOST_LOSS = 1e9
_LEAST_BYTES = 4096  # that a message of a secure sum may have


class SecureAttempt:
    """One attempt at a secure sum over HTTP: the state machine, with a deadline for every stage."""

    def __init__(self, job: FederatedJob, roster: Mapping[int, bytes], weights: Tensors, at_s: float) -> None:
        self._roster = roster
        # No sum is made that would not count: with the next attempt's it would reveal more than either.
        items, minimum = sum(one.numel() for one in weights), job.terms.minimum
        self.terms = SecureTerms.draw(job.strategy.fixed_point, len(roster), items, minimum)
        self.server = SecureServer(self.terms, roster, hash_of(weights))
        # When the current stage ends; in the first one devices train.
        self.due_s = at_s + job.settings.deadline_s
        self._stage_s = job.settings.stage_s  # how long each stage but the first may take
        self._messages: dict[int, dict[int, bytes]] = {}  # by stage and client
        self._came: dict[tuple[int, int], bytes] = {}

    @property
    def terms_as_json(self) -> dict[str, Any]:
        terms = self.terms
        return {
            "round_id": terms.round_id.hex(),
            "threshold": terms.threshold,
            "length": terms.length,
            "roster": {str(client): key.hex() for client, key in self._roster.items()},
        }

    @property
    def most_bytes(self) -> int:
        words = self.terms.length * self.terms.fixed.dtype.itemsize
        return max(_LEAST_BYTES, words, 16 + self.terms.clients * (4 + SEALED_BYTES))

    def receive(self, client: int, stage: int, body: bytes) -> None:
        """A client's message at a stage; ProtocolRefused where it is wrong, late, or another one than before."""
        digest = digest_of(body)
        if (client, stage) in self._came:  # a device that has missed the answer repeats its message
            if self._came[client, stage] != digest:
                raise ProtocolRefused(f"client {client} has already sent another message at this stage")
            return
        if stage != self.server.stage:
            why = f"the round is at {self.server.stage.name}: the message is too late or too early"
            raise ProtocolRefused(why)
        try:
            self.server.receive(client, body)
        except ProtocolRefused:
            self.server.drop(client)  # the others need not wait for it
            raise
        self._came[client, stage] = digest

    def message_for(self, client: int, stage: int) -> tuple[bytes | None, bool]:
        """What the client is sent at a stage, and whether that is known yet; MessageRejected if it never will be."""
        if stage > SecureStage.UNMASK:
            raise MessageRejected(404, f"there is no stage {stage}")
        if stage in self._messages and client not in self._messages[stage]:
            why = f"client {client} is too late, and the round continues without it"
            raise MessageRejected(409, why)
        message = self._messages.get(stage, {}).get(client)
        return message, message is not None

    def advance(self, at_s: float) -> bool:
        """Advance if all clients have answered or it is time; whether there is a sum. RoundAbandoned with too few."""
        if self.server.waits_for and at_s < self.due_s:
            return False
        messages = self.server.advance()
        self.due_s = at_s + self._stage_s
        if self.server.stage is SecureStage.DONE:
            return True
        self._messages[int(self.server.stage)] = messages
        return False


class RoundServer:
    """The server's side of one run."""

    _came: list[int]  # whose reports are in the sum
    _norms: dict[int, float]
    _sum: RoundTally
    secure: SecureAttempt | None  # also read by the thread that answers requests
    _secure_sum: TallySum | None

    def __init__(
        self,
        job: FederatedJob,
        files: ServerFiles,
        at_s: float,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._job, self._files, self.notify, self._terms = job, files, notify, job.terms
        # what kept a decision from being carried out: nothing is answered any more, and the run must be resumed
        self.failed: Exception | None = None
        self._model = initial_model(job.task, job.seed)
        self._weights = held(self._model)
        self._algorithm = algorithm_named(job.strategy.algorithm)
        parameters = len(list(self._model.parameters()))
        self._algorithm.facts = FederatedFacts(names=held_names(self._model), parameters=parameters)
        self._like = self._algorithm.sent(self._weights)  # what an update is like
        self._private = job.private_rounds()
        self.form = protocol.TensorForm.of(self._model)
        self.updates = protocol.UpdateForm(self.form.with_more(self._like), job.strategy, job.seed)
        self.enrolment, self.new_tokens = files.enrolment(job.strategy.clients)
        self.plan = job.plan(files.run, self.form)
        self._counted_in: dict[int, int] = {}  # by client: the last round that its report is in, from 1
        self.state = core.RoundState()
        self._forget()
        self._began = self._attempt_began = time.monotonic()
        if (found := self._files.load()) is None:
            self._save([])
            if self._private is not None and (forecast := self._private.forecast(job.settings.rounds)):
                notify(forecast)
        else:
            self.state, loaded, undone = found
            self._model.load_state_dict(loaded.model)
            self._algorithm.load_state(loaded.extra.get("algorithm", {}))
            counted = loaded.extra.get("counted_in", {})
            self._counted_in = {int(client): int(number) for client, number in counted.items()}
            if self._private is not None:
                self._private.restore(loaded.extra.get("privacy") or None)
            self._count_unsaved(undone, loaded.extra.get("rows", []))
        self._do(core.ServerResumed(at_s=at_s))
        self._refresh()

    def _count_unsaved(self, undone: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Count what a server that was killed has given away beyond its checkpoint; UserError if that is too much.

        Whoever got the model of an undone round has it. A sum with the noise of devices may have been seen, and its
        attempt is repeated; a sum whose noise the server adds is told only with its checkpoint.
        """
        if self._private is None or (spending := self._private.spending) is None:
            return
        strategy, state = self._job.strategy, self.state
        for _ in range(undone):
            spending.take(range(strategy.clients))
        seen = strategy.noise_by == CLIENTS and state.phase is core.RoundPhase.REPORTING
        if seen:
            spending.take(state.asked)
        spending.require(self._terms.rounds - state.done)
        if undone or seen:  # before the next round tells more
            self._files.directory.metrics.truncate_after(state.done - 1)
            self._save(rows)

    def _save(self, rows: Sequence[Mapping[str, Any]]) -> None:
        privacy = self._private.state() if self._private is not None else {}
        counted = {str(client): number for client, number in self._counted_in.items()}
        memory = dict(self._algorithm.memory())
        kept = {"algorithm": memory, "privacy": privacy, "counted_in": counted}
        self._files.save_round(self.state, self._model.state_dict(), kept, rows)

    def _refresh(self) -> None:
        given = [*self._weights, *self._algorithm.given_besides(self._weights)]
        self.model_hash = hash_of(given).hex()
        self.model_body = self.form.with_more(given).encode(given, {"rounds": str(self.state.done)})

    def authenticated(self, headers: Mapping[str, str], method: str, target: str) -> int:
        """Whose request it is; MessageRejected unless that client has signed it, and the hash of its body."""
        client = whole_in(headers, protocol.CLIENT)
        key = self.enrolment.key_of(client)
        try:
            signature = bytes.fromhex(headers.get(protocol.SIGNATURE, ""))
        except ValueError:
            signature = b""
        hashes = headers.get(protocol.MODEL, ""), headers.get(protocol.BODY, "")
        signed = protocol.request_text(self._files.run, client, method, target, *hashes)
        if not verify(key, signature, signed):
            raise MessageRejected(401, f"the request is not signed by client {client}")
        return client

    def enrol(self, request: Mapping[str, Any]) -> dict[str, Any]:
        grown, number = self.enrolment.enrol(request)
        if grown != self.enrolment:
            self._files.save_enrolment(grown)
            self.enrolment = grown
            self.notify(f"client {number} is enrolled")
        return {"client": number, "run": self._files.run}

    def work(self, client: int, have: int, after: int, at_s: float) -> tuple[dict[str, Any], bool]:
        """What a client with the model of round `have`, done with attempt `after`, should know, and whether at once."""
        self._do(core.ClientsSeen(clients=(client,), at_s=at_s))
        state = self.state
        work: dict[str, Any] = {"rounds": state.done, "model": self.model_hash, "state": "wait"}
        work["counted_in"] = self._counted_in.get(client, 0)
        if state.phase is core.RoundPhase.FINISHED:
            work["state"] = "done"
        elif client in state.waits_for and state.attempt > after:
            left_s = self._terms.deadline_s - (state.now_s - state.since_s)
            work |= {"state": "train", "attempt": state.attempt, "left_s": max(0.0, left_s)}
            if self.secure is not None:
                work["secure"] = self.secure.terms_as_json
        return work, work["state"] != "wait" or have != state.done

    def expects(self, client: int, attempt: int) -> None:
        """MessageRejected, before anything of it is read, for a report that cannot count."""
        if self.secure is not None:
            raise MessageRejected(409, "this run uses secure sums and accepts no unmasked update")
        state = self.state
        current = state.phase is core.RoundPhase.REPORTING and attempt == state.attempt
        if not current or not (client in state.waits_for or client in state.reported):
            raise MessageRejected(409, f"client {client} was not asked in attempt {attempt}, or it has ended")

    def report(self, client: int, attempt: int, model: str, body: bytes, at_s: float) -> dict[str, Any]:
        """A client's update; MessageRejected, and the client counts as gone, where it is wrong."""
        self.expects(client, attempt)
        try:
            update = self._read_update(client, model, body)
        except MessageRejected as refused:
            if client not in self.state.reported:
                self._do(core.ClientGone(client=client, at_s=at_s))
            self.notify(f"the report of client {client} was refused: {refused}")
            raise
        digest = protocol.body_hash(body)
        norm = 0.0 if self._private is not None else update.norm  # which the clip bounds, and nobody needs
        event = core.ReportCame(client=client, attempt=attempt, digest=digest, at_s=at_s, norm=norm)
        for decision in self._do(event, update):
            if isinstance(decision, core.RefuseReport) and not decision.repeated:
                raise MessageRejected(409, decision.why)
        return {"counted": True}

    def _read_update(self, client: int, model: str, body: bytes) -> ClientUpdate:
        if model != self.model_hash:
            raise MessageRejected(409, "the update was not trained from the current model")
        change, about = self.updates.decode(body, client=client)
        samples, steps = whole_in(about, "samples", 1), whole_in(about, "steps", 1)
        try:
            loss = float(about.get("loss", ""))
        except (TypeError, ValueError):
            loss = math.nan
        if not abs(loss) < _MOST_LOSS:
            raise MessageRejected(422, "the loss of the update is not a finite number")
        for (name, _, _), one in zip(self.updates.rows, change, strict=True):
            if not bool(one.isfinite().all()):
                raise MessageRejected(422, f"tensor {name!r} of the update has a number that is not finite")
            if not bool(one.square().isfinite().all()):  # algorithms square it, and the model would be lost
                raise MessageRejected(422, f"tensor {name!r} of the update has a number that is too large")
        bounded = min(samples, self._job.strategy.max_samples)
        return ClientUpdate(client=client, change=change, samples=bounded, steps=steps, loss=loss)

    def leave(self, client: int, attempt: int, at_s: float) -> dict[str, Any]:
        if attempt == self.state.attempt:
            if self.secure is not None:
                self.secure.server.drop(client)
            self._do(core.ClientGone(client=client, at_s=at_s))
        return {}

    def secure_message(self, client: int, attempt: int, stage: int, body: bytes, at_s: float) -> None:
        try:
            self.secure_attempt(attempt).receive(client, stage, body)
        except ProtocolRefused as refused:
            self.notify(f"a message of client {client} was refused: {refused}")
            raise MessageRejected(409, str(refused)) from refused
        self._do(core.ClientsSeen(clients=(client,), at_s=at_s))
        self._advance(at_s)

    def secure_attempt(self, attempt: int) -> SecureAttempt:
        if self.secure is None or attempt != self.state.attempt:
            raise MessageRejected(409, f"attempt {attempt} has ended, or uses no secure sum")
        return self.secure

    def tick(self, at_s: float) -> None:
        self._advance(at_s)
        self._do(core.TimePassed(at_s=at_s))

    def _advance(self, at_s: float) -> None:
        secure = self.secure
        if secure is None:
            return
        for client in sorted(secure.server.waits_for) if at_s >= secure.due_s else ():
            self._do(core.ClientGone(client=client, at_s=at_s))
        if self.secure is not secure:  # nobody was left
            return
        try:
            if secure.advance(at_s):
                flat, loss, weight = sum_of(secure.terms.fixed, secure.server.result())
                survivors = secure.server.lists.survivors
                self._secure_sum = TallySum(sums=shaped(flat, self._weights), weight=weight, loss=loss)
                if (private := self._private) is not None:
                    found, place = TallySum(sums=[flat], weight=weight), self._place(survivors)
                    self._secure_sum = private_sum(found, private, self._weights, place)
                self._do(core.SumCame(attempt=self.state.attempt, clients=survivors, at_s=at_s))
        except ProtocolRefused as refused:
            self._do(core.RoundFailed(attempt=self.state.attempt, why=str(refused), at_s=at_s))

    def _do(
        self, event: core.RoundEvent, update: ClientUpdate | None = None
    ) -> tuple[core.RoundDecision, ...]:
        """Execute what the core decides; where that fails, the state is ahead of the disk, and all is over."""
        if self.failed is not None:
            raise ManyhandsError(f"the server has failed: {self.failed}")
        self.state, decisions = core.handle(self._terms, self.state, event)
        try:
            for decision in decisions:
                self._execute(decision, event.at_s, update)
        except Exception as error:
            self.failed = error
            raise
        return decisions

    def _execute(self, decision: core.RoundDecision, at_s: float, update: ClientUpdate | None) -> None:
        match decision:
            case core.BeginRound(asked=asked):
                self._forget()
                self._files.save_state(self.state)
                self._attempt_began = time.monotonic()
                if self._job.strategy.secure:
                    roster = {client: self.enrolment.key_of(client) for client in asked}
                    self.secure = SecureAttempt(self._job, roster, self._weights, at_s)
            case core.TakeReport():
                assert update is not None, "only a report is taken"
                self._came.append(update.client)
                self._sum.add(update, self._algorithm.weight(update))
                if self._private is None:
                    self._norms[update.client] = update.norm
            case core.CloseRound():
                self._close(decision)
            case core.AbandonRound():
                self._forget()
                self._files.save_state(self.state)
                self.notify(f"round {decision.number + 1} was abandoned: {decision.why}")
            case core.EndRounds():
                rows = self._files.directory.metrics.read()
                measured = [row["metrics"] for row in rows if "metrics" in row]
                summary = {
                    "task": self._job.task.name,
                    "strategy": str(self._job.strategy),
                    "workers": self._job.strategy.clients,
                    "steps": self.state.done,
                    "attempts": self.state.attempt,
                    "abandoned": self.state.abandoned,
                    "updates_rejected": self.state.rejected,
                    "complete": decision.complete,
                    "final": measured[-1] if measured else {},
                }
                if self._private is not None:
                    summary["privacy"] = self._private.summary()
                    self.notify(
                        str(summary["privacy"].get("sentence", "every update is clipped, without noise"))
                    )
                self._files.directory.write_summary(summary)
                self.notify(decision.why)
            case core.RefuseReport(repeated=False):
                self.notify(f"a report of client {decision.client} was refused: {decision.why}")

    def _close(self, decision: core.CloseRound) -> None:
        norms = self._norms
        largest = client_updates.largest_class(norms.values(), self._terms.norm_ratio)
        total = self._secure_sum or self._sum.total(largest)
        counted = decision.counted
        self._counted_in |= dict.fromkeys(counted, self.state.done)
        # Those who were not in it would weigh as much as those who were.
        weight = total.weight * self._job.strategy.clients / len(counted)
        self._algorithm.facts = replace(self._algorithm.facts, weight=weight)
        with torch.no_grad():
            mean = self._algorithm.mean(total)
            step = [one.to(mine.dtype) for one, mine in zip(mean, self._like, strict=True)]
            self._algorithm.step(self._weights, step)
        loss, now = total.loss / total.weight, time.monotonic()
        self._forget()
        row: dict[str, Any] = {
            "step": self.state.done,
            "loss": None if math.isnan(loss) else loss,
            "seconds": now - self._attempt_began,
            "at_s": now - self._began,
            "attempt": decision.attempt,
            "counted": list(counted),
        }
        if decision.rejected:
            row["rejected"] = {str(client): norms[client] for client in decision.rejected}
        rows: list[dict[str, Any]] = [row]
        plan = TrainingPlan(task=self._job.task, steps=1, seed=0, evaluate_every=1, checkpoint_every=0)
        with preserved():
            found_metrics = Computer(plan, 0).evaluate(self._model)
        measured = dict(found_metrics[0]) if found_metrics is not None else {}
        # Before anything is saved: the run continues from the round before, when it is resumed.
        came = f"{client_updates.described_clients(list(counted))}, whose norms are not seen"
        if seen := {client: norms[client] for client in counted if client in norms}:
            came = client_updates.described_norms(seen)
        finite = all(bool(one.isfinite().all()) for one in self._weights)
        client_updates.require_finite(measured, self.state.done, came, weights=finite)
        if measured:
            rows.append({"step": self.state.done, "metrics": measured, "at_s": now - self._began})
        self._save(rows)
        self._refresh()
        if decision.rejected:
            came = client_updates.described_norms({client: norms[client] for client in decision.rejected})
            usual = statistics.median(norms.values())
            self.notify(
                f"round {self.state.done}: rejected the update of {came}: larger than "
                f"norm_ratio={self._terms.norm_ratio:g} times the median of {usual:.2g}"
            )
        figures = measured if math.isnan(loss) else {"loss": loss, **measured}
        shown = "".join(f"  {name} {value:.4f}" for name, value in figures.items())
        self.notify(
            f"round {self.state.done} of {self._terms.rounds}: {num_of(len(counted), 'update')}{shown}"
        )

    def _forget(self) -> None:
        self._came, self._norms = [], {}
        place, strategy = self._place(self._came), self._job.strategy
        self._sum = PlainTally(place.total, self._like)  # to which nothing is added where sums are secure
        if not strategy.secure:
            about = strategy, self._algorithm, place, self._weights, self._like
            self._sum = tally_for(*about, self._private)
        self.secure = self._secure_sum = None

    def _place(self, clients: Sequence[int]) -> RoundPlace:
        """The round under way, whose updates come from these clients; this process is all there is."""
        return RoundPlace(number=self.state.done, clients=clients, rank=0, total=lambda values: values)
