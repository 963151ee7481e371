"""A run as it is shown: everything that a page, a report or a scrape of metrics says of it, as plain values.

`gather` makes these from events, rows of the history and what happened to members; whoever draws them decides
nothing. Lists are bounded, whatever the length of the run. Seconds count from the run's first event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, unique

__all__ = [
    "Curve",
    "Happening",
    "PartiesView",
    "PartyView",
    "Phase",
    "Presence",
    "RunView",
    "ServerView",
    "Shares",
    "Staleness",
    "TrafficView",
    "WorkerView",
]


@unique
class Phase(Enum):
    """Where a run is."""

    STARTING = "starting"
    """No step has ended yet."""
    RUNNING = "running"
    """Steps end."""
    QUIET = "quiet"
    """Nothing has happened for a while; nobody said that it is over."""
    ENDED = "ended"
    """It has come to its end, and its summary is there."""


@unique
class Presence(Enum):
    """Whether a worker or a server takes part."""

    STARTING = "starting"
    """It was asked for or its process was started, and it has not joined yet."""
    PRESENT = "present"
    """It takes part."""
    GONE = "gone"
    """It took part, and died, fell silent or left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One number over the run: the loss, a metric, samples per second; thinned evenly where there are many points."""

    name: str
    steps: tuple[float, ...]
    seconds: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Where a worker's time goes; shares of what it accounted for, which add up to 1, or all 0 before that."""

    compute: float = 0.0
    input: float = 0.0
    exchange: float = 0.0
    wait: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker, by its role; what is recent is of the last five seconds, or where the run has ended of all of it."""

    role: int
    name: str
    presence: Presence
    steps: int
    samples: int
    steps_per_s: float
    compute_ms: float
    """Of a recent step."""
    shares: Shares
    recent: Shares
    waits_for: str
    """The one that it mostly waits for, recently; empty where it does not wait."""
    bytes_sent: int
    messages_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """One server process; what is recent is as in a `WorkerView`."""

    role: int
    name: str
    presence: Presence
    primary_of: tuple[int, ...]
    backup_of: tuple[int, ...]
    num_bytes: int
    """Of the parameters whose primary it is; 0 where that is not known."""
    updates: int
    updates_per_s: float
    apply_ms: float
    """Of a recent update."""
    share: float
    """Of all servers' recent applying: 1 / servers where the load is even."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """How many steps of others an update had missed when it was applied."""

    histogram: Mapping[int, int] = field(default_factory=dict)
    mean: float = 0.0
    max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficView:
    """What went through one kind of link in one codec, from all roles together."""

    wire: str
    codec: str
    num_bytes: int
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """Something that happened to a member: it came, left, died, fell silent, recovered."""

    at_s: float
    what: str
    """started, joined, left, died, silent, fenced, recovered, fault, note."""
    who: str
    sentence: str
    epoch: int
    """Of the membership, from then on; 0 where a run has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartyView:
    """One party of a federated run."""

    number: int
    name: str
    samples: int
    rounds: int
    """That it took part in."""
    labels: tuple[int, ...]
    """How many samples of each label it has; none where samples have no labels."""
    measures: Mapping[str, float]
    """Means over samples of its own, at the end, with the model that it uses itself."""
    common: Mapping[str, float] = field(default_factory=dict)
    """The same with the common model, where that is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartiesView:
    """The parties of a federated run: who took part so far, and at the end how unlike they are."""

    count: int
    """How many there are; 0 before that is known."""
    rounds: Mapping[int, int]
    """How many rounds each took part in, by number; those who never did are left out."""
    labels: tuple[str, ...] = ()
    parties: tuple[PartyView, ...] = ()
    """All, or some in even distances."""
    spread: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Of each measure, over the parties: mean, lowest and highest tenth, standard deviation."""
    spread_common: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The same with the common model, where parties use others."""
    held_out: float = 0.0
    """Which part of its samples a party was measured by and has not trained on; 0: by what it trained on."""
    courses: Mapping[str, tuple[Curve, ...]] = field(default_factory=dict)
    """Of each measure, at the evaluations: the mean over parties, and the means of the lowest and highest tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment."""

    task: str
    strategy: str
    about: tuple[tuple[str, str], ...] = ()
    """How the run was begun, by name: command, host, date, settings."""
    phase: Phase
    step: int
    """Global batches done."""
    steps_asked: int
    seconds: float
    loss: float | None
    samples_per_s: float
    steps_per_s: float
    seconds_left: float | None
    final: Mapping[str, float]
    """The metrics of the newest evaluation."""
    best: tuple[str, float, int] | None = None
    """Of the run's first metric that is no loss, or its evaluation loss: name, best value so far, and after which
    step."""
    curves: tuple[Curve, ...]
    """`loss` first, then `samples_per_s`, then one for each metric."""
    workers: tuple[WorkerView, ...]
    servers: tuple[ServerView, ...]
    waits: tuple[tuple[float, ...], ...]
    """Seconds that worker i (row) waited for worker j (column)."""
    staleness: Staleness
    traffic: tuple[TrafficView, ...]
    epoch: int
    """Of the membership; 0 where a run has none."""
    happenings: tuple[Happening, ...]
    """The newest last."""
    warnings: tuple[str, ...]
    """What is wrong now, each in a plain sentence; none where all is well."""
    notes: tuple[str, ...]
    """What is missing from this view."""
    parties: PartiesView | None = None
    """Where a run has any."""
    notices: tuple[str, ...] = ()
    """What a run that has ended says besides its figures: what it promised, and why it ended."""
    evaluating: bool = False
    """Whether an evaluation goes on, during which nobody trains."""
