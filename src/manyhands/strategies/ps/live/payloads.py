"""The gradients that a server holds, and where they lie: in a worker's memory, in a receive buffer, or in a copy.

On one host a gradient stays in the memory of the worker that made it; the server, and its backup, read it there.
Over TCP it is received into one buffer per worker and shard. Either way the worker may overwrite it once its next
Read is answered, so a gradient that must live longer is copied. Row gradients are always sent inline, behind the
dense ones.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.native.segment import Segment
from manyhands.strategies.common.tables.row_tables import RowGradient
from manyhands.strategies.ps.actions import Keep
from manyhands.strategies.ps.live.area import AreaPart, SharedParameters, WorkerArea
from manyhands.strategies.ps.live.server_tables import ServerTables
from manyhands.strategies.ps.live.shard_encoding import RangeCoding, as_tensor
from manyhands.strategies.ps.ps_messages import Push
from manyhands.strategies.ps.shard_layout import FlatLayout
from manyhands.strategies.ps.shard_store import Contribution, byte_view
from manyhands.transport.messages import ProtocolError


class Gradients:
    """All gradients of one server process; with `inline`, workers share no memory with it and send everything.

    `shared` is the copy in which workers read parameters, if there is one. `coding` is the encoding of
    gradients that workers send; servers send them to each other unencoded.
    """

    def __init__(
        self,
        layout: FlatLayout,
        *,
        inline: bool,
        shared: SharedParameters | None = None,
        coding: RangeCoding | None = None,
        rests: bool = False,
    ) -> None:
        self._shared = shared
        self._coding = coding if coding is not None and coding.codes_gradients else None
        self.tables = ServerTables(layout, rests=rests)
        self._layout = layout
        self._dense_bytes = [
            layout.flag_bytes(shard) + layout.range_bytes(shard) for shard in range(layout.shards)
        ]
        self._inline = inline
        self.areas: dict[int, WorkerArea] = {}  # the memory of workers of this host, by member
        self.parts: dict[tuple[int, int], AreaPart] = {}  # of those areas, by member and shard
        self._dense: dict[tuple[int, int], Contribution] = {}  # of those parts
        self._received: dict[tuple[int, int], Tensor] = {}
        self._as_received: dict[tuple[int, int], tuple[Tensor, Contribution]] = {}  # without rows, by buffer
        self._rooms: dict[tuple[int, int], memoryview] = {}  # of those buffers: what the last push filled
        self._slots: dict[int, int] = {}  # of the members that are known to have one
        self._newest: dict[tuple[int, int], int] = {}  # by slot and shard: whose push was taken last
        self._held: dict[tuple[int, int, int], Contribution | None] = {}  # None within its carrier's
        self._fleeting: dict[tuple[int, int, int], bool] = {}  # held, copied if they outlive this message

    def add_area(self, member: int, segment: Segment) -> None:
        """Attach a worker's memory; ValueError if its size does not match this task."""
        known = self.areas.pop(member, None)
        if known is not None:
            known.close()
        area = self.areas[member] = WorkerArea(
            segment, self._layout, self._shared.values if self._shared is not None else None
        )
        for shard in range(self._layout.shards):
            self.parts[member, shard] = area.part(shard)
            self._dense.pop((member, shard), None)

    def room_for(self, push: Push, num_bytes: int, *, by_worker: bool = True) -> memoryview | None:
        """The receive buffer for a push's payload, None for a fresh one; ProtocolError if the size is wrong."""
        if by_worker and self._coding is not None:
            flags = self._layout.flag_bytes(push.shard)
            least = flags + self._coding.least_bytes(push.shard)
            if num_bytes < least:
                what = f"an encoded gradient for shard {push.shard}"
                raise ProtocolError("payload_bytes", f"{what} needs at least {least} bytes, not {num_bytes}")
            rows = num_bytes - flags - self._coding.most_bytes(push.shard)
            self.tables.check_capacity(push.shard, max(0, rows))
            return None
        dense = self._dense_bytes[push.shard] if self._inline else 0
        if num_bytes < dense:
            raise ProtocolError(
                "payload_bytes", f"a gradient for shard {push.shard} needs {dense} bytes, not {num_bytes}"
            )
        self.tables.check_capacity(push.shard, num_bytes - dense)
        if not self._inline:
            return None
        known = self._rooms.get((push.member, push.shard))
        if known is None or known.nbytes != num_bytes:
            buffer = self._buffer(push, num_bytes)  # which may drop the room that was known
            known = self._rooms[push.member, push.shard] = byte_view(buffer)
        return known

    def arriving(self, push: Push) -> Contribution | None:
        """The gradient that a push is bringing, of which not everything is here yet."""
        room = self._rooms.get((push.member, push.shard))
        return None if room is None else self.of(push, room)

    def of(self, push: Push, payload: memoryview, *, by_worker: bool = True) -> Contribution | None:
        """The gradient that came with a push, in place; None if its worker shares no memory and sent none.

        UnknownSets if it names row sets that are not known here. Rows may lie in `payload`: see `keep`.
        """
        of = push.member, push.shard
        part = self.parts.get(of)
        if part is not None:
            dense = self._dense.get(of)
            if dense is None:
                dense = self._dense[of] = Contribution(gradient=part.gradient, present=part.flags)
            if not self._layout.tables and not payload:
                return dense
            return replace(dense, rows=self.tables.gradients(push.shard, payload, borrow=True), borrows=True)
        if by_worker and payload and self._coding is not None:
            return self._contribution(self._decoded(self._coding, push, payload), push.shard)
        buffer = self._received.get(of)
        if buffer is None or not payload:
            return None
        if self._layout.tables or len(payload) != self._dense_bytes[push.shard]:
            return self._contribution(buffer[: len(payload)], push.shard)
        known = self._as_received.get(of)
        if known is None or known[0] is not buffer:
            whole = self._contribution(buffer[: len(payload)], push.shard)
            known = self._as_received[of] = (buffer, whole)
        return known[1]

    def keep(self, keep: Keep, contribution: Contribution | None) -> None:
        """Hold a gradient until `take` or `drop`; `secure` copies what the message or its worker may overwrite."""
        key = (keep.shard, keep.slot, keep.clock)
        if keep.carried:
            self._held[key] = None
            return
        assert contribution is not None, "what is kept came with the message"
        self._held[key] = contribution
        if keep.copy or contribution.borrows:
            self._fleeting[key] = keep.copy

    def secure(self) -> None:
        """Copy the held gradients that may be overwritten from now on, at the end of a message."""
        for key, copies_dense in self._fleeting.items():
            held = self._held.get(key)
            if held is not None:
                rows = {
                    name: RowGradient(rows=one.rows.clone(), values=one.values.clone())
                    for name, one in held.rows.items()
                }
                if copies_dense:
                    buffer = torch.cat([held.present, held.gradient.memory])
                    self._held[key] = replace(self._in_buffer(buffer, key[0]), rows=rows)
                else:
                    self._held[key] = replace(held, rows=rows, borrows=False)
        self._fleeting.clear()

    def take(self, shard: int, slot: int, clock: int) -> Contribution | None:
        """A held gradient, which is not held any more; None if its carrier's has it."""
        return self._held.pop((shard, slot, clock))

    def drop(self, shard: int, slot: int, clock: int) -> None:
        self._held.pop((shard, slot, clock), None)

    def held(self, shard: int) -> dict[tuple[int, int], Tensor]:
        """The gradients held for a shard, by slot and clock, in the form that `replace` takes."""
        held = {}
        for (of, slot, clock), one in self._held.items():
            if of == shard and one is None:
                held[slot, clock] = torch.empty(0, dtype=torch.uint8)
            elif of == shard and one is not None:
                rows = np.frombuffer(b"".join(self.tables.packed(one.rows)), np.uint8).copy()
                held[slot, clock] = torch.cat([one.present, one.gradient.memory, torch.from_numpy(rows)])
        return held

    def forwarded(self, push: Push) -> list[Any]:
        """The payload with which a held gradient is forwarded to a backup."""
        held = self._held[push.shard, push.slot, push.clock]
        assert held is not None, "a carried push is never forwarded by itself"
        rows = self.tables.packed(held.rows)
        if push.member in self.areas:
            return rows
        return [held.present.numpy(), held.gradient.memory.numpy(), *rows]

    def replace(self, shard: int, held: dict[tuple[int, int], Tensor]) -> None:
        """Hold exactly these gradients for a shard; each is one tensor of flags, range and rows."""
        for key in [key for key in self._held if key[0] == shard]:
            del self._held[key]
        for (slot, clock), buffer in held.items():
            self._held[shard, slot, clock] = self._contribution(buffer, shard) if buffer.numel() else None

    def lost(self, member: int) -> None:
        """Handle a disconnected member: release its memory if it never had a slot."""
        self.tables.forget(member)
        area = self.areas.get(member) if member not in self._slots else None
        if area is not None:
            del self.areas[member]
            for shard in range(self._layout.shards):
                self.parts.pop((member, shard), None)
                self._dense.pop((member, shard), None)
            area.close()

    def taken(self, push: Push) -> None:
        """Note that the shard has taken this push: earlier holders of its slot are fenced there from now on."""
        if self._newest.get((push.slot, push.shard)) != push.member:
            self._newest[push.slot, push.shard] = push.member
            self.succeed(push.slot, push.member, [push.shard])

    def succeed(self, slot: int, member: int, shards: Collection[int]) -> None:
        """Release what the predecessors of `member` in this slot had for these shards (0: nothing to do).

        A predecessor's whole area is closed when no shard needs it and no held gradient points into it.
        """
        if not member:
            return
        self._slots[member] = slot
        for old in [old for old, place in self._slots.items() if place == slot and old < member]:
            for shard in shards:
                for table in (self.parts, self._dense, self._received, self._rooms, self._as_received):
                    table.pop((old, shard), None)
            needed = {of for of, _ in (*self.parts, *self._received)}
            area = self.areas.get(old)
            if old in needed:
                continue
            if area is not None:
                begin, end = area.segment.address, area.segment.address + area.segment.num_bytes
                if any(one is not None and begin <= one.at[0] < end for one in self._held.values()):
                    continue
                del self.areas[old]
                area.close()
            del self._slots[old]

    def close(self) -> None:
        self._held.clear()
        self.parts.clear()
        self._dense.clear()
        for area in self.areas.values():
            area.close()
        self.areas.clear()

    def _buffer(self, push: Push, num_bytes: int) -> Tensor:
        buffer = self._received.get((push.member, push.shard))
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._received[push.member, push.shard] = torch.empty(num_bytes, dtype=torch.uint8)
            self._rooms.pop((push.member, push.shard), None)
        return buffer[:num_bytes]

    def _decoded(self, coding: RangeCoding, push: Push, payload: memoryview) -> Tensor:
        """Decode a payload into flags, range and rows, as an unencoded payload would be received."""
        flags, dense = self._layout.flag_bytes(push.shard), self._dense_bytes[push.shard]
        came = as_tensor(payload)
        encoded = flags + coding.length(push.shard, came[flags:])
        buffer = self._buffer(push, dense + came.numel() - encoded)
        buffer[:flags] = came[:flags]
        coding.decode(push.shard, came[flags:encoded], self._layout.range_in(buffer[flags:dense], push.shard))
        buffer[dense:] = came[encoded:]
        return buffer

    def _contribution(self, buffer: Tensor, shard: int) -> Contribution:
        dense = self._dense_bytes[shard]
        payload = memoryview(buffer[dense:].numpy())  # type: ignore[arg-type]
        return replace(self._in_buffer(buffer[:dense], shard), rows=self.tables.gradients(shard, payload))

    def _in_buffer(self, buffer: Tensor, shard: int) -> Contribution:
        flags = self._layout.flag_bytes(shard)
        return Contribution(gradient=self._layout.range_in(buffer[flags:], shard), present=buffer[:flags])
