"""What a slow link adds to a step that was run on loopback: by the cost model of each strategy; pure."""

from __future__ import annotations

from dataclasses import dataclass

from manyhands.errors import UserError
from manyhands.facts import LinkRate, Machines, TaskProfile
from manyhands.strategy import Strategy

_CODED = ("codec=", "feedback=")


@dataclass(frozen=True, kw_only=True, slots=True)
class GeoRow:
    """One strategy: what was seen on loopback, and what the link makes of it."""

    strategy: str
    here_s: float  # a step, seen on loopback
    link_s: float  # what the link adds to it, modelled
    step_bytes: float  # that a worker sends, seen
    steps: int | None  # until the target, seen; None: never
    shaped_s: float | None = None  # a step, seen on a shaped loopback
    shaped_predicted_s: float | None = None  # the same, modelled

    @property
    def step_s(self) -> float:
        return self.here_s + self.link_s

    @property
    def seconds(self) -> float | None:
        """Until the target, over the link."""
        return None if self.steps is None else self.steps * self.step_s

    @property
    def num_bytes(self) -> float | None:
        """That a worker sends until the target."""
        return None if self.steps is None else self.steps * self.step_bytes

    @property
    def error(self) -> float | None:
        """Of the model, where the link was shaped for real."""
        if self.shaped_s is None or self.shaped_predicted_s is None:
            return None
        return self.shaped_predicted_s / self.shaped_s - 1


def plain_of(strategy: Strategy) -> Strategy:
    """The same without its codec."""
    return Strategy.parse(" ".join(word for word in str(strategy).split() if not word.startswith(_CODED)))


def sent_plainly(strategy: Strategy, profile: TaskProfile, workers: int) -> float | None:
    """Bytes that a worker sends in a step without the codec; None where that is not modelled."""
    traffic = plain_of(strategy).sends(profile.model, workers)
    return None if traffic is None else max((one.num_bytes for one in traffic), default=0.0)


def link_seconds(
    strategy: Strategy, profile: TaskProfile, workers: int, link: LinkRate, ratio: float = 1.0
) -> float:
    """Seconds that workers on hosts of their own wait in a step for a link that sends and receives at once.

    A codec is a faster link: by `ratio`, of the bytes that travel to those that would without it. Its rounds, and so
    the latencies, stay those of the plain strategy.
    """
    faster = LinkRate(latency_s=link.latency_s, bytes_per_s=link.bytes_per_s / max(ratio, 1e-9))
    plain = plain_of(strategy)
    far = plain.predict(profile, Machines(hosts=workers, between=faster))
    here = plain.predict(profile, Machines(per_host=workers))
    if far is None or here is None:
        raise UserError(f"strategy={strategy}: no cost model predicts its steps over a link; leave it out")
    return max(0.0, far.exchange_s - here.exchange_s)
