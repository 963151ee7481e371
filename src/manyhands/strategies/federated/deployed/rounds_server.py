"""The device server without its sockets: handles requests, feeds events to the round core and executes its decisions.

Everything here is called by one thread at a time. `at_s` is the time of the driver's clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from manyhands.data.randomness import preserved, seed_all
from manyhands.data.store.fingerprint import parameter_shapes
from manyhands.engine.computing import Computer, TrainingPlan
from manyhands.engine.exchange import Traffic
from manyhands.errors import ManyhandsError
from manyhands.strategies.federated.algorithms import FederatedFacts
from manyhands.strategies.federated.client_updates import ClientUpdate, TallySum, shaped
from manyhands.strategies.federated.clients import held, held_names
from manyhands.strategies.federated.deployed.device_job import FederatedJob
from manyhands.strategies.federated.deployed.protocol import (
    BODY,
    CLIENT,
    MODEL,
    SIGNATURE,
    MessageRejected,
    TensorForm,
    UpdateForm,
    body_hash,
    request_text,
    whole_in,
)
from manyhands.strategies.federated.deployed.server_files import ServerFiles
from manyhands.strategies.federated.deployed.stages import SecureAttempt
from manyhands.strategies.federated.norms import (
    ClassSums,
    described_clients,
    described_norms,
    largest_class,
    require_finite,
)
from manyhands.strategies.federated.rounds.round_core import (
    AbandonRound,
    BeginRound,
    ClientGone,
    ClientSeen,
    CloseRound,
    EndRounds,
    RefuseReport,
    ReportCame,
    RoundDecision,
    RoundEvent,
    RoundFailed,
    RoundPhase,
    RoundState,
    ServerResumed,
    SumCame,
    TakeReport,
    TimePassed,
    handle,
)
from manyhands.strategies.federated.secure.primitives import ProtocolRefused, verify
from manyhands.strategies.federated.secure.secure_tally import hash_of

__all__ = ["RoundServer", "require_complete", "shapes_of"]

_MOST_LOSS = 1e9


def initial_model(job: FederatedJob) -> torch.nn.Module:
    """The weights that a run of this seed begins with, as in simulation."""
    with preserved():
        seed_all(job.seed)
        return job.task.model()


class RoundServer:
    """The server's side of one run."""

    _norms: dict[int, float]
    _secure: SecureAttempt | None

    def __init__(
        self, job: FederatedJob, files: ServerFiles, at_s: float, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self._job, self._files, self.tell, self._terms = job, files, tell, job.terms
        self.failed: Exception | None = None
        """What kept a decision from being carried out: nothing is answered any more, and the run must be resumed."""
        self._model = initial_model(job)
        self._weights = held(self._model)
        self._algorithm = job.algorithm
        self._algorithm.facts = FederatedFacts(
            names=held_names(self._model), parameters=len(list(self._model.parameters()))
        )
        self.form = TensorForm.of(self._model)
        self.updates = UpdateForm(self.form, job.strategy, job.seed)
        self.enrolment, self.new_tokens = files.enrolment(job.strategy.clients)
        self.plan = job.plan(files.run, self.form)
        self.state = RoundState()
        self._forget()
        self._began = self._attempt_began = time.monotonic()
        found = self._files.load()
        if found is None:
            self._files.save_round(self.state, self._model.state_dict(), {}, [])
        else:
            self.state, loaded = found
            self._model.load_state_dict(loaded.model)
            self._algorithm.load_state(loaded.extra.get("algorithm", {}))
        self._do(ServerResumed(at_s=at_s))
        self._refresh()

    def _refresh(self) -> None:
        """What is asked for often, made once a round."""
        self.model_hash = hash_of(self._weights).hex()
        self.model_body = self.form.encode(self._weights, {"rounds": str(self.state.done)})

    @property
    def secure_stage(self) -> int:
        secure = self._secure  # another thread may look
        return int(secure.server.stage) if secure is not None else -1

    def authenticated(self, headers: Mapping[str, str], method: str, target: str) -> int:
        """Whose request it is; MessageRejected unless that client has signed it, and the hash of its body."""
        client = whole_in(headers, CLIENT)
        key = self.enrolment.key_of(client)
        try:
            signature = bytes.fromhex(headers.get(SIGNATURE, ""))
        except ValueError:
            signature = b""
        hashes = headers.get(MODEL, ""), headers.get(BODY, "")
        if not verify(key, signature, request_text(self._files.run, client, method, target, *hashes)):
            raise MessageRejected(401, f"the request is not signed by client {client}")
        return client

    def enrol(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        grown, number = self.enrolment.enrol(asked)
        if grown != self.enrolment:
            self._files.save_enrolment(grown)
            self.enrolment = grown
            self.tell(f"client {number} is enrolled")
        return {"client": number, "run": self._files.run}

    def work(self, client: int, have: int, after: int, at_s: float) -> tuple[dict[str, Any], bool]:
        """What a client should know, and whether it should know it at once.

        `have` is how many rounds its model has seen (-1: none), `after` the last attempt that it has done with.
        """
        self._do(ClientSeen(client=client, at_s=at_s))
        state = self.state
        work: dict[str, Any] = {"rounds": state.done, "model": self.model_hash, "state": "wait"}
        if state.phase is RoundPhase.FINISHED:
            work["state"] = "done"
        elif client in state.waits_for and state.attempt > after:
            left_s = self._terms.deadline_s - (state.now_s - state.since_s)
            work |= {"state": "train", "attempt": state.attempt, "left_s": max(0.0, left_s)}
            if self._secure is not None:
                work["secure"] = self._secure.terms_as_json
        return work, work["state"] != "wait" or have != state.done

    def expects(self, client: int, attempt: int) -> None:
        """MessageRejected, before anything of it is read, for a report that cannot count."""
        if self._secure is not None:
            raise MessageRejected(409, "this run is summed securely, and takes no update in the clear")
        state = self.state
        current = state.phase is RoundPhase.REPORTING and attempt == state.attempt
        if not current or not (client in state.waits_for or client in state.reported):
            raise MessageRejected(409, f"client {client} is not asked in attempt {attempt}, or it has ended")

    def report(self, client: int, attempt: int, model: str, body: bytes, at_s: float) -> dict[str, Any]:
        """A client's update; MessageRejected, and the client counts as gone, where it is wrong."""
        self.expects(client, attempt)
        try:
            update = self._read_update(client, model, body)
        except MessageRejected as refused:
            if client not in self.state.reported:
                self._do(ClientGone(client=client, at_s=at_s))
            self.tell(f"the report of client {client} was refused: {refused}")
            raise
        event = ReportCame(
            client=client, attempt=attempt, digest=body_hash(body), at_s=at_s, norm=update.norm
        )
        decisions = self._do(event, update)
        for decision in decisions:
            if isinstance(decision, RefuseReport) and not decision.repeated:
                raise MessageRejected(409, decision.why)
        return {"counted": True}

    def _read_update(self, client: int, model: str, body: bytes) -> ClientUpdate:
        if model != self.model_hash:
            raise MessageRejected(409, "the update is not from the current model")
        change, about = self.updates.decode(body, client=client)
        samples, steps = whole_in(about, "samples", 1), whole_in(about, "steps", 1)
        try:
            loss = float(about.get("loss", ""))
        except (TypeError, ValueError):
            loss = math.nan
        if not abs(loss) < _MOST_LOSS:
            raise MessageRejected(422, "the loss of the update is no finite number")
        for (name, _, _), one in zip(self.form.rows, change, strict=True):
            if not bool(one.isfinite().all()):
                raise MessageRejected(422, f"tensor {name!r} of the update has a number that is not finite")
            if not bool(one.square().isfinite().all()):  # algorithms square it, and the model would be lost
                raise MessageRejected(422, f"tensor {name!r} of the update has a number that is too large")
        bounded = min(samples, self._job.strategy.max_samples)
        return ClientUpdate(client=client, change=change, samples=bounded, steps=steps, loss=loss)

    def leave(self, client: int, attempt: int, at_s: float) -> dict[str, Any]:
        if attempt == self.state.attempt:
            if self._secure is not None:
                self._secure.server.drop(client)
            self._do(ClientGone(client=client, at_s=at_s))
        return {}

    def secure_message(self, client: int, attempt: int, stage: int, body: bytes, at_s: float) -> None:
        """A client's message of the secure sum; MessageRejected where it is wrong or too late."""
        secure = self.secure_attempt(attempt)
        try:
            secure.receive(client, stage, body)
        except ProtocolRefused as refused:
            self.tell(f"a message of client {client} was refused: {refused}")
            raise MessageRejected(409, str(refused)) from refused
        self._do(ClientSeen(client=client, at_s=at_s))
        self._advance(at_s)

    def secure_attempt(self, attempt: int) -> SecureAttempt:
        """The current one; MessageRejected for another, or where updates come in the clear."""
        if self._secure is None or attempt != self.state.attempt:
            raise MessageRejected(409, f"attempt {attempt} has ended, or is not summed securely")
        return self._secure

    def tick(self, at_s: float) -> None:
        self._advance(at_s)
        self._do(TimePassed(at_s=at_s))

    def _advance(self, at_s: float) -> None:
        secure = self._secure
        if secure is None:
            return
        for client in sorted(secure.silent(at_s)):
            self._do(ClientGone(client=client, at_s=at_s))
        if self._secure is not secure:  # nobody was left
            return
        try:
            found = secure.advance(at_s)
        except ProtocolRefused as refused:
            self._do(RoundFailed(attempt=self.state.attempt, why=str(refused), at_s=at_s))
            return
        if found is not None:
            self._sum = ClassSums.whole(shaped(found.flat, self._weights), found.weight, found.loss)
            self._do(SumCame(attempt=self.state.attempt, clients=found.clients, at_s=at_s))

    def _do(self, event: RoundEvent, update: ClientUpdate | None = None) -> tuple[RoundDecision, ...]:
        """Tell the core, and do what it decides; where that fails, the state is ahead of the disk, and all is over."""
        if self.failed is not None:
            raise ManyhandsError(f"the server has failed: {self.failed}")
        self.state, decisions = handle(self._terms, self.state, event)
        try:
            self._carry_out(decisions, event, update)
        except Exception as error:
            self.failed = error
            raise
        return decisions

    def _carry_out(
        self, decisions: Sequence[RoundDecision], event: RoundEvent, update: ClientUpdate | None
    ) -> None:
        for decision in decisions:
            match decision:
                case BeginRound(asked=asked):
                    self._forget()
                    self._files.save_state(self.state)
                    self._attempt_began = time.monotonic()
                    if self._job.strategy.secure:
                        roster = {client: self.enrolment.key_of(client) for client in asked}
                        self._secure = SecureAttempt(self._job, roster, self._weights, event.at_s)
                case TakeReport():
                    assert update is not None, "only a report is taken"
                    self._sum.add(update, self._algorithm.weight(update))
                    self._norms[update.client] = update.norm
                case CloseRound():
                    self._close(decision)
                case AbandonRound():
                    self._forget()
                    self._files.save_state(self.state)
                    self.tell(f"round {decision.number + 1} was abandoned: {decision.why}")
                case EndRounds():
                    self._end(decision)
                case RefuseReport():
                    if not decision.repeated:
                        self.tell(f"a report of client {decision.client} was refused: {decision.why}")

    def _close(self, decision: CloseRound) -> None:
        norms = self._norms
        total = self._sum.total(largest_class(norms.values(), self._terms.norm_ratio))
        found = TallySum(sums=total.sums, weight=total.weight, loss=total.loss, traffic=Traffic())
        with torch.no_grad():
            mean = self._algorithm.mean(found)
            self._algorithm.step(
                self._weights, [one.to(mine.dtype) for one, mine in zip(mean, self._weights, strict=True)]
            )
        loss, now = total.loss / total.weight, time.monotonic()
        self._forget()
        row = {
            "step": self.state.done,
            "loss": loss,
            "seconds": now - self._attempt_began,
            "at_s": now - self._began,
            "attempt": decision.attempt,
            "counted": list(decision.counted),
        }
        if decision.rejected:
            row["rejected"] = {str(client): norms[client] for client in decision.rejected}
        rows: list[dict[str, Any]] = [row]
        plan = TrainingPlan(task=self._job.task, steps=1, seed=0, evaluate_every=1, checkpoint_every=0)
        with preserved():
            found_metrics = Computer(plan, 0).evaluate(self._model)
        measured = dict(found_metrics[0]) if found_metrics is not None else {}
        # Before anything is saved: the run continues from the round before, when it is resumed.
        came = f"{described_clients(list(decision.counted))}, whose norms a secure sum does not show"
        if seen := {client: norms[client] for client in decision.counted if client in norms}:
            came = described_norms(seen)
        finite = all(bool(one.isfinite().all()) for one in self._weights)
        require_finite(measured, self.state.done, came, weights=finite)
        if measured:
            rows.append({"step": self.state.done, "metrics": measured, "at_s": now - self._began})
        self._files.save_round(self.state, self._model.state_dict(), dict(self._algorithm.memory()), rows)
        self._refresh()
        if decision.rejected:
            came = described_norms({client: norms[client] for client in decision.rejected})
            usual = statistics.median(norms.values())
            self.tell(
                f"round {self.state.done}: rejected, since larger than norm_ratio={self._terms.norm_ratio:g} times the "
                f"median of {usual:.2g}: the update of {came}"
            )
        shown = "".join(f"  {name} {value:.4f}" for name, value in measured.items())
        self.tell(
            f"round {self.state.done} of {self._terms.rounds}: {len(decision.counted)} updates  loss {loss:.4f}{shown}"
        )

    def _end(self, decision: EndRounds) -> None:
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
        self._files.directory.write_summary(summary)
        self.tell(decision.why)

    def _forget(self) -> None:
        self._sum = ClassSums(self._weights, by_norm=self._terms.norm_ratio > 0)
        self._norms = {}
        self._secure = None


def shapes_of(job: FederatedJob) -> dict[str, str]:
    return parameter_shapes(initial_model(job).named_parameters())


def require_complete(server: RoundServer) -> None:
    """ManyhandsError where the server gave up, or could not do what it had to."""
    if server.failed is not None:
        raise ManyhandsError(f"the server has failed: {server.failed}") from server.failed
    if server.state.phase is RoundPhase.GIVEN_UP:
        raise ManyhandsError(
            f"the server gave up after {server.state.done} rounds: too few devices came, or too few reported; start it "
            "again with --resume"
        )
