"""A shard's state as bytes: to a new backup over a connection, and to the disk as a checkpoint of its own.

    RUN/shards/0/step-00000040/…      shard 0 as it was at version 40
    RUN/shards/1/step-00000040/…

A snapshot holds the store's state and, beside it, what the shard's core knows: which updates it has. So a run continues
from the newest version that every shard has, and nothing is applied twice. A shard that went back has fewer updates
than the others from then on: they keep what it has not reached yet.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from manyhands.data.store.checkpoint import CheckpointStore, Loaded, NoCheckpoint, Snapshot
from manyhands.data.store.state_tree import flatten, unflatten
from manyhands.errors import CorruptCheckpoint
from manyhands.strategies.common.consistency import Policy
from manyhands.strategies.ps.ps_messages import LEAD
from manyhands.strategies.ps.shard_layout import ShardState
from manyhands.strategies.ps.slots import SlotTable
from manyhands.transport.messages import ProtocolError

_LENGTH = struct.Struct("<Q")


def pack_install(state: ShardState, held: Mapping[tuple[int, int], Tensor]) -> list[Any]:
    """A store's state and the gradients held for the shard, as buffers to be sent in order."""
    waiting = [[slot, clock, buffer] for (slot, clock), buffer in held.items()]
    tensors, meta = flatten(
        {"model": state.model, "optimizer": state.optimizer, "batches": state.batches, "held": waiting}
    )
    text = json.dumps(meta).encode()
    body = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return [_LENGTH.pack(len(text)), text, body]


def unpack_install(payload: memoryview) -> tuple[ShardState, dict[tuple[int, int], Tensor]]:
    """What `pack_install` packed; ProtocolError for anything else."""
    data = bytes(payload)
    try:
        (length,) = _LENGTH.unpack_from(data)
        start = _LENGTH.size + length
        meta = json.loads(data[_LENGTH.size : start])
        tree = unflatten(safetensors.torch.load(data[start:]), meta)
        state = ShardState(model=tree["model"], optimizer=tree["optimizer"], batches=tree["batches"])
        held = {(slot, clock): buffer for slot, clock, buffer in tree["held"]}
    except (ValueError, KeyError, TypeError, struct.error, safetensors.SafetensorError) as error:
        raise ProtocolError("payload", f"not the state of a shard: {error}") from error
    return state, held


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardSnapshot:
    """One shard at one version."""

    version: int
    state: ShardState
    held: dict[tuple[int, int], Tensor]  # gradients that wait for their group, by slot and clock
    core: str  # the replica's state, as JSON


class ShardSnapshots:
    """The snapshots of all shards of one run; without a run directory there are none."""

    def __init__(self, run_path: Path | None, shards: int, keep: int = 1) -> None:
        self._folder = run_path / "shards" if run_path is not None else None
        self._shards, self._keep, self.kept = shards, keep, run_path is not None

    def save(self, shard: int, snapshot: ShardSnapshot) -> None:
        """Write one; a WriteFailed leaves the older ones as they are."""
        held = [[slot, clock, buffer] for (slot, clock), buffer in snapshot.held.items()]
        self._store(shard).save(
            Snapshot(
                step=snapshot.version,
                model=snapshot.state.model,
                optimizer=snapshot.state.optimizer,
                extra={"batches": snapshot.state.batches, "core": snapshot.core, "held": held},
            ),
            spare_from=max(self._common(), default=0),  # the newest version that all have stays
        )

    def load(self, shard: int, version: int | None = None) -> ShardSnapshot | None:
        """The newest good snapshot, or that of `version`; None where there is none."""
        try:
            loaded: Loaded = self._store(shard).load(version)
        except NoCheckpoint:
            return None
        extra = loaded.extra
        return ShardSnapshot(
            version=loaded.step,
            state=ShardState(model=loaded.model, optimizer=loaded.optimizer, batches=extra["batches"]),
            held={(slot, clock): buffer for slot, clock, buffer in extra["held"]},
            core=extra["core"],
        )

    def versions(self, shard: int) -> set[int]:
        assert self._folder is not None, "without a directory there are no snapshots"
        found = (path.name.removeprefix("step-") for path in (self._folder / str(shard)).glob("step-*"))
        return {int(version) for version in found if version.isdigit()}

    def remove_after(self, version: int) -> None:
        """Remove all snapshots of later versions, which belong to a discarded history. WriteFailed if one remains."""
        assert self._folder is not None, "without a directory there are no snapshots"
        for folder in self._folder.iterdir() if self._folder.is_dir() else ():
            if folder.name.isdigit():
                self._store(int(folder.name)).remove_after(version)

    def newest_whole(self) -> list[ShardSnapshot] | None:
        """Every shard's snapshot of the newest version that all of them have undamaged; None where there is none."""
        found = (self.at([version] * self._shards) for version in sorted(self._common(), reverse=True))
        return next((snapshots for snapshots in found if snapshots is not None), None)

    def at(self, versions: Sequence[int]) -> list[ShardSnapshot] | None:
        """Every shard's snapshot of its own version, in order; None where one is missing or damaged."""
        try:
            found = [self.load(shard, version) for shard, version in enumerate(versions)]
        except CorruptCheckpoint:
            return None
        whole = [snapshot for snapshot in found if snapshot is not None]
        return whole if len(whole) == self._shards else None

    def _common(self) -> set[int]:
        return set.intersection(*(self.versions(shard) for shard in range(self._shards)))

    def _store(self, shard: int) -> CheckpointStore:
        assert self._folder is not None, "without a directory there are no snapshots"
        return CheckpointStore(self._folder / str(shard), self._keep)


