"""Whether so many workers fit on this host. Does no I/O: figures in, a verdict out.

A run's `MemoryCost` says what it takes once, for each worker and for each pair of workers; a `Room` is the free
capacity (read by `capacity_check`). Both count three things: memory, tasks (processes and their threads, as the
kernel limits them), and descriptors of the launcher. The estimate is a lower bound: what the run's code allocates
besides, such as activations, is not known before it runs. More workers than cores are not a reason to refuse.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from manyhands.errors import Overload, format_bytes

__all__ = [
    "LAUNCHER_DESCRIPTORS",
    "PROCESS_BYTES",
    "Amount",
    "MemoryCost",
    "Room",
    "check_room",
    "most_workers",
    "of_processes",
]

PROCESS_BYTES = 256 << 20
"""Private memory of one worker before its model: Python, torch and compiled kernels; 260 MiB were measured."""

LAUNCHER_DESCRIPTORS = 6
"""That a launcher holds for each of its processes: control channel, two pipes, process, stacks, events."""

_LAUNCHER_RESERVE = 32
"""Descriptors that a launcher needs whatever it starts: its own files, and those of the next process to start."""

_SEARCHED = 1 << 20


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
    per_pair: Amount = Amount()
    """Of workers: where each has a link to each other."""

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
    """The largest number of workers that fits; 0 if not even one does."""
    low, high = 0, _SEARCHED
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if not _short_of(cost.of(middle), room) else (low, middle - 1)
    return low


def check_room(cost: MemoryCost, workers: int, room: Room) -> None:
    """Overload if the workers do not fit, with the figures and the largest number that does."""
    need = cost.of(workers)
    short = _short_of(need, room)
    if not short:
        return
    told = " and ".join(_told(name, need, room) for name in short)
    most = most_workers(cost, room)
    fits = f"at most {most} workers fit" if most > 1 else "one worker fits" if most else "not even one fits"
    each = format_bytes(cost.per_worker.memory_bytes)
    raise Overload(
        f"workers={workers}: the run needs about {told}; {fits} (a worker takes about {each} before its activations); "
        "use fewer, or free some, or insist with Options(allow_overload=True) or --allow-overload",
        most,
    )


def _short_of(need: Amount, room: Room) -> list[str]:
    """What there is too little of, by name."""
    return [
        one.name
        for one in fields(Room)
        if (free := getattr(room, one.name)) is not None and getattr(need, one.name) > free
    ]


def _told(name: str, need: Amount, room: Room) -> str:
    wanted, free = getattr(need, name), getattr(room, name)
    what, there = _WORDS[name]
    if name == "memory_bytes":
        return f"{format_bytes(wanted)} {what}, but {format_bytes(free)} {there}"
    return f"{wanted:,} {what}, but {max(0, free):,} {there}"
