"""Where a process stands when it joins, what strategy suits the hosts, and one group per name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.errors import UserError
from manyhands.interop.own_loop.connect import choose
from manyhands.interop.own_loop.launch_script import launch
from manyhands.places.external.process_place import SpecificationPlace, joining_place
from manyhands.places.external.specification import ClusterSpec
from manyhands.places.place import LAUNCHER_VARIABLE, using_place
from manyhands.strategy import Strategy

WORKERS = {"worker": ["10.0.0.1:2222", "10.0.0.2:2222"]}
TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_without_a_launcher_a_process_is_alone() -> None:
    place = joining_place({})
    assert (place.rank, place.world, place.launched) == (0, 1, None)


def test_torchrun_says_rank_and_world() -> None:
    place = joining_place(TORCHRUN)
    assert (place.rank, place.world, place.master) == (3, 4, "10.0.0.1")


def tf_config(cluster: dict[str, list[str]]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})}


def test_a_cluster_specification_says_rank_and_world() -> None:
    place = joining_place({**tf_config(WORKERS), **TORCHRUN})
    assert (place.rank, place.world, place.master, place.kind) == (1, 2, "10.0.0.1", "specification")


def test_a_declared_place_is_found_before_the_environment() -> None:
    cluster = {"worker": WORKERS["worker"], "chief": ["10.0.0.3:2222"], "ps": ["10.0.0.4:2222"]}
    spec = ClusterSpec.from_tf_config(tf_config(cluster)["TF_CONFIG"])
    with using_place(SpecificationPlace.of(*spec)):
        place = joining_place(TORCHRUN)
    assert (place.rank, place.world, place.master, place.roles["ps"]) == (2, 4, "10.0.0.3", 1)


@pytest.mark.parametrize(
    ("environment", "report"),
    [
        (tf_config({**WORKERS, "ps": ["10.0.0.3:2222"]}), "the cluster lists ps but no chief"),
        ({LAUNCHER_VARIABLE: "0.0.7"}, f"started by manyhands 0.0.7 but imports manyhands {mh.__version__}"),
        ({LAUNCHER_VARIABLE: mh.__version__}, "a worker of `manyhands launch` started"),
        ({**TORCHRUN, "MASTER_PORT": ""}, "not MASTER_PORT"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "not MASTER_ADDR, MASTER_PORT"),
        ({**TORCHRUN, "RANK": "4"}, "RANK=4 and WORLD_SIZE=4"),
        ({**TORCHRUN, "RANK": "first"}, "RANK=first"),
    ],
)
def test_where_joining_makes_no_sense_one_sentence_says_why(environment: dict[str, str], report: str) -> None:
    with pytest.raises(UserError) as raised:
        joining_place(environment)
    assert report in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("asked", "hosts", "chosen"),
    [
        (None, [[0, 1, 2]], "mirrored"),
        ("central", [[0, 1]], "central"),
        ("central", [[0, 1], [2]], "central"),
        ("allreduce algorithm=ring", [[0, 1]], "allreduce algorithm=ring"),
        (None, [[0, 1], [2, 3]], "allreduce algorithm=hierarchical group=2"),
        (None, [[0, 1, 2], [3, 4, 5], [6]], "allreduce algorithm=hierarchical group=3"),
        (None, [[0], [1]], "allreduce algorithm=hierarchical group=1"),
        (None, [[0, 2], [1, 3]], "allreduce algorithm=ring"),
        (None, [[0], [1, 2]], "allreduce algorithm=ring"),
        ("allreduce algorithm=hierarchical", [[0, 1], [2, 3]], "allreduce algorithm=hierarchical group=2"),
        ("mirrored buckets=1MiB", [[0, 1], [2, 3]], "allreduce algorithm=hierarchical buckets=1MiB group=2"),
        ("allreduce", [[0], [1, 2]], "allreduce algorithm=ring"),
        (
            "allreduce algorithm=hierarchical group=3",
            [[0, 1], [2, 3]],
            "allreduce algorithm=hierarchical group=3",
        ),
        ("local", [[0, 1], [2, 3]], "local"),
        ("allreduce algorithm=butterfly", [[0, 1], [2, 3]], "allreduce algorithm=butterfly"),
    ],
)
def test_the_hosts_choose_the_strategy(asked: str | None, hosts: list[list[int]], chosen: str) -> None:
    assert str(choose(Strategy.parse(asked) if asked else None, hosts)) == chosen


@pytest.mark.parametrize(
    ("asked", "hosts", "report"),
    [
        ("single", [[0, 1]], "strategy=single runs one process, but there are 2 workers"),
        ("federated", [[0, 1]], "strategy=federated does not support a loop of your own"),
        (
            "sharded",
            [[0], [1]],
            "strategy=sharded: workers of your own loop that cut a model must be on one host",
        ),
        ("single device_memory=1GiB", [[0]], "give the model and its loss to mh.fit for device_memory"),
    ],
)
def test_a_strategy_that_hosts_can_not_have_is_refused(
    asked: str, hosts: list[list[int]], report: str
) -> None:
    with pytest.raises(UserError) as raised:
        choose(Strategy.parse(asked), hosts)
    assert report in str(raised.value)


def test_two_open_groups_of_one_name_are_refused_and_both_are_named() -> None:
    with mh.join("encoder"), mh.join("decoder"):
        with pytest.raises(UserError) as raised:
            mh.join("encoder")
        lines = [word for word in str(raised.value).split() if Path(__file__).name in word]
        assert len(lines) == 2
        assert lines[0] != lines[1]
    with mh.join("encoder") as again:
        assert again.name == "encoder"


@pytest.mark.parametrize(
    ("arguments", "report"),
    [
        ({"buffers": "brodcast"}, "did you mean 'broadcast'?"),
        ({"strategy": "mirored"}, "did you mean 'mirrored'?"),
        ({"device": "cuda:99"}, "device=cuda:99"),
        ({"timeout_s": 0}, "timeout_s=0"),
        ({"name": ""}, "name=''"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, object], report: str) -> None:
    with pytest.raises(UserError) as raised:
        mh.join(**arguments)
    assert report in str(raised.value)


def test_alone_the_order_of_samples_and_the_random_numbers_are_those_of_the_plain_loop() -> None:
    def read(loader: DataLoader[tuple[torch.Tensor, ...]]) -> list[object]:
        torch.manual_seed(4)
        seen: list[object] = []
        for _ in range(2):
            for (x,) in loader:
                seen += [x.tolist(), float(torch.rand(1))]
        return seen

    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=6, shuffle=True)
    with mh.join() as group:
        assert read(group.prepare(loader)) == read(loader)


def test_after_the_group_the_model_is_an_ordinary_one() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mh.join() as group:
        assert group.prepare(model, optimizer) == (model, optimizer)
        assert group.is_main
        assert str(group.strategy) == "single"
        group.close()
        group.close()
    assert not model._forward_pre_hooks
    model(torch.ones(3, 2)).sum().backward()
    assert torch.equal(model.bias.grad, torch.tensor([3.0]))


@pytest.mark.parametrize(
    ("script", "arguments", "report"),
    [
        ("nowhere.py", {"workers": 2}, "script nowhere.py does not exist"),
        (__file__, {"workers": 0}, "workers=0 must be an integer of at least 1"),
        (__file__, {"workers": 2, "strategy": "single"}, "strategy=single runs one process"),
        (__file__, {"workers": 2, "strategy": "centre"}, "did you mean 'central'?"),
    ],
)
def test_a_launch_that_makes_no_sense_starts_nothing(
    script: str, arguments: dict[str, Any], report: str
) -> None:
    with pytest.raises(UserError) as raised:
        launch(script, **arguments)
    assert report in str(raised.value)
