"""Every place that a run can be on, by its name: where its class is. One line a place.

Classes are named and not imported: only that of the place that a run is on is ever loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class PlaceEntry:
    """`module:name` of a place's class, inside the package or with its full name outside of it."""

    path: str
    variables: tuple[str, ...] = ()
    """Environment variables that are all set where the processes of a run were started at this place."""

    def load(self) -> Any:
        module, _, name = self.path.partition(":")
        inside = module.startswith("places.")
        return getattr(import_module(f"manyhands.{module}" if inside else module), name)


PLACES: Final[dict[str, PlaceEntry]] = {
    "specification": PlaceEntry("places.external.process_place:SpecificationPlace", ("TF_CONFIG",)),
    "torchrun": PlaceEntry("places.external.process_place:TorchrunPlace", ("RANK", "WORLD_SIZE")),
    "ray": PlaceEntry("places.ray.ray_place:RayCluster"),
    "local": PlaceEntry("places.place:LocalPlace"),
}
"""In the order in which the environment is asked for them."""
