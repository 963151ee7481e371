"""Ray's part that needs no Ray: which cluster, who is put where, how many workers, and the store."""

from __future__ import annotations

import json
import queue
import random
import sys
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore, PrefixStore

import manyhands as mh
from manyhands.errors import ManyhandsError, PeerTimeout, UserError
from manyhands.places.external.process_group import join_group
from manyhands.places.external.process_place import ProcessPlace, TorchrunPlace
from manyhands.places.external.run_store import KeyValueStore
from manyhands.places.place import AddWorker, Command, RemoveWorker, using_place
from manyhands.places.ray.actor_placement import (
    Autoscaler,
    Bounds,
    GivenUp,
    Restart,
    RestartPolicy,
    SlotChange,
    bundles,
    room_for,
)
from manyhands.places.ray.ray_place import (
    ActorArguments,
    ActorKeeper,
    RankAssignment,
    RayCluster,
    connected,
    ray_module,
)
from manyhands.places.ray.role_actors import RoleEnded, open_actor_store
from manyhands.strategies.ps.live.ps_members import ps_ranks
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategy import Strategy
from manyhands.transport.security import Security


def test_a_cluster_is_read_from_its_text() -> None:
    assert RayCluster.parse("ray") == RayCluster()
    auto = RayCluster.parse("auto workers=spread cpus=4")
    assert (auto.address, auto.workers, auto.servers, auto.cpus) == ("auto", "spread", "spread", 4)
    assert RayCluster.parse(auto) is auto
    assert RayCluster.parse("ray://head:10001").is_remote
    assert not RayCluster.parse("10.0.0.1:6379").is_remote


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "cluster='' is not a Ray cluster; give ray, auto, ray://HOST:PORT or HOST:PORT"),
        ("rayy", "cluster='rayy' is not a Ray cluster"),
        ("ray://head", "cluster='ray://head' is not a Ray cluster"),
        ("ray workers=near", "unknown workers 'near'"),
        ("ray worker=pack", "cluster ray has no setting 'worker'; allowed: workers, servers, cpus"),
        ("auto cpus=0", "cpus=0 must be an integer of at least 1"),
        ("auto cpus=x", "cluster auto cpus=x: 'x' is not an integer"),
    ],
)
def test_a_text_that_makes_no_sense_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence.replace("(", r"\(")):
        RayCluster.parse(text)


def test_every_kind_of_role_has_bundles_of_its_own() -> None:
    workers, servers = bundles(
        {"worker": range(1, 4), "ps": range(2)},
        {"worker": "pack", "ps": "spread"},
        cpus=2,
        gpus={"worker": 1},
    )
    assert (workers.strategy, workers.first, workers.count) == ("PACK", 1, 3)
    assert not workers.single
    (alone,) = bundles({"worker": range(3)}, {"worker": "pack"}, 1, {}, single={"worker"})
    assert alone.single
    assert workers.bundle == {"CPU": 2, "GPU": 1}
    assert (servers.strategy, servers.count, servers.bundle) == ("SPREAD", 2, {"CPU": 2})
    assert bundles({"worker": range(1, 1)}, {"worker": "pack"}, 1, {}) == []
    assert room_for({"CPU": 7.0, "GPU": 1.0}, workers.bundle) == 1
    assert room_for({"CPU": 7.0}, workers.bundle) == 0
    assert room_for({"CPU": 7.0}, servers.bundle) == 3


def test_workers_follow_the_room_within_their_bounds() -> None:
    assert Bounds.of(2, None, None) is None
    assert Bounds.of(2, None, 4) == Bounds(2, 4)
    bounds = Bounds.of(2, 1, 4)
    assert bounds == Bounds(1, 4)
    assert [bounds.change(2, room) for room in (-5, -1, 0, 1, 2, 9)] == [-1, -1, 0, 1, 2, 2]
    assert Bounds(2, 3).change(5, 0) == -2
    for workers, least, most in ((2, 0, 4), (2, 3, 1)):
        with pytest.raises(UserError, match="must be at least 1 and at most max_workers="):
            Bounds.of(workers, least, most)
    with pytest.raises(UserError, match="workers=5 must be between min_workers=1 and max_workers=4"):
        Bounds.of(5, 1, 4)


