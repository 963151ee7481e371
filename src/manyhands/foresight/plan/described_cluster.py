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

Instead of `speed`, `device = "h100"` names one that the file describes, by its data sheet and what of it is reached:

[devices.h100]
peak = "989TFLOPS"
bandwidth = "3.35TB/s"        # of its memory
memory = "80GiB"
efficiency = 0.5              # of the peak, in products of matrices
launch = "7us"                # the least that an operation takes; may be left out
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
from manyhands.facts import CodecRate, ComputeTime, LayerTimes, LinkRate, Machines, TaskProfile
from manyhands.strategy import parse_size

__all__ = [
    "DescribedCluster",
    "DescribedDevice",
    "parse_budget",
    "parse_duration",
    "parse_flops",
    "parse_rate",
]

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_LONG = {"min": 60.0, "h": 3600.0, "d": 86400.0, **_SECONDS}
_BYTES = {"b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_THOUSANDS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BITS = {"kbit": 1e3 / 8, "mbit": 1e6 / 8, "gbit": 1e9 / 8, "tbit": 1e12 / 8}


def parse_duration(text: str) -> float:
    """`20us` in seconds; UserError where the unit is missing or the number makes no sense."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*([a-zµ]+)", text.strip().lower())
    if match is None or match[2] not in _SECONDS:
        raise UserError(f"{text!r} is not a time with a unit; write it as 20us, 1.5ms or 2s")
    return float(match[1]) * _SECONDS[match[2]]


def parse_budget(text: str) -> float:
    """`2h` in seconds; UserError where the unit is missing or the number is not above 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zµ]+)", text.strip().lower())
    if match is None or match[2] not in _LONG or float(match[1]) <= 0:
        raise UserError(
            f"--budget {text!r} is neither a price nor a time above 0 with a unit; write it as 2h, 90s or 12.5"
        )
    return float(match[1]) * _LONG[match[2]]


def parse_rate(text: str) -> float:
    """`25Gbit/s` or `100GB/s` in bytes per second; UserError where the unit is missing or the rate is not positive."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*([a-z]+)(?:/s)?", text.strip().lower())
    factor = {**_BYTES, **_BITS}.get(match[2]) if match else None
    if match is None or factor is None or float(match[1]) <= 0:
        raise UserError(
            f"{text!r} is not a rate above 0 with a unit; write it as 25Gbit/s, 100MB/s or 200GB/s"
        )
    return float(match[1]) * factor


def _memory(text: str) -> int:
    """`80GiB` in bytes; UserError where the unit is missing, as in most files that mean something else than bytes."""
    if text.strip().isdecimal():
        raise UserError(f"{text!r} has no unit; write it as 80GiB")
    return parse_size(text)


def parse_flops(text: str) -> float:
    """`989TFLOPS` in operations per second; UserError where the unit is missing or the rate is not positive."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtp])flops?(?:/s)?", text.strip().lower())
    if match is None or float(match[1]) <= 0:
        raise UserError(f"{text!r} is not a rate above 0 with a unit; write it as 989TFLOPS or 1.2PFLOPS")
    return float(match[1]) * _THOUSANDS[match[2]]


@dataclass(frozen=True, kw_only=True, slots=True)
class DescribedDevice:
    """What computes in a worker, by its limits."""

    name: str
    flops_per_s: float  # at its peak
    efficiency: float  # the share of the peak that products of matrices reach
    bytes_per_s: float  # of its memory
    memory: int = 0  # bytes; 0: not known
    launch_s: float = 0.0  # the least that an operation takes

    def __str__(self) -> str:
        peak, rate = self.flops_per_s / 1e12, self.bytes_per_s / 1e9
        return f"{self.name} ({peak:,.4g} TFLOPS × {self.efficiency:g}, {rate:,.4g} GB/s)"


