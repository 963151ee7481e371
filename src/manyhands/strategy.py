"""How many machines train one model, as a value: frozen dataclasses with a text form that parses and prints back.

    allreduce algorithm=ring buckets=1MiB

The first word says who holds the truth, the rest are settings of that choice. Only settings that differ from their
default are printed, in the order of the fields, so equal strategies have equal texts. A value carries every fact that
others ask about it: nobody outside a strategy's own package asks which one it is. To add a strategy: a folder with its
value and its training, and one line in `strategies/registry.py`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from manyhands.errors import UserError, check_count, nearest
from manyhands.facts import (
    NOTHING_TRAVELS,
    ONE_DEVICE,
    Facts,
    Machines,
    ModelFootprint,
    PredictedStep,
    Split,
    TaskProfile,
    Truth,
)
from manyhands.strategies.registry import ALIASES, CHOOSERS, STRATEGIES, entry_of

__all__ = [
    "MIB",
    "Searched",
    "Setting",
    "Strategy",
    "WorkerMemory",
    "WorkerTraffic",
    "buckets_setting",
    "check_buckets",
    "check_choice",
    "check_count",
    "check_link",
    "enough",
    "integer",
    "link_setting",
    "parse_size",
    "read_settings",
    "setting",
    "settings_of",
    "shared_copy",
    "show_size",
    "silent",
    "switch_setting",
]

MIB = 1024 * 1024
LINKS = ("shared", "tcp")
_SWITCH = {"yes": True, "no": False, "true": True, "false": False}
_UNITS = {"b": 1, "kib": 1024, "mib": MIB, "gib": 1024 * MIB, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """What each of `count` processes holds at its peak, or what is there once where they share it."""

    who: str
    count: int = 1
    weights: int = 0
    gradients: int = 0
    state: int = 0  # what the optimizer keeps
    activations: int = 0
    besides: int = 0  # anything else that grows with the model
    what: str = ""  # what that is

    @property
    def total(self) -> int:
        """Of one of them."""
        return self.weights + self.gradients + self.state + self.activations + self.besides


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTraffic:
    """What each of `count` processes sends in one step of a long run, on average."""

    who: str
    count: int = 1
    num_bytes: float = 0.0
    messages: float = 0.0

    @classmethod
    def of_all(cls, who: str, count: int, num_bytes: float, messages: float) -> WorkerTraffic:
        """Of `count` processes that send so much together."""
        return cls(who=who, count=count, num_bytes=num_bytes / count, messages=messages / count)


def silent(workers: int) -> list[WorkerTraffic]:
    """Of workers that send nothing."""
    return [WorkerTraffic(who="worker", count=workers)]


def shared_copy(
    model: ModelFootprint, workers: int, parts: int, *, keeps_gradients: bool, share: float = 1.0
) -> list[WorkerMemory]:
    """Of workers that share parameters and optimizer state, and have gradients of their own."""
    return [
        WorkerMemory(
            who="worker",
            count=workers,
            weights=model.buffers,
            gradients=model.gradients,
            activations=model.working(parts, keeps_gradients=keeps_gradients, share=share),
        ),
        WorkerMemory(who="shared by all", weights=model.parameters, state=model.state),
    ]


@dataclass(frozen=True, slots=True)
class Setting:
    """How one field of a strategy is read from text and printed."""

    default: Any
    read: Callable[[str], Any]
    show: Callable[[Any], str]


def setting(default: Any, read: Callable[[str], Any], show: Callable[[Any], str] = str) -> Any:
    """A field of a strategy with its text form; `read` raises UserError for a text that makes no sense."""
    return dataclasses.field(default=default, metadata={"setting": Setting(default, read, show)})


def settings_of(kind: type[Any]) -> dict[str, Setting]:
    """The settings that a strategy's class offers, in the order of its fields."""
    offered = [one for one in dataclasses.fields(kind) if kind.offers is None or one.name in kind.offers]
    return {one.name: one.metadata["setting"] for one in offered}


