"""How easy a strategy is to use, as facts that are counted: lines, settings, processes, packages, what is shared."""

from __future__ import annotations

import dataclasses
import difflib
import importlib.metadata
import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, cast

from torch.nn.functional import mse_loss

from manyhands.facts import Split
from manyhands.strategy import Strategy


def plain_loop(model: Any, optimizer: Any, loader: Any) -> None:
    """A loop as people have it, before anything is changed."""
    for inputs, targets in loader:
        loss: Any = mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def joined_loop(model: Any, optimizer: Any, loader: Any) -> None:
    """The same loop for several workers."""
    import manyhands as mh

    with mh.join() as group:
        model, optimizer, loader = group.prepare(model, optimizer, loader)
        for inputs, targets in loader:
            loss: Any = mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def stepped_loop(model: Any, optimizer: Any, loader: Any) -> None:
    """The same loop where no worker can call the whole model."""
    import manyhands as mh

    with mh.join() as group:
        model, optimizer, loader = group.prepare(model, optimizer, loader)
        for batch in loader:
            group.step(batch, lambda model, batch: mse_loss(model(batch[0]), batch[1]))
            optimizer.step()
            optimizer.zero_grad()


@dataclass(frozen=True, kw_only=True, slots=True)
class Ease:
    """What a user of a strategy has to write, choose, start, install and share."""

    lines: int | None  # of a plain loop that are new or other; None: it takes no loop of one's own
    instead: str  # what it takes then
    settings: int  # of the strategy, without a default
    processes: Mapping[str, int]  # that one command starts, by kind
    packages: int | None  # that it needs installed; None where this package is not
    shares: str  # what its processes must have in common


def ease_of(strategy: Strategy, workers: int) -> Ease:
    facts = strategy.facts
    loop = stepped_loop if strategy.split is Split.LAYERS else joined_loop
    fields: Any = [one for one in dataclasses.fields(cast(Any, strategy)) if one.init]
    hosts = "one host's memory" if facts.cannot_cross_hosts else "one host's memory, or a network"
    processes = {kind: count for kind, count in strategy.processes(workers).items() if count}
    return Ease(
        lines=None if facts.instead_of_own_loop else _new_lines(loop),
        instead=facts.instead_of_own_loop,
        settings=sum(one.default is MISSING and one.default_factory is MISSING for one in fields),
        processes=processes,
        packages=_packages(),
        shares=hosts if sum(processes.values()) > 1 else "nothing",
    )


def _new_lines(loop: Callable[..., None]) -> int:
    """How many lines a loop has that the plain one lacks, whatever their indentation."""
    before, after = (_lines(one) for one in (plain_loop, loop))
    return sum(line.startswith("+ ") for line in difflib.ndiff(before, after))


def _lines(loop: Callable[..., None]) -> list[str]:
    _, _, *lines = (
        line.strip() for line in inspect.getsource(loop).splitlines()
    )  # without head and docstring
    return [line for line in lines if line]


def _packages() -> int | None:
    """Packages that this one names as needed, without those of its extras and what they need in turn."""
    try:
        required = importlib.metadata.requires("manyhands") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return sum("extra ==" not in one for one in required)
