"""A run by the roles of a cluster specification, each a process of its own that a test starts."""

from __future__ import annotations

import json
from pathlib import Path

from manyhands.strategies.ps.audit import audit_run
from roles import cluster

TRAIN = ("-m", "manyhands", "train", "digits", "--progress", "none", "--out", "run")


def test_tf_config_trains_digits_asynchronously_on_five_roles(tmp_path: Path) -> None:
    """Two servers, two workers and a chief, in any order, to 97 %; they end together, and the audit finds nothing."""
    command = [*TRAIN, "--strategy", "ps consistency=async"]
    order = [("ps", 1), ("worker", 0), ("chief", 0), ("worker", 1), ("ps", 0)]
    with cluster(tmp_path, {"chief": 1, "worker": 2, "ps": 2}) as roles:
        for kind, index in order:
            roles.start(kind, index, command)
        assert [roles.roles[one].ended() for one in order] == [0] * 5, roles.report()
        quiet = {one: roles.roles[one].said for one in order if one[0] != "chief"}
        assert quiet == dict.fromkeys(quiet, "")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["final"]["accuracy"] >= 0.97
    assert summary["strategy"] == "ps servers=2 consistency=async"
    assert summary["workers"] == 2
    assert len(summary["servers"]) == 2
    assert [row["worker"] for row in summary["per_worker"] if row["steps"]] == [0, 1]
    found = audit_run(tmp_path / "run").found
    assert not found.violations
    assert not found.missing
