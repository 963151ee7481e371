"""What a worker makes of the mean over all replicas: the setting `outer=`, and the steps it stands for.

mean       every replica becomes the mean                                       local SGD (Stich 2019)
nesterov   the mean is taken for a step, and momentum is put under it           DiLoCo (Douillard et al. 2023)
elastic    replicas stay apart, drawn to a centre that is drawn to them         elastic averaging (Zhang et al. 2015)

Where the exchange takes a while (`overlap=`) or takes fragments in turn, `Mixed` merges what arrives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Final

from manyhands.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import Tensor

MEAN: Final = "mean"


class OuterStep(ABC):
    """One worker's outer step, for all parameters by number; every call is made on all workers."""

    keeps_apart: ClassVar[bool] = False
    """Whether replicas, and with them the optimizer states, differ after the step."""

    def begin(self, parameters: Sequence[Tensor]) -> None:  # noqa: B027 - the mean needs nothing
        """Called before the first step since the last average."""

    @abstractmethod
    def take(self, number: int, parameter: Tensor, mean: Tensor) -> None:
        """Update parameter `number` in place, given the mean over all replicas."""

    def plainly(self, _number: int, parameter: Tensor, mean: Tensor) -> None:
        """Set parameter `number` to the mean, in place: for steps that end with a plain average."""
        parameter.copy_(mean)

    def memory(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, memory: Mapping[str, Tensor]) -> None:  # noqa: B027 - the mean remembers nothing
        """Restore what `memory` returned."""

    @contextmanager
    def shown(self, _parameters: Sequence[Tensor]) -> Iterator[None]:
        """While the context is open, parameters hold the result of the run."""
        yield


class Mean(OuterStep):
    """Every replica becomes the mean."""

    def take(self, number: int, parameter: Tensor, mean: Tensor) -> None:
        self.plainly(number, parameter, mean)

    def stepped(self, _number: int, _before: Tensor, mean: Tensor) -> Tensor:
        return mean


class Nesterov(OuterStep):
    """Treats the change of the mean since the last average as a gradient, for SGD with Nesterov momentum."""

    def __init__(self, rate: float, momentum: float) -> None:
        self._rate, self._momentum = rate, momentum
        self._before: list[Tensor] = []
        self._velocity: dict[int, Tensor] = {}

    def begin(self, parameters: Sequence[Tensor]) -> None:
        if not self._before:
            self._before = [parameter.detach().clone() for parameter in parameters]
        for before, parameter in zip(self._before, parameters, strict=True):
            before.copy_(parameter)

    def take(self, number: int, parameter: Tensor, mean: Tensor) -> None:
        parameter.copy_(self.stepped(number, self._before[number], mean))

    def stepped(self, number: int, before: Tensor, mean: Tensor) -> Tensor:
        """Return where the step leads from `before`, and remember its momentum."""
        gradient = before - mean
        velocity = self._velocity.get(number)
        if velocity is None:
            velocity = self._velocity[number] = gradient.clone()
        else:
            velocity.mul_(self._momentum).add_(gradient)
        return before.add(gradient.add(velocity, alpha=self._momentum), alpha=-self._rate)

    def memory(self) -> dict[str, Tensor]:
        return {str(number): velocity for number, velocity in self._velocity.items()}

    def load_state(self, memory: Mapping[str, Tensor]) -> None:
        self._velocity = {int(number): velocity.clone() for number, velocity in memory.items()}


