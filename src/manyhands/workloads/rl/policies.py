"""Policies: modules that give a batch of N observations scores (N, actions) and values (N,).

The scores are unnormalised log-probabilities of discrete actions. A policy of a user's own is any `nn.Module` like
this; `check_policy` says before training where one is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.errors import UserError, first_line, num_of
from manyhands.workloads.rl.rl_kernels import draw_actions
from manyhands.workloads.rl.rollouts import RolloutSpec

__all__ = ["ActorCritic", "check_policy", "choose", "scorer"]

_SMALLEST_SIDE = 20  # of an image, so that both convolutions have something to see
_FEATURES = 256
_WHITE = 255
_CHECKED_ROWS = 3
_MOST_PRODUCTS = 1 << 17  # of a layer in numpy; from about twice as many on, its BLAS starts threads

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


class ActorCritic(nn.Module):
    """The policy that is used where none is given.

    Two tanh layers for numbers; for images, uint8 (channels, height, width), IMPALA's shallow network (Espeholt et
    al., 2018) without its LSTM. Weights are orthogonal at the start, and those of the scores small, so that the first
    actions are nearly uniform. A shared trunk serves scores and values; separate ones are each other's copy in shape.
    """

    def __init__(
        self, observation_shape: Sequence[int], actions: int, *, hidden: int = 64, shared: bool | None = None
    ) -> None:
        super().__init__()
        self.observation_shape = shape = tuple(observation_shape)
        self._sees_images = len(shape) == 3 and min(shape[1:]) >= _SMALLEST_SIDE
        shared = self._sees_images if shared is None else shared

        def trunk() -> nn.Sequential:
            return _convolutions(shape) if self._sees_images else _layers(math.prod(shape), hidden)

        self.policy_trunk = trunk()
        self.value_trunk = None if shared else trunk()
        features = _FEATURES if self._sees_images else hidden
        self.scores = _orthogonal(nn.Linear(features, actions), 0.01)
        self.value = _orthogonal(nn.Linear(features, 1), 1.0)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self._inputs(observations)
        features = self.policy_trunk(inputs)
        seen = features if self.value_trunk is None else self.value_trunk(inputs)
        return self.scores(features), self.value(seen).squeeze(1)

    def _inputs(self, observations: Tensor) -> Tensor:
        inputs = observations.to(self.scores.weight.dtype)
        if observations.dtype == torch.uint8:
            inputs = inputs / _WHITE
        return inputs if self._sees_images else inputs.reshape(len(inputs), -1)

    def scorer(self) -> Callable[[Tensor], Tensor]:
        """See `scorer`. Few rows of small layers are left to numpy, whose cost per call is a fraction of PyTorch's."""

        def by_torch(observations: Tensor) -> Tensor:
            found: Tensor = self.scores(self.policy_trunk(self._inputs(observations)))
            return found

        weight = self.scores.weight
        layers = [one for one in (*self.policy_trunk, self.scores) if isinstance(one, nn.Linear)]
        small = not self._sees_images and weight.device.type == "cpu"
        if not small or weight.dtype not in (torch.float32, torch.float64):
            return by_torch
        *trunk, last = ((one.weight.detach().numpy().T, one.bias.detach().numpy()) for one in layers)
        most_rows = _MOST_PRODUCTS // max(one.weight.numel() for one in layers)

        def scores(observations: Tensor) -> Tensor:
            if len(observations) > most_rows:
                return by_torch(observations)
            outputs = self._inputs(observations).numpy()
            for weights, biases in trunk:
                outputs = np.tanh(outputs @ weights + biases)
            return torch.from_numpy(outputs @ last[0] + last[1])

        return scores


def scorer(policy: nn.Module) -> Callable[[Tensor], Tensor]:
    """A function that gives the scores of observations without the values, which few steps of acting need.

    For use without gradients, and for as long as the policy's weights stay where they are in memory; their numbers may
    change.
    """
    if isinstance(policy, ActorCritic):
        return policy.scorer()
    return lambda observations: policy(observations)[0]


