"""A run whose processes Ray starts: this process leads it, and actors take the other parts.

    fit(cluster="ray") ── connects ──►  Ray
        ── placement groups, actors ─►  each stands in its place (kind "ray") and takes part as under torchrun
        ── stands in rank 0 ─────────►  session, run directory and terminal are this process's

What an actor is given is the request; tensors move on links between the processes. Through Ray go the address of the
leader and the run's secret (`RayStore`), and word of who died. Where the strategy survives that, the role is started
again, on another node if need be, and comes back in the place of the one that died. Where workers follow the size of
the cluster, one that has no place any more is followed by an actor that takes none, for as long as it takes to finish
what the slot owes.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from manyhands.engine.external_run import run_externally
from manyhands.engine.request import Request
from manyhands.engine.run import Run
from manyhands.errors import ManyhandsError, PeerTimeout, UserError
from manyhands.places.ray.actor import RUN, ActorSeat, take_part
from manyhands.places.ray.actor_placement import Again, Bounds, GivenUp, Staff, seats
from manyhands.places.ray.actor_store import ActorStore
from manyhands.places.ray.cluster import RayCluster
from manyhands.places.ray.following import Less, More, SizeFollower
from manyhands.places.ray.ray_connection import connected
from manyhands.places.ray.role_actors import RayRoles, RoleEnded
from manyhands.places.run_commands import MORE_WORKERS
from manyhands.strategy import Strategy

__all__ = ["fit_on_ray"]

_LOOK_S = 0.2
_JOIN_S = 10.0
_log = logging.getLogger("manyhands")


@dataclass(frozen=True, slots=True, kw_only=True)
class Casting:
    """Who takes which part: ranks by role, the leader's own first."""

    leader: tuple[str, int]
    """The role of this process, and its index."""
    actors: Mapping[str, range]
    """The indices of each role that actors carry, from the beginning."""
    later: int = 0
    """How many more workers may come."""

    @classmethod
    def of(cls, strategy: Strategy, workers: int, later: int = 0) -> Casting:
        """Where there are servers this process leads only; else it is worker 0."""
        processes = strategy.processes(workers)
        if "helper" in processes:
            raise UserError(f"strategy={strategy}: no actor is a helper on Ray; leave helpers out")
        servers = processes.get("server", 0)
        if servers:
            actors = {"ps": range(servers), "worker": range(workers)}
            return cls(leader=("chief", 0), actors=actors, later=later)
        return cls(leader=("worker", 0), actors={"worker": range(1, workers)}, later=later)

    @property
    def world(self) -> int:
        """How many processes there may be."""
        return 1 + sum(len(indices) for indices in self.actors.values()) + self.later

    def lead(self, master: str) -> ActorSeat:
        """The leader's own seat."""
        role, index = self.leader
        return ActorSeat(rank=0, world=self.world, role=role, index=index, master=master, later=self.later)

    def seat(self, role: str, index: int, master: str, *, leaves: bool = False) -> ActorSeat:
        """An actor's: ranks follow the roles, in their order."""
        kinds = list(self.actors)
        before = sum(len(self.actors[kind]) for kind in kinds[: kinds.index(role)])
        rank = 1 + before + index - self.actors[role].start
        return ActorSeat(
            rank=rank,
            world=self.world,
            role=role,
            index=index,
            master=master,
            later=self.later,
            leaves=leaves,
        )


def fit_on_ray(request: Request, cluster: RayCluster, out: str | Path | None, resume: bool) -> Run:
    """Train what is asked for on a Ray cluster; see `fit`."""
    bounds = _bounds(request)
    if bounds is not None:
        commands = request.options.commands or queue.SimpleQueue()
        request = replace(request, options=replace(request.options, commands=commands))
    casting = Casting.of(request.strategy, request.workers, MORE_WORKERS if bounds is not None else 0)
    with connected(cluster, cpus=(casting.world - casting.later) * cluster.cpus) as ray:
        status_table = (
            ray.remote(ActorStore).options(num_cpus=0, scheduling_strategy=_beside_me(ray)).remote()
        )
        asked = _handed_over(ray, request)
        gpus = {"worker": 1} if request.plan.device.startswith("cuda") else {}
        ways = {"worker": cluster.workers, "ps": cluster.servers}
        given = ActorGift(master=ray.util.get_node_ip_address(), status_table=status_table, asked=asked)
        single = {"worker"} if bounds is not None else set()
        with RayRoles(ray, seats(casting.actors, ways, cluster.cpus, gpus, single)) as roles:
            staff = Staff(survives=request.strategy.can_change_workers)
            following = SizeFollower(bounds, request.workers, request.options.commands)
            with ActorKeeper(roles, casting, given, staff, following) as keeper:
                place = casting.lead(given.master).place(status_table, keeper.trouble)
                try:
                    return run_externally(request, place, out, resume, RUN)
                except PeerTimeout as error:
                    trouble = keeper.trouble()  # why nobody came, if that is known
                    if trouble is None:
                        raise
                    raise ManyhandsError(trouble) from error


