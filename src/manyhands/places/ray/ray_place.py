"""A Ray cluster as a place: Ray starts the processes, this process leads, and actors take the other parts.

    fit(cluster="ray") ── connects ──►  Ray
        ── placement groups, actors ─►  each stands in its place (kind "ray") and takes part as under torchrun
        ── stands in rank 0 ─────────►  session, run directory and terminal are this process's

What an actor is given is the run; tensors move on links between the processes. Through Ray go the address of the
leader, the run's secret (a store in an actor), and the news of who died. Where the strategy survives that, the role is
started again, on another node if need be, in the place of the one that died. Where workers follow the size of the
cluster, one that has no place any more is followed by an actor that only finishes the pending work of the slot.

A cluster is a value with a text form:

    ray                                  one of this run's own on this host; inside a Ray job, that job's
    auto                                 the one that runs here, or that RAY_ADDRESS names
    ray://head:10001                     one elsewhere, through Ray's client
    auto workers=spread cpus=4           with settings
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

from manyhands.errors import ManyhandsError, PeerTimeout, UserError, check_count, first_line
from manyhands.places.external.run_store import KeyValueStore
from manyhands.places.place import MORE_WORKERS, Place, PlacedRun
from manyhands.places.ray.actor_placement import (
    Autoscaler,
    Bounds,
    GivenUp,
    Restart,
    RestartPolicy,
    SlotChange,
    bundles,
)
from manyhands.places.ray.role_actors import RUN, RayRoles, process_place, take_part
from manyhands.strategy import Strategy, check_choice, integer, read_settings, setting, settings_of

_WAYS = ("pack", "spread")
_LOOK_S = 0.2
_JOIN_S = 10.0
_log = logging.getLogger("manyhands")


@dataclass(frozen=True, kw_only=True)
class RayCluster(Place):
    """A Ray cluster and how it is used; `RayCluster.parse` reads the text form."""

    kind: ClassVar[str] = "ray"
    changes_size: ClassVar[bool] = True
    offers: ClassVar[tuple[str, ...]] = ("workers", "servers", "cpus")  # the address is the first word
    about: ClassVar[str] = (
        "ray, auto, ray://HOST:PORT or HOST:PORT, with settings: 'auto workers=spread cpus=4'"
    )

    workers: str = setting("pack", str)
    """Where workers are put: `pack` them on few nodes, or `spread` them over many."""
    servers: str = setting("spread", str)
    """Where parameter servers are put; spread, the death of a node takes fewer of them."""
    cpus: int = setting(1, integer)
    """What each role takes of Ray's CPUs, and how many threads it computes with."""
    address: str = setting("ray", str)
    """`ray`, `auto`, `ray://HOST:PORT` or `HOST:PORT`."""

    def __post_init__(self) -> None:
        check_choice("workers", self.workers, _WAYS)
        check_choice("servers", self.servers, _WAYS)
        check_count("cpus", self.cpus)
        name, colon, port = self.address.removeprefix("ray://").rpartition(":")
        if self.address not in ("ray", "auto") and not (name and colon and port.isdigit()):
            raise UserError(f"cluster={self.address!r} is not a Ray cluster; give {self.about}")

    @classmethod
    def parse(cls, given: str | Self) -> Self:
        """From its text; a value is itself."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, str) or not given.split():
            raise UserError(f"cluster={given!r} is not a Ray cluster; give {cls.about}")
        address, *texts = given.split()
        return cls(address=address, **read_settings(f"cluster {address}", settings_of(cls), texts, {}))

    @property
    def is_remote(self) -> bool:
        """Whether the calling process is on none of its nodes."""
        return self.address.startswith("ray://")

    def run(self, run: PlacedRun) -> Any:
        return _lead_remotely(run, self) if self.is_remote else _lead(run, self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """Who takes which part: ranks by role, the leader's own first."""

    leader: tuple[str, int]  # the role of this process, and its index
    actors: Mapping[str, range]  # the indices of each role that actors carry, from the beginning
    later: int = 0  # how many more workers may come

    @classmethod
    def of(cls, strategy: Strategy, workers: int, later: int = 0) -> RankAssignment:
        """Where there are servers this process leads only; else it is worker 0."""
        processes = strategy.processes(workers)
        if "helper" in processes:
            raise UserError(f"strategy={strategy}: helpers do not run on Ray; leave helpers out")
        servers = processes.get("server", 0)
        if servers:
            actors = {"ps": range(servers), "worker": range(workers)}
            return cls(leader=("chief", 0), actors=actors, later=later)
        return cls(leader=("worker", 0), actors={"worker": range(1, workers)}, later=later)

    @property
    def world(self) -> int:
        return 1 + sum(len(indices) for indices in self.actors.values()) + self.later

    def seat(self, role: str, index: int, master: str, *, leaves: bool = False) -> dict[str, Any]:
        """What the `ProcessPlace` of the leader, rank 0, or of an actor is made of: ranks follow the roles' order."""
        rank = 0
        if (role, index) != self.leader:
            kinds = list(self.actors)
            before = sum(len(self.actors[kind]) for kind in kinds[: kinds.index(role)])
            rank = 1 + before + index - self.actors[role].start
        own = {"rank": rank, "world": self.world, "role": role, "index": index}
        leads = {"has_chief": self.leader[0] == "chief", "later": self.later, "leaves": leaves}
        return {**own, "master": master, **leads}


