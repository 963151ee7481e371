"""Every test leaves as many threads, children and shared segments behind as it found."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from manyhands.cluster.template import kept_pid

# how long a busy machine takes to draw an example decides no test
settings.register_profile("manyhands", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("manyhands")

ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {int(pid) for pid in (task / "children").read_text().split()}
        except OSError:  # the thread ended while we looked
            continue
    return found - {kept_pid()}  # the template waits for the next run, as it should


def segments() -> int:
    """How many shared segments are mapped here."""
    return sum("manyhands:" in line for line in Path("/proc/self/maps").read_text().splitlines())


def listening() -> set[str]:
    """The sockets of this process that wait for connections, TCP and Unix."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(entry))
        except OSError:  # the listing's own descriptor
            continue
    found = set()
    for table, state, inode, waits in (("tcp", 3, 9, "0A"), ("tcp6", 3, 9, "0A"), ("unix", 3, 6, "00010000")):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[state] == waits and f"socket:[{words[inode]}]" in own:
                found.add(f"{table} {words[inode]}")
    return found


def settles(condition: Callable[[], bool], within_s: float = 2.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        os.sched_yield()
    return True


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    children_before, threads_before = children(), set(threading.enumerate())
    segments_before, listening_before = segments(), listening()
    yield
    new_threads = lambda: [t for t in threading.enumerate() if t not in threads_before and not t.daemon]  # noqa: E731
    assert settles(lambda: not new_threads()), f"threads left behind: {new_threads()}"
    new_children = lambda: children() - children_before  # noqa: E731
    assert settles(lambda: not new_children()), f"processes left behind: {new_children()}"
    if segments() > segments_before:
        gc.collect()  # a failed test's frames, and cycles, hold what they hold until then
    assert segments() <= segments_before, "shared segments left behind"
    assert listening() <= listening_before, f"ports left behind: {listening() - listening_before}"


@pytest.fixture
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no folder {SHARED_DATA} with real data sets on this machine")
    return SHARED_DATA