class _Centred(OuterStep):
    """Replicas stay apart; each worker keeps the centre, which is equal on all. It is the result of the run."""

    keeps_apart = True

    def __init__(self) -> None:
        self.centre: list[Tensor] = []

    def begin(self, parameters: Sequence[Tensor]) -> None:
        """The first time, when all replicas are equal, take them as the centre."""
        if not self.centre:
            self.centre = [parameter.detach().clone() for parameter in parameters]

    def plainly(self, number: int, parameter: Tensor, mean: Tensor) -> None:
        super().plainly(number, parameter, mean)
        self.centre[number].copy_(mean)

    @contextmanager
    def shown(self, parameters: Sequence[Tensor]) -> Iterator[None]:
        if not self.centre:
            yield
            return
        own = [parameter.detach().clone() for parameter in parameters]
        for parameter, centre in zip(parameters, self.centre, strict=True):
            parameter.detach().copy_(centre)
        try:
            yield
        finally:
            for parameter, value in zip(parameters, own, strict=True):
                parameter.detach().copy_(value)


class Elastic(_Centred):
    """Worker and centre attract each other: the worker moves by `pull` / workers, the centre by `pull` to the mean."""

    def __init__(self, pull: float, world: int) -> None:
        super().__init__()
        self._pull, self._own_pull = pull, pull / world

    def take(self, number: int, parameter: Tensor, mean: Tensor) -> None:
        centre = self.centre[number]
        parameter.sub_((parameter - centre).mul_(self._own_pull))
        centre.add_((mean - centre).mul_(self._pull))


class Mixed(_Centred):
    """The centre takes the outer step; each worker keeps the share `own` of its own parameters (Douillard et al. 2025).

    `mean` is of what the workers had when they sent it: meanwhile they may have taken further steps.
    """

    def __init__(self, outer: Mean | Nesterov, own: float) -> None:
        super().__init__()
        self._outer, self.own = outer, own

    def take(self, number: int, parameter: Tensor, mean: Tensor) -> None:
        centre = self.centre[number]
        centre.copy_(self._outer.stepped(number, centre, mean))
        parameter.lerp_(centre, 1 - self.own)  # where both are equal, exactly that

    def memory(self) -> dict[str, Tensor]:
        return self._outer.memory()

    def load_state(self, memory: Mapping[str, Tensor]) -> None:
        self._outer.load_state(memory)


Maker = Callable[[Sequence[float], int], OuterStep]

OUTER: Final[dict[str, tuple[tuple[tuple[str, float], ...], Maker]]] = {
    MEAN: ((), lambda _numbers, _world: Mean()),
    "nesterov": ((("rate", 0.7), ("momentum", 0.9)), lambda numbers, _world: Nesterov(*numbers)),
    "elastic": ((("pull", 0.9),), lambda numbers, world: Elastic(numbers[0], world)),
}
"""By name: its numbers with their defaults, and the factory for one of so many workers."""


def outer_step(text: str, world: int) -> OuterStep:
    """Return the outer step that `text`, a value of `outer=`, names; UserError says what is wrong with it."""
    word, *given = str(text).split(":")
    if word not in OUTER:
        raise UserError(f"unknown outer step {word!r}; {nearest(word, OUTER)}")
    fields: Any = OUTER[word][0]
    usual = ":".join([word, *(f"{value:g}" for _, value in fields)])
    if len(given) > len(fields):
        raise UserError(f"outer={text}: too many numbers for {word}; {usual} is the usual value")
    numbers = [value for _, value in fields]
    for index, one in enumerate(given):
        name = fields[index][0]
        try:
            numbers[index] = float(one)
        except ValueError:
            reason = f"{name} {one!r} is not a number; {usual} is the usual value"
            raise UserError(f"outer={text}: {reason}") from None
        allowed, fits = _ALLOWED[name]
        if not fits(numbers[index]):
            raise UserError(f"outer={text}: {name}={one} must be {allowed}; {usual} is the usual value")
    return OUTER[word][1](numbers, world)


_ALLOWED: Final[dict[str, tuple[str, Callable[[float], bool]]]] = {
    "rate": ("above 0 and at most 10", lambda rate: 0 < rate <= 10),
    "momentum": ("at least 0 and below 1", lambda momentum: 0 <= momentum < 1),
    "pull": ("above 0 and at most 1", lambda pull: 0 < pull <= 1),
}
