"""Gradients of a caller's own backwards, where a worker holds a part of the model: kept apart until they are summed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn

from manyhands.wire.tap import GradientTap, put


@contextmanager
def adding_up(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """What `grad` is at the end of the block is added to what it was before, as a backward does."""
    earlier = [one.grad for one in parameters]
    for one in parameters:
        one.grad = None
    yield
    for one, before in zip(parameters, earlier, strict=True):
        if before is not None:
            one.grad = before if one.grad is None else one.grad.add_(before)


class LoopGradients:
    """Takes every gradient of `parameters`, weighted, until `pending` gives them back; `close` is idempotent."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.weight = 1.0
        self.on_next_gradient: Callable[[], None] | None = None
        self._parameters = [one for one in parameters if one.requires_grad]
        self._taken: dict[int, Tensor] = {}
        self._earlier: dict[int, Tensor | None] = {}
        self._tap = GradientTap(self._parameters, self._take, self._make_room)

    def begin_step(self, step: int) -> None:
        """Nothing to do: nothing is sent before `pending`."""

    def holding(self) -> AbstractContextManager[None]:
        return nullcontext()  # whoever holds does not ask for what is pending

    @contextmanager
    def pending(self) -> Iterator[None]:
        """Inside, `grad` is what came since the last time; at the end that is added to what it was before."""
        with adding_up(self._parameters):
            for number, one in enumerate(self._parameters):
                one.grad = self._taken.get(number)
            self._taken = {}
            yield

    def close(self) -> None:
        self._tap.close()

    def _make_room(self, number: int) -> None:
        if self.on_next_gradient is not None:
            listener, self.on_next_gradient = self.on_next_gradient, None
            listener()
        self._earlier[number], self._parameters[number].grad = self._parameters[number].grad, None

    def _take(self, number: int, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, self._earlier.pop(number)
        assert gradient is not None, "it has just come"
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if number in self._taken:
            put(self._taken[number], gradient, self.weight, add=True)
        else:
            put(gradient, gradient, self.weight)
            self._taken[number] = gradient
