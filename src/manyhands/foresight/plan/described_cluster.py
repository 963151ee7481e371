"""Machines that are described in a file, in the units in which people say them.

hosts = 4
workers_per_host = 8
speed = 12                    # a worker computes like 12 of this machine
memory = "80GiB"              # of each worker
price = 2.5                   # of a host, per hour

[links]
memory = { latency = "2us", bandwidth = "200GB/s" }    # shared by the workers of a host
inside = { latency = "5us", bandwidth = "50GB/s" }     # messages between workers of a host
between = { latency = "20us", bandwidth = "100Gbit/s" } # messages between hosts, whose link all its workers share
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from manyhands.errors import UserError, nearest
from manyhands.facts import ComputeTime, LayerTimes, LinkRate, Machines, TaskProfile
from manyhands.strategy import parse_size

__all__ = ["DescribedCluster", "parse_duration", "parse_rate"]

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_BYTES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BITS = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "tbit": 1e12 / 8}


def parse_duration(text: str) -> float:
    """`20us` in seconds; UserError where the unit is missing or the number makes no sense."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*([a-zµ]+)", text.strip().lower())
    if match is None or match[2] not in _SECONDS:
        raise UserError(f"{text!r} is not a time with a unit; write it as 20us, 1.5ms or 2s")
    return float(match[1]) * _SECONDS[match[2]]


def parse_rate(text: str) -> float:
    """`25Gbit/s` or `100GB/s` in bytes per second; UserError where the unit is missing or the rate is not positive."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*([a-z]+)(?:/s)?", text.strip().lower())
    factor = {**_BYTES, **_BITS}.get(match[2]) if match else None
    if match is None or factor is None or float(match[1]) <= 0:
        raise UserError(
            f"{text!r} is not a rate above 0 with a unit; write it as 25Gbit/s, 100MB/s or 200GB/s"
        )
    return float(match[1]) * factor


@dataclass(frozen=True, kw_only=True)
class DescribedCluster:
    """The machines of a plan: those here, as they were measured, or others, as a file describes them."""

    machines: Machines
    speed: float = 1.0  # how many of the machine that was measured a worker computes like
    memory: int = 0  # bytes of each worker; 0: not known
    price: float = 0.0  # of a host, per hour; 0: not known
    measured: bool = False  # whether its links are those of this machine

    def of_workers(self, workers: int) -> Machines:
        """The machines with so many workers on them, which fill one host after the other; UserError where too few."""
        machines = self.machines
        most = machines.workers
        if workers > most and not self.measured:
            raise UserError(
                f"workers={workers}: the cluster has {most}; give at most {most}, or describe more hosts"
            )
        hosts = -(-workers // machines.per_host)
        if workers % hosts:
            raise UserError(
                f"workers={workers}: hosts of {machines.per_host} cannot share them equally; give a multiple of "
                f"{machines.per_host}"
            )
        return replace(machines, hosts=hosts, per_host=workers // hosts)

    def scaled(self, profile: TaskProfile) -> TaskProfile:
        """The profile of a worker of these machines."""

        def faster(time: ComputeTime) -> ComputeTime:
            return ComputeTime(fixed_s=time.fixed_s / self.speed, per_sample_s=time.per_sample_s / self.speed)

        def of_layer(layer: LayerTimes) -> LayerTimes:
            return replace(layer, forward=faster(layer.forward), backward=faster(layer.backward))

        return replace(
            profile,
            layers=tuple(map(of_layer, profile.layers)),
            rest=faster(profile.rest),
            optimizer_s=profile.optimizer_s / self.speed,
        )

    @classmethod
    def from_file(cls, path: Path) -> DescribedCluster:
        """What a TOML file says; a UserError names its line."""
        try:
            text = path.read_text()
            table = tomllib.loads(text)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cluster file {path} cannot be read: {error}") from None
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"cluster file {path} is not TOML: {error}") from None
        return _Reader(path, text).read(table)


_LINKS = ("memory", "inside", "between")
_TOP = ("hosts", "workers_per_host", "speed", "memory", "price", "adds", "links")


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads a table, and names the file and the line in what it rejects."""

    path: Path
    text: str

    def read(self, table: Mapping[str, Any]) -> DescribedCluster:
        self._check(table, _TOP, "")
        hosts, per_host = (self._count(table, name) for name in ("hosts", "workers_per_host"))
        links = table.get("links", {})
        if not isinstance(links, Mapping):
            raise self._wrong("links", "must be a table of memory, inside and between")
        self._check(links, _LINKS, "links.")
        rates = {name: self._link(name, links[name]) for name in _LINKS if name in links}
        needed = [name for name, many in (("between", hosts > 1), ("inside", per_host > 1)) if many]
        for name in needed:
            if name not in rates:
                raise UserError(
                    f"cluster file {self.path}: [links] has no {name}; add {name} = "
                    '{ latency = "20us", bandwidth = "25Gbit/s" }'
                )
        rates.setdefault("inside", LinkRate())
        rates.setdefault("memory", rates["inside"])
        adds = self._said(table, "adds", parse_rate) if "adds" in table else math.inf
        return DescribedCluster(
            machines=Machines(
                hosts=hosts,
                per_host=per_host,
                memory=rates["memory"],
                inside=rates["inside"],
                between=rates.get("between", LinkRate()),
                added_per_s=adds,
            ),
            speed=self._number(table, "speed", 1.0, above=True),
            memory=self._said(table, "memory", parse_size) if "memory" in table else 0,
            price=self._number(table, "price", 0.0, above=False),
        )

    def _link(self, name: str, link: Any) -> LinkRate:
        if not isinstance(link, Mapping):
            raise self._wrong(name, 'must be { latency = "20us", bandwidth = "25Gbit/s" }')
        self._check(link, ("latency", "bandwidth"), f"links.{name}.")
        for key in ("latency", "bandwidth"):
            if key not in link:
                raise self._wrong(name, f"has no {key}")
        return LinkRate(
            latency_s=self._said(link, "latency", parse_duration, name),
            bytes_per_s=self._said(link, "bandwidth", parse_rate, name),
        )

    def _said(
        self, table: Mapping[str, Any], name: str, parse: Callable[[str], Any], within: str = ""
    ) -> Any:
        value = table[name]
        if not isinstance(value, str):
            raise self._wrong(within or name, f"{name}={value!r} has no unit; write it in quotes, with one")
        try:
            return parse(value)
        except UserError as error:
            raise self._wrong(within or name, f"{name}={error}") from None

    def _count(self, table: Mapping[str, Any], name: str) -> int:
        value = table.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong(name, f"{name}={value!r} must be an integer of at least 1")
        return value

    def _number(self, table: Mapping[str, Any], name: str, default: float, *, above: bool) -> float:
        value = table.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (above and value == 0):
            raise self._wrong(
                name, f"{name}={value!r} must be a number {'above' if above else 'of at least'} 0"
            )
        return float(value)

    def _check(self, table: Mapping[str, Any], allowed: tuple[str, ...], prefix: str) -> None:
        for name in table:
            if name not in allowed:
                raise self._wrong(name, f"there is no {prefix}{name}; {nearest(name, allowed)}")

    def _wrong(self, name: str, why: str) -> UserError:
        """An error about the first line that mentions the name."""
        lines = self.text.splitlines()
        number = next(
            (at for at, line in enumerate(lines, 1) if re.search(rf"(^|\W){re.escape(name)}\W", line)), 0
        )
        where = f"line {number}" if number else "the file"
        return UserError(f"cluster file {self.path}, {where}: {why}")
