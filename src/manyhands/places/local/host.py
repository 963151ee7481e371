"""Which host a process is on, and whether so many workers fit on it.

A run's `MemoryCost` says what it takes once, for each worker and for each pair of workers; a `Room` is the free
capacity. Both count three things: memory, tasks (processes and their threads, as the kernel limits them), and
descriptors of the launcher. The estimate is a lower bound: what the run's code allocates besides, such as activations,
is not known before it runs. More workers than cores are not a reason to refuse.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath

from manyhands.errors import ManyhandsError, Overload, UserError, format_bytes

PROCESS_BYTES = 256 << 20
"""Private memory of one worker before its model: Python, torch and compiled kernels; 260 MiB were measured."""

LAUNCHER_DESCRIPTORS = 6
"""That a launcher holds for each of its processes: control channel, two pipes, process, stacks, events."""

_LAUNCHER_RESERVE = 32
"""Descriptors that a launcher needs whatever it starts: its own files, and those of the next process to start."""

_SEARCHED = 1 << 20
_NO_LIMIT = 1 << 62  # version 1 of control groups writes a number near 2^63 where there is none
_LEAST_WATCHDOG_S = 2.0  # a wait shows itself after one second, and the stacks take another
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """So much of each thing that a host can run out of."""

    memory_bytes: int = 0
    tasks: int = 0
    descriptors: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            **{one.name: getattr(self, one.name) + getattr(other, one.name) for one in fields(Amount)}
        )

    def __mul__(self, count: int) -> Amount:
        return Amount(**{one.name: getattr(self, one.name) * count for one in fields(Amount)})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCost:
    """What a run takes."""

    once: Amount = Amount()
    per_worker: Amount = Amount()
    per_pair: Amount = Amount()  # of workers: where each has a link to each other

    def of(self, workers: int) -> Amount:
        """All of it, for so many workers."""
        return self.once + self.per_worker * workers + self.per_pair * (workers * (workers - 1) // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The free capacity; None if nothing limits it, or the limit is unknown."""

    memory_bytes: int | None = None
    tasks: int | None = None
    descriptors: int | None = None


_WORDS = {
    "memory_bytes": ("of memory", "is free"),
    "tasks": ("processes and threads", "more are allowed"),
    "descriptors": ("open files in the launcher", "more are allowed (ulimit -n)"),
}


def of_processes(
    *, memory_bytes: int = 0, threads: int = 1, others: int = 0, once: Amount | None = None
) -> MemoryCost:
    """The cost of workers that are processes of their own, with `memory_bytes` each besides Python and torch.

    `others` are processes of the same kind whatever the number of workers, such as servers; each process computes with
    `threads` and has one more that shows that it lives.
    """
    process = Amount(memory_bytes=PROCESS_BYTES, tasks=1 + max(1, threads), descriptors=LAUNCHER_DESCRIPTORS)
    reserve = Amount(descriptors=_LAUNCHER_RESERVE)
    return MemoryCost(
        once=process * others + reserve + (once or Amount()),
        per_worker=process + Amount(memory_bytes=memory_bytes),
    )


def most_workers(cost: MemoryCost, room: Room) -> int:
    low, high = 0, _SEARCHED
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if not _short_of(cost.of(middle), room) else (low, middle - 1)
    return low


def check_room(cost: MemoryCost, workers: int, room: Room) -> None:
    """Overload if the workers do not fit, with the figures and the largest number that does."""
    need = cost.of(workers)
    lacking = []
    for name in _short_of(need, room):
        wanted, free = getattr(need, name), getattr(room, name)
        what, there = _WORDS[name]
        if name == "memory_bytes":
            lacking.append(f"{format_bytes(wanted)} {what}, but {format_bytes(free)} {there}")
        else:
            lacking.append(f"{wanted:,} {what}, but {max(0, free):,} {there}")
    if not lacking:
        return
    most = most_workers(cost, room)
    fits = f"at most {most} workers fit" if most > 1 else "one worker fits" if most else "not even one fits"
    needed = f"workers={workers}: the run needs about {' and '.join(lacking)}; {fits}"
    if _short_of(need, room) == ["descriptors"]:
        allowed = max(4096, 1 << (need.descriptors + _LAUNCHER_RESERVE).bit_length())
        raise Overload(f"{needed}; use fewer, or raise the limit: ulimit -n {allowed}", most)
    each = format_bytes(cost.per_worker.memory_bytes)
    raise Overload(
        f"{needed} (a worker needs about {each} besides its activations); use fewer, free some, or override with "
        "Options(allow_overload=True) or --allow-overload",
        most,
    )


def _short_of(need: Amount, room: Room) -> list[str]:
    return [
        one.name
        for one in fields(Room)
        if (free := getattr(room, one.name)) is not None and getattr(need, one.name) > free
    ]


def check_capacity(cost: MemoryCost, workers: int, *, allow_overload: bool = False) -> None:
    """Overload if `workers` do not fit beside what runs on this host now, unless that is allowed."""
    if not allow_overload:
        check_room(cost, workers, read_room())


