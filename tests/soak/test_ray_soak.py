"""Runs on Ray, on its multi-node test cluster: two nodes of this host that know nothing of each other."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
from assassin import events
from manyhands.strategies.ps.audit import Verdict, audit_run
from manyhands.workloads.tasks import build

pytest.importorskip("ray", reason="Ray is an extra: pip install 'manyhands[ray]'")

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning"),  # Ray's own logs
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of a head and one more node; this process is on the head."""
    import ray
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "240")  # a busy machine is no reason to fail
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    try:
        cluster.add_node(num_cpus=4, resources={"second": 1})
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


def test_actors_carry_roles_and_their_ends_are_reported(nodes: Any) -> None:
    import ray

    from manyhands.errors import UserError
    from manyhands.places.ray.actor_placement import bundles
    from manyhands.places.ray.role_actors import RayRoles

    planned = bundles({"worker": range(2), "ps": range(2)}, {"worker": "pack", "ps": "spread"}, 1, {})
    with RayRoles(ray, planned) as roles:
        roles.start("worker", 0, whose, 0.0)
        roles.start("worker", 1, die)
        roles.start("ps", 0, whose, 0.0, True)
        roles.start("ps", 1, whose, 600.0)
        roles.start("worker", 2, whose, 0.0)  # in a bundle of its own
        ends = {}
        deadline = time.monotonic() + 240
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
    too_many = bundles({"worker": range(9)}, {"worker": "pack"}, 1, {})
    with (
        pytest.raises(UserError, match="worker alone needs 9 CPU, and 8 CPU is free"),
        RayRoles(ray, too_many, 3),
    ):
        pass


def test_gpt_ends_with_the_weights_of_local_processes(nodes: Any) -> None:
    task = build("gpt", context=16, layers=1, width=32, heads=2)
    arguments: dict[str, Any] = {"workers": 4, "steps": 30, "seed": 3}
    here = mh.fit(task, "allreduce", **arguments)
    there = mh.fit(task, "allreduce", cluster="auto workers=spread", **arguments)
    for name, ours in there.model.state_dict().items():
        assert torch.equal(ours, here.model.state_dict()[name]), name
    assert there.history.loss == here.history.loss


def test_a_worker_that_dies_under_all_reduce_is_named(nodes: Any, tmp_path: Path) -> None:
    task = slowed(build("digits"), 0.05)

    def strike() -> None:
        await_rows(tmp_path / "run", 5)
        os.kill(carriers()[0], signal.SIGKILL)

    began = []
    with striking(strike, began), pytest.raises(mh.ManyhandsError, match=r"worker [12] on .*Ray node"):
        mh.fit(task, "allreduce", workers=3, epochs=50, cluster="auto", out=tmp_path / "run")
    print(f"the run ended {time.monotonic() - began[0]:.1f} s after the kill")
    assert time.monotonic() - began[0] < 30


def test_an_elastic_run_goes_on_without_a_worker_until_ray_has_started_it_again(
    nodes: Any, tmp_path: Path
) -> None:
    task, run = slowed(build("digits"), 0.2), tmp_path / "run"

    def strike() -> None:
        await_rows(run, 5)
        (pid,) = [
            one["pid"] for one in events(run) if one["event"] == "started" and one["name"] == "worker 2"
        ]
        os.kill(pid, signal.SIGKILL)

    with striking(strike, []):
        done = mh.fit(task, "allreduce elastic=yes", workers=3, steps=300, cluster="auto", out=run)
    counted = done.summary["membership"]
    assert (counted["lost"], counted["joined"]) == (1, 1), counted
    assert [row["step"] for row in done.history.steps] == list(range(1, 301))
    (came,) = [one for one in events(run) if one["event"] == "joined" and "sentence" in one]
    assert "worker 2 joined after step" in came["sentence"]


def slowed(task: mh.Task, seconds: float) -> mh.Task:
    def loss(model: Any, batch: Any) -> Any:
        time.sleep(seconds)
        return task.loss(model, batch)

    return replace(task, loss=loss)