def read_settings(
    word: str, allowed: Mapping[str, Setting], texts: list[str], refused: Mapping[str, str]
) -> dict[str, Any]:
    """The values that `texts` give to the settings of the strategy `word`; UserError names the one that is wrong.

    `refused` has a sentence for each setting that other strategies have, and this one, if it has not, for a reason.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in allowed and name in refused:
            raise UserError(f"{word} {text}: {refused[name]}")
        if name not in allowed:
            tail = nearest(name, allowed) if allowed else "it has no settings"
            raise UserError(f"{word} has no setting {name!r}; {tail}")
        if not equals or not value:
            example = allowed[name].show(allowed[name].default)
            raise UserError(f"{word} setting {name!r} needs a value, as in {name}={example}")
        if name in values:
            raise UserError(f"{word} setting {name!r} is given twice")
        try:
            values[name] = allowed[name].read(value)
        except UserError as error:
            raise UserError(f"{word} {text}: {error}") from error
    return values


def check_choice(name: str, value: str, allowed: Collection[str]) -> None:
    """Raise the UserError that lists what `name` may be, unless `value` is among it."""
    if value not in allowed:
        raise UserError(f"unknown {name} {value!r}; {nearest(value, allowed)}")


def integer(text: str) -> int:
    """Read an integer; the strategy that it is for says which ones it takes."""
    if re.fullmatch(r"[+-]?[0-9]+", text) is None:
        raise UserError(f"{text!r} is not an integer")
    return int(text)


def switch_setting(default: bool = False) -> Any:
    """`name=yes` or `name=no`; true and false are read as well."""

    def read(text: str) -> bool:
        check_choice("value", text, tuple(_SWITCH))
        return _SWITCH[text]

    return setting(default, read, lambda value: "yes" if value else "no")


def parse_size(text: str) -> int:
    """`25MiB` as a number of bytes; KiB, MiB, GiB, kB, MB, GB and plain bytes are allowed."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    unit = (match.group(2) or "b") if match else ""
    if match is None or unit not in _UNITS:
        raise UserError(f"size {text!r} is not a number of bytes; write it as 25MiB, 512KiB or 1000000")
    return int(float(match.group(1)) * _UNITS[unit])


def show_size(num_bytes: int) -> str:
    """The shortest exact text of a size, which `parse_size` reads back."""
    for unit, size in (("GiB", 1024 * MIB), ("MiB", MIB), ("KiB", 1024)):
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)


def enough(num_bytes: float) -> str:
    """A size of at least `num_bytes` in few digits, as a user would write it for a limit."""
    unit = 1024 if num_bytes <= MIB else MIB if num_bytes <= 16 * 1024 * MIB else 1024 * MIB
    return show_size(math.ceil(num_bytes / unit) * unit)


def buckets_setting() -> Any:
    """`buckets=4MiB`: how much of the gradient travels at once; nothing hides the exchange of the last."""
    return setting(4 * MIB, parse_size, show_size)


def link_setting() -> Any:
    """`link=shared`: whether processes of one host talk through memory that they share, or by `tcp` on loopback."""
    return setting("shared", str)


def check_link(link: str, more: Sequence[str] = ()) -> None:
    """Raise the UserError that lists what `link` may be, `more` than usual, unless it is among it."""
    check_choice("link", link, (*LINKS, *more))


def check_buckets(num_bytes: int) -> None:
    """Raise UserError for buckets that hold nothing."""
    if not isinstance(num_bytes, int) or num_bytes < 1:
        raise UserError(f"buckets={num_bytes!r} must be at least 1 byte; 4MiB is usual")


Searched = Mapping[str, Callable[[Machines], Sequence[Any]]]
"""Settings that may be `auto`: of each the values that are tried on some machines."""


