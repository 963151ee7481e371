"""Membership of a run from the rows of members.jsonl: what happened to each member, and what each server holds."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from manyhands.observe.analyse.view import Happening
from manyhands.observe.record.checked_values import number, text, whole

__all__ = ["Members", "ServerPlace"]

_MAX_HAPPENINGS = 200
_MEMBER = re.compile("[0-9]{1,15}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlace:
    """What one server holds, as of the newest membership view."""

    primary_of: tuple[int, ...] = ()
    backup_of: tuple[int, ...] = ()
    num_bytes: int = 0


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

        Where either is not known they are as they were recorded, in seconds since training began. What came before the
        first event, as the start of the process that recorded it, is shown at 0.
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

    def servers(self) -> dict[str, ServerPlace]:
        found = {}
        for name in sorted(one for one in set(self._names.values()) if one.startswith("server")):
            members = {member for member, called in self._names.items() if called == name}
            primary_of = tuple(shard for shard, primary, _ in self._shards if primary in members)
            backup_of = tuple(shard for shard, _, backup in self._shards if backup in members)
            num_bytes = sum(self._bytes_by_shard.get(shard, 0) for shard in primary_of)
            found[name] = ServerPlace(primary_of=primary_of, backup_of=backup_of, num_bytes=num_bytes)
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
