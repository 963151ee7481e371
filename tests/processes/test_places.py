"""Every place keeps one contract: the weights of the plain loop on each process, a failure named on each, no rest."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
import place_script
from equality import distance
from manyhands.errors import WorkerFailed
from manyhands.places.place import Place
from manyhands.places.registry import PLACES

ROOT = Path(__file__).parents[2]
PATIENCE_S = 150.0


def alone(_: str) -> list[dict[str, str]]:
    return [{}]


def torchrun(port: str) -> list[dict[str, str]]:
    """The variables of each process, as torchrun sets them."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(place_script.WORKERS)}
    return [{**common, "RANK": str(rank)} for rank in range(place_script.WORKERS)]


def specification(port: str) -> list[dict[str, str]]:
    addresses = [f"127.0.0.1:{int(port) + index}" for index in range(place_script.WORKERS)]
    return [
        {
            "TF_CONFIG": json.dumps(
                {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
            )
        }
        for rank in range(place_script.WORKERS)
    ]


ROWS = {
    "local": ("local", alone),
    "torchrun": ("-", torchrun),
    "specification": ("-", specification),
    "ray": ("ray", alone),
}
"""A place: its `cluster=`, and the variables of each process that calls `fit`."""


@pytest.fixture(scope="module")
def reference() -> tuple[dict[str, torch.Tensor], str]:
    """The weights of the plain loop, and the worker that has the poisoned sample."""
    task, options = place_script.task(), place_script.options()
    run = mh.fit(task, "single", steps=place_script.STEPS, options=options)
    with pytest.raises(WorkerFailed) as failed:
        mh.fit(
            place_script.task(fails=True),
            "allreduce",
            steps=place_script.STEPS,
            workers=place_script.WORKERS,
            options=options,
        )
    return run.model.state_dict(), f"worker {failed.value.worker_rank}"


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def said_at(place: str, folder: Path, **variables: str) -> list[dict[str, Any]]:
    """What each process of the script says at this place; asserts that none is left of what they started."""
    cluster, environments = ROWS[place]
    command = [sys.executable, place_script.__file__, str(folder), cluster]
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **variables, **environment},
        )
        for environment in environments(free_port())
    ]
    try:
        texts = [process.communicate(timeout=PATIENCE_S) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * len(started), texts
    sessions = {process.pid for process in started}
    deadline = time.monotonic() + 180
    while (left := in_sessions(sessions)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left
    return [json.loads(out.splitlines()[-1]) for out, _ in texts]


def in_sessions(sessions: set[int]) -> list[str]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        name, _, rest = text.rpartition(")")
        if int(rest.split()[3]) in sessions:
            found.append(name)
    return found


def check(said: list[dict[str, Any]], reference: tuple[Mapping[str, torch.Tensor], str]) -> None:
    weights, poisoned = dict(reference[0]), reference[1]
    for one in said:
        assert distance(torch.load(one["weights"]), weights) < 1e-9
        assert len(one["loss"]) == place_script.STEPS
        assert one["loss"] == said[0]["loss"]
        assert one["workers"] == place_script.WORKERS
        assert "a defect of the task" in one["failed"]
        assert "workers=0" in one["refused"]
    report = [one["failed"] for one in said if one["failed"].startswith("WorkerFailed")]
    assert len(report) == max(1, len(said) - 1), "each process but the one that failed says which has"
    assert all(re.search(rf"{poisoned}\b", sentence) for sentence in report), report


@pytest.mark.parametrize("place", PLACES)
def test_a_place_gives_a_run_its_processes(
    place: str, tmp_path: Path, reference: tuple[dict[str, torch.Tensor], str]
) -> None:
    kind = PLACES[place].load()
    assert issubclass(kind, Place)
    assert kind.kind == place
    if place == "ray" and find_spec("ray") is None:
        pytest.skip("Ray is an extra: pip install 'manyhands[ray]'")
    check(said_at(place, tmp_path), reference)


def test_a_place_is_a_file_a_line_and_a_row(
    tmp_path: Path, reference: tuple[dict[str, torch.Tensor], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe of docs/internals/extending.md, word by word, in a copy of the sources."""
    recipe = (ROOT / "docs" / "internals" / "extending.md").read_text().partition("## A place\n")[2]
    file = recipe.partition("```python\n")[2].partition("```")[0]
    line = recipe.partition("```text\n")[2].partition("```")[0]
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=ignored)
    places = tmp_path / "src" / "manyhands" / "places"
    (places / "subprocess_place.py").write_text(file)
    before, after = (places / "registry.py").read_text().split('    "local": ', 1)
    (places / "registry.py").write_text(f'{before}{line}    "local": {after}')
    monkeypatch.setitem(ROWS, "subprocess", ("subprocess", alone))
    check(said_at("subprocess", tmp_path, PYTHONPATH=str(tmp_path / "src")), reference)
