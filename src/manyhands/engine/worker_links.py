"""Connects an externally started worker to the others of its run: shared memory, links, heartbeats."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from manyhands.engine.device import device_of
from manyhands.engine.worker_resources import Resources
from manyhands.errors import UserError, WorkerFailed
from manyhands.native.group.shared_group import SharedGroup, SharedGroupFiles
from manyhands.native.threads import with_threads
from manyhands.places.external.host_heartbeats import open_heartbeats
from manyhands.places.external.links import open_links
from manyhands.places.external.process_group import GroupMember, ProcessGroup
from manyhands.places.external.sharing import attach_group, no_group, share_group_files, share_links
from manyhands.places.external.store_waiting import comes_true
from manyhands.places.external.torch_store import RunStore
from manyhands.places.local.host import threads_per_role
from manyhands.places.local.rendezvous import Rendezvous, RendezvousStore, meet
from manyhands.strategy import Strategy
from manyhands.transport.link.interface import Link
from manyhands.transport.link.tcp import TcpLink
from manyhands.transport.liveness import Alarm

__all__ = ["WorkerLinks", "connect_worker"]

_log = logging.getLogger("manyhands")
_ALL_MET_S: Final = 3.0
_THIS_HOST: Final = "127.0.0.1"


class WorkerLinks:
    """One worker's connections to the others; made by `connect_worker`."""

    def __init__(
        self, resources: Resources, rendezvous: Rendezvous, files: SharedGroupFiles | None, alarm: Alarm
    ) -> None:
        self.resources = resources
        self._rendezvous = rendezvous
        self._files = files
        self._alarm = alarm
        self._far: list[TcpLink] = []
        self._lock = threading.Lock()
        self._closed = False
        self.silent: tuple[int, str] | None = None
        """The rank that fell silent, and the sentence on it; None while everybody is heard."""

    def abort(self, rank: int, sentence: str) -> None:
        """From any thread: end this host's waits because `rank` has failed; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._alarm.ring(rank, sentence)
            if self._files is not None:
                here = self._rendezvous.here
                self._files.abort(here.index(rank) if rank in here else None)
            for link in self._far:
                link.interrupt()

    def missed(self, rank: int, sentence: str) -> None:
        """From the heartbeat thread: `rank` missed its heartbeats. Reported at once; this host's waits end."""
        self.silent = rank, sentence
        _log.warning("%s", sentence)
        self.abort(rank, sentence)

    def watch(self, link: TcpLink) -> None:
        """Have `abort` end waits for this link, too."""
        self._far.append(link)

    def close(self) -> None:
        """Close the connections; no wait may be under way. Idempotent."""
        with self._lock:
            self._closed = True


@contextmanager
def connect_worker(
    party: ProcessGroup | GroupMember,
    store: RendezvousStore,
    strategy: Strategy,
    *,
    device: str,
    seed: int,
    timeout_s: float,
) -> Iterator[WorkerLinks]:
    """Collective: rendezvous, then open shared memory on this host and links to the others, as `strategy` needs.

    UserError on every worker where the strategy cannot span so many hosts.
    """
    place = party.place
    with ExitStack() as stack:
        rendezvous = stack.enter_context(
            meet(store, rank=place.rank, world=place.world, name="fit", timeout_s=timeout_s)
        )
        alarm, several = Alarm(), len(rendezvous.hosts) > 1
        helpers = strategy.processes(1).get("helper", 0)
        links: dict[int, Link] = {}
        stack.push(partial(_let_go, links))
        files: SharedGroupFiles | None = None
        group: Callable[[], SharedGroup] = no_group
        if several:
            _require_hosts(strategy, rendezvous, store)
        if not helpers:  # the members of the group
            files = stack.enter_context(share_group_files(rendezvous, "gradients", timeout_s))
            group = partial(attach_group, files, rendezvous, timeout_s)
        if several:
            links.update(share_links(rendezvous, timeout_s))
            links.update(_open_far(party, store, rendezvous, timeout_s))
        elif strategy.facts.uses_links:
            links.update(share_links(rendezvous, timeout_s, network=strategy.uses_network))
        resources = Resources(
            rank=place.rank,
            world=place.world - helpers,
            helpers=helpers,
            timeout_s=timeout_s,
            group=no_group if several else group,
            host_group=group,
            shares_memory=files is not None and not several,
            links=lambda: links,
            seed=seed,
            device=device_of(device, rendezvous.local_rank),
            hosts=rendezvous.hosts if several else (),
            torch_store=partial(RunStore, store, "torch", timeout_s, partial(_heed, alarm)),
            in_the_clear=party.security.anywhere and not party.security.tls,
            alarm=alarm,
        )
        worker_links = WorkerLinks(resources, rendezvous, files, alarm)
        stack.callback(worker_links.close)
        for link in links.values():
            if isinstance(link, TcpLink):
                worker_links.watch(link)
        heartbeats = open_heartbeats(
            rendezvous.rank,
            rendezvous.world,
            store,
            address=party.address if several else _THIS_HOST,
            timeout_s=timeout_s,
            on_lost=worker_links.missed,
        )
        stack.callback(heartbeats.close)
        alarm.mark = heartbeats.mark
        with with_threads(threads_per_role(len(rendezvous.here))):
            yield worker_links


def _heed(alarm: Alarm) -> None:
    """Called while waiting on the run's key-value store: raises if a peer that had to answer was lost."""
    lost = alarm.lost()
    if lost is not None:
        raise WorkerFailed(lost[1], lost[0])


def _require_hosts(strategy: Strategy, rendezvous: Rendezvous, store: RendezvousStore) -> None:
    """Collective: UserError where the strategy cannot span these hosts, before anything is opened.

    No worker raises it before all have reached this point. An earlier error would end the run for workers that are
    still connecting, and those that already accept connections would wait in vain.
    """
    try:
        strategy.across_hosts(rendezvous.hosts)
    except UserError:
        store.add("refused", 1)
        comes_true(lambda: int(store.get("refused")) >= rendezvous.world, _ALL_MET_S)
        raise


def _open_far(
    party: ProcessGroup | GroupMember, store: RendezvousStore, rendezvous: Rendezvous, timeout_s: float
) -> dict[int, TcpLink]:
    return open_links(
        rendezvous.rank,
        [rank for rank in range(rendezvous.world) if rank not in rendezvous.here],
        store,
        address=party.address,
        token=party.token,
        security=party.security,
        timeout_s=timeout_s,
    )


def _let_go(links: Mapping[int, Link], kind: type[BaseException] | None, *_: object) -> None:
    """Close links that an exchange left open; without a goodbye where this worker failed, so that no peer waits."""
    for link in links.values():
        if kind is not None and isinstance(link, TcpLink):
            link.abandon()
        link.close()