def read_room(root: Path = Path("/")) -> Room:
    """What is free now; `root` is where `proc` and `sys` are found."""
    proc = root / "proc"
    groups = group_folders(_text(proc / "self/cgroup"), _text(proc / "self/mountinfo"))
    memory, tasks = (
        [root / str(folder).lstrip("/") for folder in groups.get(name, ())] for name in ("memory", "pids")
    )
    available = [
        int(line.split()[1]) * 1024
        for line in _text(proc / "meminfo").splitlines()
        if line.startswith("MemAvailable:")
    ]
    # What the kernel has room for: process numbers, and threads at all; the fourth word of loadavg is RUNNABLE/ALL.
    most = _least([_number(proc / "sys/kernel/pid_max"), _number(proc / "sys/kernel/threads-max")])
    load = _text(proc / "loadavg").split()
    unused = max(0, most - int(load[3].partition("/")[2])) if most is not None and len(load) >= 4 else None
    descriptors = None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and (proc / "self/fd").is_dir():
        descriptors = max(0, limit - len(os.listdir(proc / "self/fd")))
    return Room(
        memory_bytes=_least([*available, *map(free_memory, memory)]),
        tasks=_least([unused, _own_tasks(proc), *map(free_tasks, tasks)]),
        descriptors=descriptors,
    )


def group_folders(own: str, mounts: str) -> dict[str, list[PurePosixPath]]:
    """The folders of the control groups that limit `memory` and `pids`, the innermost first, from the two files' text.

    `own` is /proc/self/cgroup, `mounts` is /proc/self/mountinfo. Version 2 has one tree for all controllers.
    """
    found: dict[str, list[PurePosixPath]] = {}
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = set(controllers.split(","))  # {""} in version 2
        for mounted in mounts.splitlines():
            before, _, after = mounted.partition(" - ")
            place, kind = before.split(), after.split()
            if len(place) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
                continue
            if not names & ({""} if kind[0] == "cgroup2" else set(kind[2].split(","))):
                continue
            mount = PurePosixPath(place[4])
            try:
                folder = mount / PurePosixPath(path).relative_to(place[3])
            except ValueError:  # the path is that of another namespace: only the top is ours to see
                folder = mount
            # The folder of the group and those above it, as far as they are mounted here.
            above = (one for one in folder.parents if one == mount or mount in one.parents)
            folders = [folder, *above]
            for limited in ("memory", "pids"):
                if limited in names or names == {""}:
                    found.setdefault(limited, []).extend(folders)
    return found


def free_memory(folder: Path) -> int | None:
    """What a control group of either version lets its members take more; None without a limit."""
    for limit_file, usage_file, cached in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _number(folder / limit_file), _number(folder / usage_file)
        if limit is None or used is None or limit >= _NO_LIMIT:
            continue
        rows = dict(line.split()[:2] for line in _text(folder / "memory.stat").splitlines() if " " in line)
        return max(0, limit - used + int(rows.get(cached, 0)))
    return None


def free_tasks(folder: Path) -> int | None:
    """How many tasks more a control group allows; None without a limit."""
    limit, used = _number(folder / "pids.max"), _number(folder / "pids.current")
    return None if limit is None or used is None else max(0, limit - used)


def _own_tasks(proc: Path) -> int | None:
    """How many more tasks this user may have (`ulimit -u`), which limits everyone but root."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    user = os.getuid()
    if limit == resource.RLIM_INFINITY or user == 0:
        return None
    used = 0
    for status in proc.glob("[0-9]*/status"):
        rows = dict(line.split(":", 1) for line in _text(status).splitlines() if ":" in line)
        if rows.get("Uid", "-1").split()[0] == str(user):
            used += int(rows.get("Threads", "1"))
    return max(0, limit - used)


def _number(file: Path) -> int | None:
    """The number in a file; None where there is no file, or it says `max`."""
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _least(limits: Iterable[int | None]) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def check_watchdog_s(watchdog_s: float) -> float:
    """The deadline of the watchdog, or UserError: checked long before anything is watched."""
    if watchdog_s != 0 and not watchdog_s >= _LEAST_WATCHDOG_S:
        raise UserError(f"watchdog_s={watchdog_s:g} must be at least {_LEAST_WATCHDOG_S:g}, or 0 to disable")
    return watchdog_s


def threads_per_role(num_roles: int) -> int:
    """How many threads torch gets in each of `num_roles` processes: an equal share of the cores, or 1."""
    return max(1, len(os.sched_getaffinity(0)) // num_roles)


def host_identity() -> str:
    """The boot id and the network namespace: equal in two processes exactly when they can pass descriptors.

    Those travel over Unix sockets with abstract names, visible within one network namespace of one running kernel. Host
    names would be wrong both ways: containers can share a name and not a namespace, or the other way round.
    """
    try:
        boot = _BOOT_ID.read_text().strip()
        namespace = os.stat(_NETWORK_NAMESPACE).st_ino
    except OSError as error:
        raise ManyhandsError(
            f"this host cannot be identified: {error.filename} cannot be read ({error.strerror}); manyhands needs "
            "Linux with /proc mounted"
        ) from error
    return f"{boot}/{namespace}"
