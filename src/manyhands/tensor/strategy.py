"""`tensor` as a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from manyhands.errors import UserError
from manyhands.facts import IN_STEP, Promises, Split, Truth
from manyhands.strategy import Strategy

__all__ = ["Tensor"]


@dataclass(frozen=True, kw_only=True)
class Tensor(Strategy):
    """Every worker holds some of the dimensions of every vector, sees all samples, and only scalars travel."""

    word: ClassVar[str] = "tensor"
    about: ClassVar[str] = "the dimensions of every vector split over the workers; glove only, today"
    split: ClassVar[Split] = Split.DIMENSIONS
    truth: ClassVar[Truth] = Truth.EVERYONE

    @property
    def splits_batches(self) -> bool:
        """Every worker sees all samples."""
        return False

    @property
    def instead_of_own_loop(self) -> str:
        """A loop's model is whole."""
        return "run manyhands train glove for tensor"

    def check(self, workers: int, device: str, *, compiled: bool = False) -> None:
        """A network's layers cannot be split yet."""
        super().check(workers, device, compiled=compiled)
        if compiled:
            return
        raise UserError(
            "strategy tensor: only glove can split dimensions today: manyhands train glove --strategy tensor"
        )

    @property
    def promises(self) -> Promises:
        """All workers take every step together, so all are needed."""
        return IN_STEP
