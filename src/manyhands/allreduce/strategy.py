"""`mirrored` and `allreduce` as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from manyhands.allreduce.algorithms import ALGORITHMS
from manyhands.errors import UserError
from manyhands.facts import ELASTIC, IN_STEP, ROUNDED, Promises, Truth
from manyhands.settings import (
    buckets_setting,
    check_buckets,
    check_choice,
    check_link,
    link_setting,
    setting,
    switch_setting,
    whole_number,
)
from manyhands.strategy import Strategy
from manyhands.wire.names import RAW, check_codec, codec_setting

__all__ = ["AllReduce", "Mirrored"]


@dataclass(frozen=True, kw_only=True)
class Mirrored(Strategy):
    """Every worker of one host holds the model; gradients are summed in shared memory, in worker order."""

    word: ClassVar[str] = "mirrored"
    about: ClassVar[str] = "all-reduce in the shared memory of one host"
    truth: ClassVar[Truth] = Truth.EVERYONE
    cannot_cross_hosts: ClassVar[str] = ""

    buckets: int = buckets_setting()

    def __post_init__(self) -> None:
        check_buckets(self.buckets)

    def across_hosts(self, hosts: Sequence[Sequence[int]]) -> Strategy:
        """An all-reduce that suits the hosts."""
        return AllReduce(buckets=self.buckets).across_hosts(hosts)

    @property
    def promises(self) -> Promises:
        """All workers take every step together, so all are needed."""
        return IN_STEP


@dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy):
    """Every worker holds the model; gradients are summed by the algorithm you name.

    `direct` runs in place in shared memory on one host; every other algorithm runs its schedule over links.
    `group` is the number of ranks that `hierarchical` takes as one host (0: as the cluster found them), `link` how
    processes of one host talk: through `shared` memory, or every algorithm by `tcp` on loopback. There, or between
    hosts, `codec` makes gradients smaller on their way. With `elastic=yes` the run goes on without a worker that is
    lost, and workers may join and leave.
    """

    word: ClassVar[str] = "allreduce"
    about: ClassVar[str] = "every worker holds the model; gradients summed by a named algorithm"
    truth: ClassVar[Truth] = Truth.EVERYONE
    cannot_cross_hosts: ClassVar[str] = ""

    algorithm: str = setting("direct", str)
    """How gradients are summed: `direct` in shared memory, or a schedule over links such as `ring`."""
    buckets: int = buckets_setting()
    group: int = setting(0, whole_number)
    """Ranks that `hierarchical` takes as one host; 0: as the cluster found them."""
    link: str = link_setting()
    codec: str = codec_setting()
    elastic: bool = switch_setting()
    """Whether the run goes on without a worker that is lost, and workers may join and leave it."""

    def __post_init__(self) -> None:
        check_choice("all-reduce algorithm", self.algorithm, ALGORITHMS)
        check_link(self.link)
        check_codec(self.codec, link=self.link)
        check_buckets(self.buckets)
        if self.group and self.algorithm != "hierarchical":
            raise UserError(
                f"group={self.group} only means something to algorithm=hierarchical, not {self.algorithm}"
            )
        if self.group < 0:
            raise UserError(f"group={self.group} must not be negative; 0 means as the cluster found them")

    @property
    def uses_links(self) -> bool:
        """Every algorithm but `direct` in shared memory, which sums in place."""
        return self.algorithm != "direct" or self.uses_network

    def across_hosts(self, hosts: Sequence[Sequence[int]]) -> Strategy:
        """`hierarchical` by itself, with the workers of a host as a group, where hosts hold equally many one by one.

        Elsewhere, where neither algorithm nor group is named, a ring; what is named stays.
        """
        if self.algorithm not in ("direct", "hierarchical") or self.group:
            return self
        if not in_order(hosts):
            return replace(self, algorithm="ring")
        return replace(self, algorithm="hierarchical", group=len(hosts[0]))

    @property
    def can_change_workers(self) -> bool:
        """Where those who are there agree on each step among themselves."""
        return self.elastic

    @property
    def goes_on_with_fewer(self) -> bool:
        """Likewise."""
        return self.elastic

    @property
    def instead_of_own_loop(self) -> str:
        """A loop of one's own cannot be put back to the beginning of a step."""
        return "give mh.fit a Task for elastic=yes" if self.elastic else ""

    def check(self, workers: int, device: str, *, compiled: bool = False) -> None:
        """Compiled steps have no way back."""
        super().check(workers, device, compiled=compiled)
        if compiled and self.elastic:
            raise UserError(
                "elastic=yes: a compiled step cannot be taken back when a worker is lost; leave it out"
            )

    @property
    def promises(self) -> Promises:
        """All workers take every step together, so all are needed; or all that are there."""
        promises = ELASTIC if self.elastic else IN_STEP
        return promises if self.codec == RAW else replace(promises, same_numbers=ROUNDED)


def in_order(hosts: Sequence[Sequence[int]]) -> bool:
    """Whether hosts hold equally many ranks one after the other, the last one perhaps fewer."""
    size = len(hosts[0])
    world = sum(map(len, hosts))
    return [list(ranks) for ranks in hosts] == [
        list(range(begin, min(begin + size, world))) for begin in range(0, world, size)
    ]
