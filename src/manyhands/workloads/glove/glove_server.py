"""GloVe through the parameter server: an `mh.Task` whose vectors are row-sparse tables, at every consistency.

The batch rule as torch's Adagrad has it. A step of the rule, with T the sum of a row's gradients without the rate r,
is r T / sqrt(1 + sum of (r T)^2) = T / sqrt(1 / r^2 + sum of T^2), and biases the same with r = 1. The server divides
gradients by the number of workers of a batch, and the loss divides by the batch, so for T / B the accumulators start
at 1 / (r B)^2, the learning rate is 1 and nothing is added to the root. B is the full batch also where the last of a
pass is short: that is still the sum rule.

A sample of the data set is one worker's chunk of a batch, all passes in one epoch. `fit` visits samples in a drawn
order, which the data set undoes: batch k is the records in the order of the file, for every strategy.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from manyhands.data.batches import permutation, split
from manyhands.task import Passes, Task
from manyhands.workloads.glove.cooccurrence_files import GloveWork, RecordReader
from manyhands.workloads.glove.glove_model import GloveModel, GloveSnapshot

Chunk = tuple[Tensor, Tensor, Tensor]
Batch = tuple[Tensor, Tensor, Tensor, int]
"""Rows of words, rows of contexts, counts; and how many chunks these are."""


def glove_tables(work: GloveWork, workers: int) -> Task:
    batch, steps = float(work.glove.batch), _batches_per_pass(work)
    return Task(
        model=partial(GloveTables, work),
        loss=partial(_loss, work=work, workers=workers),
        data=_Chunks(work, workers),
        optimizer=partial(_optimizer, work=work),
        batch_size=workers,
        records_each=work.num_records / (steps * workers),
        passes=Passes(steps=steps, weight=batch, last_weight=batch, total=float(work.num_records)),
        collate=_joined,
        sparse={
            f"{kind}{table}.weight": operator.itemgetter(rows)
            for rows, kind in enumerate(("word", "context"))
            for table in ("", "_bias")
        },
        name="glove",
    )


class GloveTables(nn.Module):
    """The parameters as four tables, one row per word."""

    def __init__(self, work: GloveWork) -> None:
        super().__init__()
        start = GloveModel(work.vocabulary_size, work.glove).initialise().snapshot()
        self.word, self.context = _table(start.word), _table(start.context)
        self.word_bias, self.context_bias = (
            _table(start.word_bias[:, None]),
            _table(start.context_bias[:, None]),
        )

    def forward(self, words: Tensor, contexts: Tensor) -> Tensor:
        products: Tensor = (self.word(words) * self.context(contexts)).sum(1)
        biases: Tensor = self.word_bias(words) + self.context_bias(contexts)
        return products + biases[:, 0]

    def snapshot(self) -> GloveSnapshot:
        named = [(name.removesuffix(".weight"), one) for name, one in self.named_parameters()]
        found = {name: one.detach().numpy().copy() for name, one in named}
        biases = {name: one[:, 0] for name, one in found.items() if name.endswith("_bias")}
        return GloveSnapshot(**{**found, **biases})


def _table(values: np.ndarray) -> nn.Embedding:
    rows, width = values.shape
    return nn.Embedding(rows, width, sparse=True, _weight=torch.from_numpy(values))


def _optimizer(parameters: Iterable[Parameter], *, work: GloveWork) -> torch.optim.Adagrad:
    """Adagrad with accumulators that start where the rule says; the parameters come as `GloveTables` has them."""
    word, context, *biases = parameters
    start = 1.0 / work.glove.batch**2
    vectors = {"params": [word, context], "initial_accumulator_value": start / work.glove.rate**2}
    groups = [vectors, {"params": biases, "initial_accumulator_value": start}]
    optimizer = torch.optim.Adagrad(groups, lr=1.0, eps=0.0)
    for group in optimizer.param_groups:  # torch itself begins with one value for all groups
        for parameter in group["params"]:
            optimizer.state[parameter]["sum"].fill_(group["initial_accumulator_value"])
    return optimizer


def _loss(model: nn.Module, batch: Batch, *, work: GloveWork, workers: int) -> Tensor:
    """The mean over chunks of what makes the mean over all chunks of a batch its sum of costs / B."""
    words, contexts, counts, chunks = batch
    errors: Tensor = model(words, contexts) - counts.log()
    weights = (counts / work.glove.x_max).pow(work.glove.alpha).clamp(max=1.0)
    return 0.5 * workers / (work.glove.batch * chunks) * (weights * errors * errors).sum()


def _joined(samples: Sequence[Chunk]) -> Batch:
    words, contexts, counts = (torch.cat([sample[column] for sample in samples]) for column in range(3))
    return words, contexts, counts, len(samples)


def _batches_per_pass(work: GloveWork) -> int:
    return -(-work.num_records // work.glove.batch)


class _Chunks:
    """Sample i: one worker's chunk of a batch, read from the file when it is asked for."""

    def __init__(self, work: GloveWork, workers: int) -> None:
        self._work, self._workers = work, workers
        self._places: np.ndarray | None = None

    def __len__(self) -> int:
        return self._work.glove.passes * _batches_per_pass(self._work) * self._workers

    def __getitem__(self, index: int) -> Chunk:
        work = self._work
        if self._places is None:
            order = permutation(len(self), work.glove.seed, 0)
            self._places = np.empty_like(order)
            self._places[order] = np.arange(len(order))
        batch, chunk = divmod(int(self._places[index]), self._workers)
        begin = batch % _batches_per_pass(work) * work.glove.batch
        part = split(min(work.glove.batch, work.num_records - begin), chunk, self._workers)
        with RecordReader(work.path, len(part), work.vocabulary_size) as reader:
            ids, counts = reader.read(begin + part.start, len(part))
        pairs = torch.from_numpy(ids.reshape(-1, 4)[:, :2].astype(np.int64) - 1)
        return pairs[:, 0], pairs[:, 1], torch.from_numpy(counts[1::2].astype(work.glove.numpy_dtype))
