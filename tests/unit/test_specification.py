"""A cluster as it is written down: what is read from it, and the sentence that each mistake gets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.errors import UserError
from manyhands.places.external.specification import ClusterRole, ClusterSpec

CLUSTER = {"chief": ["a:2222"], "worker": ["b:2222", "C:02222"], "ps": ["d:1", "d:2"]}


def tf_config(cluster: object = CLUSTER, task: object = None) -> str:
    return json.dumps({"cluster": cluster, "task": task or {"type": "ps", "index": 1}})


def test_roles_and_addresses() -> None:
    spec = mh.ClusterSpec(CLUSTER)
    assert spec.leader == ClusterRole("chief", 0)
    assert [str(role) for role in spec.roles("ps", "worker")] == ["ps 0", "ps 1", "worker 0", "worker 1"]
    assert spec.roles() == tuple(spec.role(r.type, r.index) for r in spec.roles("chief", "worker", "ps"))
    assert spec.address(ClusterRole("worker", 1)) == "c:2222"  # one way to write an address
    assert str(spec) == "1 chief, 2 worker, 2 ps"
    assert ClusterSpec({"worker": ["a:1", "b:1"], "ps": []}).leader == ClusterRole("worker", 0)


def test_an_evaluator_need_not_be_listed() -> None:
    spec = ClusterSpec(CLUSTER)
    assert spec.address(spec.role("evaluator", 0)) == ""
    with pytest.raises(UserError, match="lists no evaluator"):
        spec.role("evaluator", 1)


def test_files_say_the_same(tmp_path: Path) -> None:
    toml, flat, table = tmp_path / "c.toml", tmp_path / "flat.json", tmp_path / "c.json"
    toml.write_text('[cluster]\nchief = ["a:2222"]\nworker = ["b:2222", "c:2222"]\nps = ["d:1", "d:2"]\n')
    flat.write_text(json.dumps(CLUSTER))
    table.write_text(json.dumps({"cluster": CLUSTER}))
    assert ClusterSpec.from_file(toml) == ClusterSpec.from_file(flat) == ClusterSpec.from_file(table)
    assert ClusterSpec.from_file(str(toml)) == ClusterSpec(CLUSTER)


def test_tf_config() -> None:
    spec, role = ClusterSpec.from_tf_config(tf_config())
    assert spec == ClusterSpec(CLUSTER)
    assert role == ClusterRole("ps", 1)
    text = json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": "0"}, "environment": "cloud"})
    assert ClusterSpec.from_tf_config(text)[1] == ClusterRole("worker", 0)


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        ([], "cluster=[] must be a table"),
        ({}, "cluster lists no worker"),
        ({"ps": ["a:1"]}, "cluster lists no worker"),
        (
            {"wroker": ["a:1"]},
            "cluster.wroker is not a type of role; allowed: chief, .* did you mean 'worker'?",
        ),
        ({"worker": "a:1"}, "cluster.worker='a:1' must be a list"),
        ({"worker": {"0": "a:1"}}, "cluster.worker=.* must be a list"),
        ({"worker": [7]}, r"cluster.worker\[0\]=7 must be an address"),
        ({"worker": ["a:1", ""]}, r"cluster.worker\[1\]='' must be an address"),
        ({"worker": ["hostA"]}, r"cluster.worker\[0\]='hostA' has no port; write hostA:2222"),
        ({"worker": [":2222"]}, "has no host; write the one"),
        ({"worker": ["grpc://a:2222"]}, "'grpc://a' is not a host name"),
        ({"worker": ["::1:2222"]}, "is not a host name or IPv4 address"),
        ({"worker": ["a:x"]}, "the port 'x' is not a number"),
        ({"worker": ["a:"]}, "the port '' is not a number"),
        ({"worker": ["a:0"]}, "must be between 1 and 65535"),
        ({"worker": ["a:65536"]}, "must be between 1 and 65535"),
        (
            {"worker": ["a:1", "A:01"]},
            r"cluster.worker\[1\]='a:1' is also the address of cluster.worker\[0\]",
        ),
        (
            {"worker": ["a:1"], "ps": ["a:1"]},
            r"cluster.ps\[0\]='a:1' is also the address of cluster.worker\[0\]",
        ),
        ({"chief": ["a:1", "b:1"]}, "cluster.chief lists 2 addresses; list one"),
    ],
)
def test_a_bad_cluster_gets_a_sentence(cluster: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence.replace("[]", r"\[\]").replace("?", r"\?")):
        ClusterSpec(cluster)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "TF_CONFIG is not JSON"),
        ("[]", "must be an object with cluster and task"),
        ('{"task": {}}', "TF_CONFIG has no cluster: it must be like"),
        (json.dumps({"cluster": CLUSTER}), "TF_CONFIG has no task"),
        (tf_config(task=["worker", 0]), "TF_CONFIG: task=.* must be like"),
        (tf_config(task={"type": "ps"}), "TF_CONFIG: task has no index"),
        (
            tf_config(task={"type": "server", "index": 0}),
            "TF_CONFIG: task.type='server' is not a type of role",
        ),
        (tf_config(task={"type": "master", "index": 0}), "task.type='master' is not a type of role; allowed"),
        (
            tf_config(task={"type": "ps", "index": 2}),
            "TF_CONFIG: task.index=2: the cluster lists 2 of type ps",
        ),
        (tf_config(task={"type": "ps", "index": -1}), "task.index=-1 must be an integer of at least 0"),
        (tf_config(task={"type": "ps", "index": True}), "task.index=True must be an integer"),
        (tf_config({"worker": ["a:1"]}, {"type": "ps", "index": 0}), "the cluster lists no ps, only worker"),
        (tf_config({"worker": ["a"]}), r"TF_CONFIG: cluster.worker\[0\]='a' has no port"),
    ],
)
def test_a_bad_tf_config_gets_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ClusterSpec.from_tf_config(text)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("c.yaml", "worker: []", r"its name must end in .toml or .json"),
        ("c.toml", "worker = [", "is not TOML"),
        ("c.json", "{", "is not JSON"),
        ("c.json", "[1]", "must be a table from types"),
        ("c.toml", 'worker = ["a"]', r"c.toml: cluster.worker\[0\]='a' has no port"),
        ("c.json", "\udcff", "cannot be read"),
    ],
)
def test_a_bad_file_gets_a_sentence(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=sentence):
        ClusterSpec.from_file(path)
    with pytest.raises(UserError, match="cannot be read"):
        ClusterSpec.from_file(tmp_path / "absent.toml")
