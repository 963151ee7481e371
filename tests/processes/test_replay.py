"""Recorded runs of real processes, executed again: the same bytes, or the first difference by name."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import manyhands as mh
from commands import run_command
from manyhands.errors import UserError
from manyhands.strategies.ps.replay_order import ReplayImpossible

WORKERS, SHARDS, UPDATES = 4, 3, 520


def make_task(
    model: Callable[[], nn.Module], optimizer: Callable[[Any], torch.optim.Optimizer], **more: Any
) -> mh.Task:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(240, 12, generator=generator)
    labels = torch.randint(0, 4, (240,), generator=generator)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    data = (images, labels, torch.arange(240))
    return mh.Task(
        **{"model": model, "optimizer": optimizer, "loss": loss, "data": data, "batch_size": 12, **more}
    )


def plain_task() -> mh.Task:
    return make_task(
        lambda: nn.Sequential(nn.Linear(12, 17), nn.Tanh(), nn.Linear(17, 4)),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    )


def recorded(folder: Path, workers: int, shards: int) -> tuple[mh.Run, Path]:
    """An asynchronous run in a directory of its own."""
    strategy = f"ps servers={shards} consistency=async"
    return mh.fit(plain_task(), strategy, workers=workers, steps=UPDATES, out=folder / "run"), folder / "run"


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory: pytest.TempPathFactory) -> tuple[mh.Run, Path]:
    return recorded(tmp_path_factory.mktemp("async"), WORKERS, SHARDS)


def same(one: nn.Module, other: nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.soak
def test_an_asynchronous_run_of_eight_workers_on_three_shards_is_replayed_to_the_same_bytes(
    tmp_path: Path,
) -> None:
    require_same_bytes(*recorded(tmp_path, 8, 3), bound=(8, 3))


def test_an_asynchronous_run_is_replayed_to_the_same_bytes(asynchronous: tuple[mh.Run, Path]) -> None:
    require_same_bytes(*asynchronous, bound=(WORKERS, SHARDS))


def require_same_bytes(run: mh.Run, path: Path, bound: tuple[int, int]) -> None:
    workers, shards = bound
    assert run.summary["staleness"]["max"] > 1, "nothing would be asynchronous about it"
    done = mh.replay(path, plain_task())
    assert done.first_difference is None
    assert done.same_bytes is True
    assert same(done.model, run.model)
    assert (done.steps, done.updates) == (UPDATES, UPDATES)
    assert done.loss == done.run_loss == run.summary["final"]["loss"]
    assert done.loss == next(row["loss"] for row in run.history.steps if row["step"] == UPDATES)
    weights = sum(parameter.nbytes for parameter in run.model.parameters())
    assert 0 < done.extra_bytes <= 2 * workers * (weights + 64 * 4 * shards), (
        "bounded by the number of workers"
    )


def test_until_stops_every_shard_where_it_was(asynchronous: tuple[mh.Run, Path]) -> None:
    _, path = asynchronous
    start = mh.replay(path, plain_task(), until=0)
    torch.manual_seed(0)
    assert same(start.model, plain_task().model())
    half = mh.replay(path, plain_task(), until=UPDATES // 2)
    assert half.steps == UPDATES // 2
    assert half.same_bytes is None
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lead = [json.loads(line) for line in next(path.glob("updates/shard-0.*")).read_text().splitlines()]
    applied = [row["updates"][0]["batch"] for row in lead if 0 < row.get("version", 0) <= UPDATES // 2]
    assert half.loss == next(row["loss"] for row in rows if row["step"] == max(applied) + 1)


def altered(
    path: Path, pattern: str, number: int, change: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Change one line of one log; returns what it says then."""
    file = sorted(path.glob(f"updates/{pattern}"))[0]
    lines = file.read_text().splitlines()
    row: dict[str, Any] = json.loads(lines[number])
    change(row)
    lines[number] = json.dumps(row)
    file.write_text("\n".join(lines) + "\n")
    return row


