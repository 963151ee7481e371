"""Reporting for strategies whose workers may choose a codec (`codec=auto`): the choice stands in the summary."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from manyhands.engine.exchanging import ExchangeTraining
from manyhands.wire.choice import CHOSEN, codec_sentence
from manyhands.wire.names import auto_error

__all__ = ["ChoosingTraining"]


class ChoosingTraining(ExchangeTraining):
    """Training with one exchange, whose summary says which codec was chosen."""

    @property
    @abstractmethod
    def codec(self) -> str:
        """The codec that the strategy sets."""

    def gather(self, finished: Sequence[Mapping[str, Any]]) -> tuple[int, dict[str, Any]]:
        """The gathered results, with the codec that the workers chose."""
        samples, besides = super().gather(finished)
        return samples, {**besides, CHOSEN: finished[0].get(CHOSEN)} if self._chooses else besides

    def said(self, finished: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """A sentence on which codec was chosen, and why."""
        return (codec_sentence(finished[0].get(CHOSEN)),) if self._chooses else ()

    @property
    def _chooses(self) -> bool:
        return auto_error(self.codec) is not None
