"""What remote members and the launcher send each other as a whole: shards, buffers, snapshots, records.

Every item has a name (`Shipment`) and is bytes: raw tensors or safetensors, no code. Names are validated here, so
that nothing is written outside its place.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from manyhands.strategies.ps.live.server_tables import final_tables
from manyhands.strategies.ps.live.snapshots import ShardSnapshot, pack_install, unpack_install
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_store import ShardStore
from manyhands.strategies.ps.update_files import is_record
from manyhands.transport.messages import ProtocolError

__all__ = ["BUFFERS", "Shipment", "final_chunks", "pack_snapshot", "take_final", "unpack_snapshot"]

_HEAD: Final = struct.Struct("<QQ")
_NAME: Final = re.compile(r"(final|snapshot) (\d{1,9})|(buffers)|record (.+)")


@dataclass(frozen=True, slots=True)
class Shipment:
    """An item to send: `final` parameters or a `snapshot` of a shard, a model's `buffers`, a `record` of updates."""

    kind: str
    shard: int = -1
    file: str = ""

    def __str__(self) -> str:
        return " ".join(
            [self.kind, *([str(self.shard)] if self.shard >= 0 else []), *([self.file] if self.file else [])]
        )

    @classmethod
    def parse(cls, name: str, shards: int) -> Shipment:
        """The shipment of that name; ProtocolError for an invalid name."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise ProtocolError("name", f"{name[:80]!r} is nothing that members send")
        kind, shard, buffers, file = match.groups()
        if buffers:
            return BUFFERS
        if file is not None:
            if not is_record(file):
                raise ProtocolError("name", f"{file[:80]!r} is no record of updates")
            return cls("record", file=file)
        if int(shard) >= shards:
            raise ProtocolError("name", f"{name!r} where there are {shards} shards")
        return cls(kind, shard=int(shard))


BUFFERS: Final = Shipment("buffers")


def final_chunks(layout: FlatLayout, shard: int, store: ShardStore) -> list[Any]:
    """A shard's parameters: its range of the flat layout, and its rows of every table in their order."""
    dense = torch.empty(layout.range_bytes(shard), dtype=torch.uint8)
    store.read_into(dense)
    rows = [store.gather(table.name, table.placed(layout.shards).rows(shard)) for table in layout.tables]
    return [dense.numpy(), *(one.contiguous().view(torch.uint8).numpy() for one in rows if one.numel())]


def take_final(layout: FlatLayout, shard: int, data: bytearray, memory: Tensor) -> None:
    """Store what `final_chunks` gave where local children store theirs; ProtocolError for another size."""
    begin, end = layout.bounds[shard]
    tables = final_tables(layout, memory)
    own = {table.name: table.placed(layout.shards).rows(shard) for table in layout.tables}
    sizes = [len(own[name]) * _row_bytes(values) for name, values in tables.items()]
    if len(data) != end - begin + sum(sizes):
        raise ProtocolError(
            "bytes", f"shard {shard} has {end - begin + sum(sizes)} bytes at the end, and {len(data)} came"
        )
    came = torch.from_numpy(np.frombuffer(data, np.uint8))
    memory[begin:end] = came[: end - begin]
    at = end - begin
    for (name, values), size in zip(tables.items(), sizes, strict=True):
        if size:
            rows = came[at : at + size].clone().view(values.dtype)
            values[own[name]] = rows.view(len(own[name]), *values.shape[1:])
        at += size


def _row_bytes(values: Tensor) -> int:
    return values[:1].nbytes


def pack_snapshot(snapshot: ShardSnapshot) -> Iterable[Any]:
    """A shard at one version, as buffers to be sent in order."""
    core = snapshot.core.encode()
    return [_HEAD.pack(snapshot.version, len(core)), core, *pack_install(snapshot.state, snapshot.held)]


def unpack_snapshot(data: bytearray) -> ShardSnapshot:
    """What `pack_snapshot` packed; ProtocolError for anything else."""
    try:
        version, length = _HEAD.unpack_from(data)
        core = bytes(data[_HEAD.size : _HEAD.size + length]).decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise ProtocolError("payload", f"is no snapshot of a shard: {error}") from error
    state, held = unpack_install(memoryview(data)[_HEAD.size + length :])
    return ShardSnapshot(version=version, state=state, held=held, core=core)