def _layers(inputs: int, hidden: int) -> nn.Sequential:
    first, second = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden)
    return nn.Sequential(_orthogonal(first), nn.Tanh(), _orthogonal(second), nn.Tanh())


def _convolutions(shape: tuple[int, ...]) -> nn.Sequential:
    height, width = (((side - 8) // 4 - 3) // 2 + 1 for side in shape[1:])
    return nn.Sequential(
        _orthogonal(nn.Conv2d(shape[0], 16, 8, stride=4)),
        nn.ReLU(),
        _orthogonal(nn.Conv2d(16, 32, 4, stride=2)),
        nn.ReLU(),
        nn.Flatten(),
        _orthogonal(nn.Linear(32 * height * width, _FEATURES)),
        nn.ReLU(),
    )


def _orthogonal(layer: Layer, gain: float = math.sqrt(2)) -> Layer:
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def choose(scores: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Actions (N,) drawn from scores (N, actions) with a number from [0, 1) each, and their log-probabilities.

    A row's action follows from its own scores and number, so that it does not matter which rows are chosen for
    together. The sums are in double precision.
    """
    scores, uniforms = scores.detach(), uniforms.double().contiguous()
    if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
        actions = torch.empty(len(scores), dtype=torch.int64)
        log_probs = torch.empty(len(scores), dtype=scores.dtype)
        draw_actions(scores.contiguous().numpy(), uniforms.numpy(), actions.numpy(), log_probs.numpy())
        return actions, log_probs
    every_log_prob = scores.double().log_softmax(1)
    sums = every_log_prob.exp().cumsum(1)
    above = sums > uniforms.unsqueeze(1) * sums[:, -1:]
    actions = above.to(torch.int8).argmax(1)
    return actions, every_log_prob.gather(1, actions.unsqueeze(1)).squeeze(1).to(scores.dtype)


@torch.no_grad()
def check_policy(policy: nn.Module, spec: RolloutSpec, actions: int) -> None:
    """UserError where the policy's outputs for observations of `spec` do not fit so many actions."""
    device = next((one.device for one in policy.parameters()), torch.device("cpu"))
    shape = (_CHECKED_ROWS, *spec.observation_shape)
    observations = torch.zeros(shape, dtype=spec.observation_dtype, device=device)
    given = f"policy: for observations of shape {shape} and type {str(spec.observation_dtype)[6:]}"
    was_training = policy.training
    policy.eval()  # what a batch norm keeps must not change
    try:
        outputs = policy(observations)
    except Exception as error:
        raise UserError(f"{given} it failed: {first_line(error)}") from error
    finally:
        policy.train(was_training)
    if not (isinstance(outputs, tuple) and len(outputs) == 2 and all(map(torch.is_tensor, outputs))):
        raise UserError(f"{given} it gave a {type(outputs).__name__}; it must give (scores, values)")
    wanted = {"scores": (_CHECKED_ROWS, actions), "values": (_CHECKED_ROWS,)}
    for (name, shape_wanted), output in zip(wanted.items(), outputs, strict=True):
        if tuple(output.shape) != shape_wanted:
            reason = f", as the environment has {num_of(actions, 'action')}" if name == "scores" else ""
            raise UserError(
                f"{given} its {name} are of shape {tuple(output.shape)}; they must be {shape_wanted}{reason}"
            )
        if not output.is_floating_point():
            raise UserError(
                f"{given} its {name} are of type {str(output.dtype)[6:]}; they must be of a floating type"
            )
        known = output if name == "values" else output.where(~output.isneginf(), 0)  # that cannot be chosen
        if not (known.isfinite().all() and (name == "values" or output.isfinite().any(1).all())):
            raise UserError(f"{given} its {name} are not all finite; check its initial weights")
