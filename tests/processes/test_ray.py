"""A run on a Ray of its own, on this host; longer ones are in soak/test_ray_soak.py."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

import manyhands as mh
from equality import OPTIMIZERS, distance, make_task

pytest.importorskip("ray", reason="Ray is an extra: pip install 'manyhands[ray]'")


@pytest.fixture(autouse=True)
def variables_are_left_as_they_were() -> Iterator[None]:
    """Ray sets some that processes read while they import, and those of later tests would no longer be alike."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_a_run_on_ray_has_the_weights_of_local_processes_to_the_bit() -> None:
    import ray

    task = make_task(OPTIMIZERS["momentum"])
    here = mh.fit(task, "allreduce", workers=2, steps=12)
    there = mh.fit(task, "allreduce", workers=2, steps=12, cluster="ray")
    for name, ours in there.model.state_dict().items():
        assert torch.equal(ours, here.model.state_dict()[name]), name
    assert there.history.loss == here.history.loss
    assert not ray.is_initialized(), "a Ray of the run's own ends with it"


def test_auto_tries_plans_on_ray_and_keeps_the_numbers_of_one_process() -> None:
    task = make_task(OPTIMIZERS["momentum"])
    alone = mh.fit(task, "single", workers=1, steps=1500)
    there = mh.fit(task, "auto shortest=0", workers=2, steps=1500, cluster="ray")
    assert len(there.summary["auto"]["tried"]) > 1
    assert distance(there.model.state_dict(), alone.model.state_dict()) < 1e-9
