"""The part of a configuration that must stay the same for a run to be resumed.

A checkpoint says which sample comes next only together with the seed, the batch size and the number of
samples, and its tensors fit only the model they came from. How the work is split (strategy, workers) and
how long it trains (steps) may change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manyhands.errors import UserError, printable

__all__ = ["Fingerprint", "fingerprint", "parameter_shapes"]

_PLAIN_FIELDS = {"task": str, "seed": int, "batch_size": int, "samples": int}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """The part of a configuration that a resumed run shares with the one before."""

    task: str
    seed: int
    batch_size: int
    samples: int
    parameters: Mapping[str, str]

    @property
    def digest(self) -> str:
        """One word that stands for all of it."""
        fields = [getattr(self, name) for name in _PLAIN_FIELDS]
        text = json.dumps([*fields, sorted(self.parameters.items())])
        return hashlib.sha256(text.encode()).hexdigest()

    def conflict(self, current: Fingerprint) -> str | None:
        """Why `current` cannot continue a run of this fingerprint, as a sentence; None if it can."""
        for name in _PLAIN_FIELDS:
            before, now = getattr(self, name), getattr(current, name)
            if before != now:
                now, before = printable(repr(now)), printable(repr(before))
                return f"{name} is {now}, but the run was started with {before}; resume with that"
        for name in [*self.parameters, *current.parameters]:
            before, now = self.parameters.get(name, "absent"), current.parameters.get(name, "absent")
            if before != now:
                who, now, before = printable(repr(name)), printable(now), printable(before)
                return f"parameter {who} is {now}, but in the run it was {before}; resume with that model"
        return None


def fingerprint(config: Mapping[str, Any]) -> Fingerprint:
    """Pick the fields that must stay the same out of a configuration; UserError names one it lacks."""
    for name, kind in _PLAIN_FIELDS.items():
        if not isinstance(config.get(name), kind):
            shown = printable(repr(config.get(name)))
            raise UserError(f"the configuration's {name} is {shown}; it must be {kind.__name__}")
    parameters = config.get("parameters")
    if not isinstance(parameters, Mapping):
        shown = printable(repr(parameters))
        raise UserError(f"the configuration's parameters are {shown}; they must map names to shapes")
    return Fingerprint(
        **{name: config[name] for name in _PLAIN_FIELDS},
        parameters={str(name): str(shape) for name, shape in parameters.items()},
    )


def parameter_shapes(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """`model.named_parameters()` as `{"fc.weight": "float32 10×64"}`: the configuration's `parameters`."""
    shapes = {}
    for name, tensor in named:
        shape = "×".join(map(str, tensor.shape)) or "scalar"
        shapes[name] = f"{str(tensor.dtype).removeprefix('torch.')} {shape}"
    return shapes
