"""What the consistencies are for, in simulated experiments: `python benchmarks/consistency.py` prints the tables.

Stragglers: one worker that is slow for good holds everybody back under any bound (in the long run all clocks advance
alike), and under `async` nobody but itself; delays that pass are what a bound hides.

Staleness: n-softsync of Zhang et al., "Staleness-aware Async-SGD for Distributed Deep Learning" (arXiv 1511.05950), in
miniature: 30 learners train a small network on handwritten digits. Time is simulated, gradients are real.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from manyhands.foresight.simulate.driver import simulate
from manyhands.foresight.simulate.models import SimulatedTrained
from manyhands.foresight.simulate.simulated_spec import ComputeModel, SimulationSpec
from manyhands.native.threads import with_threads
from manyhands.strategies.common.consistency import parse_consistency
from manyhands.workloads.tasks.digits import read_digits

BOUNDS = ("bounded:0", "bounded:1", "bounded:2", "bounded:4", "bounded:8", "bounded:16", "async")
"""The consistencies of the straggler tables, from the strictest to none."""

PERMANENT = ComputeModel(step_s=0.1, factors={0: 5.0})
"""Worker 0 is five times as slow as the others, for good."""

PASSING = ComputeModel(step_s=0.1, delay_probability=0.1, delay_factor=5.0)
"""Any computation of any worker is five times as long, one time in ten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerRow:
    """One row of a straggler table."""

    consistency: str
    waiting_share: float  # of all workers' time, waiting for parameters
    updates_per_s: float  # optimizer steps per second; each is of one global batch


def straggler_table(
    compute: ComputeModel, *, workers: int = 8, rounds: int = 150, seed: int = 0
) -> list[StragglerRow]:
    """Run the same batches (`rounds` for each worker) under every consistency of `BOUNDS`."""
    rows = []
    for name in BOUNDS:
        run = simulate(
            SimulationSpec(
                workers=workers, steps=workers * rounds, consistency=name, compute=compute, seed=seed
            )
        )
        waiting, rate = run.waiting_share, run.updates_per_s
        rows.append(StragglerRow(consistency=name, waiting_share=waiting, updates_per_s=rate))
    return rows


def render_stragglers(rows: Sequence[StragglerRow]) -> str:
    lines = [f"{'consistency':<12}{'waiting':>8}{'updates/s':>11}"]
    lines += [f"{row.consistency:<12}{row.waiting_share:>8.1%}{row.updates_per_s:>11.1f}" for row in rows]
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRow:
    """The training result of one consistency."""

    consistency: str
    accuracy: float  # on images that were not trained on
    staleness: Counter[int]


LEARNERS = 30  # the lambda of the paper: learners, and so the staleness under `softsync:30`


def learn_digits(
    consistency: str, *, seed: int = 0, learners: int = LEARNERS, epochs: int = 20, rate: float = 0.5
) -> LearningRow:
    """Train a network with 32 hidden units on the digits of scikit-learn by plain SGD, and see what it has learned.

    As in the paper, each learner computes minibatches of mu images (here 8), everybody sees `epochs` epochs, and alpha0
    (here `rate`) is one that suits synchronous steps (hardsync) of lambda * mu = 240 images: under `sync` each step is
    the mean over so many. Under `softsync:30` each minibatch is a step of its own, about 30 steps stale: at the same
    alpha0 that fails, at alpha0 / tau it makes 30 steps of 1/30 of the rate for each synchronous one.

    What was chosen and why: digits, because they are there without a download and a plain network gets 95 % of them and
    more; 0.5, because it lies well between what steps 30 steps stale bear (0.1 trains, 0.3 does not) and what
    synchronous ones do (4 trains, 8 does not); 20 epochs, because little changes after that. Nothing depends on a lucky
    seed, which draws the weights, the order of the images and the times.

    `sync` splits each batch of 240, and its parts add up to the same whoever computes them: `learners=1` is as good.
    """
    stepwise = parse_consistency(consistency).stepwise
    batch = _MINIBATCH * LEARNERS if stepwise else _MINIBATCH
    model = _digits_model(rate, seed, batch)
    spec = SimulationSpec(
        workers=learners,
        steps=epochs * _TRAINED_ON // batch,
        consistency=consistency,
        compute=ComputeModel(spread=0.2),
        model=model,
        seed=seed,
    )
    with with_threads(1):  # tensors this small are slower with several
        run = simulate(spec)
    module = model.show([store.read() for store in run.stores])
    _, _, images, labels = _digits()
    with torch.no_grad():
        accuracy = (module(images).argmax(1) == labels).double().mean().item()
    return LearningRow(consistency=consistency, accuracy=accuracy, staleness=run.staleness())


_MINIBATCH = 8  # images per minibatch of a learner
_TRAINED_ON = 1440  # images, of 1797; a multiple of 30 minibatches


@cache
def _digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return training images and labels, and test ones; every pixel's mean is subtracted."""
    pixels, classes = read_digits()
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels, dtype=torch.float32)[order] / 8
    labels = torch.tensor(classes)[order]
    images -= images[:_TRAINED_ON].mean(0)
    return images[:_TRAINED_ON], labels[:_TRAINED_ON], images[_TRAINED_ON:], labels[_TRAINED_ON:]


def _layer(num_inputs: int, num_outputs: int, generator: torch.Generator) -> nn.Linear:
    """Return a linear layer whose initial weights depend on the generator alone."""
    layer = nn.Linear(num_inputs, num_outputs)
    bound = (3 / num_inputs) ** 0.5  # a variance of 1 / num_inputs
    with torch.no_grad():
        layer.weight.uniform_(-bound, bound, generator=generator)
        layer.bias.zero_()
    return layer


def _digits_model(rate: float, seed: int, batch_size: int) -> SimulatedTrained:
    images, labels, _, _ = _digits()
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(_layer(64, 32, generator), nn.ReLU(), _layer(32, 10, generator))

    @cache
    def order(epoch: int) -> Tensor:
        return torch.randperm(_TRAINED_ON, generator=torch.Generator().manual_seed(1000 * seed + epoch))

    def loss(module: nn.Module, batch: int, part: int, parts: int) -> Tensor:
        epoch, index = divmod(batch, _TRAINED_ON // batch_size)
        samples = order(epoch)[index * batch_size : (index + 1) * batch_size].tensor_split(parts)[part]
        return nn.functional.cross_entropy(module(images[samples]), labels[samples])

    def weight(batch: int, part: int, parts: int) -> float:
        del batch
        return (batch_size // parts + (part < batch_size % parts)) / batch_size

    def optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=rate)

    return SimulatedTrained(module, loss, optimizer, weight)


if __name__ == "__main__":
    for title, slow in (("one worker slow for good", PERMANENT), ("delays that pass", PASSING)):
        print(f"{title}\n{render_stragglers(straggler_table(slow))}\n")
    for name in ("sync", "softsync:30", "aware:softsync:30"):
        print(f"{name:<20}" + "".join(f"{learn_digits(name, seed=seed).accuracy:>8.1%}" for seed in range(3)))
