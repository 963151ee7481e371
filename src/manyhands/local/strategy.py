"""`local` as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

from manyhands.errors import UserError
from manyhands.facts import (
    ENDS,
    NO_SERVERS,
    NOBODY_JOINS,
    ROUNDED,
    TO_ROUNDING,
    Answer,
    Promise,
    Promises,
    Truth,
)
from manyhands.holding import ModelFootprint, WorkerMemory
from manyhands.settings import check_link, link_setting, setting
from manyhands.strategy import Strategy
from manyhands.wire.names import RAW, check_codec, codec_setting

__all__ = ["Local"]


def _read_steps(text: str) -> float:
    if text == "inf":
        return math.inf
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise UserError(f"local steps={text}: must be a whole number of at least 1, or inf")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class Local(Strategy):
    """Every worker takes its own steps on its part of each batch; every `steps` of them all replicas are averaged.

    `steps=1` with plain SGD is the synchronous step; `steps=inf` averages once, at the end. `link` is how processes of
    one host talk: through `shared` memory, or in a ring by `tcp` on loopback; there `codec` makes what travels smaller:
    how far each worker has come since the last average.
    """

    word: ClassVar[str] = "local"
    about: ClassVar[str] = "each worker takes its own steps; parameters are averaged every few of them"
    truth: ClassVar[Truth] = Truth.EVERYONE
    cannot_cross_hosts: ClassVar[str] = ""
    when_evaluating: ClassVar[str] = "Under local, evaluations wait for the next average."

    steps: float = setting(8, _read_steps)
    """How many steps of its own a worker takes between two averages."""
    link: str = link_setting()
    codec: str = codec_setting()

    def __post_init__(self) -> None:
        check_link(self.link)
        check_codec(self.codec, link=self.link)
        if self.steps != math.inf and (self.steps < 1 or self.steps != int(self.steps)):
            raise UserError(f"local steps={self.steps}: must be a whole number of at least 1, or inf")

    @property
    def uses_links(self) -> bool:
        """Only where there is a network; memory is averaged in place."""
        return self.uses_network

    @property
    def stepwise(self) -> bool:
        """Only where every step ends with an average."""
        return self.steps == 1

    def needs(self, model: ModelFootprint, workers: int) -> list[WorkerMemory]:
        """A replica each, and room in which replicas are averaged."""
        [worker] = super().needs(model, workers)
        if workers == 1:
            return [worker]
        return [
            replace(worker, besides=model.weights + model.state, what="room in which replicas are averaged")
        ]

    @property
    def promises(self) -> Promises:
        """All are needed for the next average."""
        apart = Promise(
            answer=Answer.NO, words="replicas drift apart between averages; the same in every repetition"
        )
        return Promises(
            worker_dies=ENDS,
            server_dies=NO_SERVERS,
            workers_join=NOBODY_JOINS,
            same_numbers=apart if self.steps != 1 else TO_ROUNDING if self.codec == RAW else ROUNDED,
        )
