"""How much memory, how many tasks and how many descriptors are free for this process, read from the kernel.

The tightest limit counts: the machine's, those of every control group that this process is in (version 2 or 1, and
those above it), and its own (`ulimit`). What cannot be read limits nothing. Memory that only caches files counts as
free, as in the kernel's own MemAvailable.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from manyhands.places.local.capacity import MemoryCost, Room, check_room

__all__ = ["check_capacity", "free_memory", "free_tasks", "group_folders", "read_room"]

_NO_LIMIT = 1 << 62  # version 1 writes a number near 2^63 where there is none


def check_capacity(cost: MemoryCost, workers: int, *, allow_overload: bool = False) -> None:
    """Overload if `workers` do not fit beside what runs on this host now, and nobody insists."""
    if not allow_overload:
        check_room(cost, workers, read_room())


def read_room(root: Path = Path("/")) -> Room:
    """What is free now; `root` is where `proc` and `sys` are found."""
    proc = root / "proc"
    groups = group_folders(_text(proc / "self/cgroup"), _text(proc / "self/mountinfo"))
    memory = [free_memory(root / str(folder).lstrip("/")) for folder in groups.get("memory", ())]
    tasks = [free_tasks(root / str(folder).lstrip("/")) for folder in groups.get("pids", ())]
    return Room(
        memory_bytes=_least([_available(_text(proc / "meminfo")), *memory]),
        tasks=_least([_unused_numbers(proc), _own_tasks(proc), *tasks]),
        descriptors=_free_descriptors(proc),
    )


def group_folders(own: str, mounts: str) -> dict[str, list[PurePosixPath]]:
    """The folders of the control groups that limit `memory` and `pids`, the innermost first, from the two files' text.

    `own` is /proc/self/cgroup, `mounts` is /proc/self/mountinfo. Version 2 has one tree for all controllers.
    """
    trees = list(_trees(mounts))
    found: dict[str, list[PurePosixPath]] = {}
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = set(controllers.split(",")) if controllers else {""}
        for tree_names, mounted_root, mount in trees:
            if not names & tree_names:
                continue
            folders = _upwards(PurePosixPath(path), mounted_root, mount)
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


def _trees(mounts: str) -> Iterator[tuple[set[str], PurePosixPath, PurePosixPath]]:
    """The mounted trees: the controllers of each ("" for version 2), which part of it is mounted, and where."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        place, kind = before.split(), after.split()
        if len(place) < 5 or len(kind) < 3 or kind[0] not in ("cgroup", "cgroup2"):
            continue
        names = {""} if kind[0] == "cgroup2" else set(kind[2].split(","))
        yield names, PurePosixPath(place[3]), PurePosixPath(place[4])


def _upwards(path: PurePosixPath, mounted_root: PurePosixPath, mount: PurePosixPath) -> list[PurePosixPath]:
    """The folder of a group and those above it, as far as they are mounted here."""
    try:
        inner = path.relative_to(mounted_root)
    except ValueError:  # the path is that of another namespace: only the top of the tree is ours to see
        inner = PurePosixPath()
    folder = mount / inner
    return [folder, *(above for above in folder.parents if above == mount or mount in above.parents)]


def _available(meminfo: str) -> int | None:
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _unused_numbers(proc: Path) -> int | None:
    """How many tasks the kernel has room for: process numbers, and threads at all."""
    most = _least([_number(proc / "sys/kernel/pid_max"), _number(proc / "sys/kernel/threads-max")])
    words = _text(proc / "loadavg").split()  # the fourth is RUNNABLE/ALL
    return None if most is None or len(words) < 4 else max(0, most - int(words[3].partition("/")[2]))


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


def _free_descriptors(proc: Path) -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return None
    try:
        return max(0, limit - len(os.listdir(proc / "self/fd")))
    except OSError:
        return None


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
