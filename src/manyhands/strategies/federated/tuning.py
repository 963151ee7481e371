"""Fine-tuning: `personal=finetune:EPOCHS`, where each client trains the common model further after the last round.

It is the simplest personalisation: the improved model is on the device anyway, and nothing leaves it. The result
follows from the common model, the client's samples and the seed, so nothing of it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from torch import Tensor

from manyhands.errors import UserError, nearest
from manyhands.strategies.federated.algorithms.algorithm import FederatedAlgorithm

__all__ = ["AFTER_ALL", "NOTHING_PERSONAL", "Tuned", "Tuning", "TuningSteps"]

NOTHING_PERSONAL: Final = "none"
"""The setting with which clients use the model that the algorithm gives them."""
AFTER_ALL: Final = 2**31 - 1
"""The number of a round that no run has: what is random in fine-tuning is drawn apart."""
_WORD: Final = "finetune"

Tuned = Iterator[tuple[int, Sequence[Tensor]]]
"""Clients, and what their models have become: parameters, then floating-point buffers."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Fine-tuning settings: for how many epochs each client trains on its samples."""

    epochs: int

    @classmethod
    def parse(cls, text: str) -> Tuning | None:
        """Read `finetune:2`, or `finetune` for one epoch; None for `none`; UserError for anything else."""
        if text == NOTHING_PERSONAL:
            return None
        word, colon, number = text.partition(":")
        if word != _WORD:
            raise UserError(f"personal={text}: unknown; {nearest(word, [_WORD, NOTHING_PERSONAL])}")
        if not colon:
            return cls(1)
        if not (number.isascii() and number.isdigit() and 0 < int(number) < 10**6):
            raise UserError(f"personal={text}: {number!r} is no number of epochs; write {_WORD}:1 or more")
        return cls(int(number))


class TuningSteps(FederatedAlgorithm):
    """Plain training steps after which a client reports its tensors as they are: they are not averaged."""

    word: ClassVar[str] = _WORD
    about: ClassVar[str] = "steps on a client's own samples after the last round"

    def report(
        self, client: int, start: Sequence[Tensor], trained: Sequence[Tensor], steps: int
    ) -> Sequence[Tensor]:
        """Report a copy of the trained tensors."""
        del client, start, steps
        return [one.clone() for one in trained]
