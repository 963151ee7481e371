"""What the workers of `sharded` send in a step: its layers are visited by the state machine that executes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor

from manyhands.data.batches import cut
from manyhands.data.randomness import preserved
from manyhands.engine.exchange import Traffic
from manyhands.facts import Stepping, TracedModel
from manyhands.strategies.common.grid.grid_group import traffic_of_sum
from manyhands.strategies.common.sharding import layer_units
from manyhands.strategies.common.sharding.optimizers import stepping_for
from manyhands.strategies.sharded.exchange import WORDS_OF_REQUEST, status_items
from manyhands.strategies.sharded.strategy import Sharded
from manyhands.strategy import WorkerTraffic, silent
from manyhands.wire.tap import GradientTap


def sent_in_step(strategy: Sharded, traced: TracedModel, workers: int) -> list[WorkerTraffic]:
    if workers == 1:
        return silent(1)
    task, ways = traced.task, strategy.facts.stepping
    whole = stepping_for(traced.optimizer, ways, strategy.word) is Stepping.APART
    share = -(-task.batch_size // workers)
    moves = Counter[int]()
    for piece in cut(share, task.microbatches):
        moves += _moved(traced, len(piece))
    units = layer_units.units_of(traced.model)
    pairs, words = workers * (workers - 1), torch.int64.itemsize * WORDS_OF_REQUEST
    rounds = moves.total() + 1  # the last one is where all have arrived
    total = traffic_of_sum(8 * status_items(workers, sum(len(unit.trained) for unit in units)), workers)
    if task.clip_norm is not None:  # the norm is summed when all have arrived once more
        rounds, total = rounds + 1, total + traffic_of_sum(8, workers)
    total += Traffic(messages_sent=rounds * pairs, bytes_sent=rounds * pairs * words)
    for unit in units:
        for layout in unit.layouts:
            for owned in layer_units.piece_ranges(layout, workers, whole=whole):
                # Its owner sends a piece of the values to all others, or gets their gradients of it.
                messages = moves[unit.number] * (workers - 1) * bool(owned)
                num_bytes = messages * len(owned) * layout.dtype.itemsize
                total += Traffic(messages_sent=messages, bytes_sent=num_bytes)
    return [WorkerTraffic.of_all("worker", workers, total.bytes_sent, total.messages_sent)]


def _moved(traced: TracedModel, samples: int) -> Counter[int]:
    """By unit: how often it is gathered, or its gradient handed on, for so many samples.

    What is gathered ahead, in the order of the step before, is what is needed, and counts once.
    """
    key = ("sharded", samples)
    if key not in traced.played:
        with preserved():
            traced.played[key] = _Visit(traced).moved(samples)
    return Counter(traced.played[key])


class _Visit:
    """A model without values whose units are never dropped, and that counts what would move."""

    def __init__(self, traced: TracedModel) -> None:
        self._traced = traced
        with traced.tracing():
            self._model = traced.copy()
            units = layer_units.units_of(self._model)
            memories = [layer_units.UnitMemory(unit, torch.device("cpu")) for unit in units]
            for memory in memories:
                memory.adopt()
        lasting = [unit.number for unit in units if unit.module is None]
        self._flow = layer_units.UnitFlow(len(units), lasting)
        self._visits = layer_units.UnitVisits(self._model, memories, self._flow, self._count)
        self._places = [(unit, number) for unit in units for number in unit.trained]
        self._units, self._moves = units, Counter[int]()
        self._missing = [set(unit.trained) for unit in units]  # gradients that have not come yet

    def moved(self, samples: int) -> Counter[int]:
        batch = self._traced.batch(samples)
        parameters = [unit.parameters[number] for unit, number in self._places]
        tap = GradientTap(parameters, self._on_gradient, lambda _: None)
        self._flow.begin("training")
        with self._visits.watching():
            loss = self._traced.task.loss(self._model, batch)
            self._flow.backward()
            loss.backward()
            for unit, missing in zip(self._units, self._missing, strict=True):
                if 0 < len(missing) < len(unit.trained):  # some of its parameters were not reached
                    self._count(self._flow.complete(unit.number))
        tap.close()
        self._visits.close()
        return self._moves

    def _on_gradient(self, index: int, parameter: Tensor) -> None:
        unit, number = self._places[index]
        parameter.grad = None
        missing = self._missing[unit.number]
        missing.discard(number)
        if not missing:
            missing.update(unit.trained)
            self._count(self._flow.complete(unit.number))

    def _count(self, actions: Iterable[layer_units.Action]) -> None:
        for action in actions:
            if isinstance(action, layer_units.Fetch | layer_units.Hand):
                self._moves[action.unit] += 1
