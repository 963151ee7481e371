"""What an actor runs: it takes its place and its role in the run. Light to import: kernels are compiled first."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from manyhands.engine.request import Request
    from manyhands.places.external.process_place import ProcessPlace
    from manyhands.places.ray.actor_store import RayStore

__all__ = ["RUN", "ActorSeat", "take_part"]

RUN = "run"
"""The name of every run on Ray: each run has a store of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorSeat:
    """The place of an actor in the run."""

    rank: int
    world: int
    role: str
    index: int
    master: str
    """The address of the leader's node."""
    later: int
    """How many of the last ranks come later, if at all."""
    leaves: bool = False
    """Whether it only finishes the pending work of its slot."""

    def place(self, status_table: Any, trouble: Callable[[], str | None] = lambda: None) -> ProcessPlace:
        """The place itself, made where its process is."""
        from manyhands.places.external.process_place import ProcessPlace
        from manyhands.places.ray.actor_store import RayStore, asking

        kept: list[RayStore] = []  # torch's own reference does not keep what is written in Python

        def open_store(timeout_s: float) -> Store:
            kept.append(RayStore(asking(status_table, timeout_s), timeout_s, trouble))
            return kept[-1]

        return ProcessPlace(
            rank=self.rank,
            world=self.world,
            kind="ray",
            role=self.role,
            index=self.index,
            host=_node_name(),
            later=self.later,
            leaves=self.leaves,
            open_store=open_store,
            master=self.master,
        )


def take_part(asked: Sequence[Any], seat: ActorSeat, status_table: Any) -> None:
    """Take one part of a run, to its end; `asked` holds Ray's reference to the request, and nothing else."""
    from manyhands.native.warming import prepare

    prepare("fit")  # while it compiles, a process would not be heard
    from manyhands.engine.external_run import run_externally

    run_externally(_request(asked[0]), seat.place(status_table), None, False, RUN)


def _request(reference: Any) -> Request:
    """What is asked for, as Ray brings it; ModuleNotFoundError where this node lacks what the task needs."""
    import ray

    try:
        request: Request = ray.get(reference)
    except ray.exceptions.RaySystemError as error:
        if isinstance(error.client_exc, ModuleNotFoundError):
            raise error.client_exc from None
        raise
    return request


def _node_name() -> str:
    import ray

    return f"{socket.gethostname()} (Ray node {ray.get_runtime_context().get_node_id()[:8]})"
