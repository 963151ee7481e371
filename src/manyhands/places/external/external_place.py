"""Places where the processes of a run exist already: torchrun's, and those of a cluster specification."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from manyhands.errors import UserError
from manyhands.places.external.process_place import ProcessPlace, under_torchrun
from manyhands.places.external.specification import ClusterRole, ClusterSpec, check_hosts
from manyhands.places.place import TF_CONFIG, Place, PlacedRun
from manyhands.strategy import Strategy

__all__ = ["SpecificationPlace"]


class ExternalPlace(Place):
    """This process is one of several, and joins a run instead of starting workers."""

    def __init__(self, process: ProcessPlace) -> None:
        self.process = process

    @property
    def world(self) -> int:
        return self.process.world

    @property
    def leads(self) -> bool:
        return self.process.leads

    def fitted(self, strategy: Strategy, workers: int | None) -> tuple[Strategy, int]:
        """What the strategy is on the processes that there are; UserError where another number was asked for."""
        spec, world = self.process.cluster, self.process.world
        roles = {kind: len(listed) for kind, listed in spec.addresses.items()} if spec is not None else {}
        placed, count = strategy.placed(world, roles)
        if workers is not None and workers != count:
            who = "the cluster lists" if spec is not None else f"{self.kind} started"
            each = "each of which is a worker" if count == world else f"{count} of which are workers"
            raise UserError(f"workers={workers}: {who} {world} processes, {each}; leave it out")
        return placed, count

    def run(self, run: PlacedRun) -> Any:
        return run.take_part(self.process)


class TorchrunPlace(ExternalPlace):
    """Processes of torchrun, or of what sets the same variables."""

    kind = "torchrun"

    @classmethod
    def found(cls, environment: Mapping[str, str]) -> Self:
        return cls(under_torchrun(environment))


class SpecificationPlace(ExternalPlace):
    """Roles of a cluster specification, each of which listens at an address that all know."""

    kind = "specification"

    @classmethod
    def found(cls, environment: Mapping[str, str]) -> Self | None:
        """The place that TF_CONFIG describes; None if it describes no cluster."""
        text = environment[TF_CONFIG].strip()
        return cls.of(*ClusterSpec.from_tf_config(text)) if text and text != "{}" else None

    @classmethod
    def of(cls, spec: ClusterSpec, role: ClusterRole) -> Self:
        """The place of one role; UserError for an evaluator, which has none."""
        return cls(
            ProcessPlace(
                rank=spec.rank(role),
                world=len(spec.ranked),
                kind=cls.kind,
                role=role.type,
                index=role.index,
                leader=spec.address(spec.leader),
                cluster=spec,
            )
        )

    def run(self, run: PlacedRun) -> Any:
        spec = self.process.cluster
        assert spec is not None, "a role is one of a specification"
        if spec.ranked[1:]:
            check_hosts(spec, spec.ranked[self.process.rank])
        return super().run(run)
