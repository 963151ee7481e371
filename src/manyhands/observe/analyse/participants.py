"""Who takes part in a run: its members, from the rows of members.jsonl, and the parties of a federated run."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from manyhands.observe.analyse.thinned import ThinnedCurve
from manyhands.observe.analyse.view import Happening, PartiesView, PartyView
from manyhands.observe.record.checked_values import number, text, whole

_MAX_HAPPENINGS = 200
_MEMBER = re.compile("[0-9]{1,15}")


class Members:
    """The membership of a run, as far as it was recorded."""

    def __init__(self) -> None:
        self.epoch = 0
        self.is_known = False  # whether a view of the membership was ever recorded
        self._names: dict[int, str] = {}  # as in the newest views
        self._started: dict[int, str] = {}  # as of the start of their processes
        self.gone: set[str] = set()  # those whose newest row says that they died, went silent or left
        self.starting: set[str] = set()  # those whose newest row says that their process was started
        self._bytes_by_shard: dict[int, int] = {}
        self._shards: tuple[tuple[int, int | None, int | None], ...] = ()  # (shard, primary, backup)
        self.slots: dict[int, int] = {}  # the member in each worker slot, as of the newest view
        # each with its time of day in seconds since 1970, where recorded
        self._happenings: deque[tuple[Happening, float | None]] = deque(maxlen=_MAX_HAPPENINGS)

    def happenings(self, first_s: float | None = None) -> tuple[Happening, ...]:
        """Return the happenings, newest last, in seconds since the first event, which was at `first_s` since 1970.

        Where that or a time of day is not known, seconds are those since training began, as recorded.
        """
        return tuple(
            one if first_s is None or unix_s is None else replace(one, at_s=max(0.0, unix_s - first_s))
            for one, unix_s in self._happenings
        )

    def add(self, row: Mapping[str, Any]) -> bool:
        """Add one row; unknown kinds count as plain happenings. Return False for a row that no run writes."""
        match row:
            case {"event": "layout", "shards": list(shards)}:
                sizes = [(_at(one, "shard"), _at(one, "bytes")) for one in shards]
                found = {shard: size for shard, size in sizes if shard is not None and size is not None}
                self._bytes_by_shard = found
                return len(found) == len(shards)
            case {"event": "view", "shards": list(shards), "slots": list(slots)}:
                return self._look(row, shards, slots)
            case {"event": str(what)}:
                self._happened(text(what), row)
                return True
        return False

    def servers(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], int]]:
        """Return by name what a server is the primary of and a backup of, and the bytes of the former."""
        found = {}
        for name in sorted(one for one in set(self._names.values()) if one.startswith("server")):
            members = {member for member, called in self._names.items() if called == name}
            primary_of = tuple(shard for shard, primary, _ in self._shards if primary in members)
            backup_of = tuple(shard for shard, _, backup in self._shards if backup in members)
            num_bytes = sum(self._bytes_by_shard.get(shard, 0) for shard in primary_of)
            found[name] = (primary_of, backup_of, num_bytes)
        return found

    def _look(self, row: Mapping[str, Any], shards: list[Any], slots: list[Any]) -> bool:
        names = row.get("names", {})
        held = [(_at(one, "shard"), _at(one, "primary"), _at(one, "backup")) for one in shards]
        known = tuple((shard, primary, backup) for shard, primary, backup in held if shard is not None)
        if not isinstance(names, Mapping) or len(known) < len(shards):
            return False
        self.is_known = True
        self.epoch = whole(row.get("epoch")) or self.epoch
        self._names |= {
            int(member): text(name) for member, name in names.items() if _MEMBER.fullmatch(member)
        }
        self._shards = known
        seats = ((_at(one, "slot"), _at(one, "member")) for one in slots)
        self.slots = {
            slot: member for slot, member in seats if slot is not None and member is not None and member >= 0
        }
        return True

    def _happened(self, what: str, row: Mapping[str, Any]) -> None:
        member = whole(row.get("member"))
        key = -1 if member is None else member
        if text(row.get("name")):
            self._started[key] = text(row["name"])
        unnamed = "" if member is None else f"member {member}"
        who = self._names.get(key) or self._started.get(key) or unnamed
        if what in ("died", "silent", "left"):
            self.gone.add(who)
            self.starting.discard(who)
        elif what in ("started", "joined", "recovered"):
            self.gone.discard(who)
            (self.starting.add if what == "started" else self.starting.discard)(who)
        sentence = row.get("sentence")
        happening = Happening(
            at_s=number(row.get("at_s")) or 0.0,
            what=what,
            who=who,
            sentence=text(sentence.replace("\n", " ")) if isinstance(sentence, str) else "",
            epoch=whole(row.get("epoch", self.epoch)) or 0,
        )
        self._happenings.append((happening, number(row.get("unix_s"))))


def _at(one: Any, key: str) -> int | None:
    return whole(one.get(key)) if isinstance(one, Mapping) else None


_COURSES = ("highest_tenth", "mean", "lowest_tenth")  # parts of a spread that are shown over the run
_MOST = 100_000  # upper bound on the parties that are counted
_MOST_COURSES = 20  # upper bound on the measures


class PartiesHistory:
    """Participation and evaluation of the parties over the rounds, from the rows of the history."""

    def __init__(self) -> None:
        self.rounds: Counter[int] = Counter()
        self._courses: dict[str, dict[str, ThinnedCurve]] = {}

    def add(self, row: Mapping[str, Any]) -> None:
        for one in _list(row.get("clients")):
            client = whole(one)
            if client is not None and 0 <= client < _MOST:
                self.rounds[client] += 1
        step, at_s = whole(row.get("step")), number(row.get("at_s") or 0.0)
        if step is not None and at_s is not None:
            for name, parts in _spread(row.get("fairness")).items():
                if name in self._courses or len(self._courses) < _MOST_COURSES:
                    curves = self._courses.setdefault(name, {part: ThinnedCurve(part) for part in _COURSES})
                    for part in curves.keys() & parts.keys():
                        curves[part].add(step, at_s, parts[part])

    def view(self, summary: Mapping[str, Any]) -> PartiesView:
        """Return what is known: courses from the first evaluation, most of the rest at the end."""
        found = summary.get("parties")
        found = found if isinstance(found, Mapping) else {}
        numbers = [whole(one) for one in _list(found.get("numbers"))]
        names, samples, counts = (_list(found.get(name)) for name in ("names", "samples", "counts"))
        own, common = (
            {text(name): _list(values) for name, values in columns.items()}
            if isinstance(columns := found.get(kind), Mapping)
            else {}
            for kind in ("measures", "measures_common")
        )
        labels = tuple(text(str(one)) for one in _list(found.get("labels")))
        parties = []
        for place, client in enumerate(numbers):
            if client is None:
                continue
            mine = _list(_item(counts, place))
            parties.append(
                PartyView(
                    number=client,
                    name=text(_item(names, place)) or f"client {client}",
                    samples=whole(_item(samples, place)) or 0,
                    rounds=self.rounds[client],
                    labels=tuple(whole(one) or 0 for one in mine) if len(mine) == len(labels) else (),
                    measures=_row(own, place),
                    common=_row(common, place),
                )
            )
        return PartiesView(
            count=whole(found.get("clients")) or 0,
            rounds=dict(sorted(self.rounds.items())),
            labels=labels,
            parties=tuple(parties),
            spread=_spread(summary.get("fairness")),
            spread_common=_spread(summary.get("fairness_common")),
            held_out=number(found.get("held_out")) or 0.0,
            courses={
                name: tuple(one.curve() for one in curves.values()) for name, curves in self._courses.items()
            },
        )


def _row(columns: Mapping[str, Sequence[Any]], place: int) -> dict[str, float]:
    found = {name: number(_item(values, place)) for name, values in columns.items()}
    return {name: value for name, value in found.items() if value is not None}


def _spread(found: Any) -> dict[str, dict[str, float]]:
    rows = found.items() if isinstance(found, Mapping) else ()
    return {
        text(name): {text(part): value for part, one in row.items() if (value := number(one)) is not None}
        for name, row in rows
        if isinstance(row, Mapping)
    }


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _item(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else None
