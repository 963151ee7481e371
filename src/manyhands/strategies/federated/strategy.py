"""`federated` as a value."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final

import numpy as np

from manyhands.data.own import Parties
from manyhands.errors import UserError, nearest
from manyhands.facts import (
    Answer,
    Facts,
    ModelFootprint,
    Promise,
    Promises,
    Truth,
)
from manyhands.strategies.common.usual_promises import ENDS, NO_SERVERS, NOBODY_JOINS
from manyhands.strategies.federated.algorithms import FederatedAlgorithm, algorithm_named
from manyhands.strategies.federated.client_data import NATURAL, Partition, selected
from manyhands.strategies.federated.client_states import EVERYTHING_SHARED
from manyhands.strategies.federated.client_updates import check_norm_ratio
from manyhands.strategies.federated.private_rounds import AUTO as AUTO_SAMPLING
from manyhands.strategies.federated.private_rounds import SERVER, SYSTEM, PrivacyTerms, need_accountant
from manyhands.strategies.federated.secure.fixedpoint import MOST_WEIGHT, FixedPoint
from manyhands.strategy import (
    Strategy,
    WorkerMemory,
    integer,
    setting,
    switch_setting,
)
from manyhands.wire.names import RAW, check_codec, codec_setting, feedback_setting, has_feedback

ALL = 0
"""The batch that is all of a client's samples."""
AUTO = 0
"""As many clients at once as is right."""
_RANGE, _BITS, _BATCH, _CLIENTS = 8.0, 24, 10, 10
_NORM_RATIO = 100.0
_SUMS = 3  # of updates whose norms lie within a factor of 4, and their total


def _read_together(text: str) -> int:
    if text == "auto":
        return AUTO
    if text == "0":
        raise UserError("'0' is neither a number of at least 1 nor auto")
    return integer(text)


def _number(kind: str) -> Callable[[str], float]:

    def read(text: str) -> float:
        try:
            return float(text)
        except ValueError:
            raise UserError(f"{text!r} is not {kind}") from None

    return read


_read_number = _number("a number")
_shown = "{:g}".format
FINE_TUNE: Final = "finetune"
_NOTHING_PERSONAL: Final = "none"  # clients use the model that the algorithm gives them


@contextmanager
def _named_federated() -> Iterator[None]:
    """A UserError of what does not know the strategy, with its name before it."""
    try:
        yield
    except UserError as error:
        raise UserError(f"federated {error}") from error


def tuning_epochs(personal: str) -> int:
    """Of `finetune:2`, or `finetune` for one epoch; 0 for `none`; UserError for anything else."""
    if personal == _NOTHING_PERSONAL:
        return 0
    word, colon, number = personal.partition(":")
    if word != FINE_TUNE:
        raise UserError(f"personal={personal}: unknown; {nearest(word, [FINE_TUNE, _NOTHING_PERSONAL])}")
    if colon and not (number.isascii() and number.isdigit() and 0 < int(number) < 10**6):
        why = f"personal={personal}: {number!r} is not a number of epochs; write {FINE_TUNE}:1 or more"
        raise UserError(why)
    return int(number or 1)