def test_a_changed_record_is_named(asynchronous: tuple[mh.Run, Path], tmp_path: Path) -> None:
    _, original = asynchronous
    path = shutil.copytree(original, tmp_path / "shard")
    row = altered(path, "shard-1.*", 40, lambda row: row["updates"][0].update(read_version=3))
    with pytest.raises(
        ReplayImpossible, match=f"shard 1, version {row['version']} .* the shard logged read_version 3"
    ):
        mh.replay(path, plain_task())

    path = shutil.copytree(original, tmp_path / "worker")
    row = altered(path, "worker.process-*", 9, lambda row: row["gradients"].__setitem__(2, "0" * 16))
    found = mh.replay(path, plain_task()).first_difference
    assert found is not None
    assert (found.shard, found.slot, found.clock, found.batch) == (2, row["slot"], row["clock"], row["batch"])
    assert f"slot {row['slot']}, clock {row['clock']}, batch {row['batch']}" in found.sentence


def test_another_read_or_another_batch_gives_another_gradient(
    asynchronous: tuple[mh.Run, Path], tmp_path: Path
) -> None:
    """What both the shard and the worker were made to say is found by the gradient itself."""
    _, original = asynchronous
    for change in ({"batch": 1}, {"read_version": 2}):
        path = shutil.copytree(original, tmp_path / next(iter(change)))
        file = sorted(path.glob("updates/worker.process-*"))[0]
        row = json.loads(file.read_text().splitlines()[12])
        in_worker = {"batch": 1} if "batch" in change else {"versions": [2, *row["versions"][1:]]}
        altered(path, file.name, 12, lambda row, new=in_worker: row.update(new))
        for log in sorted(path.glob("updates/shard-*")):
            if "batch" not in change and not log.name.startswith("shard-0"):
                continue
            lines = log.read_text().splitlines()
            for number, line in enumerate(lines):
                (update,) = json.loads(line).get("updates", [{}])
                if (update.get("slot"), update.get("clock")) == (row["slot"], row["clock"]):
                    altered(path, log.name, number, lambda row, new=change: row["updates"][0].update(new))
        found = mh.replay(path, plain_task()).first_difference
        assert found is not None
        assert (found.slot, found.clock) == (row["slot"], row["clock"])


def test_a_run_of_another_task_is_refused(asynchronous: tuple[mh.Run, Path]) -> None:
    _, path = asynchronous
    other = make_task(lambda: nn.Linear(12, 4), lambda parameters: torch.optim.Adam(parameters, lr=1e-2))
    with pytest.raises(UserError, match=r"is not a run of this task: parameter '0\.weight' is absent"):
        mh.replay(path, other)
    with pytest.raises(UserError, match="a task of your own"):
        mh.replay(path)


@pytest.mark.soak
def test_deaths_buffers_dropout_and_a_schedule_are_replayed_too(tmp_path: Path) -> None:
    """Bounded, with a worker and a server killed on the way: successors make some updates a second time."""
    out, flags = tmp_path / "run", tmp_path / "flags"
    flags.mkdir()

    def once(name: str) -> bool:
        try:
            (flags / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        samples = batch[2].tolist()
        if 17 in samples and once("worker"):
            os.kill(os.getpid(), signal.SIGKILL)
        if 100 in samples and (flags / "worker").exists() and once("server"):
            for file in Path("/proc").glob("[0-9]*/fd/*"):
                try:
                    if str(file.readlink()).startswith(f"{out}/updates/shard-1.member-2"):
                        os.kill(int(file.parts[2]), signal.SIGKILL)
                        break
                except OSError:  # another's, or gone
                    continue
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    task = make_task(
        lambda: nn.Sequential(nn.Linear(12, 17), nn.BatchNorm1d(17), nn.Dropout(0.2), nn.Linear(17, 4)),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        loss=loss,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.9),
    )
    run = mh.fit(task, "ps servers=2 consistency=bounded:2 replicas=1", workers=3, steps=90, out=out)
    assert sorted(flag.name for flag in flags.iterdir()) == ["server", "worker"], "both deaths happened"
    done = mh.replay(out, task)
    assert done.first_difference is None
    assert done.same_bytes is True
    for (name, one), other in zip(done.model.named_parameters(), run.model.parameters(), strict=True):
        assert torch.equal(one, other), name