def _beside_me(ray: Any) -> Any:
    """Where this process is: with any other node, others might lose what is there."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _bounds(request: Request) -> Bounds | None:
    options = request.options
    if request.strategy.goes_on_with_fewer:  # by itself, down to min_workers
        if options.max_workers is not None:
            raise UserError(
                f"max_workers={options.max_workers}: strategy {request.strategy} goes on with fewer and gets back whom "
                "it lost, but no more than it began with; leave it out, or use ps"
            )
        return None
    bounds = Bounds.of(request.workers, options.min_workers, options.max_workers)
    if bounds is not None and not request.strategy.can_change_workers:
        raise UserError(
            f"min_workers and max_workers: strategy {request.strategy} needs the workers it began with; leave them "
            "out, or use ps"
        )
    return bounds


def _handed_over(ray: Any, request: Request) -> Any:
    """Ray's reference to the request, which it pickles; UserError where that cannot be."""
    try:
        return ray.put(_for_actors(request))
    except TypeError as error:
        reason = (str(error.__cause__ or error).splitlines() or ["TypeError"])[0]
        raise UserError(
            f"what the workers run cannot be sent to them: {reason}; it may use functions, closures, tensors and plain "
            "objects, but no open files, locks, sockets or generators"
        ) from error


def _for_actors(request: Request) -> Request:
    """Without what is the leader's alone."""
    options = replace(
        request.options,
        callbacks=(),
        on_rows=None,
        view=None,
        commands=None,
        progress="none",
        resume_command="",
    )
    return replace(request, options=options)


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorGift:
    """What every actor is given besides its seat."""

    master: str
    status_table: Any
    asked: Any
    """Ray's reference to the request."""


class ActorKeeper:
    """Starts the actors of a run and, in a thread, those again that end too early, and more as the cluster grows.

    A context manager.
    """

    def __init__(
        self, roles: RayRoles, casting: Casting, given: ActorGift, staff: Staff, following: SizeFollower
    ) -> None:
        self._roles, self._casting, self._given = roles, casting, given
        self._staff, self._following = staff, following
        self._due: list[Again] = []
        self._leaving: set[int] = set()  # slots without which the run continues
        self._given_up: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="manyhands-ray", daemon=True)

    def trouble(self) -> str | None:
        """Why some role will not come, if that is so."""
        return self._given_up[0] if self._given_up else None

    def __enter__(self) -> Self:
        for role, indices in self._casting.actors.items():
            for index in indices:
                self._start(role, index)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _log.warning("Ray has not answered for %.0f s; the run ends without it", _JOIN_S)

    def _start(self, role: str, index: int) -> None:
        given = self._given
        leaves = role == "worker" and index in self._leaving
        seat = self._casting.seat(role, index, given.master, leaves=leaves)
        # Ray fetches what it is given directly before the work begins; in a list, when it is asked for.
        self._roles.start(role, index, take_part, [given.asked], seat, given.status_table, extra=leaves)

    def _run(self) -> None:
        """Nobody else would hear of what is raised in this thread: no role is started again after it."""
        try:
            self._go()
        except Exception as error:
            self._give_up(f"what starts the roles on Ray again has failed: {error!r}", logged=True)

    def _go(self) -> None:
        while not self._over.is_set():
            for end in self._roles.ended(_LOOK_S):
                self._hear(end)
            now_s = time.monotonic()
            for again in [one for one in self._due if one.at_s <= now_s]:
                self._due.remove(again)
                self._vacate(again)
                self._start(again.role, again.index)
            for change in self._following.look(self._roles, now_s):
                self._follow(change)
            self._over.wait(_LOOK_S)

    def _follow(self, change: More | Less) -> None:
        match change:
            case More(slot=slot):
                _log.warning("Ray has room for one more: worker %d is started", slot)
                self._start("worker", slot)
            case Less(slot=slot):
                _log.warning("Ray has no place for worker %d any more: the run goes on without it", slot)
                self._roles.kill("worker", slot)
                self._roles.vacate("worker", slot)
                self._leaving.add(slot)
                self._due = [one for one in self._due if (one.role, one.index) != ("worker", slot)]
                self._due.append(Again(role="worker", index=slot, at_s=time.monotonic()))

    def _vacate(self, again: Again) -> None:
        """Its predecessor's notice would make it a second process of one rank."""
        rank = self._casting.seat(again.role, again.index, self._given.master).rank
        self._given.status_table.vacate.remote(rank)  # before the actor can ask: it has yet to be started

    def _hear(self, end: RoleEnded) -> None:
        match self._staff.ended(end.role, end.index, end.sentence, time.monotonic()):
            case Again() as again:
                _log.warning("%s; it is started again", end.sentence)
                self._due.append(again)
            case GivenUp(sentence=sentence):
                self._give_up(sentence, logged=self._staff.survives)

    def _give_up(self, sentence: str, *, logged: bool) -> None:
        """Log the reason, because the run may continue: once it has begun, `trouble` is not read any more."""
        if logged:
            _log.error("%s", sentence)
        self._given_up.append(sentence)