@pytest.mark.parametrize("seed", range(5))
def test_the_noticeboard_answers_as_torchs_store_does(seed: int) -> None:
    store, chance = KeyValueStore(), random.Random(seed)
    kept = open_actor_store(lambda call, *given: getattr(store, call)(*given), 1.0)
    ours = PrefixStore("run", kept)
    theirs = PrefixStore("run", HashStore())
    for _ in range(200):
        key, value = chance.choice("abc"), chance.choice(["1", "2", ""])
        match chance.choice(["set", "compare_set", "delete", "check"]):
            case "set":
                ours.set(key, value)
                theirs.set(key, value)
            case "compare_set":
                expected = chance.choice(["1", "2", ""])
                assert ours.compare_set(key, expected, value) == theirs.compare_set(key, expected, value)
            case "delete":
                assert ours.delete_key(key) == theirs.delete_key(key)
            case "check":
                assert ours.check([key]) == theirs.check([key])
                assert not ours.check([key]) or ours.get(key) == theirs.get(key)
                there = [one for one in "cab" if theirs.check([one])]
                assert ours.multi_get(there) == theirs.multi_get(there)
    amounts = (1, 5, -2)
    assert [ours.add("count", amount) for amount in amounts] == [theirs.add("count", one) for one in amounts]


def test_who_waits_in_the_store_hears_that_somebody_will_not_come() -> None:
    actor, troubles = KeyValueStore(), [None, None, "worker 1 on Ray: died"]
    ask = lambda call, *given: getattr(actor, call)(*given)  # noqa: E731
    kept, impatient = open_actor_store(ask, 5.0, lambda: troubles.pop(0)), open_actor_store(ask, 0.1)
    store = PrefixStore("run", kept)
    store.set("here/0", "a")
    assert not store.check(["here/1"])
    with pytest.raises(ManyhandsError, match="worker 1 on Ray: died"):
        store.check(["here/1"])
    with pytest.raises(PeerTimeout, match="no process set 'run/leader' in the run's store within 0 s"):
        PrefixStore("run", impatient).get("leader")
    patient = open_actor_store(ask, 600.0)
    patient.wait(["run/here/0"])
    with pytest.raises(PeerTimeout, match="no process set 'leader' in the run's store within 0 s"):
        patient.wait(["run/here/0", "leader"], timedelta(seconds=0.1))


def test_who_comes_from_another_host_to_a_run_of_one_is_told_how_to_begin_it() -> None:
    store = HashStore()
    report = {
        "name": "chief 0 on hostA",
        "host": "another",
        "version": mh.__version__,
        "unix": "unix:x",
        "token": "aa",
    }
    store.set("manyhands/run/leader", json.dumps(report))
    place = ProcessPlace(rank=3, world=4, kind="ray", later=1, host="hostB", open_store=lambda _: store)
    with pytest.raises(
        UserError, match=r"worker 3 on hostB cannot join: the run started on one host.*--tls DIR"
    ):
        join_group(place, (), "run", security=Security.insecure(), timeout_s=1.0)


