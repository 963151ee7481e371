"""What a sweep runs: every combination of the values of its settings, as data; nothing is run here.

--learning-rate 0.001,0.004   --strategy "single; mirrored"   ──►   four trials, numbered from 1
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from manyhands.errors import DataError, UserError, printable

MOST_TRIALS = 10_000  # a grid of more is a slip of the keyboard


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSetting:
    """One option, by its name in Python, and the texts that it is given in turn."""

    name: str
    values: tuple[str, ...]

    def __post_init__(self) -> None:
        twice = next((value for place, value in enumerate(self.values) if value in self.values[:place]), None)
        if twice is not None:
            raise UserError(
                f"{printable(flag(self.name))} has {printable(twice)!r} twice; leave one of them out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepTrial:
    """One combination."""

    number: int  # from 1
    values: Mapping[str, str]

    @property
    def folder(self) -> str:
        return f"{self.number:04d}"

    def words(self) -> list[str]:
        return [f"{flag(name)}={value}" for name, value in self.values.items()]


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """A whole sweep: a task, its settings, and the words that all its runs have besides."""

    task: str
    settings: tuple[SweepSetting, ...]
    metric: str
    common: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        count = math.prod(len(setting.values) for setting in self.settings)
        if count > MOST_TRIALS:
            raise UserError(
                f"these settings have {count:,} combinations; a sweep has at most {MOST_TRIALS:,}"
            )

    @property
    def varying(self) -> tuple[SweepSetting, ...]:
        return tuple(setting for setting in self.settings if len(setting.values) > 1)

    def trials(self) -> list[SweepTrial]:
        grid = itertools.product(*(setting.values for setting in self.settings))
        names = [setting.name for setting in self.settings]
        return [
            SweepTrial(number=number, values=dict(zip(names, values, strict=True)))
            for number, values in enumerate(grid, 1)
        ]

    def to_dict(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "settings": {setting.name: list(setting.values) for setting in self.settings},
            "metric": self.metric,
            "common": dict(self.common),
        }

    @classmethod
    def from_dict(cls, kept: Any) -> SweepPlan:
        """Back from there; DataError for what no sweep has written."""
        match kept:
            case {
                "task": str(task),
                "settings": dict(settings),
                "metric": str(metric),
                "common": dict(common),
            }:
                if all(isinstance(values, list) and values for values in settings.values()):
                    texts = [*common.values(), *(text for values in settings.values() for text in values)]
                    if all(isinstance(text, str) for text in texts):
                        found = tuple(
                            SweepSetting(name=name, values=tuple(values)) for name, values in settings.items()
                        )
                        return cls(task=task, settings=found, metric=metric, common=common)
        raise DataError("is not the plan of a sweep")

    def conflict(self, now: SweepPlan) -> str | None:
        """What of `now` differs from this plan, as a sentence; which metric to judge by may change."""
        ours, theirs = self.to_dict(), now.to_dict()
        for name in ("task", "settings", "common"):
            before, after = ours[name], theirs[name]
            if before == after:
                continue
            if name == "task":
                return f"it is a sweep of {printable(before)}, and not of {printable(after)}"
            key = next(key for key in [*before, *after] if before.get(key) != after.get(key))
            shown = []
            for values in (before.get(key), after.get(key)):
                text = values if isinstance(values, str) else ",".join(values or ())
                shown.append("left out" if values is None else printable(text))
            return f"{printable(flag(key))} was {shown[0]}, and is {shown[1]} now"
        return None


def parse_values(text: str, separator: str) -> tuple[str, ...]:
    """The values that a text lists, without what is around them; UserError where it lists none."""
    values = tuple(part.strip() for part in text.split(separator) if part.strip())
    if not values:
        raise UserError(f"{text!r} lists no value; separate several by {separator!r}")
    return values


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
