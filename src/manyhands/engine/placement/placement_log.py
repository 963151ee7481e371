"""The placement log: where each operation of a forward pass ran, and what was copied for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from manyhands.errors import format_bytes

__all__ = ["PlacedOperation", "PlacementLog"]

_HEAD = ("module", "operation", "device", "shape", "copied", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedOperation:
    """One operation, as it was called in Python: `linear`, `matmul`, `to`."""

    module: str
    """The module in whose `forward` it was called; empty for the model's own."""

    operation: str
    device: str
    """Where it ran; of a copy, where to."""

    shape: tuple[int, ...]
    """Of its result, of the first where there are several."""

    copied_bytes: int = 0
    """What was copied from one device to another for it."""

    note: str = ""
    """Why it did not run where its module is placed; empty where it did."""


@dataclass(slots=True)
class PlacementLog:
    """The operations of the last forward pass, in order; `print` it, or iterate over its rows.

    Operations of backward run where those of forward did, and gradients pass every copy in reverse.
    """

    rows: list[PlacedOperation] = field(default_factory=list)
    """Of the last forward pass."""

    notes: list[str] = field(default_factory=list)
    """What was placed elsewhere than it was asked for, and why; a sentence each."""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[PlacedOperation]:
        return iter(self.rows)

    @property
    def copied_bytes(self) -> int:
        """The bytes that the last forward pass copied between devices."""
        return sum(row.copied_bytes for row in self.rows)

    def note(self, sentence: str) -> None:
        """Add a notice, once."""
        if sentence not in self.notes:
            self.notes.append(sentence)

    def __str__(self) -> str:
        table = [_HEAD, *map(_cells, self.rows)]
        widths = [max(len(row[column]) for row in table) for column in range(len(_HEAD))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table
        ]
        lines += [f"note: {sentence}" for sentence in self.notes]
        return "\n".join(line.rstrip() for line in lines)


def _cells(row: PlacedOperation) -> tuple[str, ...]:
    copied = format_bytes(row.copied_bytes) if row.copied_bytes else ""
    shape = "×".join(map(str, row.shape)) or "scalar"
    return (row.module or "(model)", row.operation, row.device, shape, copied, row.note)