def test_roles_are_started_again_ever_later_and_not_for_ever() -> None:
    policy = RestartPolicy(survives=True)
    delays, now_s = [], 100.0
    for _ in range(5):
        again = policy.ended("ps", 1, "ps 1: died", now_s)
        assert isinstance(again, Restart)
        assert (again.role, again.index) == ("ps", 1)
        delays.append(again.at_s - now_s)
        now_s = again.at_s + 1
    assert delays == [0.5, 1, 2, 4, 8]
    given_up = policy.ended("ps", 1, "ps 1: died", now_s)
    assert given_up == GivenUp("ps 1: died (6 times within 60 s, so it is not restarted)")
    assert policy.ended("ps", 0, "ps 0: died", now_s) == Restart(role="ps", index=0, at_s=now_s + 0.5)
    assert policy.ended("ps", 1, "ps 1: died", now_s + 100) == Restart(role="ps", index=1, at_s=now_s + 100.5)
    assert policy.ended("ps", 0, "", now_s) is None, "its part was done"
    assert RestartPolicy(survives=False).ended("worker", 1, "worker 1: died", 0.0) == GivenUp(
        "worker 1: died"
    )


def test_what_fails_where_roles_are_started_again_is_told_to_who_waits_for_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Gone:
        def ended(self, timeout_s: float) -> list[RoleEnded]:
            raise ConnectionError("Ray is gone")

    assignment = RankAssignment(leader=("worker", 0), actors={})
    given = ActorArguments(master="here", store=None, run=None)
    follower = Autoscaler(None, 1, None)
    with ActorKeeper(Gone(), assignment, given, RestartPolicy(survives=True), follower) as keeper:  # type: ignore[arg-type]
        deadline = time.monotonic() + 180
        while keeper.trouble() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
    sentence = "restarting roles on Ray failed: ConnectionError('Ray is gone')"
    assert keeper.trouble() == sentence
    assert sentence in caplog.messages, "once a run has begun nobody asks for the trouble"


class Space:
    def __init__(self) -> None:
        self.free, self.unplaced = 0, dict[int, float]()

    def room(self, role: str) -> int:
        return self.free

    def waiting(self, role: str, now_s: float) -> dict[int, float]:
        return self.unplaced


def test_workers_come_one_by_one_and_go_when_their_place_is_gone() -> None:
    space, commands = Space(), queue.SimpleQueue[Command]()
    follower = Autoscaler(Bounds(1, 4), 2, commands)
    assert follower.look(space, 10.0) == []
    assert commands.empty()
    space.free = 3
    assert follower.look(space, 11.0) == [], "looks every 2 s"
    assert follower.look(space, 12.0) == []
    asked = commands.get_nowait()
    assert isinstance(asked.change, AddWorker)
    assert follower.look(space, 20.0) == [], "the run has not answered"
    assert commands.empty()
    asked.done.set_result(2)
    assert follower.look(space, 20.1) == [SlotChange(2, True)]
    space.unplaced = {2: 20.1}
    assert follower.look(space, 22.2) == [], "it is being started"
    assert follower.look(space, 45.0) == []
    asked = commands.get_nowait()
    assert asked.change == RemoveWorker(slot=2)
    assert follower.look(space, 50.0) == [], "the run has not answered"
    asked.done.set_result(2)
    assert follower.look(space, 50.1) == [SlotChange(2, False)]
    assert follower.look(space, 52.2) == [], "whoever comes for it leaves by itself"
    assert commands.empty()
    space.unplaced = {0: 0.0, 1: 0.0}
    assert follower.look(space, 60.0) == []
    commands.get_nowait().done.set_result(1)
    assert follower.look(space, 60.1) == [SlotChange(1, False)]
    assert follower.look(space, 70.0) == [], "one is the least"
    assert commands.empty()


def test_no_more_workers_are_asked_for_than_a_run_can_have() -> None:
    space, commands = Space(), queue.SimpleQueue[Command]()
    space.free = 9
    follower = Autoscaler(Bounds(1, 9), 2, commands)
    follower.look(space, 0.0)
    commands.get_nowait().done.set_exception(UserError("no more than 18 slots"))
    assert [follower.look(space, now_s) for now_s in (1.0, 10.0, 20.0)] == [[], [], []]
    assert commands.empty()
    assert Autoscaler(None, 2, commands).look(space, 0.0) == []


