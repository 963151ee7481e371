"""The actors that run the roles of one run: what each does, where it is started, and that none is left behind.

Light to import: an actor compiles kernels first.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from manyhands.errors import ManyhandsError, UserError, first_line
from manyhands.places.ray.actor_placement import Bundles, room_for

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from manyhands.places.external.process_place import ProcessPlace
    from manyhands.places.external.run_store import RunStore
    from manyhands.places.place import PlacedRun

RUN = "run"  # the name of every run on Ray: each run has a store of its own

_PLACING_S = 60.0


def process_place(
    seat: Mapping[str, Any], store: Any, trouble: Callable[[], str | None] = lambda: None
) -> ProcessPlace:
    """The place of a process in the run, made where the process is; `seat` is what a plan says of it."""
    import ray

    from manyhands.places.external.process_place import ProcessPlace

    kept: list[RunStore] = []  # torch's own reference does not keep what is written in Python

    def open_store(timeout_s: float) -> Store:
        def ask(call: str, *arguments: Any) -> Any:
            return ray.get(getattr(store, call).remote(*arguments), timeout=timeout_s)

        kept.append(open_actor_store(ask, timeout_s, trouble))
        return kept[-1]

    host = f"{socket.gethostname()} (Ray node {ray.get_runtime_context().get_node_id()[:8]})"
    return ProcessPlace(**seat, kind="ray", host=host, open_store=open_store)


class _ActorCalls:
    """The calls of a `RendezvousStore`, made by the actor."""

    def __init__(self, ask: Callable[..., Any], trouble: Callable[[], str | None]) -> None:
        self._ask, self._trouble = ask, trouble

    def __getattr__(self, call: str) -> Callable[..., Any]:
        def ask(*arguments: Any) -> Any:
            sentence = self._trouble()
            if sentence is not None:
                raise ManyhandsError(sentence)
            return self._ask(call, *arguments)

        return ask


def open_actor_store(
    ask: Callable[..., Any], timeout_s: float, trouble: Callable[[], str | None] = lambda: None
) -> RunStore:
    """A process's access to the store of its run, a `KeyValueStore` in an actor whose methods `ask` calls by name.

    Every call raises ManyhandsError once `trouble` has a sentence: a process that waits for a role that will not come
    is told why.
    """
    from manyhands.places.external.run_store import RunStore

    calls: Any = _ActorCalls(ask, trouble)
    return RunStore(calls, "", timeout_s)


def take_part(run: Sequence[Any], seat: Mapping[str, Any], store: Any) -> None:
    """Take one part of a run, to its end; `run` holds Ray's reference to it, and nothing else."""
    from manyhands.native.warming import prepare

    prepare("fit")  # while it compiles, a process would send no heartbeat
    import ray

    try:
        placed: PlacedRun = ray.get(run[0])
    except ray.exceptions.RaySystemError as error:
        if isinstance(error.client_exc, ModuleNotFoundError):  # this node lacks what the task needs
            raise error.client_exc from None
        raise
    placed.take_part(process_place(seat, store), RUN)


class RoleActor:
    """The actor, which runs one role in a process on some node."""

    def run(self, work: Callable[..., Any], *arguments: Any) -> str:
        """Do it; what went wrong, as a line: not every error can travel. Empty where nothing did."""
        try:
            work(*arguments)
        except Exception as error:
            return _described(error)
        return ""


