"""Who takes part in a run, from the rows of members.jsonl: what happened to whom, and which server keeps what."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from manyhands.errors import printable
from manyhands.observe.view import Happening

__all__ = ["Members", "ServerPlace"]

_MAX_HAPPENINGS = 200
_MAX_SENTENCE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlace:
    """What one server keeps, as of the newest view of the membership."""

    primary_of: tuple[int, ...] = ()
    backup_of: tuple[int, ...] = ()
    num_bytes: int = 0


class Members:
    """The membership of a run, as far as it was told."""

    def __init__(self) -> None:
        self.epoch = 0
        self.is_known = False
        """Whether a view of the membership was ever told."""
        self._names: dict[int, str] = {}  # as the newest views have them
        self._started: dict[int, str] = {}  # as they were when their processes began
        self._gone: set[str] = set()
        self._bytes_by_shard: dict[int, int] = {}
        self._shards: tuple[Mapping[str, Any], ...] = ()
        self._slots: dict[int, int] = {}
        self._happenings: deque[Happening] = deque(maxlen=_MAX_HAPPENINGS)

    @property
    def happenings(self) -> tuple[Happening, ...]:
        """The newest last."""
        return tuple(self._happenings)

    def add(self, row: Mapping[str, Any]) -> None:
        """Take in one row; one of an unknown kind is a happening like the others."""
        match row:
            case {"event": "layout", "shards": list(shards)}:
                self._bytes_by_shard = {int(one["shard"]): int(one["bytes"]) for one in shards}
            case {"event": "view", "shards": list(shards), "slots": list(slots)}:
                self._look(row, shards, slots)
            case {"event": str(what)}:
                self._happened(what, row)

    def servers(self) -> dict[str, ServerPlace]:
        """What each server keeps, by its name."""
        places: dict[str, ServerPlace] = {}
        for name in sorted(name for name in self._names.values() if name.startswith("server")):
            member = {member for member, other in self._names.items() if other == name}
            primary = tuple(int(one["shard"]) for one in self._shards if one.get("primary") in member)
            backup = tuple(int(one["shard"]) for one in self._shards if one.get("backup") in member)
            num_bytes = sum(self._bytes_by_shard.get(shard, 0) for shard in primary)
            places[name] = ServerPlace(primary_of=primary, backup_of=backup, num_bytes=num_bytes)
        return places

    def is_gone(self, name: str) -> bool:
        """Whether the newest thing told of it is that it died, fell silent or left."""
        return name in self._gone

    def has_slot(self, worker: int) -> bool:
        """Whether the newest view gives this worker's slot to a member."""
        return worker in self._slots

    def _look(self, row: Mapping[str, Any], shards: list[Any], slots: list[Any]) -> None:
        self.is_known = True
        self.epoch = int(row.get("epoch", self.epoch))
        self._names |= {int(member): str(name) for member, name in row.get("names", {}).items()}
        self._shards = tuple(shards)
        self._slots = {
            int(one["slot"]): int(one["member"])
            for one in slots
            if one.get("member") is not None and int(one["member"]) >= 0
        }

    def _happened(self, what: str, row: Mapping[str, Any]) -> None:
        member = row.get("member")
        number = member if isinstance(member, int) else -1
        if row.get("name"):
            self._started[number] = str(row["name"])
        who = self._names.get(number) or self._started.get(number) or ""
        if not who and member is not None:
            who = f"member {member}"
        if what in ("died", "silent", "left"):
            self._gone.add(who)
        elif what in ("started", "joined", "recovered"):
            self._gone.discard(who)
        self._happenings.append(
            Happening(
                at_s=float(row.get("at_s") or 0.0),
                what=what,
                who=who,
                sentence=printable(str(row.get("sentence", "")).replace("\n", " "), _MAX_SENTENCE),
                epoch=int(row.get("epoch", self.epoch)),
            )
        )
