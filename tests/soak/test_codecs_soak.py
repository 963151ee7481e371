"""Published settings: what codecs leave out costs no accuracy, and without error feedback it does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from manyhands.workloads.tasks.digits import DigitsOptions, digits
from manyhands.workloads.tasks.mnist import MnistOptions, mnist

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3600)]

MNIST = Path(__file__).parents[3] / "shared" / "data" / "mnist"
RATE, MOMENTUM = 0.05, 0.9
WORKERS = 2


def sgd(momentum: float, parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=momentum)


def decayed(steps: int, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def accuracy(make: Callable[[], mh.Task], steps: int, codec: str, momentum: float = MOMENTUM) -> float:
    """In points, at the end."""
    task = replace(
        make(), optimizer=functools.partial(sgd, momentum), scheduler=functools.partial(decayed, steps)
    )
    run = mh.fit(task, f"allreduce link=tcp {codec}", workers=WORKERS, steps=steps)
    assert task.evaluation is not None
    images, labels = task.evaluation
    run.model.eval()
    with torch.no_grad():
        return 100 * float((run.model(images).argmax(1) == labels).double().mean())


def make_mnist() -> mh.Task:
    return mnist(MnistOptions(path=MNIST))


TASKS = {"digits": (lambda: digits(DigitsOptions()), 400), "mnist": (make_mnist, 1400)}


@pytest.mark.parametrize("name", TASKS)
def test_published_settings_are_as_accurate_as_no_codec(name: str) -> None:
    make, steps = TASKS[name]
    if name == "mnist" and not MNIST.exists():
        pytest.skip(f"{MNIST} is not here")
    plain = accuracy(make, steps, "")
    sparse = accuracy(make, steps, f"codec=dgc:0.001,momentum={MOMENTUM},warmup={steps // 4}", momentum=0.0)
    factors = accuracy(make, steps, "codec=powersgd:2")
    assert plain - sparse <= 0.5, (plain, sparse)
    assert plain - factors <= 0.5, (plain, factors)


def test_without_error_feedback_the_known_failure_shows() -> None:
    """Top-k that forgets what it leaves out never moves most parameters (Karimireddy et al., ICML 2019)."""
    make, steps = TASKS["digits"]
    plain = accuracy(make, steps, "")
    without = accuracy(make, steps, "codec=topk:0.001 feedback=no")
    assert plain - without > 3, (plain, without)
