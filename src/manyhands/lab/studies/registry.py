"""Every study by its name: where its `Study` is. One line a study; modules are named, and imported when one is run."""

from __future__ import annotations

from typing import Final

__all__ = ["STUDIES"]

STUDIES: Final[dict[str, str]] = {
    "gpu": "gpu_study:GPU",
    "parallelism": "parallelism_study:PARALLELISM",
    "truck": "truck_study:TRUCK",
}
"""`module:name` of each study, inside `manyhands.lab.studies`."""
