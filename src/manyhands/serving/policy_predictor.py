"""Predictor of a policy that was trained by `train rl`: an observation in, the best action out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from manyhands.data.file_reader import read_values
from manyhands.errors import UserError
from manyhands.workloads.exporting import load
from manyhands.workloads.predictor import ModulePredictor, ReadAs
from manyhands.workloads.rl.policies import ActorCritic

_DIGITS = 6  # of a probability
_AT_ONCE = 1024


class PolicyPredictor(ModulePredictor[Tensor]):
    """Chooses the action with the highest probability; says that, and what the policy expects to earn."""

    formats: ClassVar[tuple[str, ...]] = ("auto", "json", "npy")
    takes: str  # type: ignore[misc] # depends on the environment

    def __init__(self, model: ActorCritic) -> None:
        super().__init__(model)
        self._shape = model.observation_shape
        self.takes = f"an observation: finite numbers of shape {self._shape}"

    def blocks(self, source: str, read_as: ReadAs) -> Iterator[Tensor]:
        self.check_format(read_as)
        values = read_values(source, read_as.format)
        for begin in range(0, len(values), _AT_ONCE):
            yield self.inputs(values[begin : begin + _AT_ONCE])

    def inputs(self, values: Sequence[Any]) -> Tensor:
        rows = []
        for number, value in enumerate(values):
            try:
                row = np.asarray(value, np.float32)
            except (TypeError, ValueError, OverflowError):
                row = np.empty(0, np.float32)
            if row.shape != self._shape or not np.isfinite(row).all():
                raise UserError(f"input {number} must be {self.takes}")
            rows.append(row)
        return torch.from_numpy(np.stack(rows))

    def together(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts))

    def answers(self, inputs: Tensor) -> list[Any]:
        with torch.inference_mode():
            scores, values = self.model(inputs)
            chances, actions = scores.double().softmax(dim=1).max(dim=1)
        found = zip(actions.tolist(), chances.tolist(), values.tolist(), strict=True)
        return [
            {"action": action, "probability": round(chance, _DIGITS), "value": value}
            for action, chance, value in found
        ]

    @property
    def example(self) -> Any:
        return np.zeros(self._shape).tolist()

    def example_batch(self, count: int, seed: int = 0) -> tuple[Tensor]:
        return (torch.randn(count, *self._shape, generator=torch.Generator().manual_seed(seed)),)


def open_policy(path: Path) -> PolicyPredictor:
    model = load(path)
    assert isinstance(model, ActorCritic), "train rl trains these"
    return PolicyPredictor(model)
