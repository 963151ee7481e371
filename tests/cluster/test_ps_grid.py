"""Synchronous parameter servers against the plain loop, with servers and workers as threads of the test."""

from __future__ import annotations

from functools import cache

import pytest
from torch import Tensor

from equality import OPTIMIZERS, STEPS, TWICE, distance, make_task, same_bits, train_plainly
from threaded_ps import ThreadedRun, job_for


@cache
def plain(optimizer: str, steps: int) -> dict[str, Tensor]:
    return train_plainly(make_task(OPTIMIZERS[optimizer]), steps)


def trained(strategy: str, workers: int, optimizer: str, steps: int) -> dict[str, Tensor]:
    job = job_for(make_task(OPTIMIZERS[optimizer]), strategy, steps=steps, workers=workers)
    with ThreadedRun(job) as run:
        run.start_workers()
        run.await_joined(job.strategy.num_server_processes + workers)
        servers = tuple(range(1, job.strategy.servers + 1))
        run.publish(1, servers)
        return {name: value.clone() for name, value in run.finish().state_dict().items()}


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_sync_ends_with_the_weights_of_the_plain_loop(servers: int, workers: int, optimizer: str) -> None:
    steps = STEPS if (servers, workers, optimizer) == (2, 2, "adamw") else TWICE
    assert (
        distance(trained(f"ps servers={servers}", workers, optimizer, steps), plain(optimizer, steps)) < 1e-9
    )


@pytest.mark.parametrize("consistency", ["bounded:1", "bounded:4", "async", "softsync:1", "aware:async"])
@pytest.mark.parametrize("servers", [1, 3])
def test_one_worker_is_the_plain_loop_under_every_consistency(servers: int, consistency: str) -> None:
    steps = STEPS if (servers, consistency) == (1, "async") else TWICE
    ours = trained(f"ps servers={servers} consistency={consistency}", 1, "adamw", steps)
    assert distance(ours, plain("adamw", steps)) < 1e-9


def test_bounded_0_is_sync_to_the_bit() -> None:
    bounded, sync = (trained(text, 3, "adamw", TWICE) for text in ("ps consistency=bounded:0", "ps"))
    assert same_bits(bounded, sync)