class Bag(nn.Module):
    """The mean of a few rows of a table, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.out(self.words(words).mean(dim=1))
        return logits


@pytest.mark.soak
def test_groups_and_rows_of_tables_are_replayed_too(tmp_path: Path) -> None:
    words = torch.randint(0, 50, (240, 3), generator=torch.Generator().manual_seed(5))
    task = make_task(
        Bag,
        lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
        data=(words, words.sum(dim=1) % 4),
        sparse={"words.weight": lambda batch: batch[0]},
    )
    run = mh.fit(
        task, "ps servers=2 consistency=softsync:2 link=tcp", workers=4, steps=60, out=tmp_path / "run"
    )
    done = mh.replay(tmp_path / "run", task)
    assert done.first_difference is None
    assert done.same_bytes is True
    assert same(done.model, run.model)


# ── the commands ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_commands_on_a_built_in_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    run, weights = tmp_path / "run", tmp_path / "weights.safetensors"
    strategy = "ps servers=2 consistency=bounded:2"
    train = ("train", "digits", "--width", "8", "--strategy", strategy, "--workers", "2", "--steps", "24")
    assert run_command(monkeypatch, *train, "--out", str(run)) == 0, capfd.readouterr().err
    assert run_command(monkeypatch, "audit", str(run)) == 0
    assert "reads lag by at most 2 clocks · complete" in capfd.readouterr().out
    assert run_command(monkeypatch, "replay", str(run), "--save", str(weights)) == 0
    printed = capfd.readouterr()
    assert "the weights are the same bytes" in printed.out
    accuracy = json.loads((run / "summary.json").read_text())["final"]["accuracy"]
    assert f"accuracy {accuracy:.4f} (in the run {accuracy:.4f})" in printed.out
    own = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row["loss"] for row in own if "loss" in row}
    found = re.search(r"^loss ([\d.]+) \(in the run ([\d.]+)\)", printed.out, re.MULTILINE)
    assert found is not None
    assert found[1] == found[2]
    assert found[2] in {f"{loss:.4f}" for loss in losses.values()}
    assert sum(tensor.numel() for tensor in safetensors.torch.load_file(weights).values()) > 1000
    assert run_command(monkeypatch, "replay", str(run), "--until", "99") == 2
    assert "must be between 0 and 24" in capfd.readouterr().err

    altered(run, "worker.process-*", 3, lambda row: row["gradients"].__setitem__(0, "0" * 16))
    assert run_command(monkeypatch, "replay", str(run)) == 1
    assert "its gradient differs from the recorded one" in capfd.readouterr().err


def test_audit_names_the_first_violation_and_says_what_is_missing(
    asynchronous: tuple[mh.Run, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    _, original = asynchronous
    assert run_command(monkeypatch, "audit", str(original)) == 0
    path = shutil.copytree(original, tmp_path / "twice")
    first = json.loads(sorted(path.glob("updates/shard-0.*"))[0].read_text().splitlines()[5])["updates"][0]
    altered(
        path, "shard-0.*", 30, lambda row: row["updates"][0].update(slot=first["slot"], clock=first["clock"])
    )
    capfd.readouterr()
    assert run_command(monkeypatch, "audit", str(path)) == 1
    printed = capfd.readouterr().err
    assert f"slot {first['slot']}, clock {first['clock']}: applied as version" in printed
    assert "but it was already applied" in printed

    path = shutil.copytree(original, tmp_path / "cut")
    log = sorted(path.glob("updates/shard-2.*"))[0]
    log.write_text(log.read_text()[:-30])
    assert run_command(monkeypatch, "audit", str(path)) == 3
    printed = capfd.readouterr()
    assert "its last line is incomplete" in printed.err
    assert f"{log.name} has {UPDATES} of the {UPDATES + 1} rows that were written" in printed.err
    assert "· incomplete" in printed.out
    log.unlink()
    assert run_command(monkeypatch, "audit", str(path)) == 2
    assert "no log of shard 2" in capfd.readouterr().err
    shutil.rmtree(path / "updates")
    assert run_command(monkeypatch, "audit", str(path)) == 2
    assert run_command(monkeypatch, "audit", str(tmp_path / "nowhere")) == 2
