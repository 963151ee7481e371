"""Central inference: a thread of the learner's process answers the observations of all actors that wait, as one batch.

L. Espeholt et al., "SEED RL: Scalable and Efficient Deep-RL with Accelerated Central Inference" (ICLR 2020). The policy
is on the learner's device, and its newest weights are taken between two batches, also in the middle of a rollout:
each row is stamped with the version that chose its action.

Two copies of the policy take turns: the learner writes new weights into the one that is not in use.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from manyhands.errors import ManyhandsError, first_line
from manyhands.native.closeable import Closeable
from manyhands.places.local.watchdog import Stall
from manyhands.workloads.rl.actor_memory import ActorMemory, MemoryPlan
from manyhands.workloads.rl.inference_requests import ActionRequest, Asked
from manyhands.workloads.rl.policies import choose, scorer
from manyhands.workloads.rl.rollouts import Rollouts
from manyhands.workloads.rl.stepping import Array

__all__ = ["CentralInference"]

_LOOK_S = 0.2
_END_S = 1.0


class CentralInference(Closeable):
    """Answers from the first published weights on, until it is closed or fails, which `check` says."""

    def __init__(
        self,
        policy: Callable[[], nn.Module],
        plan: MemoryPlan,
        memory: ActorMemory,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self._plan, self._memory, self._timeout_s = plan, memory, timeout_s
        self._device, self._stream = device, _stream_of(device)
        with torch.random.fork_rng(devices=[]):  # what the learner draws does not depend on who infers
            self._weights, self._spare = (_Weights(policy(), device) for _ in range(2))
        self._is_new = False
        self._swapping = threading.Lock()  # of the weights
        self._answering = threading.Lock()  # while rollouts are written
        self._rooms: dict[tuple[int, int], _Room] = {}
        rows = plan.rows * plan.actors
        self._observations = torch.empty(
            (rows, *plan.spec.observation_shape),
            dtype=plan.spec.observation_dtype,
            pin_memory=self._stream is not None,
        )
        self._uniforms = torch.empty(rows, dtype=torch.float64)
        self.batches = self.rows = 0  # that were answered
        self._is_over = self._is_computing = False
        self._error: ManyhandsError | None = None
        self._stall = Stall(timeout_s, time.monotonic_ns())
        self._thread = threading.Thread(target=self._run, name="central inference", daemon=True)
        self._thread.start()

    def publish(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Weights to be used from the next batch on; called by the learner."""
        with self._swapping:
            self._spare.take(version, state)
            self._is_new = True

    def is_asked_by(self, actor: int) -> bool:
        """Whether it is inference that this actor waits for."""
        return any(one.is_open for one in self._memory.requests.of_actors[actor])

    def forget(self, actor: int) -> None:
        """The process of this actor has ended: from now on nothing is written for it."""
        with self._answering:
            for request in self._memory.requests.of_actors[actor]:
                request.close()

    def check(self) -> None:
        """ManyhandsError if it has failed, or computes one batch for too long; called now and then."""
        if self._error is not None:
            raise self._error
        self._stall.look(self.batches if self._is_computing else object(), time.monotonic_ns())
        if self._stall.is_over:
            raise ManyhandsError(
                f"central inference has computed one batch for {self._timeout_s:g} s; look at what the policy does "
                'with observations, or let actors compute it themselves (inference="actor")'
            )

    def close(self) -> None:
        self._is_over = True
        self._memory.requests.end()
        self._thread.join(_END_S)
        self._rooms.clear()

    def _run(self) -> None:
        requests = self._memory.requests
        every = [one for own in requests.of_actors for one in own]
        try:
            with torch.inference_mode(), _on(self._stream):
                while not self._is_over:
                    if places := requests.wait(_LOOK_S):
                        self._is_computing = True
                        self._answer([every[place] for place in places])
                        self._is_computing = False
        except Exception as error:
            self._error = ManyhandsError(
                f"central inference with the weights of update {self._weights.version} failed: "
                f"{type(error).__name__}: {first_line(error)}"
            )
            self._error.add_note(traceback.format_exc())
            requests.end()

    def _answer(self, requests: Sequence[ActionRequest]) -> None:
        weights = self._newest()
        asked = [one.read() for one in requests]
        parts, answered, rows = [], list[ActionRequest](), 0
        for request, one in zip(requests, asked, strict=True):
            room, begin = self._room(one.ticket, request.rows), rows
            rows += len(request.rows)
            self._observations.numpy()[begin:rows] = room.observations[:, one.row]
            drawn = min(one.row, self._plan.spec.length - 1)  # after the last row no actions are needed
            self._uniforms.numpy()[begin:rows] = request.uniforms[:, drawn]
            parts.append((request, one, room, slice(begin, rows)))
        scores = weights.scores_of(self._moved(self._observations[:rows]))
        actions, log_probs = choose(scores.cpu(), self._uniforms[:rows])
        chosen = actions.numpy()
        values = iter(self._values(weights.policy, asked))
        with self._answering:
            for request, one, room, part in parts:
                final_values = next(values) if len(one.places) else None
                if not request.is_still(one):
                    continue
                if one.row < self._plan.spec.length:
                    room.actions[:, one.row] = chosen[part]
                    room.log_probs[:, one.row] = log_probs[part]
                    room.versions[:, one.row] = weights.version
                if final_values is not None:
                    room.final_values[torch.from_numpy(one.places), one.row - 1] = final_values
                answered.append(request)
            for request in answered:  # at the end: whoever wakes up may take this core
                request.close()
        self.batches += 1
        self.rows += rows

    def _newest(self) -> _Weights:
        with self._swapping:
            if self._is_new:
                self._weights, self._spare, self._is_new = self._spare, self._weights, False
                self._weights.wait(self._stream)
        return self._weights

    def _values(self, policy: nn.Module, asked: Sequence[Asked]) -> Sequence[Tensor]:
        """Of the last observations of episodes, for each request that has any."""
        finals = [one.finals for one in asked if len(one.places)]
        if not finals:
            return ()
        _, values = policy(self._moved(torch.from_numpy(np.concatenate(finals))))
        found: Sequence[Tensor] = values.to("cpu", self._plan.spec.precision).split(
            [len(one) for one in finals]
        )
        return found

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=True)

    def _room(self, ticket: int, rows: range) -> _Room:
        plan = self._plan
        key = ticket % (plan.rollouts_per_update * (plan.lag + 1)), rows.start
        if key not in self._rooms:
            self._rooms[key] = _Room.of(self._memory.rollout(ticket).part(rows.start, rows.stop))
        return self._rooms[key]


