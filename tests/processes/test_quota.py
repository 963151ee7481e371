"""A worker that a control group starves of processor time is slow and not dead: the run goes on, and it is named."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.observe.analyse.totals import TotalsSnapshot
from quota import cpu_quota

STEPS = 240  # a starved one takes two of them a second
SHARE = 0.015  # less than a busy machine leaves anyone
STARVED_S = 8.0
"""Longer than the silence after which a process is given up."""


NAMED_S = 90.0
"""By then the view must have named it, however busy the machine."""


def heavy_task() -> mh.Task:
    x = torch.randn(256, 64)
    return mh.Task(
        model=lambda: nn.Sequential(
            nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)
        ),
        loss=lambda model, batch: model(batch).square().mean(),
        data=x,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.001),
        batch_size=128,
    )


def process_called(name: str) -> int:
    """The child of this process whose command line ends with `name`."""
    for task in Path("/proc/self/task").iterdir():
        for pid in (task / "children").read_text().split():
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                return int(pid)
    pytest.fail(f"there is no {name}")


class Starving:
    """A view that starves worker 1 once it trains, and lets it go when it has been named for long enough."""

    def __init__(self, group: Path) -> None:
        self.group = group
        self.named: list[int] = []
        self.starved_s = 0.0
        self.steps_meanwhile = 0
        self.failure: BaseException | None = None
        self._over = threading.Event()

    @contextmanager
    def view(self, steps: int, snapshot: Callable[[], TotalsSnapshot]) -> Iterator[None]:
        assert steps == STEPS
        thread = threading.Thread(target=self._watch, args=(snapshot,))
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def _watch(self, snapshot: Callable[[], TotalsSnapshot]) -> None:
        try:
            while snapshot().step < 20 and not self._over.wait(0.05):
                pass
            pid = process_called("worker 1")
            before, began = snapshot().step, time.monotonic()
            (self.group / "cgroup.procs").write_text(str(pid))
            while not self._over.wait(0.2):
                now = snapshot()
                self.named += [one.worker for one in now.slow[:1]]
                self.starved_s, self.steps_meanwhile = time.monotonic() - began, now.step - before
                is_named = self.named[-1:] == [1] and self.starved_s > STARVED_S
                if is_named or self.starved_s > NAMED_S:
                    break
            (self.group.parent / "cgroup.procs").write_text(str(pid))
        except BaseException as failure:  # told by the test
            self.failure = failure


@pytest.mark.parametrize(
    "strategy", ["mirrored", pytest.param("ps consistency=async", marks=pytest.mark.soak)]
)
def test_a_worker_starved_by_a_quota_is_named_as_slow_and_the_run_goes_on(strategy: str) -> None:
    with cpu_quota(SHARE) as group:
        starving = Starving(group)
        run = mh.fit(
            heavy_task(),
            strategy,
            workers=2,
            steps=STEPS,
            options=mh.Options(view=starving.view, check_every=0),
        )
    assert starving.failure is None, starving.failure
    assert starving.starved_s > STARVED_S, "the run was over before anything was tested"
    assert starving.steps_meanwhile > 0, "it goes on while it is starved"
    assert starving.named[-1:] == [1], f"the slowest, as the view had it: {starving.named}"
    assert run.summary["steps"] == STEPS
    assert run.summary.get("recoveries", []) == [], "nobody was taken for dead"
    assert os.path.isdir(group) is False
