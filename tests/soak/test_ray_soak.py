"""Runs on Ray, on its multi-node test cluster: two nodes of this host that know nothing of each other."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is an extra: pip install 'manyhands[ray]'")

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of a head and one more node; this process is on the head."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_DEDUP_LOGS", "0")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=4)
        ray.init(address=cluster.address, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def whose(seconds: float, fails: bool = False) -> str:
    import ray

    time.sleep(seconds)
    if fails:
        raise ValueError("as asked")
    return str(ray.get_runtime_context().get_node_id())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_actors_carry_roles_and_their_ends_are_told(nodes: Any) -> None:
    import ray

    from manyhands.errors import UserError
    from manyhands.onray.plan import seats
    from manyhands.onray.roles import RayRoles

    planned = seats({"worker": range(2), "ps": range(2)}, {"worker": "pack", "ps": "spread"}, 1, {})
    with RayRoles(ray, planned) as roles:
        roles.start("worker", 0, whose, 0.0)
        roles.start("worker", 1, die)
        roles.start("ps", 0, whose, 0.0, True)
        roles.start("ps", 1, whose, 600.0)
        roles.start("worker", 2, whose, 0.0)  # it has no bundle
        ends = {}
        deadline = time.monotonic() + 60
        while len(ends) < 4 and time.monotonic() < deadline:
            ends |= {(end.role, end.index): end for end in roles.ended(1.0)}
        assert sorted(ends) == [("ps", 0), ("worker", 0), ("worker", 1), ("worker", 2)]
        assert {whom: end.died for whom, end in ends.items() if end.died} == {("worker", 1): True}
        assert ends["ps", 0].sentence == "ps 0 on Ray: ValueError: as asked"
        assert "worker 1 on Ray: The actor died unexpectedly" in ends["worker", 1].sentence
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU") != 8 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ray.available_resources()["CPU"] == 8, "nothing is left"
    too_many = seats({"worker": range(9)}, {"worker": "pack"}, 1, {})
    with (
        pytest.raises(UserError, match="worker alone needs 9 CPU, and 8 CPU is free"),
        RayRoles(ray, too_many, 3),
    ):
        pass
