"""Model of step time by exchange order: layers, one link, virtual time.

    after        everything is exchanged when backward is over: t_f + t_b + T_c
    overlapped   gradients leave as backward makes them, and the next step begins when all are there; at best
                 t_f + max(t_b, T_c)
    priority     the most urgent first, and each layer of the next step waits for its own parameters only; at best
                 max(t_f + t_b, T_c)

So priority gains at most 1 + t_f / (t_f + t_b) over a good overlap, where the exchange takes as long as computing, and
nothing where it hides behind backward. Slices go by the rule of a live run (`SendOrder`); all workers are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manyhands.errors import UserError
from manyhands.strategies.allreduce.priority.sender import SendOrder

__all__ = ["ORDERS", "LayeredStep", "gain_bound", "step_seconds"]


ORDERS = ("after", "overlapped", "priority")
_WARM = 4  # steps until the step time is stationary


@dataclass(frozen=True, slots=True, kw_only=True)
class LayeredStep:
    """A training step of a layered model, in forward order."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    num_bytes: Sequence[int]  # of each layer's gradient
    bytes_per_s: float  # that an all-reduce gets through: with P workers, bandwidth · P / (2 (P - 1))
    message_s: float = 0.0  # what each slice takes besides: reports and latencies
    slice_bytes: int = 1 << 20
    credit_bytes: int = 1 << 20

    def __post_init__(self) -> None:
        if not len(self.forward_s) == len(self.backward_s) == len(self.num_bytes) > 0:
            raise UserError("forward_s, backward_s and num_bytes must have one entry for each layer")
        if not (self.bytes_per_s > 0 and self.slice_bytes > 0):
            raise UserError("bytes_per_s and slice_bytes must be above 0")

    @property
    def slices(self) -> list[tuple[int, int]]:
        """Return layer and bytes of each slice, in the order in which backward produces them."""
        return [
            (layer, min(self.slice_bytes, self.num_bytes[layer] - begin))
            for layer in reversed(range(len(self.num_bytes)))
            for begin in range(0, self.num_bytes[layer], self.slice_bytes)
        ]

    @property
    def exchange_s(self) -> float:
        """T_c: the time of all slices one after the other."""
        return sum(self.seconds_of(num_bytes) for _, num_bytes in self.slices)

    def seconds_of(self, num_bytes: int) -> float:
        return self.message_s + num_bytes / self.bytes_per_s


def gain_bound(step: LayeredStep) -> float:
    """The most that priority gains over a perfect overlap, at any bandwidth: 1 + t_f / (t_f + t_b)."""
    forward_s, backward_s = sum(step.forward_s), sum(step.backward_s)
    return 1 + forward_s / (forward_s + backward_s)


def step_seconds(step: LayeredStep, order: str) -> float:
    if order not in ORDERS:
        raise UserError(f"order={order}: must be one of {', '.join(ORDERS)}")
    arrived, ends = [0.0] * len(step.num_bytes), [0.0]
    for _ in range(_WARM):
        made, end = _computed(step, ends[-1], arrived)
        ends.append(end)
        arrived = _exchanged(step, order, made, end)
    return ends[-1] - ends[-2]


def _computed(step: LayeredStep, begin: float, arrived: Sequence[float]) -> tuple[list[float], float]:
    """When each layer's gradient is made, and when backward is over; a layer waits for its own parameters."""
    now = begin
    for seconds, ready in zip(step.forward_s, arrived, strict=True):
        now = max(now, ready) + seconds
    made = [0.0] * len(arrived)
    for layer in reversed(range(len(arrived))):
        now += step.backward_s[layer]
        made[layer] = now
    return made, now


def _exchanged(step: LayeredStep, order: str, made: Sequence[float], end: float) -> list[float]:
    """Return when the next step may read each layer's parameters."""
    slices = step.slices
    ready = [end if order == "after" else made[layer] for layer, _ in slices]
    urgency = [layer if order == "priority" else 0 for layer, _ in slices]
    rule = SendOrder([num_bytes for _, num_bytes in slices], urgency, step.credit_bytes)
    arrived, now, sent = [0.0] * len(made), 0.0, 0
    while not rule.is_over:
        chosen = rule.next([number for number, at in enumerate(ready) if at <= now])
        if not chosen:
            now = min(at for at in ready if at > now)
        for number in chosen:
            layer, num_bytes = slices[number]
            now += step.seconds_of(num_bytes)
            arrived[layer] = now
            rule.arrived(number)
            sent += 1
    assert sent == len(slices), "every slice is sent once"
    return arrived if order == "priority" else [max(arrived, default=0.0)] * len(arrived)
