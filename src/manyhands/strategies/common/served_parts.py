"""A trained model cut for serving, where one process is not to hold all of it: what each process of a worker has.

A strategy that cuts models for training cuts them here as well; its line in the registry names its class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from manyhands.errors import UserError
from manyhands.strategy import Strategy, settings_of
from manyhands.transport.link.interface import Link


class ServedParts(ABC):
    """`modules[r]` is for process r, the first of which is asked; UserError where the model cannot be cut so."""

    part: ClassVar[str]  # what a process holds, in a word
    chained: ClassVar[bool]
    """Whether each takes the output of the one before; else all take the model's input, and are connected by links."""
    precisions: ClassVar[tuple[str, ...]]  # that its parts can compute in
    modules: tuple[nn.Module, ...]

    @abstractmethod
    def __init__(self, strategy: Strategy, model: nn.Module, example: tuple[Tensor, ...]) -> None:
        """Cut `model`, which takes `example`: some inputs."""

    @staticmethod
    def attach(module: nn.Module, rank: int, links: Mapping[int, Link]) -> nn.Module:
        """What process `rank` computes with; called there, with links to the others where parts are not chained."""
        del rank, links
        return module


def refuse_others(strategy: Strategy, *used: str) -> None:
    """UserError where `strategy` says something besides `used`, which are all that serving has a use for."""
    for name, one in settings_of(type(strategy)).items():
        if name not in used and getattr(strategy, name) != one.default:
            raise UserError(f"--strategy {strategy}: a served model has {used[0]} only; leave {name} out")
