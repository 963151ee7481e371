"""What ties a worker to the others of a run whose processes somebody else started: memory of its host, links, beats."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Final

from manyhands.cluster.cores import threads_per_role
from manyhands.cluster.meeting import Meeting, MeetingStore, meet
from manyhands.device import device_of
from manyhands.errors import UserError, WorkerFailed
from manyhands.group.shared import SharedGroup, SharedGroupFiles
from manyhands.hosts.beats import open_beats
from manyhands.hosts.company import Company, CompanyMember
from manyhands.hosts.links import open_links
from manyhands.hosts.sharing import attach_group, no_group, share_group_files, share_links
from manyhands.hosts.torch_store import RunStore
from manyhands.hosts.waiting import comes_true
from manyhands.link.alarm import Alarm
from manyhands.link.base import Link
from manyhands.link.tcp import TcpLink
from manyhands.strategy import Strategy
from manyhands.threads import with_threads
from manyhands.training.resources import Resources

__all__ = ["Ties", "tied"]

_log = logging.getLogger("manyhands")
_ALL_MET_S: Final = 3.0
_THIS_HOST: Final = "127.0.0.1"


class Ties:
    """What ties one worker to the others; made by `tied`."""

    def __init__(
        self, resources: Resources, meeting: Meeting, files: SharedGroupFiles | None, alarm: Alarm
    ) -> None:
        self.resources = resources
        self._meeting = meeting
        self._files = files
        self._alarm = alarm
        self._far: list[TcpLink] = []
        self._lock = threading.Lock()
        self._closed = False
        self.silent: tuple[int, str] | None = None
        """The rank that fell silent, and the sentence on it; None while everybody is heard."""

    def abort(self, rank: int, sentence: str) -> None:
        """From any thread: end this host's waits, for `rank` has failed; idempotent."""
        with self._lock:
            if self._closed:
                return
            self._alarm.ring(rank, sentence)
            if self._files is not None:
                here = self._meeting.here
                self._files.abort(here.index(rank) if rank in here else None)
            for link in self._far:
                link.interrupt()

    def missed(self, rank: int, sentence: str) -> None:
        """From the thread that listens for beats: `rank` fell silent. Told at once; this host's waits end."""
        self.silent = rank, sentence
        _log.warning("%s", sentence)
        self.abort(rank, sentence)

    def watch(self, link: TcpLink) -> None:
        """Have `abort` end waits for this link, too."""
        self._far.append(link)

    def close(self) -> None:
        """Nobody waits here any more; idempotent."""
        with self._lock:
            self._closed = True


@contextmanager
def tied(
    party: Company | CompanyMember,
    store: MeetingStore,
    strategy: Strategy,
    *,
    device: str,
    seed: int,
    timeout_s: float,
) -> Iterator[Ties]:
    """Collective: meet the others, and share memory on this host, links with all others as `strategy` needs them.

    UserError on all alike where the strategy cannot be on so many hosts.
    """
    place = party.place
    with ExitStack() as stack:
        meeting = stack.enter_context(
            meet(store, rank=place.rank, world=place.world, name="fit", timeout_s=timeout_s)
        )
        alarm, several = Alarm(), len(meeting.hosts) > 1
        helpers = strategy.processes(1).get("helper", 0)
        links: dict[int, Link] = {}
        stack.push(partial(_let_go, links))
        files: SharedGroupFiles | None = None
        group: Callable[[], SharedGroup] = no_group
        if several:
            _require_hosts(strategy, meeting, store)
        if not helpers:  # who would be in the group
            files = stack.enter_context(share_group_files(meeting, "gradients", timeout_s))
            group = partial(attach_group, files, meeting, timeout_s)
        if several:
            links.update(share_links(meeting, timeout_s))
            links.update(_open_far(party, store, meeting, timeout_s))
        elif strategy.uses_links:
            links.update(share_links(meeting, timeout_s, network=strategy.uses_network))
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
            device=device_of(device, meeting.local_rank),
            hosts=meeting.hosts if several else (),
            torch_store=partial(RunStore, store, "torch", timeout_s, partial(_heed, alarm)),
            in_the_clear=party.security.anywhere and not party.security.tls,
            alarm=alarm,
        )
        ties = Ties(resources, meeting, files, alarm)
        stack.callback(ties.close)
        for link in links.values():
            if isinstance(link, TcpLink):
                ties.watch(link)
        beats = open_beats(
            meeting.rank,
            meeting.world,
            store,
            address=party.address if several else _THIS_HOST,
            timeout_s=timeout_s,
            on_lost=ties.missed,
        )
        stack.callback(beats.close)
        alarm.mark = beats.mark
        with with_threads(threads_per_role(len(meeting.here))):
            yield ties


def _heed(alarm: Alarm) -> None:
    """While something is waited for in the run's store: raise if somebody was lost, who would have said it."""
    lost = alarm.lost()
    if lost is not None:
        raise WorkerFailed(lost[1], lost[0])


def _require_hosts(strategy: Strategy, meeting: Meeting, store: MeetingStore) -> None:
    """Collective: UserError where the strategy cannot be on these hosts, before anything is opened.

    Nobody raises it before all have met: the run is then over for those who are still at it, and whoever has begun to
    let others in would wait for them in vain.
    """
    try:
        strategy.across_hosts(meeting.hosts)
    except UserError:
        store.add("refused", 1)
        comes_true(lambda: int(store.get("refused")) >= meeting.world, _ALL_MET_S)
        raise


def _open_far(
    party: Company | CompanyMember, store: MeetingStore, meeting: Meeting, timeout_s: float
) -> dict[int, TcpLink]:
    return open_links(
        meeting.rank,
        [rank for rank in range(meeting.world) if rank not in meeting.here],
        store,
        address=party.address,
        token=party.token,
        security=party.security,
        timeout_s=timeout_s,
    )


def _let_go(links: Mapping[int, Link], kind: type[BaseException] | None, *_: object) -> None:
    """Close what an exchange has not; without a goodbye where this worker failed, so that nobody waits for more."""
    for link in links.values():
        if kind is not None and isinstance(link, TcpLink):
            link.abandon()
        link.close()
