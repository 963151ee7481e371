"""How many machines train one model, as a value: frozen dataclasses with a text form that parses and prints back.

    allreduce algorithm=ring buckets=25MiB

The first word says who holds the truth, the rest are settings of that choice. Only settings that differ from their
default are printed, in the order of the fields, so equal strategies have equal texts. To add a strategy: one class
here, which states what it promises, and one line in `STRATEGIES`; to add a setting: one field.
"""

from __future__ import annotations

import dataclasses
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, unique
from typing import Any, ClassVar

from manyhands.allreduce.algorithms import ALGORITHMS
from manyhands.consistency.parse import parse_consistency
from manyhands.consistency.policy import Policy
from manyhands.consistency.sync import Sync
from manyhands.errors import UserError, nearest

__all__ = [
    "STRATEGIES",
    "AllReduce",
    "Answer",
    "Central",
    "Hogwild",
    "Mirrored",
    "Promise",
    "Promises",
    "Ps",
    "Single",
    "Strategy",
    "Tensor",
    "parse_size",
    "show_size",
]

MIB = 1024 * 1024
_UNITS = {"b": 1, "kib": 1024, "mib": MIB, "gib": 1024 * MIB, "kb": 10**3, "mb": 10**6, "gb": 10**9}


@unique
class Answer(Enum):
    """The short answer to whether a strategy promises something."""

    YES = "yes"
    """It does, nothing is lost."""
    PARTLY = "partly"
    """It does, and something is lost or must be given for it: the promise's words say what."""
    NO = "no"
    """It does not."""
    NONE = "–"
    """The question does not arise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """One answer, and the sentence behind it."""

    answer: Answer
    words: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Promises:
    """What users of a strategy may rely on."""

    worker_dies: Promise
    """Does the run go on when a worker is killed?"""
    server_dies: Promise
    """Does it when a server is?"""
    workers_join: Promise
    """May workers come and go while it runs?"""
    same_numbers: Promise
    """Are the weights at the end those of one process on the same batches?"""


_ENDS = Promise(
    answer=Answer.NO, words="the run ends with an error that names it; resume from the last checkpoint"
)
_NO_SERVERS = Promise(answer=Answer.NONE, words="it has no servers")
_NOBODY_JOINS = Promise(
    answer=Answer.NO, words="a run keeps its workers; resume from a checkpoint with another number"
)
_TO_ROUNDING = Promise(answer=Answer.YES, words="those of one process on the same batches, but for rounding")
_BY_CHANCE = Promise(answer=Answer.NO, words="they depend on who comes when; no two runs are alike")
_IN_STEP = Promises(
    worker_dies=_ENDS, server_dies=_NO_SERVERS, workers_join=_NOBODY_JOINS, same_numbers=_TO_ROUNDING
)


class Strategy(ABC):
    """One way for many workers to train one model; see `Strategy.parse` for the text form."""

    word: ClassVar[str]
    """The first word of the text form."""

    about: ClassVar[str]
    """One sentence for help texts and tables."""

    @property
    @abstractmethod
    def promises(self) -> Promises:
        """What its users may rely on, with these settings."""

    @property
    def stepwise(self) -> bool:
        """Whether every step of every worker waits for all the others."""
        return True

    @staticmethod
    def parse(text: str | Strategy) -> Strategy:
        """Read `word key=value ...`; a UserError names the word, lists what is allowed and suggests the nearest."""
        if isinstance(text, Strategy):
            return text
        if not isinstance(text, str) or not text.split():
            raise UserError(f"strategy={text!r} is empty; {nearest('', STRATEGIES)}")
        word, *settings = text.split()
        if word not in STRATEGIES:
            raise UserError(f"unknown strategy {word!r}; {nearest(word, STRATEGIES)}")
        kind = STRATEGIES[word]
        return kind(**_read_settings(word, _settings(kind), settings))

    def __str__(self) -> str:
        words = [self.word]
        for name, setting in _settings(type(self)).items():
            value = getattr(self, name)
            if value != setting.default:
                words.append(f"{name}={setting.show(value)}")
        return " ".join(words)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Setting:
    """How one field of a strategy is read from text and printed."""

    default: Any
    read: Callable[[str], Any]
    show: Callable[[Any], str]


def _setting(default: Any, read: Callable[[str], Any], show: Callable[[Any], str] = str) -> Any:
    return dataclasses.field(default=default, metadata={"read": read, "show": show})


def _settings(kind: type[Strategy]) -> dict[str, _Setting]:
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    return {
        field.name: _Setting(default=field.default, read=field.metadata["read"], show=field.metadata["show"])
        for field in fields
    }


def _read_settings(word: str, allowed: Mapping[str, _Setting], texts: list[str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in allowed:
            tail = nearest(name, allowed) if allowed else "it takes none"
            raise UserError(f"{word} has no setting {name!r}; {tail}")
        if not equals or not value:
            raise UserError(f"{word} setting {name!r} needs a value, as in {name}={_example(allowed[name])}")
        if name in values:
            raise UserError(f"{word} setting {name!r} is given twice")
        values[name] = allowed[name].read(value)
    return values


def _example(setting: _Setting) -> str:
    return setting.show(setting.default)


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


def _whole_number(text: str) -> int:
    if not text.isdigit():
        raise UserError(f"{text!r} is not a whole number")
    return int(text)


def _check_buckets(num_bytes: int) -> None:
    if not isinstance(num_bytes, int) or num_bytes < 1:
        raise UserError(f"buckets={num_bytes!r} must be at least one byte; 25MiB is usual")


@dataclass(frozen=True, kw_only=True)
class Single(Strategy):
    """The plain loop in one process: the reference for everything else."""

    word: ClassVar[str] = "single"
    about: ClassVar[str] = "the plain loop in one process; the reference"

    @property
    def promises(self) -> Promises:
        """It is what the others are held against."""
        same = Promise(answer=Answer.YES, words="it is the one process")
        return Promises(
            worker_dies=_ENDS, server_dies=_NO_SERVERS, workers_join=_NOBODY_JOINS, same_numbers=same
        )


@dataclass(frozen=True, kw_only=True)
class Mirrored(Strategy):
    """Every worker of one host holds the model; gradients are summed in shared memory, in worker order."""

    word: ClassVar[str] = "mirrored"
    about: ClassVar[str] = "all-reduce in the shared memory of one host"

    buckets: int = _setting(25 * MIB, parse_size, show_size)

    def __post_init__(self) -> None:
        _check_buckets(self.buckets)

    @property
    def promises(self) -> Promises:
        """All workers take every step together, so all are needed."""
        return _IN_STEP


@dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy):
    """Every worker holds the model; gradients are summed by the algorithm you name.

    `direct` runs in place in shared memory on one host; every other algorithm runs its schedule over links.
    `group` is the number of ranks that `hierarchical` takes as one host (0: as the cluster found them).
    """

    word: ClassVar[str] = "allreduce"
    about: ClassVar[str] = "every worker holds the model; gradients summed by a named algorithm"

    algorithm: str = _setting("direct", str)
    buckets: int = _setting(25 * MIB, parse_size, show_size)
    group: int = _setting(0, _whole_number)

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise UserError(
                f"unknown all-reduce algorithm {self.algorithm!r}; {nearest(self.algorithm, ALGORITHMS)}"
            )
        _check_buckets(self.buckets)
        if self.group and self.algorithm != "hierarchical":
            raise UserError(
                f"group={self.group} only means something to algorithm=hierarchical, not {self.algorithm}"
            )
        if self.group < 0:
            raise UserError(f"group={self.group} must not be negative; 0 means as the cluster found them")

    @property
    def promises(self) -> Promises:
        """All workers take every step together, so all are needed."""
        return _IN_STEP


@dataclass(frozen=True, kw_only=True)
class Central(Strategy):
    """One copy of the parameters per host; each worker reduces and updates its slice of them."""

    word: ClassVar[str] = "central"
    about: ClassVar[str] = "one copy of the parameters per host; each worker updates its slice"

    buckets: int = _setting(25 * MIB, parse_size, show_size)

    def __post_init__(self) -> None:
        _check_buckets(self.buckets)

    @property
    def promises(self) -> Promises:
        """All workers take every step together, so all are needed."""
        return _IN_STEP


@dataclass(frozen=True, kw_only=True)
class Ps(Strategy):
    """Parameter servers hold the truth, each a shard of it; workers pull, compute and push.

    `consistency` says when replicas must agree, `replicas=1` that every shard is kept by two servers, `link` how
    processes of one host talk: `shared` memory or `tcp` on loopback.
    """

    word: ClassVar[str] = "ps"
    about: ClassVar[str] = "parameter servers, each with a shard; sync, bounded, async or softsync"

    servers: int = _setting(1, _whole_number)
    consistency: Policy = _setting(Sync(), parse_consistency)  # noqa: RUF009 - a value without state
    replicas: int = _setting(0, _whole_number)
    link: str = _setting("shared", str)

    def __post_init__(self) -> None:
        if self.servers < 1:
            raise UserError(f"servers={self.servers} must be at least 1")
        if self.replicas not in (0, 1):
            raise UserError(f"replicas={self.replicas} must be 0, or 1: every shard on two servers")
        if self.link not in _PS_LINKS:
            raise UserError(f"unknown link {self.link!r}; {nearest(self.link, _PS_LINKS)}")

    @property
    def stepwise(self) -> bool:
        """As the consistency has it."""
        return self.consistency.stepwise

    @property
    def num_server_processes(self) -> int:
        """One per shard, and at least two where each shard is kept twice."""
        return max(self.servers, self.replicas + 1)

    @property
    def promises(self) -> Promises:
        """Nothing ends with a worker; what is left of a server depends on `replicas`."""
        return Promises(
            worker_dies=Promise(
                answer=Answer.YES,
                words="the others go on; a successor takes its place, and no update is applied twice",
            ),
            server_dies=Promise(
                answer=Answer.YES, words="its shards are kept by a second server, which takes over"
            )
            if self.replicas
            else Promise(
                answer=Answer.PARTLY,
                words="in a run with a directory a new server goes on from the last snapshot; later updates are lost",
            ),
            workers_join=Promise(answer=Answer.YES, words="they may come and go while it runs (mh.start)"),
            same_numbers=_TO_ROUNDING if self.consistency == Sync() else _BY_CHANCE,
        )


_PS_LINKS = ("shared", "tcp")


@dataclass(frozen=True, kw_only=True)
class Hogwild(Strategy):
    """One copy of the parameters in shared memory; every worker takes its own steps on it, without locks.

    `order` is `free` for that, or one of two ways to compare it with: `locked` (one step at a time, whoever comes
    first) and `turns` (round-robin: step k is worker k mod n's, in this order). `hands` says what the workers are:
    `processes`, or `threads` of one process where the whole step is compiled (glove, logreg); `auto` is threads there.
    """

    word: ClassVar[str] = "hogwild"
    about: ClassVar[str] = "one shared memory that every worker updates without locks; sparse models"

    order: str = _setting("free", str)
    hands: str = _setting("auto", str)

    @property
    def stepwise(self) -> bool:
        """Each worker takes its own steps."""
        return False

    def __post_init__(self) -> None:
        if self.order not in _HOGWILD_ORDERS:
            raise UserError(f"unknown order {self.order!r}; {nearest(self.order, _HOGWILD_ORDERS)}")
        if self.hands not in _HOGWILD_HANDS:
            raise UserError(f"unknown hands {self.hands!r}; {nearest(self.hands, _HOGWILD_HANDS)}")

    @property
    def promises(self) -> Promises:
        """A step may be half written when its worker dies, so nobody goes on from that memory."""
        same = {
            "turns": Promise(
                answer=Answer.YES,
                words="those of one process; of tables, as far as lazy rows are dense ones",
            ),
            "locked": Promise(
                answer=Answer.NO, words="those of one process on the same batches in some other order"
            ),
            "free": _BY_CHANCE,
        }
        return Promises(
            worker_dies=_ENDS,
            server_dies=_NO_SERVERS,
            workers_join=_NOBODY_JOINS,
            same_numbers=same[self.order],
        )


_HOGWILD_ORDERS = ("free", "locked", "turns")
_HOGWILD_HANDS = ("auto", "threads", "processes")


@dataclass(frozen=True, kw_only=True)
class Tensor(Strategy):
    """Every worker holds some of the dimensions of every vector, sees all samples, and only scalars travel."""

    word: ClassVar[str] = "tensor"
    about: ClassVar[str] = "the dimensions of every vector split over the workers; glove only, today"

    @property
    def promises(self) -> Promises:
        """All workers take every step together, so all are needed; glove keeps no checkpoints to resume from."""
        return dataclasses.replace(
            _IN_STEP,
            worker_dies=Promise(answer=Answer.NO, words="the run ends with an error that names it"),
            workers_join=Promise(answer=Answer.NO, words="a run keeps its workers"),
        )


STRATEGIES: dict[str, type[Strategy]] = {
    kind.word: kind for kind in (Single, Mirrored, AllReduce, Central, Ps, Hogwild, Tensor)
}
