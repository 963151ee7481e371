"""How many threads torch computes with in this process; and what one thread must have done before several do it.

MKL, with which torch computes `sqrt`, `exp` and their like on x86, chooses the code of each such function when it is
first called. In MKL 2024.2, which is in torch's wheels, several threads that are the first may disagree: one of them
computes its part of that one call with an error of 1e-4 (pytorch/pytorch issue 188792). In the first step of Adam that
is enough for workers to part that should hold the same bits for ever. So each function is called once beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import cache
from typing import Final

import torch

VECTOR_FUNCTIONS: Final = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "digamma", "erf", "erfc", "erfinv", "exp",
    "exp2", "expm1", "floor", "lgamma", "log", "log10", "log1p", "log2", "reciprocal", "round", "rsqrt", "sigmoid",
    "sin", "sinh", "sqrt", "tan", "tanh", "trunc",
)  # fmt: skip
"""Functions of one number of which torch has MKL compute some, which ones by its release."""

_ITEMS: Final = 16  # more than one vector, and far too few to be shared by threads


@cache
def choose_functions() -> None:
    """Have MKL choose the code of its functions in this process, by one thread; in a few milliseconds."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return
    for dtype in (torch.float32, torch.float64):
        items = torch.full((_ITEMS,), 0.5, dtype=dtype)
        for name in VECTOR_FUNCTIONS:
            getattr(torch, name)(items)


def use_threads(count: int) -> None:
    choose_functions()
    torch.set_num_threads(count)


@contextmanager
def with_threads(count: int) -> Iterator[None]:
    """Have torch compute with `count` threads, and afterwards with as many as before."""
    before = torch.get_num_threads()
    use_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_one_thread(pool: Executor) -> None:
    """Have torch compute with one thread in the one thread of a pool, and with as many as before in all others.

    Each thread has a team of OpenMP of its own, which spins before it sleeps: that of a thread beside the one that
    computes the model would take the cores from it.
    """

    def begin() -> None:
        torch.get_num_threads()  # or the first sum would set it to what other threads have
        torch.set_num_threads(1)

    count = torch.get_num_threads()
    pool.submit(begin).result()
    torch.set_num_threads(count)  # also that of threads that begin later
