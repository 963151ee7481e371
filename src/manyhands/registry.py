"""Every strategy by the first word of its text: where its value and its training are.

One line a strategy. Homes are names and not imports, so that a text is parsed, a help page printed or a worker started
without importing the packages of all the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

__all__ = ["STRATEGIES", "Home"]


@dataclass(frozen=True, slots=True)
class Home:
    """Where a strategy lives: `module:name` of its value's class and of its training's, inside the package."""

    value: str
    training: str

    def load_value(self) -> Any:
        """The class of the value."""
        return _load(self.value)

    def load_training(self) -> Any:
        """The class that trains by it."""
        return _load(self.training)


def _load(home: str) -> Any:
    module, _, name = home.partition(":")
    return getattr(import_module(f"manyhands.{module}"), name)


STRATEGIES: Final[dict[str, Home]] = {
    "single": Home("single.strategy:Single", "single.training:SingleTraining"),
    "mirrored": Home("allreduce.strategy:Mirrored", "allreduce.training:AllReduceTraining"),
    "allreduce": Home("allreduce.strategy:AllReduce", "allreduce.training:AllReduceTraining"),
    "central": Home("central.strategy:Central", "central.training:CentralTraining"),
    "ps": Home("server.strategy:Ps", "server.training:PsTraining"),
    "hogwild": Home("hogwild.strategy:Hogwild", "hogwild.training:HogwildTraining"),
    "local": Home("local.strategy:Local", "local.training:LocalTraining"),
    "tensor": Home("tensor.strategy:Tensor", "tensor.training:TensorTraining"),
}
