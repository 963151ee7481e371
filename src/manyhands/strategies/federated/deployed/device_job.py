"""A federated run with real devices as a value, and the plan that the server sends to the devices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from manyhands.data.batches import BatchSource
from manyhands.data.randomness import preserved, seed_all
from manyhands.data.store.tensorfile import read_tensors
from manyhands.errors import DataError, UserError
from manyhands.native.dtypes import NAMED
from manyhands.strategies.federated.algorithms import algorithm_named
from manyhands.strategies.federated.deployed.protocol import MOST_HOLD_S, TensorForm
from manyhands.strategies.federated.private_rounds import (
    PrivacyTerms,
    PrivateRounds,
    need_accountant,
    spoiled_buffer,
)
from manyhands.strategies.federated.round_core import RoundTerms
from manyhands.strategies.federated.strategy import Federated
from manyhands.strategy import Strategy
from manyhands.task import Task
from manyhands.wire.names import RAW
from manyhands.workloads.registry import WORKLOADS, load


def initial_model(task: Task, seed: int) -> nn.Module:
    """The weights that a run of this seed begins with, as in simulation."""
    with preserved():
        seed_all(seed)
        return task.model()


@dataclass(frozen=True, slots=True)
class DataColumn:
    """One tensor of a sample."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> DataColumn:
        name, equals, kind = text.partition("=")
        dtype, colon, sizes = kind.partition(":")
        shape = sizes.split("x") if colon else []
        if not (
            name and equals and dtype in NAMED and all(size.isdigit() and int(size) > 0 for size in shape)
        ):
            raise UserError(
                f"--data-schema: {text!r} is not a column; write NAME=TYPE or NAME=TYPE:AxB, as in images=uint8:1x8x8, "
                "with a torch type"
            )
        return cls(name, dtype, tuple(map(int, shape)))

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{self.name}={self.dtype}" + (f":{sizes}" if sizes else "")


@dataclass(frozen=True, slots=True)
class DataSchema:
    """The columns of a sample, in the order in which the task's loss takes them."""

    columns: tuple[DataColumn, ...]

    def __str__(self) -> str:
        return ",".join(map(str, self.columns))

    @classmethod
    def parse(cls, text: str) -> DataSchema:
        columns = tuple(DataColumn.parse(part.strip()) for part in text.split(","))
        if len({column.name for column in columns}) < len(columns):
            raise UserError(f"--data-schema {text}: two columns have the same name")
        return cls(columns)

    @classmethod
    def of(cls, task: Task) -> DataSchema:
        batch = BatchSource(task.data, task.collate).fetch([0])
        if not isinstance(batch, Mapping):
            parts = batch if isinstance(batch, tuple | list) else (torch.as_tensor(batch),)
            batch = dict(enumerate(parts))
        columns = []
        for name, one in batch.items():
            if not isinstance(one, Tensor) or one.ndim == 0:
                raise UserError(
                    f"task {task.name!r}: column {name!r} of its batches is not a tensor with a row for each sample, "
                    "and devices hold tensors; give the task another collate"
                )
            dtype = str(one.dtype).removeprefix("torch.")
            columns.append(DataColumn(str(name), dtype, tuple(one.shape[1:])))
        return cls(tuple(columns))

    def require_like(self, other: DataSchema, whose: str) -> None:
        if len(self.columns) != len(other.columns):
            raise UserError(f"{whose} has {len(other.columns)} columns; expected: {self}")
        for mine, theirs in zip(self.columns, other.columns, strict=True):
            if (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape):
                raise UserError(f"{whose}: a column is {theirs}; expected: {mine}")


def read_columns(path: Path, schema: DataSchema, task: Task) -> Task:
    try:
        found = read_tensors(path)
    except ValueError as error:
        raise DataError(f"--data {path} {error}") from error
    for column in schema.columns:
        if column.name not in found:
            raise DataError(f"--data {path}: has no tensor {column.name!r}; expected: {schema}")
    columns = {column.name: found[column.name] for column in schema.columns}
    lengths = {len(one) if one.ndim else 0 for one in columns.values()}
    if len(lengths) > 1 or lengths == {0}:
        why = f"--data {path}: its tensors have {sorted(lengths)} rows; all must have the same number, at least 1"
        raise DataError(why)
    for column, tensor in zip(schema.columns, columns.values(), strict=True):
        mine = DataColumn(column.name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape[1:]))
        if mine != column:
            raise DataError(f"--data {path}: has {mine}; expected: {column}")
    data: Any = columns if isinstance(task.data, Mapping) else tuple(columns.values())
    return replace(task, data=data if len(columns) > 1 or isinstance(data, dict) else data[0])


