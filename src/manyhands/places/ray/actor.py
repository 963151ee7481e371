"""What an actor runs: it takes its place and its role in the run. Light to import: kernels are compiled first."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from manyhands.places.external.process_place import ProcessPlace
    from manyhands.places.external.torch_store import RunStore
    from manyhands.places.place import PlacedRun

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

    def place(self, store: Any, trouble: Callable[[], str | None] = lambda: None) -> ProcessPlace:
        """The place itself, made where its process is."""
        from manyhands.places.external.process_place import ProcessPlace
        from manyhands.places.ray.actor_store import asking, open_actor_store

        kept: list[RunStore] = []  # torch's own reference does not keep what is written in Python

        def open_store(timeout_s: float) -> Store:
            kept.append(open_actor_store(asking(store, timeout_s), timeout_s, trouble))
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


def take_part(run: Sequence[Any], seat: ActorSeat, store: Any) -> None:
    """Take one part of a run, to its end; `run` holds Ray's reference to it, and nothing else."""
    from manyhands.native.warming import prepare

    prepare("fit")  # while it compiles, a process would not be heard
    import ray

    try:
        placed: PlacedRun = ray.get(run[0])
    except ray.exceptions.RaySystemError as error:
        if isinstance(error.client_exc, ModuleNotFoundError):  # this node lacks what the task needs
            raise error.client_exc from None
        raise
    placed.take_part(seat.place(store), RUN)


def _node_name() -> str:
    import ray

    return f"{socket.gethostname()} (Ray node {ray.get_runtime_context().get_node_id()[:8]})"
