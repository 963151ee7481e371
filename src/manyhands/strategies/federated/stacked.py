"""Several clients trained at once, on stacked copies of the model (`torch.func.vmap`).

    rows of each stacked parameter:   client a │ b │ c │ d        ordered by how many steps they take, most first
    step t:                           the first so many rows: those that still have batches
    of these, batches of equal size:  one vmapped gradient;  then one step of the optimizer on all rows at once

No batch is padded, so that a loss may be any function of a batch. The optimizer is torch's own: those that work item by
item do the same to a stack as to its rows.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from manyhands.data.randomness import mix
from manyhands.engine.computing import require_loss
from manyhands.strategies.federated.algorithms import FederatedAlgorithm
from manyhands.strategies.federated.client_data import Batches, Samples, apart
from manyhands.strategies.federated.client_updates import ClientAssignment, ClientUpdate, Tensors
from manyhands.strategies.federated.clients import LocalWork, batches, plain_products
from manyhands.task import Task

Indices = NDArray[np.int64]
Found = tuple[list[Tensor], Tensor]  # gradients, and losses
Correct = Callable[[int, Tensors, Tensors], None]
ITEM_BY_ITEM: Final = (SGD, Adam, AdamW, Adagrad, Adadelta, Adamax, NAdam, RAdam, RMSprop)
"""Optimizers that do to an item of a parameter what depends on this item alone."""
_EPSILON: Final = 1e-6  # as in torch.nn.utils.clip_grad_norm_
_WORTH: Final = 20  # times that a shape has been computed before a graph of it is made
_GRAPHS: Final = 8  # at most: each keeps its own memory
_WARM_UP: Final = 3  # runs before a capture, in which libraries choose their kernels


class ReplayedGradients:
    """Gradients of the first rows of `stacks`, from samples on the GPU; a shape that comes often has a graph."""

    def __init__(self, gradients: Callable[[Tensors, Any], Found], samples: Samples, stacks: Tensors) -> None:
        self._gradients, self._samples, self._stacks = gradients, samples, stacks
        self._counts: dict[tuple[int, ...], int] = {}
        self._graphs: dict[tuple[int, ...], Callable[[Indices], Found]] = {}
        self.refused = ""  # why no graph could be made, where that was tried

    def __call__(self, indices: Indices) -> Found:
        """For samples (clients, batch) of the first so many clients; valid until the next call."""
        shape = indices.shape
        self._counts[shape] = self._counts.get(shape, 0) + 1
        often = self._counts[shape] > _WORTH and len(self._graphs) < _GRAPHS
        if often and shape not in self._graphs and not self.refused:
            try:
                self._graphs[shape] = self._capture(shape)
            except RuntimeError as error:  # a graph cannot hold every loss; it is then launched as before
                self.refused = str(error).split("\n", 1)[0]
        if shape in self._graphs:
            return self._graphs[shape](indices)
        return self._compute(torch.from_numpy(np.ascontiguousarray(indices)).to(self._stacks[0].device))

    def _compute(self, indices: Tensor) -> Found:
        batch = apart(self._samples.gather(indices.reshape(-1)), indices.shape)
        return self._gradients([stack[: len(indices)] for stack in self._stacks], batch)

    def _capture(self, shape: tuple[int, ...]) -> Callable[[Indices], Found]:
        indices = torch.zeros(int(np.prod(shape)), dtype=torch.int64, device=self._stacks[0].device)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                self._compute(indices.view(shape))
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = self._compute(indices.view(shape))

        def replay(wanted: Indices) -> Found:
            host = torch.from_numpy(np.ascontiguousarray(wanted.reshape(-1))).pin_memory()
            indices.copy_(host, non_blocking=True)
            graph.replay()
            return found

        return replay


_Parts = Sequence[tuple[Indices, Indices]]  # positions (clients,) and samples (clients, batch)
_Work = tuple[ClientAssignment, list[Indices]]  # and the client's batches in order


def steps_of(batches_of: Sequence[Sequence[Indices]]) -> Iterator[tuple[int, _Parts]]:
    """Each step: how many clients are active, the first so many; for each size of batch, which, and their samples."""
    counts = [len(own) for own in batches_of]
    assert counts == sorted(counts, reverse=True), "clients with more steps come first"
    for number in range(counts[0] if counts else 0):
        active = sum(count > number for count in counts)
        by_size: dict[int, list[int]] = {}
        for position in range(active):
            by_size.setdefault(len(batches_of[position][number]), []).append(position)
        yield (
            active,
            [
                (np.array(positions), np.stack([batches_of[position][number] for position in positions]))
                for positions in by_size.values()
            ],
        )


class _LossOfBatch(nn.Module):
    """A task's loss as a module, so that `functional_call` puts other parameters into the model."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model, self._task = model, task

    def forward(self, batch: Any) -> Tensor:
        loss = self._task.loss(self.model, batch)
        require_loss(loss)
        return loss.reshape(())