def carriers() -> list[int]:
    """The processes of the actors that carry roles."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(b"ray::RoleActor.carry"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def await_rows(run: Path, rows: int, running: mh.Running | None = None, within_s: float = 600.0) -> None:
    """Wait for so many rows of a run; what has ended it before is raised here."""
    deadline = time.monotonic() + within_s
    path = run / "metrics.jsonl"
    while time.monotonic() < deadline:
        if running is not None and running.done:
            running.result(0)
        if path.exists() and path.read_text().count("\n") >= rows:
            return
        time.sleep(0.05)
    raise TimeoutError(f"{path} has not {rows} rows after {within_s:.0f} s")


class striking:  # noqa: N801 - reads as what it does
    """While this is open, somebody is struck from a thread; what goes wrong there is told at the end."""

    def __init__(self, strike: Callable[[], None], times: list[float]) -> None:
        self._strike, self._times = strike, times
        self._wrong: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            self._strike()
            self._times.append(time.monotonic())
        except BaseException as error:
            self._wrong.append(error)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._thread.join(60)
        assert not self._wrong, self._wrong


def living(run: Path, kind: str) -> list[int]:
    """The processes of a kind of role, as the newest starts say."""
    started = {event["name"]: event["pid"] for event in events(run) if event["event"] == "started"}
    return [pid for name, pid in started.items() if name.startswith(kind) and Path(f"/proc/{pid}").exists()]


def recovered(run: Path, count: int, within_s: float = 600.0) -> None:
    deadline = time.monotonic() + within_s
    while sum(event["event"] == "recovered" for event in events(run)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{run} has not recovered {count} times after {within_s:.0f} s: {events(run)}")
        time.sleep(0.05)


def test_deaths_of_a_worker_a_server_and_a_node_are_survived(nodes: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"

    def strike() -> None:
        await_rows(run, 20)
        os.kill(living(run, "worker")[0], signal.SIGKILL)
        recovered(run, 1)
        os.kill(living(run, "ps")[-1], signal.SIGKILL)
        recovered(run, 2)
        before = len(events(run))
        nodes.remove_node(nodes.worker_nodes.copy().pop(), allow_graceful=False)
        deadline = time.monotonic() + 600
        while not any(event["event"] == "recovered" for event in events(run)[before:]):
            assert time.monotonic() < deadline, events(run)[before:]
            time.sleep(0.05)

    times: list[float] = []
    with striking(strike, times):
        trained = mh.fit(
            slowed(build("digits"), 0.05),
            "ps servers=2 consistency=async replicas=1",
            workers=2,
            steps=1500,
            cluster="auto workers=spread",
            out=run,
        )
    assert times, "all were struck"
    for one in trained.summary["recoveries"]:
        print(one)
    found = audit_run(run).found
    assert found.verdict is Verdict.COMPLETE, [*(one.sentence for one in found.violations), *found.missing][
        :5
    ]
    assert trained.summary["final"]["accuracy"] > 0.95


@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning:ray")  # of Ray's own settings, by Ray
def test_a_ray_dataset_is_read_by_its_workers(nodes: Any) -> None:
    pytest.importorskip("pandas", reason="Ray Datasets need pandas and pyarrow: pip install 'ray[data]'")
    pytest.importorskip("pyarrow", reason="Ray Datasets need pandas and pyarrow: pip install 'ray[data]'")
    import ray.data

    rows = [{"x": [float(number % 7)], "y": [float(3 * (number % 7))]} for number in range(120)]
    task = mh.Task(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda model, batch: (
            (model(torch.stack(batch["x"], 1).float()) - torch.stack(batch["y"], 1).float()).square().mean()
        ),
        data=ray.data.from_items(rows),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02),
        batch_size=12,
    )
    run = mh.fit(task, "allreduce", workers=3, steps=100, cluster="auto")
    assert run.history.loss[-1] < 0.1 * run.history.loss[0]


def test_workers_come_when_the_cluster_grows(nodes: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    for node in nodes.worker_nodes.copy():
        nodes.remove_node(node)

    running = mh.start(
        slowed(build("digits"), 0.3),
        "ps consistency=async",
        workers=2,
        steps=1500,
        cluster="auto",
        out=run,
        options=mh.Options(max_workers=4),
    )
    with running:
        await_rows(run, 10, running)
        nodes.add_node(num_cpus=2)  # in the main thread, as Ray wants it
        running.result(600)
    started = {event["name"] for event in events(run) if event["event"] == "started"}
    assert {"worker 0", "worker 1", "worker 2", "worker 3"} <= started
    assert "worker 4" not in started
    found = audit_run(run).found
    assert found.verdict is Verdict.COMPLETE, [*(one.sentence for one in found.violations), *found.missing][
        :5
    ]


def test_workers_go_when_the_cluster_shrinks(nodes: Any, tmp_path: Path) -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    run = tmp_path / "run"
    held = placement_group([{"CPU": 4, "second": 1}])
    assert held.wait(60)
    running = mh.start(
        slowed(build("digits"), 0.3),
        "ps consistency=async",
        workers=6,
        steps=1200,
        cluster="auto",
        out=run,
        options=mh.Options(min_workers=2),
    )
    with running:
        while ray.available_resources().get("CPU", 0) >= 4:  # until the server has its place, on the head
            assert not running.done, running
            time.sleep(0.1)
        remove_placement_group(held)  # three of the six workers find theirs on the second node
        await_rows(run, 10, running)
        nodes.remove_node(nodes.worker_nodes.copy().pop(), allow_graceful=False)
        gone = time.monotonic()
        left = 6
        while left > 3:
            assert not running.done
            assert time.monotonic() < gone + 300, "workers without a place have not left"
            views = [event for event in events(run) if event["event"] == "view"]
            left = len(views[-1]["slots"])
            time.sleep(0.2)
        print(f"the run went on with {left} workers {time.monotonic() - gone:.1f} s after the node was gone")
        trained = running.result(600)
    assert left == 3, "all for whom there is room stay"
    found = audit_run(run).found
    assert found.verdict is Verdict.COMPLETE, [*(one.sentence for one in found.violations), *found.missing][
        :5
    ]
    assert trained.summary["final"]["accuracy"] > 0.95