class _Room(NamedTuple):
    """Where the rows of a request are; numpy takes a fraction of PyTorch's time per call, but not all of its types."""

    observations: Array
    actions: Array
    versions: Array
    log_probs: Tensor
    final_values: Tensor

    @classmethod
    def of(cls, rollouts: Rollouts) -> _Room:
        return cls(
            rollouts.observations.numpy(),
            rollouts.actions.numpy(),
            rollouts.versions.numpy(),
            rollouts.log_probs,
            rollouts.final_values,
        )


class _Weights:
    """A copy of the policy."""

    def __init__(self, policy: nn.Module, device: torch.device) -> None:
        self.policy, self.version = policy.to(device), -1
        self._device = device
        self._taken: torch.cuda.Event | None = None
        self._state = self.policy.state_dict()
        self.scores_of = scorer(self.policy)

    def take(self, version: int, state: Mapping[str, Tensor]) -> None:
        """Called by the learner, while nobody uses this copy."""
        with torch.no_grad():
            for name, room in self._state.items():
                room.copy_(state[name])
        self.version = version
        if self._device.type == "cuda":
            self._taken = torch.cuda.current_stream(self._device).record_event()

    def wait(self, stream: torch.cuda.Stream | None) -> None:
        """What `stream` computes from now on sees what was taken."""
        if stream is not None and self._taken is not None:
            stream.wait_event(self._taken)


def _stream_of(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