def _described(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"a node cannot import {error.name}; install it there, or name it in the runtime_env of your ray.init"
    return f"{type(error).__name__}: {first_line(error)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleEnded:
    """An actor has ended."""

    role: str
    index: int
    died: bool = False  # whether its process or its node is gone, instead of having returned or raised
    sentence: str = ""  # what went wrong; empty where nothing did


@dataclass(slots=True)
class _Running:
    actor: Any
    ending: Any
    bundle: str
    """What Ray calls the bundle it is in, among the resources of the cluster; empty: it needs none."""


class RayRoles:
    """The actors of a run, by role and index; a context manager. All calls come from one thread."""

    def __init__(self, ray: Any, bundles: Sequence[Bundles], placing_s: float = _PLACING_S) -> None:
        self._ray = ray
        self._bundles = {one.role: one for one in bundles}
        self._placing_s = placing_s
        self._groups: dict[str, Any] = {}
        self._single: dict[tuple[str, int], Any] = {}  # groups of one bundle
        self._running: dict[tuple[str, int], _Running] = {}
        self._unplaced: dict[tuple[str, int], float] = {}  # since when
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        from ray.util.placement_group import placement_group, remove_placement_group

        with ExitStack() as stack:
            stack.callback(lambda: [self.vacate(*whose) for whose in list(self._single)])
            for one in self._bundles.values():
                if not one.single:
                    group = placement_group([dict(one.bundle)] * one.count, strategy=one.strategy)
                    stack.callback(remove_placement_group, group)
                    self._groups[one.role] = group
            deadline = time.monotonic() + self._placing_s
            for one in self._bundles.values():
                for index in range(one.first, one.first + one.count):
                    group, _ = self._bundle(one.role, index)
                    if not group.wait(max(0.1, deadline - time.monotonic())):
                        raise UserError(self._no_room(one.role))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for role, index in list(self._running):
            self.kill(role, index)
        self._stack.close()

    def start(
        self, role: str, index: int, work: Callable[..., Any], *arguments: Any, extra: bool = False
    ) -> None:
        """Have a new actor do `work`, in a bundle of its own; an `extra` one, which runs for a moment, needs none."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles, bundle = self._bundles[role], ""
        options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0, "num_cpus": 0}
        if not extra:
            group, number = self._bundle(role, index)
            bundle = f"bundle_group_{number}_{group.id.hex()}"
            options |= {
                "num_cpus": bundles.bundle.get("CPU", 0),
                "num_gpus": bundles.bundle.get("GPU", 0),
                "scheduling_strategy": PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number
                ),
            }
        actor = self._ray.remote(RoleActor).options(**options).remote()
        self._running[role, index] = _Running(actor, actor.run.remote(work, *arguments), bundle)

    def _bundle(self, role: str, index: int) -> tuple[Any, int]:
        """The group and the number of a role's bundle: one of many, or one of its own."""
        from ray.util.placement_group import placement_group

        bundles = self._bundles[role]
        if role in self._groups and bundles.first <= index < bundles.first + bundles.count:
            return self._groups[role], index - bundles.first
        if (role, index) not in self._single:
            self._single[role, index] = placement_group([dict(bundles.bundle)], strategy=bundles.strategy)
        return self._single[role, index], 0

    def vacate(self, role: str, index: int) -> None:
        """Remove a bundle that is a group of its own."""
        from ray.util.placement_group import remove_placement_group

        group = self._single.pop((role, index), None)
        if group is not None:
            remove_placement_group(group)

    def kill(self, role: str, index: int) -> None:
        """Kill an actor now; its end is not reported."""
        running = self._running.pop((role, index), None)
        if running is not None:
            self._ray.kill(running.actor, no_restart=True)

    def ended(self, timeout_s: float = 0.0) -> list[RoleEnded]:
        """The actors that ended since the last call, waiting up to `timeout_s` for the first."""
        if not self._running:
            return []
        by_ending = {running.ending: whose for whose, running in self._running.items()}
        endings = list(by_ending)
        done, _ = self._ray.wait(endings, num_returns=1, timeout=timeout_s)
        if done:
            done, _ = self._ray.wait(endings, num_returns=len(endings), timeout=0)
        return [self._end(*by_ending[ending]) for ending in done]

    def waiting(self, role: str, now_s: float) -> dict[int, float]:
        """Since when which of a role's actors have been without a bundle on any node, as far as was asked."""
        placed = self._ray.cluster_resources()
        for whose, running in self._running.items():
            if running.bundle and running.bundle not in placed:
                self._unplaced.setdefault(whose, now_s)
            else:
                self._unplaced.pop(whose, None)
        there = self._unplaced.keys() & self._running.keys()
        return {index: self._unplaced[kind, index] for kind, index in there if kind == role}

    def room(self, role: str) -> int:
        return room_for(self._ray.available_resources(), self._bundles[role].bundle)

    def _end(self, role: str, index: int) -> RoleEnded:
        running = self._running.pop((role, index))
        died = False
        try:
            wrong = self._ray.get(running.ending)
        except self._ray.exceptions.RayTaskError as error:
            wrong = _described(getattr(error, "cause", error))
        except self._ray.exceptions.RayError as error:
            self._ray.kill(running.actor, no_restart=True)  # where its node is out of reach, it may live
            died, wrong = True, first_line(error)
        sentence = f"{role} {index} on Ray: {wrong}" if wrong else ""
        return RoleEnded(role=role, index=index, died=died, sentence=sentence)

    def _no_room(self, role: str) -> str:
        bundles = self._bundles[role]
        wanted = " and ".join(f"{one.count} {one.role}" for one in self._bundles.values())
        needed = _resources({name: each * bundles.count for name, each in bundles.bundle.items()})
        free = _resources({name: self._ray.available_resources().get(name, 0) for name in bundles.bundle})
        return (
            f"cluster: Ray found no room for {wanted} within {self._placing_s:.0f} s: {role} alone needs {needed}, "
            f"but {free} is free; ask for fewer, or wait until Ray has room"
        )


def _resources(amounts: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:g} {name}" for name, amount in amounts.items())