def _lead(run: PlacedRun, cluster: RayCluster) -> Any:
    bounds = _bounds(run)
    if bounds is not None:
        run = run.following(run.commands or queue.SimpleQueue())
    assignment = RankAssignment.of(run.strategy, run.workers, MORE_WORKERS if bounds is not None else 0)
    with connected(cluster.address, cpus=(assignment.world - assignment.later) * cluster.cpus) as ray:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # Beside this process: with any other node, others might lose what is there.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        store = ray.remote(KeyValueStore).options(num_cpus=0, scheduling_strategy=here).remote()
        given = ActorArguments(
            master=ray.util.get_node_ip_address(), store=store, run=_handed_over(ray, run.for_others())
        )
        gpus = {"worker": 1} if run.device.startswith("cuda") else {}
        ways = {"worker": cluster.workers, "ps": cluster.servers}
        single = {"worker"} if bounds is not None else set()
        with RayRoles(ray, bundles(assignment.actors, ways, cluster.cpus, gpus, single)) as roles:
            policy = RestartPolicy(survives=run.strategy.facts.can_change_workers)
            following = Autoscaler(bounds, run.workers, run.commands)
            with ActorKeeper(roles, assignment, given, policy, following) as keeper:
                seat = assignment.seat(*assignment.leader, given.master)
                place = process_place(seat, store, keeper.trouble)
                try:
                    return run.take_part(place, RUN)
                except PeerTimeout as error:
                    trouble = keeper.trouble()  # why nobody came, if that is known
                    if trouble is None:
                        raise
                    raise ManyhandsError(trouble) from error


def _lead_remotely(run: PlacedRun, cluster: RayCluster) -> Any:
    # Run on a cluster elsewhere, through Ray's client: a task on one of its nodes leads, and its result comes back. The
    # output of that process is shown here, as Ray does with all its tasks.
    if run.calls_back:
        raise UserError(
            f"cluster={cluster.address}: the run is led on the cluster, which cannot call callbacks of this "
            "process; leave them out, or submit the script as a Ray job with cluster=auto"
        )
    with connected(cluster.address, cpus=1) as ray:
        leading = ray.remote(_lead_there).options(num_cpus=cluster.cpus, max_retries=0)
        wrong, data = ray.get(leading.remote(run, replace(cluster, address="auto")))
    if wrong:
        raise (UserError if wrong[0] == UserError.__name__ else ManyhandsError)(wrong[1])
    return run.unpack(data)


def _lead_there(run: PlacedRun, cluster: RayCluster) -> tuple[Any, bytes]:
    """On a node of the cluster: lead the run; what went wrong (an error's name and sentence), and the result."""
    try:
        return None, run.pack(_lead(run, cluster))
    except ManyhandsError as error:
        return (type(error).__name__, str(error)), b""


def _bounds(run: PlacedRun) -> Bounds | None:
    if run.strategy.facts.continues_with_fewer:  # by itself, down to min_workers
        if run.max_workers is not None:
            raise UserError(
                f"max_workers={run.max_workers}: strategy {run.strategy} continues with fewer and replaces lost "
                "workers, but never has more than at the start; leave it out, or use ps"
            )
        return None
    bounds = Bounds.of(run.workers, run.min_workers, run.max_workers)
    if bounds is not None and not run.strategy.facts.can_change_workers:
        raise UserError(
            f"min_workers and max_workers: strategy {run.strategy} cannot change its number of workers; leave them "
            "out, or use ps"
        )
    return bounds


def _handed_over(ray: Any, run: PlacedRun) -> Any:
    """Ray's reference to the run, which it pickles; UserError where that cannot be."""
    try:
        return ray.put(run)
    except TypeError as error:
        reason = (str(error.__cause__ or error).splitlines() or ["TypeError"])[0]
        raise UserError(
            f"the task cannot be sent to the workers: {reason}; it may use functions, closures, tensors and plain "
            "objects, but no open files, locks, sockets or generators"
        ) from error


class ActorArguments(NamedTuple):
    """What every actor is given besides its seat: the leader's address, and Ray's references to store and run."""

    master: str
    store: Any
    run: Any


