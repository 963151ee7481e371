"""One optimizer state out of what the owners of parts keep, as the `state_dict()` of a single process would hold it.

An owner, a worker of `central` or a shard of `ps`, keeps the state of its parts of the parameters. A tensor of the
state that has the parameter's shape is cut as the parameter is; anything else (Adam's count of steps) every owner has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["MergedState", "Part"]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some rows of a parameter, or of the optimizer's state for it; the rows of a dense one are its items."""

    shape: torch.Size
    """Of the whole."""

    rows: slice | Tensor
    count: int
    """How many rows these are."""

    width: int = 1
    """Items in a row."""

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the parameter."""
        return self.count * self.width == self.shape.numel()

    def cut(self, value: Any) -> Any:
        """A copy of this part of a whole; what has another shape than the parameter is not cut."""
        if not isinstance(value, Tensor):
            return value
        if self.is_whole or value.shape != self.shape:
            return value.detach().clone()
        return value.detach().reshape(-1, self.width)[self.rows].reshape(-1).clone()

    def is_cut(self, value: Any) -> bool:
        """Whether it is this part of a tensor, and not something that every owner has."""
        return isinstance(value, Tensor) and not self.is_whole and value.shape == (self.count * self.width,)

    def room_in(self, whole: Tensor) -> Tensor:
        """Where the items of a part of consecutive rows belong, flat and in the memory of the whole."""
        assert isinstance(self.rows, slice), "rows that lie apart have no view"
        return whole.view(-1, self.width)[self.rows].view(-1)

    def lay_into(self, whole: Tensor | None, value: Tensor) -> Tensor:
        """The whole with this part in it; the part itself where that is all."""
        if not self.is_cut(value):
            return value
        if whole is None:
            whole = torch.empty(self.shape, dtype=value.dtype)
        whole.view(-1, self.width)[self.rows] = value.view(-1, self.width)
        return whole


class MergedState:
    """The `state` of a `state_dict()`, by the parameter's number; what every owner has is the first one's."""

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, Any]] = {}

    def add(self, position: int, state: Mapping[str, Any], part: Part | None = None) -> None:
        """Take in what one owner keeps for its part of a parameter; None: its tensors are laid in place already.

        Tensors that it has whole become the state's own, not copies.
        """
        kept = self._kept.setdefault(position, {})
        for key, value in state.items():
            if part is not None and part.is_cut(value):
                kept[key] = part.lay_into(kept.get(key), value)
            else:
                kept.setdefault(key, value)

    def to_dict(self) -> dict[int, dict[str, Any]]:
        """In the order of the parameters."""
        return dict(sorted(self._kept.items()))
