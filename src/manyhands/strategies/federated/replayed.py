"""A vmapped gradient as a CUDA graph: otherwise a small model's step on a GPU is mostly the launching of kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from manyhands.strategies.federated.samples import Samples, apart

__all__ = ["ReplayedGradients"]

Gradients = Callable[[Sequence[Tensor], Any], tuple[list[Tensor], Tensor]]
_WORTH: Final = 20  # times that a shape has been computed before a graph of it is made
_GRAPHS: Final = 8  # at most: each keeps its own memory
_WARM_UP: Final = 3  # runs before a capture, in which libraries choose their kernels


@dataclass(frozen=True, slots=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    indices: Tensor
    gradients: list[Tensor]
    losses: Tensor

    def replay(self, indices: NDArray[np.int64]) -> tuple[list[Tensor], Tensor]:
        host = torch.from_numpy(np.ascontiguousarray(indices.reshape(-1))).pin_memory()
        self.indices.copy_(host, non_blocking=True)
        self.graph.replay()
        return self.gradients, self.losses


class ReplayedGradients:
    """Gradients of the first rows of `stacks`, from samples on the GPU; a shape that comes often has a graph."""

    def __init__(self, gradients: Gradients, samples: Samples, stacks: Sequence[Tensor]) -> None:
        self._gradients = gradients
        self._samples = samples
        self._stacks = stacks
        self._seen: dict[tuple[int, ...], int] = {}
        self._captured: dict[tuple[int, ...], _Captured] = {}
        self.refused = ""
        """Why no graph could be made, where that was tried."""

    def __call__(self, indices: NDArray[np.int64]) -> tuple[list[Tensor], Tensor]:
        """For samples (clients, batch) of the first so many clients; valid until the next call."""
        shape = indices.shape
        if shape in self._captured:
            return self._captured[shape].replay(indices)
        self._seen[shape] = self._seen.get(shape, 0) + 1
        if self._seen[shape] > _WORTH and len(self._captured) < _GRAPHS and not self.refused:
            try:
                self._captured[shape] = self._capture(shape)
            except (
                RuntimeError
            ) as error:  # a loss may do what a graph cannot hold, and is then launched as before
                self.refused = str(error).split("\n", 1)[0]
            else:
                return self._captured[shape].replay(indices)
        return self._compute(torch.from_numpy(np.ascontiguousarray(indices)).to(self._stacks[0].device))

    def _compute(self, indices: Tensor) -> tuple[list[Tensor], Tensor]:
        batch = apart(self._samples.gather(indices.reshape(-1)), indices.shape)
        return self._gradients([stack[: len(indices)] for stack in self._stacks], batch)

    def _capture(self, shape: tuple[int, ...]) -> _Captured:
        indices = torch.zeros(int(np.prod(shape)), dtype=torch.int64, device=self._stacks[0].device)
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                self._compute(indices.view(shape))
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            gradients, losses = self._compute(indices.view(shape))
        return _Captured(graph, indices, gradients, losses)