_OF_SIMULATION: Final = (
    *("partition", "together", "keep", "personal", "held_out"),
    *("sampling", "randomness", "dropout"),
)
_MORE_THAN_UPDATES: Final = {"fednova": "numbers of steps", "scaffold": "control variates"}
_FEWEST_SECURE: Final = 3


def _known(strategy: Federated) -> PrivacyTerms:
    """The terms where it is known who is in a round: no draw makes one cheaper, and the fraction does not count."""
    return replace(strategy.privacy, fraction=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundSettings:
    """Settings of the rounds, as given on the command line."""

    rounds: int
    over: float = 1.3
    min_reports: int | None = None
    deadline_s: float = 600.0
    select_s: float = 30.0
    present_s: float = 60.0
    patience_s: float = math.inf
    stage_s: float = 30.0  # with secure=yes, how long each message after the first is waited for
    hold_s: float = 20.0  # how long a question for work is held back while there is none


@dataclass(frozen=True, kw_only=True, slots=True)
class FederatedJob:
    """One federated run with devices; UserError where it cannot be done."""

    task: Task
    strategy: Federated
    seed: int
    settings: RoundSettings
    schema: DataSchema

    @classmethod
    def make(
        cls, task: Task, strategy: str, settings: RoundSettings, *, seed: int = 0, schema: str | None = None
    ) -> FederatedJob:
        parsed = Strategy.parse(strategy)
        if not isinstance(parsed, Federated):
            raise UserError(f"--strategy {strategy!r}: only federated serves devices; write 'federated …'")
        own = DataSchema.of(task)
        wanted = DataSchema.parse(schema) if schema is not None else own
        wanted.require_like(own, "the task's own data")
        if parsed.epsilon and not parsed.noise:  # a device may be in every round
            need_accountant("epsilon")
            found = _known(parsed).with_noise(parsed.clients, settings.rounds)
            parsed = replace(parsed, noise=found.noise, clip=found.clip, delta=found.delta)
        return cls(task=task, strategy=parsed, seed=seed, settings=settings, schema=wanted)

    def __post_init__(self) -> None:
        word = self.strategy.algorithm.partition(":")[0]
        if word == "fedbuff":
            why = "not with devices, only in simulation: it goes by simulated time"
            raise UserError(f"algorithm={self.strategy.algorithm}: {why}")
        if word in _MORE_THAN_UPDATES and (self.strategy.secure or self.strategy.codec != RAW):
            raise UserError(
                f"algorithm={word}: devices send their {_MORE_THAN_UPDATES[word]} as they are; leave out secure= and "
                "codec="
            )
        if self.task.options is not None and not getattr(WORKLOADS.get(self.task.name), "task", ""):
            raise UserError(
                f"task {self.task.name!r}: devices build the task themselves and receive no code; serve a built-in "
                "task, or your own: manyhands federated serve own MODULE:NAME"
            )
        # What is a simulation's as yet would be left out without a word.
        usual = Federated()
        for name in ("over", "min_reports", "deadline"):
            if (value := getattr(self.strategy, name)) != getattr(usual, name):
                why = f"is for simulated clients; for devices, give --{name.replace('_', '-')}"
                raise UserError(f"federated {name}={value:g}: {why}")
        for name in _OF_SIMULATION:
            if (value := getattr(self.strategy, name)) != getattr(usual, name):
                why = "is for simulation only; leave it out"
                raise UserError(f"federated {name}={value}: {why}")
        for name in ("stage_s", "hold_s"):
            if not 0 < getattr(self.settings, name) < math.inf:
                raise UserError(f"{name}={getattr(self.settings, name):g}: must be a number above 0")
        if self.settings.hold_s >= MOST_HOLD_S:
            raise UserError(f"hold_s={self.settings.hold_s:g}: must be below {MOST_HOLD_S:g}")
        terms = self.terms  # which checks itself
        algorithm_named(self.strategy.algorithm).check_round(terms.minimum)
        if self.strategy.secure:
            self.strategy.fixed_point.check_capacity(terms.asks)
        self._check_privacy()

    def _check_privacy(self) -> None:
        if self.strategy.noise:
            need_accountant()
        private = self.private_rounds()
        if private is None:
            return
        rule, spending = self.strategy.privacy.rule, private.spending
        if self.strategy.secure and rule is not None and rule.quantile is not None:
            raise UserError(
                f"clip={self.strategy.clip}: with secure=yes devices clip to a norm that they know beforehand; "
                "give clip=1.0"
            )
        if spending is None:
            return
        if spending.most_rounds is not None and spending.most_rounds < self.settings.rounds:
            raise UserError(
                f"epsilon={self.strategy.epsilon:g}: with noise={self.strategy.noise:g} it is spent after "
                f"{spending.most_rounds} rounds of a device, and --rounds {self.settings.rounds} may ask it in all; "
                "leave out noise=, and it is computed"
            )
        model = initial_model(self.task, self.seed)
        if buffers := [name for name, one in model.named_buffers() if one.is_floating_point()]:
            raise UserError(spoiled_buffer(self.strategy.noise, buffers[0]))

    def private_rounds(self) -> PrivateRounds | None:
        """What the server of a private run keeps: it knows whom it asks, so each device pays for its own rounds."""
        strategy = self.strategy
        if strategy.privacy.rule is None:
            return None
        fixed = strategy.fixed_point if strategy.secure else None
        per_round = self.terms.asks if strategy.secure else strategy.per_round(strategy.clients)
        about = _known(strategy), strategy.clients, per_round, fixed, self.seed
        # A round begins with as few devices as are there, and each adds more noise.
        return PrivateRounds(*about, known=True, fewest=self.terms.minimum if strategy.secure else None)

    @property
    def terms(self) -> RoundTerms:
        settings, goal = self.settings, self.strategy.per_round(self.strategy.clients)
        least = settings.min_reports
        if least is None:
            half = max(_FEWEST_SECURE if self.strategy.secure else 1, math.ceil(goal / 2))
            least = next((count for count in range(half, goal) if self._suffices(count)), max(half, goal))
        elif self.strategy.secure and least < _FEWEST_SECURE:
            raise UserError(f"--min-reports {least}: a sum of under {_FEWEST_SECURE} clients protects none")
        stages = 4 * settings.stage_s if self.strategy.secure else 0.0
        return RoundTerms(
            rounds=settings.rounds,
            clients=self.strategy.clients,
            goal=goal,
            minimum=least,
            over=settings.over,
            deadline_s=settings.deadline_s + stages + (1.0 if stages else 0.0),
            select_s=settings.select_s,
            present_s=max(settings.present_s, 2 * settings.hold_s),
            patience_s=settings.patience_s,
            norm_ratio=self.strategy.seen_norm_ratio,
            seed=self.seed,
        )

    def _suffices(self, reports: int) -> bool:
        try:
            algorithm_named(self.strategy.algorithm).check_round(reports)
        except UserError:
            return False
        return True

    def plan(self, run: str, form: TensorForm) -> dict[str, Any]:
        """The plan that a device downloads once; it does not reveal where the server's files are.

        It has no code: a device builds the task itself, from its options where it is built in (`task_options`), and
        from the device's own module where they are null.
        """
        options = self.task.options
        if options is not None:
            paths = [one.name for one in load(WORKLOADS[self.task.name].task).options if one.kind is Path]
            options = {name: value for name, value in options.items() if name not in paths}
        return {
            "run": run,
            "task": self.task.name,
            "task_options": options,
            "strategy": str(self.strategy),
            "seed": self.seed,
            "schema": str(self.schema),
            "model": form.as_json,
            "hold_s": self.settings.hold_s,
        }

    def config(self, parameters: Mapping[str, str], run: str) -> dict[str, Any]:
        return {
            "task": self.task.name,
            "task_options": self.task.options,
            "strategy": str(self.strategy),
            "workers": self.strategy.clients,
            "steps": self.settings.rounds,
            "seed": self.seed,
            "device": "cpu",
            "batch_size": self.task.batch_size,
            "samples": 0,  # that the server knows of
            "parameters": dict(parameters),
            "schema": str(self.schema),
            "run": run,
        }