class StackedGradients:
    """Gradient and loss of each of several clients, on its own batch with its own tensors, in the order of `held`."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        loss = _LossOfBatch(task, model)
        parameters = dict(loss.named_parameters())
        buffers = [name for name, one in loss.named_buffers() if one.is_floating_point()]
        self._names = [*parameters, *buffers]
        self.trained = [number for number, one in enumerate(parameters.values()) if one.requires_grad]

        def loss_of(trained: dict[str, Tensor], fixed: dict[str, Tensor], batch: Any) -> Tensor:
            found: Tensor = functional_call(loss, {**trained, **fixed}, (batch,))
            return found

        self._gradients = vmap(grad_and_value(loss_of), randomness="error")

    def __call__(self, stacked: Tensors, batch: Any) -> Found:
        """For tensors (clients, …), a batch (clients, samples, …): gradients of what is trained, losses (clients,)."""
        trained = {self._names[one]: stacked[one] for one in self.trained}
        named = zip(self._names, stacked, strict=True)
        fixed = {name: one for name, one in named if name not in trained}
        found, losses = self._gradients(trained, fixed, batch)
        return [found[name] for name in trained], losses


class StackedTrainer:
    """Simulates up to `most` clients at once; the caller has checked that the task and the model allow it."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        algorithm: FederatedAlgorithm,
        work: LocalWork,
        seed: int,
        most: int,
    ) -> None:
        self._task, self._algorithm, self._work = task, algorithm, work
        self._seed, self._most = seed, most
        self._model = copy.deepcopy(model).train()
        parameters = list(self._model.parameters())
        self._parameters = len(parameters)
        self._device = parameters[0].device
        self.samples = Samples(task, self._device)
        self._coming: Iterator[Any] = iter(())  # batches of the steps to come
        self._gradients = StackedGradients(task, self._model)
        self._trained = self._gradients.trained
        self._optimizer = task.optimizer(self._model.parameters())
        places = {id(parameters[number]): place for place, number in enumerate(self._trained)}
        self._places = [
            [places[id(one)] for one in group["params"] if id(one) in places]
            for group in self._optimizer.param_groups
        ]
        self._stacks: list[Tensor] = []
        self._rows: list[Tensor] = []  # of what is trained: those of clients that still have batches
        self._losses = torch.zeros(0)
        self._replayed: ReplayedGradients | None = None

    def play(self, assigned: Sequence[ClientAssignment], like: Optimizer) -> Iterator[ClientUpdate]:
        for begin in range(0, len(assigned), self._most):
            yield from self._play_group(assigned[begin : begin + self._most], like)

    @property
    def notice(self) -> str:
        refused = self._replayed.refused if self._replayed is not None else ""
        return f"; without a CUDA graph ({refused})" if refused else ""

    def _play_group(self, assigned: Sequence[ClientAssignment], like: Optimizer) -> Iterator[ClientUpdate]:
        algorithm = self._algorithm
        works = [
            (one, list(batches(self._work, one.samples, self._seed, one.number, one.client)))
            for one in assigned
        ]
        works.sort(key=lambda work: -len(work[1]))
        starts = [
            algorithm.layers.put(one.client, algorithm.begin(one.client, one.weights)) for one, _ in works
        ]
        losses = self._run(works, starts, like, algorithm.correct if algorithm.corrects else None)
        updates = {}
        for position, ((one, own), start) in enumerate(zip(works, starts, strict=True)):
            steps = len(own)
            with torch.no_grad():
                change = algorithm.reported(one.client, start, self._row(position, start), steps)
            updates[one.client] = ClientUpdate(
                client=one.client,
                change=change,
                samples=len(one.samples),
                steps=steps,
                loss=losses[position] / max(1, steps),
                staleness=one.staleness,
            )
        if algorithm.trains_personal:
            near = [one.weights for one, _ in works]
            starts = [algorithm.personal(one.client, one.weights) for one, _ in works]
            self._run(works, starts, like, algorithm.correct_personal, near)
            for position, ((one, _), start) in enumerate(zip(works, starts, strict=True)):
                with torch.no_grad():
                    algorithm.keep_personal(one.client, self._row(position, start))
        for one in assigned:
            yield updates[one.client]

    def _row(self, position: int, start: Tensors) -> list[Tensor]:
        tensors = list(start)
        for one in self._trained:
            tensors[one] = self._stacks[one][position]
        return tensors

    def _run(
        self,
        works: Sequence[_Work],
        starts: Sequence[Tensors],
        like: Optimizer,
        correct: Correct | None,
        near: Sequence[Tensors] | None = None,
    ) -> list[float]:
        """All steps of these clients; the sums of their losses. Gradients are corrected by `near`, or by `starts`."""
        self._begin(starts, like)
        steps = list(steps_of([own for _, own in works]))
        wanted = [indices for _, parts in steps for _, indices in parts]
        first, _ = works[0]
        self._coming = self.samples.each(Batches(wanted, mix(self._seed, first.number, first.client)))
        for active, parts in steps:
            if active < len(self._rows[0]):
                self._shrink(active)
            with plain_products(self._model):
                gradients, losses = self._computed(active, parts)
            with torch.no_grad():
                self._losses[:active] += losses
                for row, gradient in zip(self._rows, gradients, strict=True):
                    row.grad = gradient
                for position, (one, _) in enumerate(works[:active]):
                    if correct is None:
                        break
                    parameters = list(starts[position][: self._parameters])
                    for row, gradient, number in zip(self._rows, gradients, self._trained, strict=True):
                        parameters[number] = row[position].detach()  # what is not trained has no gradient
                        parameters[number].grad = gradient[position]
                    correct(one.client, parameters, (near or starts)[position])
                self._clip(gradients)
                self._optimizer.step()
        return self._losses.tolist()

    @torch.no_grad()
    def _begin(self, starts: Sequence[Tensors], like: Optimizer) -> None:
        count = len(starts)
        if not self._stacks:
            self._stacks = [one.new_empty((self._most, *one.shape)) for one in starts[0]]
            if self._device.type == "cuda" and self.samples.resident:
                self._replayed = ReplayedGradients(self._gradients, self.samples, self._stacks)
        for stack, *begun in zip(self._stacks, *starts, strict=True):
            if all(one is begun[0] for one in begun):
                stack[:count].copy_(begun[0].expand(count, *begun[0].shape))
            else:
                torch.stack(begun, out=stack[:count])
        self._losses = torch.zeros(count, dtype=torch.float64, device=self._device)
        self._rows = [self._stacks[one][:count] for one in self._trained]
        self._optimizer.state.clear()
        groups = self._optimizer.param_groups
        for group, set_as, places in zip(groups, like.param_groups, self._places, strict=True):
            group.update({name: value for name, value in set_as.items() if name != "params"})
            group["params"] = [self._rows[place] for place in places]

    def _shrink(self, active: int) -> None:
        smaller = [self._stacks[one][:active] for one in self._trained]
        state = self._optimizer.state
        for before, after in zip(self._rows, smaller, strict=True):
            kept = state.pop(before, None)
            if kept is not None:
                state[after] = {  # a step count is shared by all rows
                    name: value[:active]
                    if isinstance(value, Tensor) and value.shape == before.shape
                    else value
                    for name, value in kept.items()
                }
        self._rows = smaller
        for group, places in zip(self._optimizer.param_groups, self._places, strict=True):
            group["params"] = [smaller[place] for place in places]

    def _computed(self, active: int, parts: _Parts) -> Found:
        if len(parts) == 1:
            [(_, indices)] = parts
            if self._replayed is not None:
                return self._replayed(indices)
            return self._gradients([stack[:active] for stack in self._stacks], self._next_apart(indices))
        gradients = [torch.empty_like(row) for row in self._rows]
        losses = self._losses.new_empty(active)
        for positions, indices in parts:
            where = torch.from_numpy(positions).to(self._device)
            stacks = [stack[where] for stack in self._stacks]
            found, lost = self._gradients(stacks, self._next_apart(indices))
            for gradient, one in zip(gradients, found, strict=True):
                gradient[where] = one
            losses[where] = lost.to(losses.dtype)
        return gradients, losses

    def _next_apart(self, indices: Indices) -> Any:
        resident = self.samples.resident  # some steps may be replayed without a batch
        batch = self.samples.fetch(indices.reshape(-1)) if resident else next(self._coming)
        return apart(batch, indices.shape)

    def _clip(self, gradients: Tensors) -> None:
        task = self._task
        if task.clip_norm is not None:
            norms = [torch.linalg.vector_norm(one.flatten(1), dim=1) for one in gradients]
            norm = torch.linalg.vector_norm(torch.stack(norms), dim=0)
            scale = (task.clip_norm / (norm + _EPSILON)).clamp(max=1)
            for one in gradients:
                one.mul_(scale.view(-1, *[1] * (one.dim() - 1)))
        elif task.clip_value is not None:
            for one in gradients:
                one.clamp_(-task.clip_value, task.clip_value)
