"""Every test leaves as many threads and children behind as it found."""

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


def pytest_collection_finish() -> None:
    """Collecting, which fixtures that count descriptors do twice a test, leaves torch and the test modules out."""
    gc.collect()
    gc.freeze()


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            found |= {int(pid) for pid in (task / "children").read_text().split()}
        except OSError:  # the thread ended while we looked
            continue
    return found - {kept_pid()}  # the template waits for the next run, as it should


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
    yield
    new_threads = lambda: [t for t in threading.enumerate() if t not in threads_before and not t.daemon]  # noqa: E731
    assert settles(lambda: not new_threads()), f"threads left behind: {new_threads()}"
    new_children = lambda: children() - children_before  # noqa: E731
    assert settles(lambda: not new_children()), f"processes left behind: {new_children()}"


@pytest.fixture
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no folder {SHARED_DATA} with real data sets on this machine")
    return SHARED_DATA
