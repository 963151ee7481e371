"""Builds the view of a run from its events, the rows of its history and its membership rows.

Pure: chunks of any size go in, `view` comes out. Memory is bounded whatever the length of the run. All start times
are on one axis, the clock of the first part of the run (`recorded` describes how a resumed run's clocks are mapped
onto it).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from manyhands.errors import UserError
from manyhands.facts import Truth
from manyhands.observe.analyse import view as views
from manyhands.observe.analyse.curves import HistoryCurves, RateCurve
from manyhands.observe.analyse.participants import Members, PartiesHistory
from manyhands.observe.analyse.recent import SHOWN, WINDOW_NS, Recent, Seen
from manyhands.observe.analyse.remarks import (
    about_imbalance,
    about_quiet,
    about_workers,
    privacy_words,
    speed_words,
)
from manyhands.observe.analyse.totals import Totals, TotalsSnapshot
from manyhands.observe.analyse.view import ModelView
from manyhands.observe.record.checked_values import number, text, whole
from manyhands.observe.record.events import MAX_SHOWN, NO_STEP, EventKind, Records
from manyhands.observe.record.recorded import role_name
from manyhands.strategy import Strategy
from manyhands.transport.link.wire import Wire, codec_of

_NS_PER_S = 1_000_000_000
_QUIET_NS = 10 * _NS_PER_S  # time without an event, once steps have ended
_QUIET_START_NS = 30 * _NS_PER_S  # the same before that: models are loaded and compiled
_QUIET_STEPS = 3  # nor is a run quiet whose steps are just long
_MAX_STALENESS = 1000  # larger staleness counts as this
_MIN_APPLYING = 0.2  # share of the busiest server's time below which an imbalance does not matter
_SPLIT = (EventKind.COMPUTE, EventKind.INPUT, EventKind.EXCHANGE, EventKind.WAIT)
_DOING = {
    EventKind.COMPUTE: "computing",
    EventKind.EXCHANGE: "exchanging in",
    EventKind.WAIT: "waiting in",
    EventKind.STEP: "at the end of",
    EventKind.EVALUATE: "evaluating after",
    EventKind.CHECKPOINT: "saving after",
    EventKind.JOIN: "joining",
    EventKind.FAULT: "failing in",
    EventKind.INPUT: "reading the samples of",
    EventKind.APPLY: "applying an update of",
    EventKind.HOLD: "holding an answer back in",
    EventKind.SEND: "sending in",
    EventKind.RECEIVE: "receiving in",
}


class Gather:
    """The accumulated state of one run."""

    def __init__(
        self,
        *,
        task: str = "",
        strategy: str = "",
        steps_asked: int = 0,
        workers: int = 1,
        about: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._task, self._strategy, self._steps_asked = task, strategy, steps_asked
        self._about = about
        self._workers = workers  # the numbers that were requested
        self._servers, has_parties = 0, False  # also for an unknown strategy, as in runs of other releases
        try:
            known = Strategy.parse(strategy)
            has_parties = known.truth is Truth.SERVER_OF_CLIENTS
            self._servers = min(MAX_SHOWN, known.processes(workers).get("server", 0))
        except UserError:
            pass
        self.offset_ns: int | None = None  # from the events' clock to the time of day, which times members
        self._names: dict[int, str] = {}
        self._totals = Totals(max(1, workers))
        self._recent = Recent()
        self._rate = RateCurve("samples_per_s")
        self.seen = Seen()
        self.history = HistoryCurves()
        self._members = Members()
        self._staleness: Counter[int] = Counter()
        # by role, kind and wire: bytes and messages
        self._traffic: dict[tuple[int, int, int], npt.NDArray[np.int64]] = defaultdict(
            lambda: np.zeros(2, np.int64)
        )
        self._updates: Counter[int] = Counter()
        self._applying_ns: Counter[int] = Counter()
        self.summary: Mapping[str, Any] | None = None  # of a run that has ended
        self.episode = b""  # what it has in its directory of a trained policy
        self._notes: dict[str, None] = {}
        self._odd_rows: Counter[str] = Counter()  # by file
        self._parties = PartiesHistory() if has_parties else None

    def meet(self, role: int, name: str) -> None:
        """Register a role by the name of its event file: `worker-3` or `server-0`."""
        if role >= MAX_SHOWN:
            self.note(
                f"{role_name(name)} is left out: its role is {role}, and a view shows roles 0 to {MAX_SHOWN - 1}"
            )
            return
        self._names[role] = role_name(name)
        if name.startswith("worker"):
            self._totals.widen(role + 1)

    def add_events(self, records: Records) -> None:
        """Add events of registered roles, those of one role in recording order; others are left out."""
        records = records[np.isin(records["role"], list(self._names))]
        if not len(records):
            return
        workers = [role for role, name in self._names.items() if name.startswith("worker")]
        is_worker = np.isin(records["role"], workers)
        self._totals.update(records[is_worker])
        self._recent.add(records)
        self._rate.add(records[is_worker & (records["kind"] == EventKind.STEP)])
        self.seen.add(records)
        applied = records[records["kind"] == EventKind.APPLY]
        self._staleness.update(np.clip(applied["value"], 0, _MAX_STALENESS).astype(int).tolist())
        self._updates.update(applied["role"].tolist())
        for role in np.unique(applied["role"]).tolist():
            self._applying_ns[role] += int(applied["duration_ns"][applied["role"] == role].sum())
        sends = np.isin(records["kind"], (EventKind.SEND, EventKind.EXCHANGE))
        sent = records[sends & (records["count"] > 0)]
        carried = sent["wire"].astype(np.int64) | sent["codec"].astype(np.int64) << 8  # as `wire_of` has it
        keys = np.stack([sent["role"], sent["kind"], carried]).astype(np.int64)
        unique, index = np.unique(keys, axis=1, return_inverse=True)
        num_bytes = np.bincount(index.ravel(), sent["num_bytes"].astype(np.float64), unique.shape[1])
        messages = np.bincount(index.ravel(), sent["count"], unique.shape[1])
        for column in range(unique.shape[1]):
            role, kind, wire = unique[:, column].tolist()
            self._traffic[role, kind, wire] += (int(num_bytes[column]), int(messages[column]))

    def add_rows(self, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Add rows of metrics.jsonl; invalid rows are left out with a note."""
        known = []
        for row in rows:
            if self.history.add(row):
                known.append(row)
                if self._parties is not None:
                    self._parties.add(row)
            else:
                self._odd_rows["metrics.jsonl"] += 1
        return known

    def forget_rows(self) -> None:
        """Drop all history rows, because a resumed run rewrote the file; all rows will be added again."""
        self.history = HistoryCurves()
        if self._parties is not None:
            self._parties = PartiesHistory()

    def add_members(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self._odd_rows["members.jsonl"] += sum(not self._members.add(row) for row in rows)

    def note(self, sentence: str) -> None:
        self._notes[sentence] = None

    @property
    def training_began_s(self) -> float:
        """When the clock of the history began, in seconds since the first event."""
        began = self.seen.first_step_ns
        return (began - self.seen.first_ns) / _NS_PER_S if began else 0.0

    def _phase(self, step: int, now_ns: int, held: bool | None) -> views.Phase:
        longest_ns = _QUIET_STEPS * max(self.seen.step_ns.values(), default=0)
        limit_ns = max(_QUIET_NS if step else _QUIET_START_NS, longest_ns)
        if self.summary is not None:
            return views.Phase.ENDED
        if self.seen.last_ns > 0 and (held is False or now_ns - self.seen.last_ns >= limit_ns):
            return views.Phase.QUIET
        return views.Phase.RUNNING if step else views.Phase.STARTING

    def view(self, now_ns: int, *, held: bool | None = None) -> views.RunView:
        """Return the run as of `now_ns`; `held` says whether a live process holds it, None where that is unknown."""
        snapshot = self._totals.snapshot(now_ns)
        first_ns, last_ns = self.seen.first_ns, self.seen.last_ns
        phase = self._phase(snapshot.step, now_ns, held)
        until_ns = last_ns if phase is views.Phase.ENDED else max(now_ns, last_ns)
        workers, servers = self._worker_views(snapshot, now_ns, phase), self._server_views(now_ns, phase)
        roles = [worker.role for worker in workers]
        summary = self.summary or {}
        rate = number(summary.get("samples_per_s"))
        seconds_left = None
        if phase is views.Phase.RUNNING and snapshot.steps_per_s > 0 and not snapshot.evaluating:
            seconds_left = max(0, self._steps_asked - snapshot.step) / snapshot.steps_per_s
        # The final loss is that of the history; before the end the events are ahead of it.
        losses = [snapshot.loss, self.history.loss]
        losses = losses[::-1] if phase is views.Phase.ENDED else losses
        loss, *metrics = self.history.curves(self.training_began_s)
        odd = [
            f"{name}: {count} invalid row{'s' * (count > 1)} left out"
            for name, count in sorted(self._odd_rows.items())
            if count
        ]
        return views.RunView(
            task=self._task,
            strategy=self._strategy,
            about=self._about,
            phase=phase,
            step=max(snapshot.step, self.history.step),
            steps_asked=self._steps_asked,
            seconds=max(0.0, (until_ns - first_ns) / _NS_PER_S) if first_ns else 0.0,
            loss=next((one for one in losses if one is not None), None),
            samples_per_s=snapshot.samples_per_s if rate is None else rate,
            steps_per_s=snapshot.steps_per_s,
            seconds_left=seconds_left,
            final=self.history.final,
            best=self.history.best,
            curves=(loss, self._rate.curve(first_ns), *metrics),
            logged=tuple(self.history.logged(self.training_began_s)),
            workers=workers,
            servers=servers,
            waits=tuple(tuple(snapshot.workers[i].wait_for_s[j] for j in roles) for i in roles),
            staleness=views.Staleness(
                histogram=dict(sorted(self._staleness.items())),
                mean=sum(stale * times for stale, times in self._staleness.items())
                / (self._staleness.total() or 1),
                max=max(self._staleness, default=0),
            ),
            traffic=self._traffic_views(),
            epoch=self._members.epoch,
            parties=self._parties.view(summary) if self._parties else None,
            acting=self.history.acting.view(self.training_began_s, self.episode if summary else b""),
            model=model_view(summary),
            happenings=self._happenings(),
            warnings=self._warnings(snapshot, servers, now_ns, phase, held),
            notes=(*self._notes, *odd),
            notices=(*privacy_words(summary), *filter(None, [speed_words(summary)])),
            evaluating=phase is views.Phase.RUNNING and snapshot.evaluating,
        )

    def _worker_views(
        self, snapshot: TotalsSnapshot, now_ns: int, phase: views.Phase
    ) -> tuple[views.WorkerView, ...]:
        durations, events, waits = self._recent.sums(now_ns)
        found = []
        for worker in snapshot.workers:
            role, name = worker.worker, self._name(worker.worker)
            if role >= self._workers and not worker.steps and role not in self.seen.last_event:
                continue  # unused capacity
            whole = [int(self._totals.rows["duration_ns"][role, kind]) for kind in _SPLIT]
            if phase is views.Phase.ENDED:
                spent, steps, for_whom = whole, worker.steps, worker.waits_mostly_for()
            else:
                known = role < len(durations)
                spent = [int(durations[role, kind]) if known else 0 for kind in _SPLIT]
                steps = int(events[role, EventKind.STEP]) if known else 0
                for_whom = int(waits[role].argmax()) if known and waits[role].any() else None
            found.append(
                views.WorkerView(
                    role=role,
                    name=name,
                    presence=self._presence(role, name),
                    steps=worker.steps,
                    samples=worker.samples,
                    steps_per_s=steps / self._window_s(now_ns, phase),
                    compute_ms=_per(spent[0], steps) if steps else _per(whole[0], worker.steps),
                    shares=_shares(whole),
                    recent=_shares(spent),
                    waits_for="" if for_whom is None else self._name(for_whom),
                    bytes_sent=worker.bytes_sent,
                    messages_sent=worker.messages_sent,
                )
            )
        return tuple(found)

    def _server_views(self, now_ns: int, phase: views.Phase) -> tuple[views.ServerView, ...]:
        durations, events, _ = self._recent.sums(now_ns)
        roles = {name: role for role, name in self._names.items() if name.startswith("server")}
        places = self._members.servers()
        if phase is views.Phase.ENDED:
            applying = {name: self._applying_ns[role] for name, role in roles.items()}
            updates = {name: self._updates[role] for name, role in roles.items()}
        else:
            recent = {name: role for name, role in roles.items() if role < len(durations)}
            applying = {name: int(durations[role, EventKind.APPLY]) for name, role in recent.items()}
            updates = {name: int(events[role, EventKind.APPLY]) for name, role in recent.items()}
        whole = sum(applying.values())
        found = []
        asked = {f"server {place}" for place in range(self._servers)}
        for name in sorted({*roles, *places, *asked}, key=lambda name: (roles.get(name, 1 << 16), name)):
            role, (primary_of, backup_of, num_bytes) = roles.get(name, -1), places.get(name, ((), (), 0))
            found.append(
                views.ServerView(
                    role=role,
                    name=name,
                    presence=self._presence(role, name, holds_shards=name in places),
                    primary_of=primary_of,
                    backup_of=backup_of,
                    num_bytes=num_bytes,
                    updates=self._updates[role],
                    updates_per_s=updates.get(name, 0) / self._window_s(now_ns, phase),
                    apply_ms=_per(applying.get(name, 0), updates.get(name, 0)),
                    share=applying.get(name, 0) / whole if whole else 0.0,
                )
            )
        return tuple(found)

    def _window_s(self, now_ns: int, phase: views.Phase) -> float:
        """Return the averaging window: that of recent events, or from the first to the last step once ended."""
        began = self.seen.first_step_ns or self.seen.first_ns
        if phase is views.Phase.ENDED:
            return max(1e-3, (self.seen.last_step_ns - began) / _NS_PER_S)
        return max(0.25, min(WINDOW_NS, now_ns - began) / _NS_PER_S)  # the window is shorter at the beginning

    def _name(self, role: int) -> str:
        return self._names.get(role, f"worker {role}")

    def _presence(self, role: int, name: str, *, holds_shards: bool = False) -> views.Presence:
        if name in self._members.gone:
            return views.Presence.GONE
        if name in self._members.starting:
            return views.Presence.STARTING
        was_seen = role in self.seen.last_event
        if self._members.is_known and name.startswith("worker") and self.summary is None:
            has_place = role in self._members.slots
        else:
            has_place = (was_seen or holds_shards) and not self.seen.has_left(role)
        if has_place:
            return views.Presence.PRESENT
        return views.Presence.GONE if was_seen else views.Presence.STARTING

    def _traffic_views(self) -> tuple[views.TrafficView, ...]:
        """Return the traffic: from message events where a role records them, else from its exchanges."""
        sending = {role for role, kind, _ in self._traffic if kind == EventKind.SEND}
        sums: dict[int, npt.NDArray[np.int64]] = defaultdict(lambda: np.zeros(2, np.int64))
        for (role, kind, wire), both in self._traffic.items():
            if (kind == EventKind.SEND) == (role in sending):
                sums[wire] += both
        return tuple(
            views.TrafficView(
                wire=Wire(both & 0xFF).name.lower(),
                codec=codec_of(both >> 8),
                num_bytes=int(total[0]),
                messages=int(total[1]),
            )
            for both, total in sorted(sums.items())
        )

    def _happenings(self) -> tuple[views.Happening, ...]:
        first_ns, offset_ns = self.seen.first_ns, self.offset_ns
        first_s = (first_ns + offset_ns) / _NS_PER_S if first_ns and offset_ns is not None else None
        seen = [
            ((at_ns - first_ns) / _NS_PER_S, SHOWN[kind], self._name(role))
            for at_ns, role, kind in self.seen.shown
        ]
        return self._members.happenings(first_s) or tuple(
            views.Happening(at_s=at_s, what=what, who=who, sentence="", epoch=0) for at_s, what, who in seen
        )

    def _warnings(
        self,
        snapshot: TotalsSnapshot,
        servers: Sequence[views.ServerView],
        now_ns: int,
        phase: views.Phase,
        held: bool | None,
    ) -> tuple[str, ...]:
        if phase is views.Phase.ENDED:
            slowness = self._totals.slowness
            warnings = about_workers(slowness.ever(), slowness.late_ever(), self._strategy)
        else:
            warnings = about_workers(snapshot.slow, snapshot.late, self._strategy)
            servers = [server for server in servers if server.role >= 0]
            busiest = max((server.apply_ms * server.updates_per_s / 1000 for server in servers), default=0.0)
            if busiest >= _MIN_APPLYING:
                warnings += about_imbalance([(server.name, server.share) for server in servers])
        if phase is views.Phase.QUIET and held is False:
            warnings.append(
                "no process holds the run, and it has no summary: it was stopped; --resume continues it"
            )
        elif phase is views.Phase.QUIET:
            last_seen = []
            events = sorted(self.seen.last_event.items(), key=lambda item: item[1][0])
            for role, (at_ns, kind, step) in events:
                if kind != EventKind.LEAVE:
                    where = "" if step == NO_STEP else f" step {step}"
                    doing = _DOING[kind] if where else re.sub(" (in|of|after)$", "", _DOING[kind])
                    ago = f"{(now_ns - at_ns) / _NS_PER_S:.0f} s ago"
                    last_seen.append((self._name(role), f"{doing}{where}, {ago}"))
            warnings.append(about_quiet((now_ns - self.seen.last_ns) / _NS_PER_S, last_seen))
        for role, lost in sorted(self.seen.lost.items()):
            warnings.append(
                f"{self._name(role)} recorded faster than it was read: {lost} events are missing from all figures"
            )
        return tuple(warnings)


def _shares(spent_ns: list[int]) -> views.Shares:
    compute, reading, exchange, wait = (part / (sum(spent_ns) or 1) for part in spent_ns)
    return views.Shares(compute=compute, input=reading, exchange=exchange, wait=wait)


def _per(duration_ns: int, count: int) -> float:
    return duration_ns / count / 1e6 if count else 0.0


_MOST_FEATURES = 10
_MOST_LABELS = 100


def model_view(summary: Mapping[str, Any]) -> ModelView | None:
    """None where the run did not measure its model; what is damaged is left out."""
    found, features = summary.get("quality"), summary.get("importance")
    measured: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    rows = [one for one in features if isinstance(one, Mapping)] if isinstance(features, list) else []
    if not measured and not rows:
        return None
    scores = measured.get("scores")
    labels = _list(measured.get("labels"))[:_MOST_LABELS]
    table = [[whole(one) or 0 for one in _list(row)] for row in _list(measured.get("confusion"))]
    is_square = len(table) == len(labels) and all(len(row) == len(labels) for row in table)
    return ModelView(
        measured_on=text(measured.get("measured_on")),
        scores={
            text(name): value
            for name, one in (scores.items() if isinstance(scores, Mapping) else ())
            if (value := number(one)) is not None
        },
        labels=tuple(text(str(one)) for one in labels) if is_square else (),
        confusion=tuple(map(tuple, table)) if is_square else (),
        by_label=_by_label(labels, table) if is_square and len(labels) > 2 else (),
        importance=tuple(
            (text(one.get("feature")), number(one.get("gain")) or 0.0, whole(one.get("splits")) or 0)
            for one in rows[:_MOST_FEATURES]
        ),
        features=len(rows),
    )


def _by_label(
    labels: Sequence[Any], table: Sequence[Sequence[int]]
) -> tuple[tuple[str, int, float, float, float], ...]:
    """What was never predicted has precision 0, as in scikit-learn."""
    rows, predicted = [sum(row) for row in table], [sum(column) for column in zip(*table, strict=True)]
    return tuple(
        (
            text(str(label)),
            rows[at],
            table[at][at] / max(1, predicted[at]),
            table[at][at] / max(1, rows[at]),
            2 * table[at][at] / max(1, predicted[at] + rows[at]),
        )
        for at, label in enumerate(labels)
    )


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