def test_without_ray_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"Ray is not installed .*; pip install 'manyhands\[ray\]'"):
        ray_module()


def test_what_makes_no_sense_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    task = mh.Task(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda model, batch: model(batch).mean(),
        data=torch.ones(8, 1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    with pytest.raises(UserError, match="cluster='rya' is not a Ray cluster"):
        mh.fit(task, cluster="rya")
    bounded = mh.Options(max_workers=4)
    with pytest.raises(UserError, match="are for a cluster; give cluster= as well"):
        mh.fit(task, workers=2, options=bounded)
    with pytest.raises(UserError, match="strategy allreduce cannot change its number of workers"):
        mh.fit(task, "allreduce", workers=2, options=bounded, cluster="ray")
    with pytest.raises(
        UserError, match=r"max_workers=4: strategy .*elastic=yes.* never has more than at the start"
    ):
        mh.fit(task, "allreduce elastic=yes", workers=2, options=bounded, cluster="ray")
    with (
        using_place(TorchrunPlace(ProcessPlace(rank=0, world=2, kind="torchrun"))),
        pytest.raises(UserError, match="torchrun already started"),
    ):
        mh.fit(task, cluster="auto")


def test_who_leads_and_who_is_which_rank() -> None:
    ring = RankAssignment.of(Strategy.parse("allreduce"), 3)
    assert (ring.leader, ring.world) == (("worker", 0), 3)
    assert [ring.seat("worker", index, "a")["rank"] for index in (1, 2)] == [1, 2]
    served = RankAssignment.of(Strategy.parse("ps servers=2"), 3, later=16)
    assert (served.leader, served.world) == (("chief", 0), 1 + 2 + 3 + 16)
    ranks = [
        served.seat("ps", 1, "a")["rank"],
        served.seat("worker", 0, "a")["rank"],
        served.seat("worker", 5, "a")["rank"],
    ]
    assert ranks == [2, 3, 8], "later workers follow the first ones"
    strategy = Strategy.parse("ps servers=2")
    assert isinstance(strategy, Ps)
    place = ProcessPlace(
        rank=0, world=served.world, kind="ray", role="chief", later=served.later, has_chief=True
    )
    found = ps_ranks(strategy, place)
    assert 3 + place.later == len(found.workers), "each has a place in the run's memory"
    assert (found.servers, found.workers[:2], len(found.workers)) == ((1, 2), (3, 4), 19)
    assert [found.names[rank] for rank in (0, 2, 3)] == ["chief", "ps 1", "worker 0"]


# What Ray 2.60 raised where it could not start here: its daemons died, /tmp was read-only, a path was too long.
RAISED = (
    Exception(
        "The current node timed out during startup. This could happen because some of the raylet failed to startup or "
        "the GCS has become overloaded."
    ),
    FileNotFoundError(2, "No such file or directory", "/tmp/ray"),
    OSError("validate_socket_filename failed: AF_UNIX path length cannot exceed 107 bytes: /tmp/aaa"),
    ConnectionError("Could not find any running Ray instance.\nPlease specify the one to connect to."),
)


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize(
    ("address", "sentence"),
    [("ray", "Ray could not start on this host"), ("auto", "no Ray cluster can be reached there")],
)
def test_a_ray_that_cannot_start_is_one_sentence_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, address: str, sentence: str, error: Exception
) -> None:
    def init(**_: object) -> None:
        raise error

    ended: list[bool] = []
    fake = SimpleNamespace(is_initialized=lambda: False, init=init, shutdown=lambda: ended.append(True))
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    with pytest.raises(UserError) as report, connected(address, cpus=2):
        raise AssertionError("nothing is trained")
    said = str(report.value)
    assert said.startswith(f"cluster={address}: {sentence} (")
    assert "\n" not in said
    assert str(error).splitlines()[0].rstrip(".") in said
    assert ended == [True], "what has started of it is ended"
