"""The view of a run: everything that a page, a report or a metrics scrape shows, as plain values.

`run_view` builds it from events, history rows and membership rows; renderers only draw it. Lists are bounded,
whatever the length of the run. Seconds count from the run's first event.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, unique


@unique
class Phase(Enum):
    """The phase of a run."""

    STARTING = "starting"  # no step has ended yet
    RUNNING = "running"  # training steps are completing
    QUIET = "quiet"  # nothing has happened for a while, and the run was not reported as ended
    ENDED = "ended"  # the run has ended and its summary exists


@unique
class Presence(Enum):
    """Whether a worker or a server takes part."""

    STARTING = "starting"  # it was requested or its process was started, and it has not joined yet
    PRESENT = "present"  # it takes part
    GONE = "gone"  # it took part, and died, went silent or left


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One number over the run: the loss, a metric, samples per second; evenly thinned where there are many points."""

    name: str
    steps: tuple[float, ...]
    seconds: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Where a worker's time goes: shares of the time it accounted for; they sum to 1, or are all 0 before that."""

    compute: float = 0.0
    input: float = 0.0
    exchange: float = 0.0
    wait: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """One worker by role; recent figures cover the last five seconds, or the whole run once it has ended."""

    role: int
    name: str
    presence: Presence
    steps: int
    samples: int
    steps_per_s: float
    compute_ms: float  # of a recent step
    shares: Shares
    recent: Shares
    waits_for: str  # the peer that it mostly waits for, recently; empty where it does not wait
    bytes_sent: int
    messages_sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerView:
    """One server process; recent figures as in a `WorkerView`."""

    role: int
    name: str
    presence: Presence
    primary_of: tuple[int, ...]
    backup_of: tuple[int, ...]
    num_bytes: int  # bytes of the parameters whose primary it is; 0 where unknown
    updates: int
    updates_per_s: float
    apply_ms: float  # of a recent update
    share: float  # of all servers' recent applying: 1 / servers where the load is even


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """How many steps of others an update had missed when it was applied."""

    histogram: Mapping[int, int] = field(default_factory=dict)
    mean: float = 0.0
    max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficView:
    """Traffic over one kind of link in one codec, summed over all roles."""

    wire: str
    codec: str
    num_bytes: int
    messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """An event of a member: it joined, left, died, went silent or recovered."""

    at_s: float
    what: str  # started, joined, left, died, silent, fenced, recovered, fault, note
    who: str
    sentence: str
    epoch: int  # the membership epoch from then on; 0 where a run has none


@dataclass(frozen=True, slots=True, kw_only=True)
class PartyView:
    """One party of a federated run."""

    number: int
    name: str
    samples: int
    rounds: int  # the rounds that it took part in
    labels: tuple[int, ...]  # the number of samples of each label; empty where samples have no labels
    measures: Mapping[str, float]
    """Means over the party's samples at the end, with the model that the party uses."""
    common: Mapping[str, float] = field(default_factory=dict)
    """The same with the common model, where the party uses another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartiesView:
    """The parties of a federated run: participation so far, and at the end how different they are."""

    count: int  # the number of parties; 0 before it is known
    rounds: Mapping[int, int]
    """The number of rounds each took part in, by party number; those that never did are left out."""
    labels: tuple[str, ...] = ()
    parties: tuple[PartyView, ...] = ()  # all parties, or some at even distances
    spread: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Of each measure, over the parties: mean, lowest and highest tenth, standard deviation."""
    spread_common: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The same with the common model, where parties use other models."""
    held_out: float = 0.0
    """The share of its samples held out for measuring a party; 0: measured on its training samples."""
    courses: Mapping[str, tuple[Curve, ...]] = field(default_factory=dict)
    """Of each measure, at the evaluations: the mean over parties, and the means of the lowest and highest tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelView:
    """What a model of tables is worth, known at the end of its run."""

    measured_on: str = ""  # as in "131 rows held out"
    scores: Mapping[str, float] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    confusion: tuple[tuple[int, ...], ...] = ()
    """How many rows of each label (row) were predicted to have each label (column)."""
    by_label: tuple[tuple[str, int, float, float, float], ...] = ()
    """Of each of several labels its rows, precision, recall and F1."""
    importance: tuple[tuple[str, float, int], ...] = ()
    """The features that matter most: name, gain and number of splits."""
    features: int = 0
    """How many features any split uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActingView:
    """What environments and actors did in a run of reinforcement learning."""

    frames: int  # steps of environments
    episodes: int
    frames_per_s: float  # since training began
    updates_per_s: float
    returns: Curve | None  # mean of the last 100 episodes; its steps are frames
    lags: Mapping[int, int]  # rollouts of actors by policy lag; empty where the workers act
    learner_waited: float  # the share of the time that worker 0 waited for its actors
    actors_waited: float  # the share of their time that actors waited for newer weights
    dropped: int  # rollouts, with actors that were lost
    replaced: int  # actors
    episode: bytes = b""  # a moving picture of one, once the run has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run at one moment."""

    task: str
    strategy: str
    about: tuple[tuple[str, str], ...] = ()  # how the run was started, by name: command, host, date, settings
    phase: Phase
    step: int  # global batches done
    steps_asked: int
    seconds: float
    loss: float | None
    samples_per_s: float
    steps_per_s: float
    seconds_left: float | None
    final: Mapping[str, float]  # the metrics of the newest evaluation
    best: tuple[str, float, int] | None = None
    """Of the run's first metric that is not a loss, or its evaluation loss: name, best value so far, and after which
    step."""
    curves: tuple[Curve, ...]  # `loss` first, then `samples_per_s`, then one for each metric
    logged: tuple[Curve, ...] = ()  # the learning rate and the gradient's norm, where the run logs them
    workers: tuple[WorkerView, ...]
    servers: tuple[ServerView, ...]
    waits: tuple[tuple[float, ...], ...]  # seconds that worker i (row) waited for worker j (column)
    staleness: Staleness
    traffic: tuple[TrafficView, ...]
    epoch: int  # the membership epoch; 0 where a run has none
    happenings: tuple[Happening, ...]  # the newest last
    warnings: tuple[str, ...]  # current warnings, one sentence each; empty where all is well
    notes: tuple[str, ...]  # what is missing from this view
    parties: PartiesView | None = None  # the parties of a federated run; None for other runs
    acting: ActingView | None = None  # of reinforcement learning
    model: ModelView | None = None  # of a model of tables whose run has ended
    notices: tuple[str, ...] = ()
    """Sentences of a run that has ended besides its figures: its guarantees, and why it ended."""
    evaluating: bool = False  # whether an evaluation is in progress, during which training is paused