@dataclass(frozen=True, kw_only=True)
class DescribedCluster:
    """The machines of a plan: those here, as they were measured, or others, as a file describes them."""

    machines: Machines
    speed: float = 1.0  # how many of the machine that was measured a worker computes like
    device: DescribedDevice | None = None  # by whose limits the times of layers are known; None: by measuring
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

    def scaled_codecs(self, rates: Mapping[str, CodecRate]) -> Machines:
        """The machines, whose workers code as much faster than the one that was measured as they compute."""
        return replace(self.machines, codecs={codec: rate.times(self.speed) for codec, rate in rates.items()})

    def scaled(self, profile: TaskProfile) -> TaskProfile:
        """The profile of a worker of these machines."""

        def faster(time: ComputeTime) -> ComputeTime:
            return time.times(1 / self.speed)

        def of_layer(layer: LayerTimes) -> LayerTimes:
            return replace(layer, forward=faster(layer.forward), backward=faster(layer.backward))

        return replace(
            profile,
            layers=tuple(map(of_layer, profile.layers)),
            rest=faster(profile.rest),
            optimizer_s=profile.optimizer_s / self.speed,
            owners_s=profile.by_owners_s / self.speed,
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
_TOP = ("hosts", "workers_per_host", "speed", "device", "memory", "price", "adds", "links", "devices")
_DEVICE = ("peak", "bandwidth", "efficiency", "memory", "launch")

Keys = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads a table, and names the file and the line in what it rejects."""

    path: Path
    text: str

    def read(self, table: Mapping[str, Any]) -> DescribedCluster:
        self._check(table, _TOP, ())
        hosts, per_host = (self._count(table, name) for name in ("hosts", "workers_per_host"))
        rates = self._links(table, hosts, per_host)
        device = self._device(table)
        own_memory = self._said(table, ("memory",), _memory) if "memory" in table else 0
        return DescribedCluster(
            machines=Machines(
                hosts=hosts,
                per_host=per_host,
                memory=rates["memory"],
                inside=rates["inside"],
                between=rates.get("between", LinkRate()),
                added_per_s=self._said(table, ("adds",), parse_rate) if "adds" in table else math.inf,
            ),
            speed=self._number(table, ("speed",), 1.0, above=True),
            device=device,
            memory=own_memory or (device.memory if device is not None else 0),
            price=self._number(table, ("price",), 0.0, above=False),
        )

    def _links(self, table: Mapping[str, Any], hosts: int, per_host: int) -> dict[str, LinkRate]:
        links = self._table(table, "links", "memory, inside and between")
        self._check(links, _LINKS, ("links",))
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
        return rates

    def _link(self, name: str, link: Any) -> LinkRate:
        keys = ("links", name)
        if not isinstance(link, Mapping):
            raise self._wrong(keys, 'must be { latency = "20us", bandwidth = "25Gbit/s" }')
        self._check(link, ("latency", "bandwidth"), keys)
        for key in ("latency", "bandwidth"):
            if key not in link:
                raise self._wrong(keys, f"has no {key}")
        return LinkRate(
            latency_s=self._said(link, (*keys, "latency"), parse_duration),
            bytes_per_s=self._said(link, (*keys, "bandwidth"), parse_rate),
        )

    def _device(self, table: Mapping[str, Any]) -> DescribedDevice | None:
        """The one that `device` names; all that are described are looked at."""
        described = self._table(
            table, "devices", 'a table for each device, as [devices.h100] with peak = "989TFLOPS"'
        )
        found = {name: self._described(name, one) for name, one in described.items()}
        if "device" not in table:
            return None
        name = table["device"]
        if not isinstance(name, str) or name not in found:
            known = nearest(str(name), found) if found else "the file describes none"
            add = f"add [devices.{name}] with peak, bandwidth and efficiency"
            raise self._wrong(("device",), f"device={name!r} is not described; {known}; {add}")
        if "speed" in table:
            raise self._wrong(("speed",), "device says how fast a worker is; leave speed or device out")
        return found[name]

    def _described(self, name: str, one: Any) -> DescribedDevice:
        keys = ("devices", name)
        if not isinstance(one, Mapping):
            raise self._wrong(keys, "must be a table with peak, bandwidth and efficiency")
        self._check(one, _DEVICE, keys)
        for key in ("peak", "bandwidth", "efficiency"):
            if key not in one:
                raise self._wrong(keys, f"has no {key}")
        efficiency = self._number(one, (*keys, "efficiency"), 1.0, above=True)
        if efficiency > 1:
            raise self._wrong((*keys, "efficiency"), f"efficiency={efficiency:g} must be at most 1")
        return DescribedDevice(
            name=name,
            flops_per_s=self._said(one, (*keys, "peak"), parse_flops),
            bytes_per_s=self._said(one, (*keys, "bandwidth"), parse_rate),
            efficiency=efficiency,
            memory=self._said(one, (*keys, "memory"), _memory) if "memory" in one else 0,
            launch_s=self._said(one, (*keys, "launch"), parse_duration) if "launch" in one else 0.0,
        )

    def _table(self, table: Mapping[str, Any], name: str, what: str) -> Mapping[str, Any]:
        found = table.get(name, {})
        if not isinstance(found, Mapping):
            raise self._wrong((name,), f"{name} must be {what}")
        return found

    def _said(self, table: Mapping[str, Any], keys: Keys, parse: Callable[[str], Any]) -> Any:
        name = keys[-1]
        value = table[name]
        if not isinstance(value, str):
            raise self._wrong(keys, f"{name}={value!r} has no unit; write it in quotes, with one")
        try:
            return parse(value)
        except UserError as error:
            raise self._wrong(keys, f"{name}={error}") from None

    def _count(self, table: Mapping[str, Any], name: str) -> int:
        value = table.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._wrong((name,), f"{name}={value!r} must be an integer of at least 1")
        return value

    def _number(self, table: Mapping[str, Any], keys: Keys, default: float, *, above: bool) -> float:
        name = keys[-1]
        value = table.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (above and value == 0):
            raise self._wrong(
                keys, f"{name}={value!r} must be a number {'above' if above else 'of at least'} 0"
            )
        return float(value)

    def _check(self, table: Mapping[str, Any], allowed: tuple[str, ...], within: Keys) -> None:
        for name in table:
            if name not in allowed:
                keys = (*within, name)
                raise self._wrong(keys, f"there is no {'.'.join(keys)}; {nearest(name, allowed)}")

    def _wrong(self, keys: Keys, why: str) -> UserError:
        """An error about the line that gives the value, or the table that it is missing in."""
        number = self._line_of(keys)
        where = f"line {number}" if number else "the file"
        return UserError(f"cluster file {self.path}, {where}: {why}")

    def _line_of(self, keys: Keys) -> int:
        """Of the longest beginning of the keys that some line gives; 0 for none."""
        found: tuple[int, int] = (0, 0)
        table: Keys = ()
        for number, line in enumerate(self.text.splitlines(), 1):
            if head := re.match(r"\s*\[\[?([^\]]+)\]", line):
                table = _keys(head[1])
                given = table
            elif value := re.match(r"\s*([^=#]+?)\s*=", line):
                given = (*table, *_keys(value[1]))
            else:
                continue
            if given == keys[: len(given)] and len(given) > found[0]:
                found = (len(given), number)
        return found[1]


def _keys(text: str) -> Keys:
    return tuple(one.strip().strip("\"'") for one in text.split("."))
