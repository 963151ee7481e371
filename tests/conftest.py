"""Every test leaves as many threads, children, memory segments and listening sockets behind as it found."""

import gc
import logging
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

import warm
from manyhands.places.local.template import kept_pid

# Read when torch is imported, here and in what tests start: its threads sleep while they wait, and do not spin on cores
# that other tests need. A process that trained with two threads beside others took eight times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault(
    "KMP_INIT_AT_FORK", "FALSE"
)  # as scikit-learn sets it where a test imports that: for all alike

# how long a busy machine takes to draw an example decides no test
settings.register_profile("manyhands", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("manyhands")

ROOT = Path(__file__).resolve().parent.parent
SHARED_DATA = ROOT.parent / "shared" / "data"


def pytest_collectstart() -> None:
    """What makes or steps an optimizer does not import torch's compiler, for seconds; what needs it, imports it.

    Asked of here, and not above, by those who run tests: the process that hands them out needs no torch.
    """
    from manyhands.engine.dynamo import defer

    defer()


def pytest_collection_finish() -> None:
    """Collecting, which fixtures that count descriptors do twice a test, leaves torch and the test modules out.

    And torch computes what tests do here with one thread: several processes run tests side by side, and threads that
    wait for each other on a core that another process has spend most of their time at that.
    """
    _freeze()
    _join_loggers()
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _join_loggers() -> None:
    """Have torch's forty loggers tell their parent, or pytest gives a handler to each of them six times a test."""
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """And what has come since, when a module's tests are over: imports, caches, compiled kernels.

    A collection looks at all that is not left out: 60 ms when only large imports were. Done every time, this one has
    little to look at, and so have those of the next module's tests.
    """
    _Held.is_last = nextitem is None or nextitem.path != item.path
    yield
    if _Held.is_last:
        _freeze()


def _freeze() -> None:
    """Keep all that lives now out of later collections."""
    gc.collect()
    gc.freeze()


def children() -> set[int]:
    found: set[int] = set()
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children", "rb", buffering=0) as file:
                found.update(map(int, file.read().split()))
        except OSError:  # the thread ended while we looked
            continue
    return found - {kept_pid(), warm.pid()}  # the templates wait for the next run, as they should


class Left(NamedTuple):
    """What a test may leave as it found it: child processes, memory segments by inode, listening sockets by address."""

    children: set[int]
    segments: set[str]
    listening: set[str]


def left() -> Left:
    """What this process has now; its descriptors are looked through once."""
    segments, listening = set(), set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            kind = os.readlink(f"/proc/self/fd/{descriptor}")
            if kind.startswith(("/memfd:", "/dev/shm/")):
                segments.add(str(os.fstat(int(descriptor)).st_ino))
            elif kind.startswith("socket:"):
                listening |= _listened_at(int(descriptor))
        except OSError:  # closed while we looked
            continue
    return Left(children(), segments | _mapped(), listening)


def _mapped() -> set[str]:
    """The shared memory that this process has mapped."""
    resident = _resident_shared()
    if resident <= _Held.others_kb and not _Held.is_last and _kernel_counts_pages():
        _Held.others_kb = resident
        return set()
    mapped = _mapped_segments()
    if not mapped:
        _Held.others_kb = resident
    return mapped


def _resident_shared() -> int:
    """KiB of shared memory that this process maps and has touched, whose ever it is."""
    with open("/proc/self/status", "rb", buffering=0) as file:
        status = file.read()
    return int(status[status.index(b"RssShmem:") :].split(None, 2)[1])


@cache
def _kernel_counts_pages() -> bool:
    """Whether one page more shows in the number of them; some kernels (Linux 6.2 to 6.15) count roughly."""
    before = _resident_shared()
    descriptor = os.memfd_create("a page")
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as page:
            page[0] = 1
            return _resident_shared() - before == mmap.PAGESIZE // 1024
    finally:
        os.close(descriptor)


def _mapped_segments() -> set[str]:
    found = set()
    mapped = Path("/proc/self/maps").read_bytes()
    for name in (
        b"/memfd:",
        b"/dev/shm/",
    ):  # looked for in all lines at once: there are thousands, and mostly none
        at = mapped.find(name)
        while at >= 0:
            if not mapped.startswith(
                b"/dev/shm/sem.", at
            ):  # a lock, such as that of tqdm, which Ray's data uses
                found.add(mapped[mapped.rfind(b"\n", 0, at) + 1 : at].split()[4].decode())
            at = mapped.find(name, at + 1)
    return found


class _Held:
    """What the last test left, which is what the next one finds.

    Looking takes a millisecond, in which most tests are over. Only what lives longer than a test, set up meanwhile,
    makes it necessary to look again.
    """

    left: Left | None = None
    others_kb = 0
    """Resident when no mapping was a segment (it is locks then, and the like): with no more than that, none is now.

    The list of all mappings, thousands of them, takes the kernel five milliseconds: it is read where there is more,
    and after the last test of a file, whatever there is.
    """
    is_last = False


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Iterator[None]:
    if fixturedef.scope != "function":
        _Held.left = None
    return (yield)


def _listened_at(descriptor: int) -> set[str]:
    """The socket and its address, if it listens and is not that of CUDA's driver, which stays open."""
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        if not copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return set()
        address = copy.getsockname()
    if isinstance(address, bytes) and address.startswith(b"\0cuda-uvmfd-"):
        return set()
    return {f"{os.fstat(descriptor).st_ino} at {address!r}"}


def settles(condition: Callable[[], bool], within_s: float = 30.0) -> bool:
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    threads_before, before = set(threading.enumerate()), _Held.left or left()
    _Held.left = None
    yield
    new_threads = lambda: [t for t in threading.enumerate() if t not in threads_before and not t.daemon]  # noqa: E731
    assert settles(lambda: not new_threads()), f"threads left behind: {new_threads()}"
    _Held.left = left()

    def more(kind: str, *, again: bool = True) -> set[object]:
        if again:
            _Held.left = left()
        return getattr(_Held.left, kind) - getattr(before, kind)

    assert not more("children", again=False) or settles(lambda: not more("children")), (
        f"processes left behind: {more('children')}"
    )
    assert not more("segments", again=False) or _collected(lambda: not more("segments")), (
        f"memory left behind, by this test or one before it in this file: inodes {more('segments')}"
    )
    if request.node.get_closest_marker("gloo") is None:
        assert not more("listening", again=False) or _collected(lambda: not more("listening")), (
            f"listening sockets left: {more('listening')}"
        )


def _collected(condition: Callable[[], bool]) -> bool:
    """Tensors on a segment keep it, and cycles keep tensors: collected only where something is left."""
    gc.collect()
    return settles(condition)


@pytest.fixture
def one_core() -> Iterator[None]:
    """For tests whose ranks are threads of this process: they take turns at the interpreter's lock, on one core.

    On two they hand it to and fro, which takes twice the processor's time. Not for tests of memory that threads write
    without that lock: several cores are what these are about.
    """
    cores = os.sched_getaffinity(0)
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    os.sched_setaffinity(0, {sorted(cores)[number % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)


@pytest.fixture
def shared_data() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip(f"no folder {SHARED_DATA} with real data sets on this machine")
    return SHARED_DATA