@dataclass(frozen=True, kw_only=True)
class Federated(Strategy):
    """In each round some of the clients train the model on data of their own, and a server averages what they send.

    The clients are simulated: the workers of a run share those of a round among them. `partition` says how one data set
    is split over them, or that each has its own.
    """

    word: ClassVar[str] = "federated"
    about: ClassVar[str] = "many clients train on data of their own; a server averages what they send"
    truth: ClassVar[Truth] = Truth.SERVER_OF_CLIENTS

    clients: int = setting(_CLIENTS, integer)
    """How many there are; with partition=natural, as many as there are parties."""
    fraction: float = setting(1.0, _number("a number above 0 and up to 1"), _shown)
    """Which part of them takes part in a round, at least one."""
    epochs: int = setting(1, integer)
    """How often a client goes through its data in a round."""
    batch: int = setting(
        _BATCH,
        lambda text: ALL if text == "all" else integer(text),
        lambda value: "all" if value == ALL else str(value),
    )
    """Samples in a client's batch; `all`: one batch of all it has."""
    algorithm: str = setting("fedavg", str)
    """How clients train and what the server makes of it: `fedavg`, `fedsgd`, `fedprox:MU`, `fedadam:RATE`, …"""
    partition: str = setting("iid", str)
    """Who has which samples: `iid`, `shards:2`, `dirichlet:0.5`, `quantity:0.5`, or `natural` for `Parties`."""
    together: int = setting(AUTO, _read_together, lambda value: "auto" if value == AUTO else str(value))
    """How many clients a worker trains at once, as one stacked model; `auto`: as many as is right for the task."""
    over: float = setting(1.0, _read_number, _shown)
    """How many times as many clients are asked as a round takes; the first to report count."""
    dropout: float = setting(0.0, _read_number, _shown)
    """How likely a client that was asked says nothing more."""
    deadline: float = setting(0.0, _read_number, _shown)
    """How long a round waits for reports, where a typical client takes 1; 0: for all that come."""
    min_reports: int = setting(1, integer)
    """Reports without which a round is abandoned, and tried again with others."""
    secure: bool = switch_setting()
    """Whether the updates of a round are summed by secure aggregation, so that the server learns their sum alone."""
    range: float = setting(_RANGE, _number("a number above 0"), _shown)
    """With secure=yes, the largest absolute value of an item of an update; larger ones are clipped to it."""
    bits: int = setting(_BITS, integer)
    """With secure=yes, how many an item is rounded to, its sign included."""
    keep: str = setting(EVERYTHING_SHARED, str)
    """Which layers stay with each client, by the names of parameters or modules: `head`, `*norm*,head`; or `none`."""
    personal: str = setting(_NOTHING_PERSONAL, str)
    """What each client makes of the common model for itself after the last round: `finetune:EPOCHS`, or `none`."""
    held_out: float = setting(0.0, _number("a number from 0 to below 1"), _shown)
    """Which part of its samples a client does not train on, and is measured by instead; 0: by what it trains on."""
    codec: str = codec_setting()
    """How updates are made smaller on their way to the server: `raw`, or a codec such as `bf16` or `topk:0.01+int8`."""
    feedback: bool = feedback_setting()
    """Whether a client keeps what a codec leaves out, and adds it to its next update."""
    max_samples: int = setting(MOST_WEIGHT, integer)
    """For how many samples a client counts at most, whatever it says that it has."""
    norm_ratio: float = setting(_NORM_RATIO, _read_number, _shown)
    """How many times the median of a round's norms an update may have, or it is rejected (of 3 or more); 0: any."""
    clip: str = setting("no", str)
    """The most that the norm of an update may be: `1.0`, or `adaptive:0.5` for a quantile of the norms; `no`: any."""
    noise: float = setting(0.0, _read_number, _shown)
    """The deviation of the Gaussian noise of a round's sum, by the most that one client can change; needs a clip."""
    noise_by: str = setting(SERVER, str)
    """Who adds it: the `server`, or the `clients`, each its share, so that a server sees no sum without it."""
    epsilon: float = setting(0.0, _read_number, _shown)
    """The run ends before more than this is given away of a client; without noise=, the noise that takes is computed.
    0: it is counted, and no bound."""
    delta: float = setting(0.0, _read_number, _shown)
    """With noise, the chance for which epsilon need not hold: well below one by the number of clients."""
    sampling: str = setting(AUTO_SAMPLING, str)
    """How a round's clients are drawn: a `fixed` number of them, or each by a draw of its own (`poisson`); `auto`: the
    latter where that makes noise cheaper."""
    randomness: str = setting(SYSTEM, str)
    """Where noise comes from: the operating `system`, or the run's `seed`, which is for tests and hides nothing."""

    def __post_init__(self) -> None:
        for name in ("clients", "epochs", "max_samples", "min_reports"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"federated {name}={value}: must be an integer of at least 1")
        if not 0 < self.fraction <= 1:
            raise UserError(f"federated fraction={self.fraction:g}: must be above 0 and at most 1")
        for name, word in (("batch", "all"), ("together", "auto")):
            if (value := getattr(self, name)) < 0:
                raise UserError(f"federated {name}={value}: must be an integer of at least 1, or {word}")
        algorithm = algorithm_named(self.algorithm)
        for name, unused in (("epochs", self.epochs != 1), ("batch", self.batch not in (_BATCH, ALL))):
            if algorithm.whole_batches and unused:
                raise UserError(
                    f"federated {name}={getattr(self, name)}: a client of algorithm={self.algorithm} takes one step "
                    "on all of its data; leave it out, or use fedavg"
                )
        if Partition.parse(self.partition).word != NATURAL:
            algorithm.check_round(self.per_round(self.clients))
        one_by_one = "factors are summed over workers, and a server weighs clients one by one; use topk"
        refused, feedback = {"powersgd": one_by_one}, self.feedback
        check_codec(
            self.codec, link="", strategy=self.word, feedback=feedback, sends_changes=True, refused=refused
        )
        if self.keep != EVERYTHING_SHARED and algorithm.cannot_keep_layers:
            raise UserError(
                f"federated keep={self.keep}: not with algorithm={self.algorithm}: {algorithm.cannot_keep_layers}; "
                "leave one of the two out"
            )
        self._check_personal(algorithm)
        self._check_rounds(algorithm)
        self._check_secure(algorithm)
        self._check_bounds(algorithm)

    def _check_rounds(self, algorithm: FederatedAlgorithm) -> None:
        if not 1 <= self.over < math.inf:
            raise UserError(f"federated over={self.over:g}: must be a number of at least 1")
        if not 0 <= self.dropout < 1:
            raise UserError(f"federated dropout={self.dropout:g}: must be at least 0 and below 1")
        if not 0 <= self.deadline < math.inf:
            raise UserError(f"federated deadline={self.deadline:g}: must be a number above 0, or 0 for none")
        not_with = ""
        if algorithm.cannot_drop_clients:
            not_with = f"algorithm={self.algorithm}: {algorithm.cannot_drop_clients}"
        elif self._clipping:
            not_with = f"{self._clipping} yet"
        for name in ("over", "dropout", "deadline", "min_reports"):
            value = getattr(self, name)
            if not_with and value != Federated.__dataclass_fields__[name].default:
                raise UserError(f"federated {name}={value:g}: not with {not_with}; leave one of the two out")
        if self.dropout or self.deadline:
            algorithm.check_round(self.min_reports)

    def _check_personal(self, algorithm: FederatedAlgorithm) -> None:
        with _named_federated():
            tunes = tuning_epochs(self.personal) > 0
        if not 0 <= self.held_out < 1:
            raise UserError(f"federated held_out={self.held_out:g}: must be a number from 0 to below 1")
        if tunes and algorithm.trains_personal:
            raise UserError(
                f"federated personal={self.personal}: not with algorithm={self.algorithm}: each client has a model of "
                "its own already; leave one of the two out"
            )
        if (self.noise or self.epsilon) and (tunes or self.held_out):
            given = f"personal={self.personal}" if tunes else f"held_out={self.held_out:g}"
            raise UserError(
                f"federated {given}: with noise nothing is reported about single clients, so its result would not be "
                "shown; leave one of the two out"
            )

    def _check_secure(self, algorithm: FederatedAlgorithm) -> None:
        if not self.secure:
            for name, default in (("range", _RANGE), ("bits", _BITS)):
                if getattr(self, name) != default:
                    raise UserError(f"federated {name}={getattr(self, name):g}: needs secure=yes; add it")
            return
        if algorithm.single_updates:
            raise UserError(
                f"federated secure=yes: algorithm={self.algorithm} needs each client's update, which a secure sum "
                "hides; use another algorithm"
            )
        if why := algorithm.cannot_sum_securely:
            raise UserError(
                f"federated secure=yes: not with algorithm={self.algorithm}: {why}; leave one of the two out"
            )
        if self.codec != RAW:
            raise UserError(
                f"federated secure=yes codec={self.codec}: masked words look random and cannot be compressed; use "
                "fewer bits= instead"
            )
        if self.partition == NATURAL:
            self.fixed_point.check_capacity(3)  # how many there are, the data says
        else:
            self.check_round(self.clients)

    def _check_bounds(self, algorithm: FederatedAlgorithm) -> None:
        clips = self.privacy.rule is not None
        if self._clipping and not algorithm.sums_only:
            raise UserError(
                f"federated {self._clipping}: algorithm={self.algorithm} uses more of a client than its summed "
                "update, and clip bounds only that; use fedavg, fedsgd, fedprox, fedadam, fedyogi or fedadagrad"
            )
        if clips and self.partition != NATURAL:
            self.check_clients(self.clients)
        with _named_federated():
            check_norm_ratio(self.norm_ratio)
        if self.seen_norm_ratio == self.norm_ratio or self.norm_ratio == _NORM_RATIO:
            return
        why = f"{self._clipping}, which bounds every update's norm"
        if self.secure:
            why = "secure=yes: the server sees no norm, and range= and max_samples= bound what a client sends"
        raise UserError(f"federated norm_ratio={self.norm_ratio:g}: not with {why}; leave it out")

    @property
    def seen_norm_ratio(self) -> float:
        """`norm_ratio` where the server sees norms and bounds them no other way; else 0."""
        return 0.0 if self.secure or self._clipping else self.norm_ratio

    @property
    def _clipping(self) -> str:
        """The setting that has updates clipped, as it was given; empty: they are not."""
        given = f"epsilon={self.epsilon:g}" if self.epsilon else ""
        return given if self.clip == "no" else f"clip={self.clip}"

    @property
    def privacy(self) -> PrivacyTerms:
        with _named_federated():
            return PrivacyTerms(**{name: getattr(self, name) for name in PrivacyTerms.__dataclass_fields__})

    def for_run(self, task: Any, steps: int, seed: int) -> Federated:
        """Where epsilon alone was given, with the noise that keeps so many rounds within it."""
        if self.noise or not self.epsilon:
            return self
        need_accountant("epsilon")
        natural = self.partition == NATURAL and isinstance(task.data, Parties)
        clients = len(task.data.split()) if natural else self.clients
        with _named_federated():
            found = self.privacy.with_noise(clients, self.rounds_of_one(steps, clients, seed))
        return replace(self, noise=found.noise, clip=found.clip, delta=found.delta)

    def rounds_of_one(self, rounds: int, clients: int, seed: int) -> int:
        """In how many of so many rounds a client is, as privacy counts: of a secure sum, the one that is in most."""
        if not self.secure:
            return rounds
        per_round = self.per_round(clients)
        drawn = [selected(seed, number, clients, per_round) for number in range(rounds)]
        return int(np.bincount(np.concatenate(drawn)).max())

    def check_clients(self, clients: int) -> None:
        """UserError where what is promised is void for so many clients."""
        fixed = self.fixed_point if self.secure else None
        with _named_federated():
            self.privacy.check_clients(clients, self.per_round(clients), fixed)

    @property
    def fixed_point(self) -> FixedPoint:
        return FixedPoint(clip=self.range, bits=self.bits, max_weight=self.max_samples)

    def check_parties(self, clients: int) -> None:
        if self.clients not in (_CLIENTS, clients):
            raise UserError(
                f"federated clients={self.clients}: with partition={self.partition} each of the data's {clients} "
                "parties is a client; leave it out"
            )

    def check_round(self, clients: int) -> None:
        count = self.per_round(clients)
        algorithm_named(self.algorithm).check_round(count)
        if not self.secure:
            return
        if count < 3:
            raise UserError(
                f"federated secure=yes: a round has {count} of {clients} clients, and a sum of fewer than 3 protects "
                "none; use more clients or a larger fraction"
            )
        self.fixed_point.check_capacity(count)

    def check(self, workers: int, device: str, *, compiled: bool = False) -> None:
        super().check(workers, device, compiled=compiled)
        if self.secure and workers > 1:
            raise UserError(f"workers={workers}: with secure=yes one worker runs all clients; use workers=1")

    @property
    def gives_own_models(self) -> bool:
        keeps = self.personal != _NOTHING_PERSONAL or self.keep != EVERYTHING_SHARED
        return keeps or algorithm_named(self.algorithm).trains_personal

    def per_round(self, clients: int) -> int:
        return max(1, round(self.fraction * clients))

    def needs(self, model: ModelFootprint, workers: int) -> list[WorkerMemory]:
        [worker] = super().needs(model, workers)
        what = "a client's weights, and the sum of updates"
        besides = (1 + 2 * (_SUMS if self.seen_norm_ratio else 1)) * model.weights
        if self.privacy.rule is not None:
            besides += 4 * model.weights
            what += ", and an update that is clipped"
        algorithm = algorithm_named(self.algorithm)
        own = algorithm.models_kept + int(self.feedback and self.codec != RAW and has_feedback(self.codec))
        if own:
            besides += own * model.weights * -(-self.clients // workers)
            what += ", and what clients keep"
        if algorithm.keeps_versions:
            besides += self.per_round(self.clients) * model.weights
            what += ", and the models that clients began with"
        if algorithm.single_updates:  # as they are, and in double precision
            besides += 3 * self.per_round(self.clients) * model.weights
            what += ", and every update"
        if self.secure:
            asked = min(self.clients, math.ceil(self.per_round(self.clients) * self.over))
            besides += 2 * asked * model.weights  # of 8 bytes, where a weight has 4
            what += ", and each client's words"
        return [replace(worker, besides=besides, what=what)]

    @property
    def facts(self) -> Facts:
        """The workers of a simulation share the clients of every round, which is many steps of many clients."""
        numbered = "the samples of each client are looked up by number"
        words = "those of clients trained one after another in one process, but for rounding"
        promises = Promises(
            worker_dies=ENDS,
            server_dies=NO_SERVERS,
            workers_join=NOBODY_JOINS,
            same_numbers=Promise(answer=Answer.PARTLY, words=words),
        )
        return Facts(
            promises=promises,
            counts_rounds=True,
            # With noise, or a run that broke would have given away what the resumed one does not count.
            saves_each_step=self.noise > 0,
            splits_batches=False,
            cannot_stream=numbered,
            cannot_read_apart=numbered,
            cannot_act=numbered,
            cannot_compile="clients train copies of the model, which are not compiled",
            instead_of_own_loop="give mh.fit a Task: its clients have data of their own and train in rounds, so no "
            "loop over batches can mean it",
        )