# ── what a resumed run has to do ──────────────────────────────────────────────────────────────────────────────────────
# Under `sync` these are all batches from one on. Otherwise workers are at different batches when a snapshot is taken:
# a slow one has an early batch outstanding, a fast one has done later ones. The history of the run keeps its rows of
# all that is done, and only those.


@dataclass(frozen=True, slots=True, kw_only=True)
class ToCome:
    """The batches that will be computed; test with `in`."""

    start: int  # all batches from this one on will be computed
    before: frozenset[int] = field(default_factory=frozenset)  # earlier batches that will be computed, too

    def __contains__(self, batch: int) -> bool:
        return batch >= self.start or batch in self.before

    def wants(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of the history stays, because what it reports is done and will not be computed again.

        The loss at step k is that of batch k - 1. An evaluation at step k comes before batch k, and remains valid
        if all batches before it are done.
        """
        step = int(row["step"])
        if "metrics" in row:
            return step not in self or step <= min([self.start, *self.before])
        return step - 1 not in self


def batches_to_come(policy: Policy, cores: Sequence[Mapping[str, Any]]) -> ToCome:
    """What a run that resumes from these states (`ShardCore.state`), by shard, will compute."""
    lead = cores[LEAD]
    table = SlotTable.from_state(lead["table"])
    if policy.stepwise:
        return ToCome(start=lead["steps"]["step"])
    if policy.by_clock:
        return _by_clock(policy, table)
    outstanding = (
        batch
        for record in table.records.values()
        for clock, batch in record.recent.items()
        if clock >= record.next_clock
    )
    # A lead that goes back asks the others first, and gives out nothing that one of them has seen.
    start = max(int(core["next_batch"]) for core in cores)
    return ToCome(start=start, before=frozenset(batch for batch in outstanding if batch < start))


def _by_clock(policy: Policy, table: SlotTable) -> ToCome:
    """Every slot continues at its clock, and slot and clock determine the batch."""
    last = table.generations[-1]
    top = max(last.start, *(record.next_clock for record in table.records.values()), 0)
    start = policy.place(0, len(last.slots), top, (last.start, last.base)).batch
    ends = [*(generation.start for generation in table.generations[1:]), top]
    outstanding = (
        policy.place(rank, len(slots), clock, (first, base)).batch
        for (first, base, slots), end in zip(table.generations, ends, strict=True)
        for rank, slot in enumerate(slots)
        for clock in range(max(first, table.records[slot].next_clock), end)
    )
    return ToCome(start=start, before=frozenset(batch for batch in outstanding if batch < start))
