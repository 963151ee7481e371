"""Row-sparse gradients, as of `nn.Embedding(sparse=True)`, for torch's functions that take dense ones."""

from __future__ import annotations

from collections.abc import Iterable

import torch

__all__ = ["clippable"]


def clippable(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters for torch's clipping functions; a row-sparse gradient is replaced by its rows.

    An absent row is 0: it adds nothing to a norm, and lies within every bound.
    """
    return [_rows_of(one) if one.grad is not None and one.grad.is_sparse else one for one in parameters]


@torch.no_grad()
def _rows_of(parameter: torch.Tensor) -> torch.Tensor:
    """A stand-in parameter whose gradient is the memory of the coalesced rows."""
    assert parameter.grad is not None, "only of those that have one"
    parameter.grad = parameter.grad.coalesce()
    rows = parameter.grad._values()
    stand_in = torch.empty_like(rows)
    stand_in.grad = rows
    return stand_in
