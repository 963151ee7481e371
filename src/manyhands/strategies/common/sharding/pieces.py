"""A piece: the part of a parameter that one owner keeps and updates."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Piece"]


@dataclass(frozen=True, slots=True)
class Piece:
    """Items `begin` to `end` of a parameter, all of them with one owner."""

    parameter: int
    begin: int
    end: int
