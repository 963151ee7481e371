"""Every study by its name: where its `Study` is. One line a study; modules import torch when they run."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from manyhands.lab.studies.study import Study

STUDIES: Final[dict[str, str]] = {
    "servers": "servers_study:SERVERS",
    "consistency": "consistency_study:CONSISTENCY",
    "geo": "geo_study:GEO",
    "gpu": "gpu_study:GPU",
    "truck": "truck_study:TRUCK",
    "parallelism": "parallelism_study:PARALLELISM",
}
"""`module:name` of each study, inside `manyhands.lab.studies`."""


def load_study(name: str) -> Study[Any]:
    """The study of this name; what it needs to train is imported when it runs, so that questions are listed at once."""
    module, _, value = STUDIES[name].partition(":")
    found: Study[Any] = getattr(import_module(f"manyhands.lab.studies.{module}"), value)
    return found
