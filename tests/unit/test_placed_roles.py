"""Who is who among processes that somebody else started, as a specification or torchrun has them."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from manyhands.errors import UserError
from manyhands.places.external.process_place import ProcessPlace, SpecificationPlace
from manyhands.places.external.specification import ClusterSpec, check_hosts, listening_at
from manyhands.places.place import find_place
from manyhands.strategies.ps.live.ps_members import ps_ranks
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategy import Strategy

CHIEF = ClusterSpec({"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1", "e:1"]})
PLAIN = ClusterSpec({"ps": ["d:1"], "worker": ["b:1", "c:1"]})


def ps(text: str) -> Ps:
    strategy = Strategy.parse(text)
    assert isinstance(strategy, Ps)
    return strategy


def counts(spec: ClusterSpec) -> Mapping[str, int]:
    return {kind: len(listed) for kind, listed in spec.addresses.items()}


def test_the_chief_is_rank_0_and_servers_come_last() -> None:
    places = [SpecificationPlace.of(CHIEF, role).process for role in CHIEF.roles()]
    assert [(place.rank, place.role, place.index) for place in places] == [
        (0, "chief", 0),
        (1, "worker", 0),
        (2, "worker", 1),
        (3, "ps", 0),
        (4, "ps", 1),
    ]
    assert {(place.world, place.leader, place.kind) for place in places} == {(5, "a:1", "specification")}
    ranks = ps_ranks(ps("ps servers=2"), places[0])
    assert (ranks.servers, ranks.workers) == ((3, 4), (1, 2))
    assert ranks.names[4] == "ps 1 at e:1"


def test_without_a_chief_worker_0_leads_and_works() -> None:
    place = SpecificationPlace.of(PLAIN, PLAIN.leader).process
    assert (place.rank, place.leads, place.leader) == (0, True, "b:1")
    ranks = ps_ranks(ps("ps"), place)
    assert (ranks.servers, ranks.workers) == ((2,), (0, 1))


def test_under_torchrun_the_first_ranks_serve() -> None:
    strategy, workers = ps("ps servers=2").placed(5, {})
    assert workers == 3
    ranks = ps_ranks(strategy, ProcessPlace(rank=0, world=5, kind="torchrun"))
    assert (ranks.servers, ranks.workers) == ((0, 1), (2, 3, 4))
    assert ranks.names[2] == "worker 0 (rank 2)"
    with pytest.raises(UserError, match="world size 2 leaves no worker besides 2 servers; start at least 3"):
        strategy.placed(2, {})


@pytest.mark.parametrize(
    ("text", "placed"),
    [("ps", "ps servers=2"), ("ps servers=2", "ps servers=2"), ("ps replicas=1", "ps servers=2 replicas=1")],
)
def test_a_specification_says_how_many_servers_there_are(text: str, placed: str) -> None:
    assert ps(text).placed(5, counts(CHIEF)) == (ps(placed), 2)


@pytest.mark.parametrize(
    ("text", "roles", "sentence"),
    [
        ("ps servers=3", {"worker": 1, "ps": 2}, "servers=3, but the cluster lists 2 of type ps"),
        ("ps replicas=1", {"worker": 1, "ps": 1}, "replicas=1 needs 2 servers, but the cluster lists 1"),
        ("ps", {"worker": 1}, "the cluster lists no ps; add one, or use allreduce"),
        ("ps", {"chief": 1, "ps": 1}, "the cluster lists no worker, and a chief does not train"),
        ("allreduce", {"worker": 1, "ps": 2}, "allreduce has no parameter servers, but the cluster lists 2"),
    ],
)
def test_what_does_not_fit_gets_a_sentence(text: str, roles: dict[str, int], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Strategy.parse(text).placed(sum(roles.values()), roles)


def test_the_chief_counts_as_a_worker_where_nobody_serves() -> None:
    assert Strategy.parse("allreduce").placed(3, {"chief": 1, "worker": 2})[1] == 3


def test_tf_config_says_where_this_process_stands() -> None:
    text = json.dumps(
        {"cluster": {"worker": ["b:1", "c:1"], "ps": ["d:1"]}, "task": {"type": "worker", "index": 1}}
    )
    found = find_place(environment={"TF_CONFIG": text})
    assert isinstance(found, SpecificationPlace)
    place = found.process
    assert (place.rank, place.world, place.role, place.index, place.cluster) == (1, 3, "worker", 1, PLAIN)
    assert find_place(environment={}).world is None
    assert find_place(environment={"TF_CONFIG": " {} "}).world is None
    evaluator = text.replace('"type": "worker", "index": 1', '"type": "evaluator", "index": 0')
    with pytest.raises(UserError, match="an evaluator has no work here"):
        find_place(environment={"TF_CONFIG": evaluator})


def test_a_name_that_means_loopback_here_is_refused_where_others_are_elsewhere() -> None:
    worker = PLAIN.roles("worker")[0]
    check_hosts(PLAIN, worker, lambda host: "10.0.0.7")
    with pytest.raises(UserError, match=r"cluster.worker\[0\]='b:1': 'b' is 127.0.1.1 on this host"):
        check_hosts(PLAIN, worker, lambda host: "127.0.1.1")
    alone = ClusterSpec({"worker": ["b:1", "b:2"]})
    check_hosts(alone, alone.leader, lambda host: "127.0.1.1")  # all are on one host

    def unknown(host: str) -> str:
        raise OSError("no such name")

    with pytest.raises(UserError, match="this host does not know the name 'b'"):
        check_hosts(PLAIN, worker, unknown)


def test_where_a_role_listens() -> None:
    assert listening_at("localhost:7") == "tcp:localhost:7"
    assert listening_at("127.0.0.2:7") == "tcp:127.0.0.2:7"
    assert listening_at("service:7", lambda host: "192.0.2.1") == "tcp:0.0.0.0:7"  # of no interface here
    assert listening_at("host:7", lambda host: "127.0.0.3") == "tcp:127.0.0.3:7"
