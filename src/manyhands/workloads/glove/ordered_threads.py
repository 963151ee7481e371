"""Work handed to threads in bounded portions, its results in order; compiled code runs there without the GIL."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from manyhands.errors import UserError

__all__ = ["children", "in_order"]

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def children(workers: int) -> Iterator[ThreadPoolExecutor]:
    """`workers` threads; on the way out what has not begun is dropped and what runs is awaited."""
    if workers < 1:
        raise UserError(f"workers={workers} must be at least 1")
    pool = ThreadPoolExecutor(workers, thread_name_prefix="words")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def in_order(
    pool: ThreadPoolExecutor, function: Callable[[Item], Result], items: Iterable[Item], ahead: int
) -> Iterator[Result]:
    """`function` of each item, in the order of the items, at most `ahead` of them begun and not yet taken.

    Items are drawn in the calling thread, so that reading overlaps with the work.
    """
    waiting: deque[Future[Result]] = deque()
    for item in items:
        if len(waiting) >= ahead:
            yield waiting.popleft().result()
        waiting.append(pool.submit(function, item))
    while waiting:
        yield waiting.popleft().result()
