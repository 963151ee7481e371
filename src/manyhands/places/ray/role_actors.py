"""The actors that run the roles of one run: started in their bundles, reported when they end, none left behind."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

from manyhands.errors import UserError
from manyhands.places.ray.actor_placement import Seats, room_for

__all__ = ["RayRoles", "RoleEnded"]

_PLACING_S = 60.0


class RoleActor:
    """The actor, which runs one role in a process on some node."""

    def carry(self, work: Callable[..., Any], *arguments: Any) -> str:
        """Do it; what went wrong, as a line: not every error can travel. Empty where nothing did."""
        try:
            work(*arguments)
        except ModuleNotFoundError as error:
            return _missing(error)
        except Exception as error:
            return f"{type(error).__name__}: {_first_line(error)}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleEnded:
    """An actor has ended."""

    role: str
    index: int
    died: bool = False
    """Whether its process or its node is gone, instead of having returned or raised."""
    sentence: str = ""
    """What went wrong; empty where nothing did."""


@dataclass(slots=True)
class _Carried:
    actor: Any
    ending: Any
    bundle: str
    """What Ray calls the bundle it is in, among the resources of the cluster; empty: it needs none."""


class RayRoles:
    """The actors of a run, by role and index; a context manager. All calls come from one thread."""

    def __init__(self, ray: Any, seats: Sequence[Seats], placing_s: float = _PLACING_S) -> None:
        self._ray = ray
        self._seats = {one.role: one for one in seats}
        self._placing_s = placing_s
        self._groups: dict[str, Any] = {}
        self._single: dict[tuple[str, int], Any] = {}  # groups of one bundle
        self._carried: dict[tuple[str, int], _Carried] = {}
        self._homeless: dict[tuple[str, int], float] = {}  # since when
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        from ray.util.placement_group import placement_group, remove_placement_group

        with ExitStack() as stack:
            stack.callback(self._vacate_all)
            for one in self._seats.values():
                if not one.single:
                    group = placement_group([dict(one.bundle)] * one.count, strategy=one.strategy)
                    stack.callback(remove_placement_group, group)
                    self._groups[one.role] = group
            deadline = time.monotonic() + self._placing_s
            for one in self._seats.values():
                for index in range(one.first, one.first + one.count):
                    group, _ = self._bundle(one.role, index)
                    if not group.wait(max(0.1, deadline - time.monotonic())):
                        raise UserError(self._no_room(one.role))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for role, index in list(self._carried):
            self.kill(role, index)
        self._stack.close()

    def _vacate_all(self) -> None:
        for role, index in list(self._single):
            self.vacate(role, index)

    def start(
        self, role: str, index: int, work: Callable[..., Any], *arguments: Any, extra: bool = False
    ) -> None:
        """Have a new actor do `work`, in a bundle of its own; an `extra` one needs none.

        That runs for a moment, beside whatever else is on some node.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        seats, bundle = self._seats[role], ""
        options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "num_cpus": 0}
        if not extra:
            group, number = self._bundle(role, index)
            bundle = f"bundle_group_{number}_{group.id.hex()}"
            options |= {
                "num_cpus": seats.bundle.get("CPU", 0),
                "num_gpus": seats.bundle.get("GPU", 0),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number
                ),
            }
        actor = self._ray.remote(RoleActor).options(**options).remote()
        self._carried[role, index] = _Carried(actor, actor.carry.remote(work, *arguments), bundle)

    def _bundle(self, role: str, index: int) -> tuple[Any, int]:
        """The group and the number of a role's bundle: one of many, or one of its own."""
        from ray.util.placement_group import placement_group

        seats = self._seats[role]
        if role in self._groups and seats.first <= index < seats.first + seats.count:
            return self._groups[role], index - seats.first
        if (role, index) not in self._single:
            self._single[role, index] = placement_group([dict(seats.bundle)], strategy=seats.strategy)
        return self._single[role, index], 0

    def vacate(self, role: str, index: int) -> None:
        """Nobody needs this bundle any more, which is a group of its own."""
        from ray.util.placement_group import remove_placement_group

        group = self._single.pop((role, index), None)
        if group is not None:
            remove_placement_group(group)

    def kill(self, role: str, index: int) -> None:
        """Kill an actor now; its end is not reported."""
        carried = self._carried.pop((role, index), None)
        if carried is not None:
            self._ray.kill(carried.actor, no_restart=True)

    def ended(self, timeout_s: float = 0.0) -> list[RoleEnded]:
        """The actors that ended since the last call, waiting up to `timeout_s` for the first."""
        if not self._carried:
            return []
        by_ending = {carried.ending: whose for whose, carried in self._carried.items()}
        endings = list(by_ending)
        done, _ = self._ray.wait(endings, num_returns=1, timeout=timeout_s)
        if done:
            done, _ = self._ray.wait(endings, num_returns=len(endings), timeout=0)
        return [self._end(*by_ending[ending]) for ending in done]

    def waiting(self, role: str, now_s: float) -> dict[int, float]:
        """Since when which of a role's actors have been without a bundle on any node, as far as was asked."""
        placed = self._ray.cluster_resources()
        for whose, carried in self._carried.items():
            if carried.bundle and carried.bundle not in placed:
                self._homeless.setdefault(whose, now_s)
            else:
                self._homeless.pop(whose, None)
        there = self._homeless.keys() & self._carried.keys()
        return {index: self._homeless[kind, index] for kind, index in there if kind == role}

    def room(self, role: str) -> int:
        return room_for(self._ray.available_resources(), self._seats[role].bundle)

    def _end(self, role: str, index: int) -> RoleEnded:
        carried = self._carried.pop((role, index))
        try:
            wrong = self._ray.get(carried.ending)
        except self._ray.exceptions.RayTaskError as error:
            return RoleEnded(role=role, index=index, sentence=_of_task(role, index, error))
        except self._ray.exceptions.RayError as error:
            self._ray.kill(carried.actor, no_restart=True)  # where its node is out of reach, it may live
            sentence = f"{role} {index} on Ray: {_first_line(error)}"
            return RoleEnded(role=role, index=index, died=True, sentence=sentence)
        return RoleEnded(role=role, index=index, sentence=f"{role} {index} on Ray: {wrong}" if wrong else "")

    def _no_room(self, role: str) -> str:
        seats = self._seats[role]
        wanted = " and ".join(f"{one.count} {one.role}" for one in self._seats.values())
        needed = _resources({name: each * seats.count for name, each in seats.bundle.items()})
        free = _resources({name: self._ray.available_resources().get(name, 0) for name in seats.bundle})
        return (
            f"cluster: Ray found no place for {wanted} within {self._placing_s:.0f} s: {role} alone needs {needed}, "
            f"and {free} is free; ask for fewer, or wait until Ray has room"
        )


def _resources(amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items())


def _of_task(role: str, index: int, error: Any) -> str:
    cause = getattr(error, "cause", error)
    if isinstance(cause, ModuleNotFoundError):
        return f"{role} {index} on Ray: {_missing(cause)}"
    return f"{role} {index} on Ray: {type(cause).__name__}: {_first_line(cause)}"


def _missing(error: ModuleNotFoundError) -> str:
    return (
        f"a node cannot import {error.name}; install it there, or name it in the runtime_env of your ray.init"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
