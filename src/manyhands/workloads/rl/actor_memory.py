"""What a learner shares with its actors: rollouts, the newest weights or requests for actions, where each actor is.

    | rollouts of lag + 1 updates | weights of lag + 1 versions and their numbers | progress of each actor | requests |

The rollouts of one update lie as one batch, ticket after ticket, and the learner reads them where they are. Update u
uses the room of update u - lag - 1, which has been learned from before a ticket of update u can be begun. A version
stays until every ticket that can be begun with it has ended. So no reader meets a writer, and nothing here waits; the
number beside the weights proves that they are whole and what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from manyhands.errors import Desync, UserError, num_of
from manyhands.native.closeable import Closeable
from manyhands.native.segment import CACHE_LINE, Segment, round_up
from manyhands.workloads.rl.inference_requests import ActionRequests, groups_of, request_tensors
from manyhands.workloads.rl.rollouts import Rollouts, RolloutSpec

__all__ = ["ActorMemory", "ActorProgress", "MemoryPlan", "layout_of"]

_WRITING = -1  # in place of a version
_Layout = tuple[tuple[str, tuple[int, ...], torch.dtype], ...]


def layout_of(state: Mapping[str, Tensor]) -> _Layout:
    """Name, shape and type of each tensor of a policy's `state_dict`."""
    other = next((name for name, one in state.items() if not isinstance(one, Tensor)), None)
    if other is not None:
        raise UserError(
            f"policy: {other} of its state_dict is not a tensor, so actors cannot follow it; register it as a buffer"
        )
    return tuple((name, tuple(one.shape), one.dtype) for name, one in state.items())


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """All sizes, which the learner and every actor know."""

    spec: RolloutSpec
    rows: int  # of a ticket: the environments of an actor
    rollouts_per_update: int
    lag: int
    actors: int
    weights: _Layout  # none where inference is central
    groups: int = (
        0  # of each actor's environments, that central inference answers one by one; 0: it is not central
    )

    @property
    def without_policy(self) -> int:
        """The actors that have no policy of their own."""
        return self.actors if self.groups else 0

    @property
    def tensors(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """All tensors in the order in which they lie: batches, versions, their numbers, progress, requests."""
        batch = list(self.spec.fields(self.rows * self.rollouts_per_update).values())
        weights = [(shape, dtype) for _, shape, dtype in self.weights]
        progress = ((len(ActorProgress.FIELDS),), torch.int64)
        numbers = ((self.lag + 1,), torch.int64)
        requests = request_tensors(self.spec, groups_of(self.rows, self.groups), self.without_policy)
        versions = weights * (self.lag + 1) + [numbers]
        return batch * (self.lag + 1) + versions + [progress] * self.actors + requests

    @property
    def num_bytes(self) -> int:
        return sum(_room(shape, dtype) for shape, dtype in self.tensors)


def _room(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return round_up(prod(shape) * dtype.itemsize, CACHE_LINE)


class ActorProgress:
    """Where an actor is; it writes, and the learner looks when the actor is silent or gone."""

    FIELDS = ("incarnation", "rollout", "step", "episodes")

    def __init__(self, row: Tensor) -> None:
        self._row = row.numpy()

    def begin(self, incarnation: int, rollout: int) -> None:
        self._row[:3] = incarnation, rollout, 0

    def step(self, episodes: int) -> None:
        """Called before each step is taken; `episodes` have ended in all environments of the actor."""
        self._row[2] += 1
        self._row[3] = episodes

    def read(self) -> tuple[int, ...]:
        return tuple(self._row.tolist())

    def __str__(self) -> str:
        _, rollout, step, episodes = self.read()
        return (
            f"in step {step} of its rollout {rollout}, after {num_of(episodes, 'episode')}"
            if step
            else "before its first step"
        )


class ActorMemory(Closeable):
    """The memory, mapped by a learner or an actor; `segment` is of the plan's size."""

    def __init__(self, plan: MemoryPlan, segment: Segment) -> None:
        self._plan, self._segment = plan, segment
        tensors, offset = [], 0
        for shape, dtype in plan.tensors:
            tensors.append(segment.tensor(offset, prod(shape), dtype).view(shape))
            offset += _room(shape, dtype)
        following = iter(tensors)
        fields = range(len(Rollouts._fields))
        self._batches = [Rollouts(*(next(following) for _ in fields)) for _ in range(plan.lag + 1)]
        self._weights = [{name: next(following) for name, *_ in plan.weights} for _ in range(plan.lag + 1)]
        self._numbers = next(following)
        self.progress = [ActorProgress(next(following)) for _ in range(plan.actors)]
        self.requests = ActionRequests(groups_of(plan.rows, plan.groups), plan.without_policy, following)

    def batch(self, update: int) -> Rollouts:
        return self._batches[update % len(self._batches)]

    def rollout(self, ticket: int) -> Rollouts:
        """Where the actor of this ticket writes."""
        update, place = divmod(ticket, self._plan.rollouts_per_update)
        return self.batch(update).part(place * self._plan.rows, (place + 1) * self._plan.rows)

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        place = version % len(self._weights)
        self._numbers[place] = _WRITING
        for name, room in self._weights[place].items():
            room.copy_(state[name])
        self._numbers[place] = version

    def weights(self, version: int) -> Mapping[str, Tensor]:
        """A policy's state, to be copied at once."""
        place = version % len(self._weights)
        found = int(self._numbers[place])
        if found != version:
            raise Desync(f"version {version} of the weights was asked for, but version {found} is there")
        return self._weights[place]

    def close(self) -> None:
        """Unmap it; a batch that is still used keeps it until it goes."""
        for held in (self._batches, self._weights, self.progress):
            held.clear()
        del self._numbers, self.requests
        self._segment.close()
