"""`manyhands doctor --prove FILE`: which strategies have the numbers of one process on this machine, as a file to send.

Each that promises them trains a small model, on processors and, where there are several, on all GPUs, and is compared
with one process. The file says what was proved, what failed, and what there was no device for.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from manyhands.engine.fitting import fit
from manyhands.engine.run import Run
from manyhands.errors import ManyhandsError
from manyhands.facts import Answer
from manyhands.native.version import __version__
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy
from manyhands.task import Task

STEPS: Final = 20
TOLERANCE: Final = 1e-9  # in float64, relative to the largest weight


class ProofVerdict(StrEnum):
    """What came of a proof."""

    PROVED = "proved"
    FAILED = "failed"
    SKIPPED = "skipped"  # there is no device for it, or the strategy rejects it


@dataclass(frozen=True, slots=True)
class EqualityProof:
    """A strategy on so many workers of one kind of device, and what came of it."""

    strategy: str
    device: str
    workers: int
    verdict: ProofVerdict
    found: str
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    """What the run said of itself: who sums gradients, who shares a device."""


def prove(on_proof: Callable[[EqualityProof], None] = lambda _: None) -> dict[str, Any]:
    """Everything that this machine has devices for, in a minute or two; `on_proof` hears of each as it is done."""
    cores, gpus = len(os.sched_getaffinity(0)), torch.cuda.device_count()
    proofs = []
    for proof in _all_proofs(max(2, min(cores, 8)), gpus):
        on_proof(proof)
        proofs.append(asdict(proof))
    return {"machine": _machine(cores), "steps": STEPS, "tolerance": TOLERANCE, "proofs": proofs}


def _all_proofs(workers: int, gpus: int) -> Iterator[EqualityProof]:
    yield from _proofs_on("cpu", workers)
    if gpus > 1:
        yield from _proofs_on("cuda", gpus)
    else:
        missing = f"it needs two GPUs, and {'one is' if gpus else 'none is'} here"
        for strategy in _equal_strategies():
            yield EqualityProof(str(strategy), "cuda", 2, ProofVerdict.SKIPPED, missing)


def _proofs_on(device: str, workers: int) -> Iterator[EqualityProof]:
    alone = fit(_task(), "single", steps=STEPS, device=device)
    for strategy in _equal_strategies():
        yield _proof(strategy, device, workers, alone)


def _proof(strategy: Strategy, device: str, workers: int, alone: Run) -> EqualityProof:
    begun = time.monotonic()
    try:
        run = fit(_task(), strategy, workers=workers, steps=STEPS, device=device)
    except ManyhandsError as error:
        return EqualityProof(
            str(strategy), device, workers, ProofVerdict.FAILED, str(error), time.monotonic() - begun
        )
    distance = largest_difference(run.model, alone.model)
    verdict = ProofVerdict.PROVED if distance <= TOLERANCE else ProofVerdict.FAILED
    found = f"weights differ from those of one process by {distance:.1e}"
    notes = tuple(run.summary.get("notes", ()))
    return EqualityProof(str(strategy), device, workers, verdict, found, time.monotonic() - begun, notes)


def largest_difference(model: nn.Module, other: nn.Module) -> float:
    """Of any two weights of the same place, relative to the largest weight; infinite where one is not a number."""
    with torch.no_grad():
        one, two = (parameters_to_vector(part.parameters()).cpu() for part in (model, other))
        ratio = float((one - two).abs().max() / two.abs().max())
    return ratio if math.isfinite(ratio) else math.inf


def _equal_strategies() -> list[Strategy]:
    """Those that promise the numbers of one process with their defaults."""
    every = [Strategy.parse(word) for word in STRATEGIES if word != "single"]
    return [one for one in every if one.facts.promises.same_numbers.answer is Answer.YES]


def _machine(cores: int) -> dict[str, Any]:
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "manyhands": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": cores,
        "gpus": gpus,
    }


def _task() -> Task:
    """A perceptron in float64 on numbers drawn here, with an optimizer that has momentum."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(256, 16, generator=draw, dtype=torch.float64)
    targets = inputs.sin().sum(1, keepdim=True)
    return Task(model=_model, loss=_loss, data=(inputs, targets), optimizer=_optimizer, batch_size=64)


def _model() -> nn.Module:
    layers = [nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*layers, *[nn.Linear(64, 64) for _ in range(8)], nn.Linear(64, 1)).double()


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