class Strategy(ABC):
    """One way for many workers to train one model; see `Strategy.parse` for the text form."""

    word: ClassVar[str]
    """The first word of the text form."""
    about: ClassVar[str]
    """One sentence for help texts and tables."""
    split: ClassVar[Split] = Split.DATA
    """How the work is split."""
    truth: ClassVar[Truth]
    """Who holds the truth."""
    refuses: ClassVar[Mapping[str, str]] = {
        "codec": NOTHING_TRAVELS,
        "device_memory": ONE_DEVICE,
    }
    """Settings of other strategies that make no sense in one that has them not, and why; a sentence each."""
    offers: ClassVar[tuple[str, ...] | None] = None
    """The settings that a preset of another strategy leaves open; None: all of its fields."""
    searched: ClassVar[Searched] = {}
    most_workers: ClassVar[int | None] = None
    """How many workers it can have; None: any number."""

    @property
    @abstractmethod
    def facts(self) -> Facts:
        """What the rest of the library asks about it, with these settings."""

    def forks_workers(self, *, compiled: bool) -> bool:
        """Whether the workers of a task, whose step is compiled or is not, are processes of their own."""
        return self.most_workers != 1 and not (compiled and self.facts.in_threads)

    @property
    def trains_compiled(self) -> bool:
        """Whether it trains tasks whose step is compiled; else it moves gradients."""
        return bool(entry_of(self.word).kernel)

    @property
    def uses_network(self) -> bool:
        """Whether workers of one host talk by TCP, where its setting `link` says so; every other way is memory."""
        return getattr(self, "link", "") == "tcp"

    def planned_waits(self) -> str:
        """A sentence about waiting that is the strategy's own, and no worker's fault; empty where there is none."""
        return ""

    def across_hosts(self, hosts: Sequence[Sequence[int]]) -> Strategy:
        """What it is when its workers are on these hosts, given the ranks of each; UserError says why it cannot be."""
        if self.facts.cannot_cross_hosts:
            ranks = ", ".join(str(list(host)) for host in hosts)
            raise UserError(
                f"strategy={self} supports one host, but there are {len(hosts)} (with ranks {ranks}): "
                f"{self.facts.cannot_cross_hosts}; use allreduce"
            )
        return self

    def placed(self, world: int, roles: Mapping[str, int]) -> tuple[Strategy, int]:
        """What it is on `world` external processes, with the `roles` of a specification, and how many are workers."""
        if roles.get("ps"):
            raise UserError(
                f"strategy={self} has no parameter servers, but the cluster lists {roles['ps']} of type ps; remove "
                "them on every role, or use ps"
            )
        return self, world

    def for_run(self, task: Any, steps: int, seed: int) -> Strategy:
        """What it is in a run of so many steps of `task`, where a setting follows from that: usually itself."""
        del task, steps, seed
        return self

    def stages_of(self, costs: Sequence[float], workers: int) -> tuple[int, ...] | None:
        """The stage of each layer of a chain with these costs; None where models are not cut in layers."""
        del costs, workers
        return None

    def shares(self, workers: int) -> int:
        """Into how many shares so many workers split a global batch; those who have parts of one model share one."""
        return workers if self.facts.splits_batches else 1

    def processes(self, workers: int) -> dict[str, int]:
        """How many processes of which kind it starts for so many workers."""
        return {"worker": workers}

    def role_of(self, rank: int, workers: int) -> tuple[str, int]:
        """What the process of this rank is, where ranks begin with the workers, and its number among its kind."""
        del workers
        return "worker", rank

    def needs(self, model: ModelFootprint, workers: int) -> list[WorkerMemory]:
        """What each kind of its processes holds of a model at its peak: here a copy of everything for each worker."""
        parts = self.shares(workers)
        return [
            WorkerMemory(
                who="worker",
                count=workers,
                weights=model.weights,
                gradients=model.gradients,
                state=model.state,
                activations=model.working(parts, keeps_gradients=self.facts.keeps_gradients),
            )
        ]

    def predict(self, profile: TaskProfile, machines: Machines) -> PredictedStep | None:
        """Where the time of a step goes on these machines, with a worker on each place; None: not modelled."""
        del profile, machines
        return None

    @classmethod
    def choices(
        cls, machines: Machines, *, survives: bool = False, lossy: bool = False
    ) -> Sequence[Strategy]:
        """The settings that a plan considers on these machines.

        With `survives`, those that can lose processes too; with `lossy`, those whose numbers may be others.
        """
        del machines, survives, lossy
        return [cls()]

    def sends(self, model: ModelFootprint, workers: int) -> list[WorkerTraffic] | None:
        """What each kind of its processes sends in a step of a full batch, on one host; None: not modelled.

        Bytes are those that a run counts as `sent`: the contents of messages, or what others read in shared memory.
        """
        find, traced = entry_of(self.word).load_traffic(), model.traced
        if find is None or traced is None:
            return None
        return cast("list[WorkerTraffic] | None", find(self, traced, workers))

    def check(self, workers: int, device: str, *, compiled: bool = False) -> None:
        """Raise the UserError that says why `fit` cannot train so, with a step that is `compiled` or is not."""
        if compiled and device != "cpu":
            raise UserError(f"device={device}: compiled steps support only the CPU; use device=cpu")
        if self.most_workers is not None and workers > self.most_workers:
            raise UserError(f"workers={workers}: {self.word} runs one process; use strategy=allreduce")

    def advice(self, workers: int, *, sparse: bool) -> str:
        """What users should know before it trains a model, of which `sparse` says whether it has tables of rows."""
        del workers, sparse
        return ""

    @staticmethod
    def parse(text: str | Strategy) -> Strategy:
        """Read `word key=value ...`; a UserError names the word, lists what is allowed and suggests the nearest."""
        if isinstance(text, Strategy):
            return text
        if not isinstance(text, str) or not text.split():
            raise UserError(f"strategy={text!r} is empty; {nearest('', [*STRATEGIES, *CHOOSERS])}")
        word, *settings = text.split()
        if word not in STRATEGIES and word not in CHOOSERS:
            ours = ALIASES.get(word.lower().replace("-", "_"))
            hint = f"the nearest strategy is {ours!r}; " if ours is not None else ""
            raise UserError(f"unknown strategy {word!r}; {hint}{nearest(word, [*STRATEGIES, *CHOOSERS])}")
        kind = entry_of(word).load_value()
        searched = kind.searched.keys() & settings_of(kind).keys()
        if any(one.partition("=")[0] in searched and one.endswith("=auto") for one in settings):
            return cast(Strategy, entry_of("auto").load_value().of(word, settings))
        return cast(Strategy, kind(**read_settings(word, settings_of(kind), settings, kind.refuses)))

    def __str__(self) -> str:
        values = ((name, one, getattr(self, name)) for name, one in settings_of(type(self)).items())
        shown = (f"{name}={one.show(value)}" for name, one, value in values if value != one.default)
        return " ".join((self.word, *shown))
