"""A step of layers beside its sums on a cable, played in virtual time: what an order of sending is worth at most.

One core computes forward of layers 1 to L, then backward of L to 1; a cable carries the gradients of one bucket at a
time. While it does, it takes a share of the core. A bucket may leave when backward has filled it, by arrival or the
one first that the next forward needs first. The next forward waits for all sums, or each layer for its own.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Model", "Order"]

_STEPS = 6  # of which the last is what repeats


@dataclass(frozen=True)
class Order:
    """How gradients leave, and what the next forward waits for."""

    layers: int  # of a bucket
    by_need: bool = False  # the bucket of the first layers first, else by arrival
    released: bool = False  # each layer of the next forward waits for its own bucket alone
    message_s: float = 0.0  # for which the cable is idle with every bucket


@dataclass(frozen=True)
class Model:
    """Seconds of a step: of forward, backward, the bytes on the cable, and of the optimizer with what all agree on."""

    layers: int
    forward_s: float
    backward_s: float
    cable_s: float
    end_s: float
    share: float = 0.0  # of the core, for the cable

    def step_s(self, order: Order) -> float:
        """How long a step takes once the same repeats."""
        play = _Play(self, order)
        begins = [play.step() for _ in range(_STEPS)]
        return begins[-1] - begins[-2]


class _Play:
    def __init__(self, model: Model, order: Order) -> None:
        self._model, self._order = model, order
        self._now_s = 0.0
        self._left: dict[
            int, float
        ] = {}  # by bucket on its way or waiting, in the order of backward: seconds to go
        self._sending: int | None = None
        self._count = -(-model.layers // order.layers)

    def step(self) -> float:
        """Play a step from the end of its last forward to the end of this one's."""
        model, order = self._model, self._order
        for layer in reversed(range(model.layers)):
            self._compute(model.backward_s / model.layers)
            if layer % order.layers == 0:
                self._left[layer // order.layers] = model.cable_s / self._count + order.message_s
        if not order.released:
            while self._left:
                self._pass(self._next_s())
            self._now_s += model.end_s
        for layer in range(model.layers):
            while layer // order.layers in self._left:
                self._pass(self._next_s())
            self._compute((model.forward_s + model.end_s * order.released) / model.layers)
        return self._now_s

    def _compute(self, work_s: float) -> None:
        """Compute, more slowly while the cable is busy."""
        while work_s > 0:
            speed = 1 - self._model.share if self._left else 1.0
            took_s = min(work_s / speed, self._next_s())
            self._pass(took_s)
            work_s -= took_s * speed
            if work_s < 1e-12:
                return

    def _next_s(self) -> float:
        """Until the bucket on the cable has arrived."""
        if not self._left:
            return float("inf")
        if self._sending is None:
            self._sending = min(self._left) if self._order.by_need else next(iter(self._left))
        return self._left[self._sending]

    def _pass(self, took_s: float) -> None:
        self._now_s += took_s
        if self._left:
            self._next_s()
            assert self._sending is not None, "something is on the cable"
            self._left[self._sending] -= took_s
            if self._left[self._sending] < 1e-12:
                del self._left[self._sending]
                self._sending = None
