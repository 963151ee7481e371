"""Which Ray cluster, and how roles are put on its nodes: a value with a text form.

ray                                  one of this run's own on this host; inside a Ray job, that job's
auto                                 the one that runs here, or that RAY_ADDRESS names
ray://head:10001                     one elsewhere, through Ray's client
auto workers=spread cpus=4           with settings
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from manyhands.errors import UserError
from manyhands.strategy import check_choice, read_settings, setting, settings_of, whole_number

__all__ = ["RayCluster"]

_WAYS = ("pack", "spread")


@dataclass(frozen=True, kw_only=True)
class RayCluster:
    """A Ray cluster and how it is used; `RayCluster.parse` reads the text form."""

    about: ClassVar[str] = (
        "ray, auto, ray://HOST:PORT or HOST:PORT, with settings: 'auto workers=spread cpus=4'"
    )

    workers: str = setting("pack", str)
    """Where workers are put: `pack` them on few nodes, or `spread` them over many."""
    servers: str = setting("spread", str)
    """Where parameter servers are put; spread, the death of a node takes fewer of them."""
    cpus: int = setting(1, whole_number)
    """What each role takes of Ray's CPUs, and how many threads it computes with."""
    address: str = setting("ray", str)
    """`ray`, `auto`, `ray://HOST:PORT` or `HOST:PORT`."""

    def __post_init__(self) -> None:
        check_choice("workers", self.workers, _WAYS)
        check_choice("servers", self.servers, _WAYS)
        if not isinstance(self.cpus, int) or self.cpus < 1:
            raise UserError(f"cpus={self.cpus!r} must be a whole number of at least 1")
        name, colon, port = self.address.removeprefix("ray://").rpartition(":")
        if self.address not in ("ray", "auto") and not (name and colon and port.isdigit()):
            raise UserError(f"cluster={self.address!r} is no Ray cluster; give {self.about}")

    @classmethod
    def parse(cls, given: str | Self) -> Self:
        """From its text; a value is itself."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, str) or not given.split():
            raise UserError(f"cluster={given!r} is no Ray cluster; give {cls.about}")
        address, *texts = given.split()
        allowed = {name: one for name, one in settings_of(cls).items() if name != "address"}
        return cls(address=address, **read_settings(f"cluster {address}", allowed, texts, {}))

    @property
    def is_remote(self) -> bool:
        """Whether the calling process is on none of its nodes."""
        return self.address.startswith("ray://")