class ActorKeeper:
    """Starts the actors of a run and, in a thread, those again that end too early, and more as the cluster grows."""

    def __init__(
        self,
        roles: RayRoles,
        assignment: RankAssignment,
        given: ActorArguments,
        policy: RestartPolicy,
        following: Autoscaler,
    ) -> None:
        self._roles, self._assignment, self._given = roles, assignment, given
        self._policy, self._following = policy, following
        self._due: list[Restart] = []
        self._leaving: set[int] = set()  # slots without which the run continues
        self._given_up: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="manyhands-ray", daemon=True)

    def trouble(self) -> str | None:
        """Why some role will not come, if that is so."""
        return self._given_up[0] if self._given_up else None

    def __enter__(self) -> Self:
        for role, indices in self._assignment.actors.items():
            for index in indices:
                self._start(role, index)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            _log.warning("Ray has not answered for %.0f s; the run ends without it", _JOIN_S)

    def _start(self, role: str, index: int) -> None:
        given = self._given
        leaves = role == "worker" and index in self._leaving
        seat = self._assignment.seat(role, index, given.master, leaves=leaves)
        # Ray fetches what it is given directly before the work begins; in a list, when it is asked for.
        self._roles.start(role, index, take_part, [given.run], seat, given.store, extra=leaves)

    def _run(self) -> None:
        """An error of this thread is reported here, or it would be lost: no role is started again after it."""
        try:
            while not self._over.is_set():
                for end in self._roles.ended(_LOOK_S):
                    match self._policy.ended(end.role, end.index, end.sentence, time.monotonic()):
                        case Restart() as again:
                            _log.warning("%s; it is restarted", end.sentence)
                            self._due.append(again)
                        case GivenUp(sentence=sentence):
                            self._give_up(sentence, logged=self._policy.survives)
                now_s = time.monotonic()
                for again in [one for one in self._due if one.at_s <= now_s]:
                    self._due.remove(again)
                    # Before the actor can ask: its predecessor's entry would make it a second process of one rank.
                    rank = self._assignment.seat(again.role, again.index, self._given.master)["rank"]
                    self._given.store.delete_key.remote(f"/manyhands/{RUN}/here/{rank}")
                    self._start(again.role, again.index)
                for change in self._following.look(self._roles, now_s):
                    self._follow(change)
                self._over.wait(_LOOK_S)
        except Exception as error:
            self._give_up(f"restarting roles on Ray failed: {error!r}", logged=True)

    def _follow(self, change: SlotChange) -> None:
        slot = change.slot
        if change.added:
            _log.warning("Ray has room for one more worker: starting worker %d", slot)
            self._start("worker", slot)
            return
        _log.warning("Ray no longer has room for worker %d: the run continues without it", slot)
        self._roles.kill("worker", slot)
        self._roles.vacate("worker", slot)
        self._leaving.add(slot)
        self._due = [one for one in self._due if (one.role, one.index) != ("worker", slot)]
        self._due.append(Restart(role="worker", index=slot, at_s=time.monotonic()))

    def _give_up(self, sentence: str, *, logged: bool) -> None:
        """Log the reason, because the run may continue: once it has begun, `trouble` is not read any more."""
        if logged:
            _log.error("%s", sentence)
        self._given_up.append(sentence)


def ray_module() -> Any:
    try:
        import ray
    except ImportError as error:
        raise UserError(f"cluster: Ray is not installed ({error}); pip install 'manyhands[ray]'") from error
    return ray


@contextmanager
def connected(cluster: str, cpus: int) -> Iterator[Any]:
    """Ray's module, connected to the cluster; one of this process's own has `cpus` CPUs, and ends with this.

    A connection that is there already, as inside a Ray job's task or after the user's `ray.init`, is left as it is.
    """
    ray = ray_module()
    if ray.is_initialized():
        yield ray
        return
    arguments: dict[str, Any] = {"logging_level": logging.WARNING}
    if cluster == "ray" and "RAY_ADDRESS" not in os.environ:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        arguments |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    else:
        arguments |= {"address": "auto" if cluster == "ray" else cluster}
    try:
        with _same_imports() if arguments["address"] == "local" else nullcontext():
            ray.init(**arguments)
    except Exception as error:  # where its processes do not come up, Ray raises just that
        with suppress(Exception):
            ray.shutdown()  # those that did
        why = f"no Ray cluster can be reached there ({first_line(error)}); start one with `ray start --head`, or give "
        why += "cluster=ray to start one for this run"
        if arguments["address"] == "local":
            why = f"Ray could not start on this host ({first_line(error)}); its logs in /tmp/ray/session_latest/logs "
            why += "say why; leave cluster out to run without Ray"
        raise UserError(f"cluster={cluster}: {why}") from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _same_imports() -> Iterator[None]:
    """While this is open, processes that are started here find the modules that this one finds."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
