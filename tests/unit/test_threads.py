"""What MKL computes is called once by one thread before several call it; numbers of threads are put back."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from manyhands.native.threads import (
    VECTOR_FUNCTIONS,
    choose_functions,
    use_one_thread,
    use_threads,
    with_threads,
)

SHARED_BY_THREADS = 2048
"""Torch gives each thread at least so many items of a function that MKL computes."""


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: set[tuple[str, torch.dtype]] = set()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(args[0], torch.Tensor):
            self.calls.add((func.overloadpacket.__name__, args[0].dtype))
            self.most = max(self.most, args[0].numel())
        return func(*args, **(kwargs or {}))


def test_every_function_is_called_in_both_precisions_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    with Seen() as seen:
        choose_functions.__wrapped__()
    wanted = {(name, dtype) for name in VECTOR_FUNCTIONS for dtype in (torch.float32, torch.float64)}
    assert wanted <= seen.calls
    assert seen.most < SHARED_BY_THREADS


def test_without_mkl_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    with Seen() as seen:
        choose_functions.__wrapped__()
    assert seen.calls == set()


def test_threads_are_used_for_a_while_or_from_here_on() -> None:
    before = torch.get_num_threads()
    try:
        with with_threads(3):
            assert torch.get_num_threads() == 3
        assert torch.get_num_threads() == before
        use_threads(2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert choose_functions.cache_info().currsize == 1


def test_a_thread_beside_the_one_that_computes_has_no_team_of_its_own() -> None:
    def begun_by(pool: ThreadPoolExecutor) -> int:
        """How many threads filling a million items begins."""
        before = os.listdir("/proc/self/task")
        pool.submit(torch.ones, 1 << 20).result()
        return len(set(os.listdir("/proc/self/task")).difference(before))

    with with_threads(3), ThreadPoolExecutor(1) as alone, ThreadPoolExecutor(1) as other:
        use_one_thread(alone)
        assert begun_by(alone) == 0
        assert torch.get_num_threads() == 3
        assert other.submit(torch.get_num_threads).result() == 3
        assert begun_by(other) == 2
