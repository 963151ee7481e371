"""Servers and workers that come over lines, as threads: the launcher's own roles, and no process but this one."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from hubs import FAST
from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import Aborted, PeerTimeout, UserError
from manyhands.places.external.control_connection import Broken, open_control_connection
from manyhands.places.external.control_server import ControlServer, terms_of
from manyhands.places.external.process_group import ProcessGroup
from manyhands.places.external.process_place import ProcessPlace
from manyhands.strategies.ps.audit import Audit, audit_run
from manyhands.strategies.ps.live import remote
from manyhands.strategies.ps.live.live_training import (
    RemoteMembers,
    ServerTraining,
    resume_point,
    server_summary,
)
from manyhands.strategies.ps.live.ps_members import PsRanks, RunKeeper
from manyhands.strategies.ps.live.remote import Shipment
from manyhands.strategies.ps.live.snapshots import ShardSnapshots
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategy import Strategy
from manyhands.task import Task
from manyhands.transport.security import Security
from threaded_ps import job_for

TOKEN = b"the secret of this run, 32 bytes"
TERMS = terms_of({"task": "a line"})
STEPS = 12


class Killed(BaseException):
    """Ends a thread as a signal would end its process: nothing is reported."""


killed_at: dict[str, int] = {}
"""By thread: the losses that it may still compute."""
whole_again = threading.Event()
"""Set once every shard that was lost has a server again."""
waits_from: list[int] = []
"""The losses of all that are computed before the others wait for that, where a test wants it; each takes one."""


class LinearModel(nn.Module):
    """Weights of its own: threads share the random generators. The buffer counts forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 6, dtype=torch.float64).reshape(3, 2))
        self.bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return x @ self.weight + self.bias


def loss(model: nn.Module, batch: Any) -> Tensor:
    name = threading.current_thread().name
    left = (
        killed_at.get(name, -1) if torch.is_grad_enabled() else -1
    )  # in a step, not in the trial of the loss
    if left == 0:
        del killed_at[name]
        raise Killed
    if left > 0:
        killed_at[name] = left - 1
    if waits_from and torch.is_grad_enabled():
        waits_from[0] -= 1
        assert waits_from[0] >= 0 or whole_again.wait(240), "the shards were not whole again"
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def task() -> Task:
    x = torch.linspace(0.0, 1.0, 72, dtype=torch.float64).reshape(24, 3)
    y = torch.stack([x.sum(1), x[:, 0] - x[:, 2]], 1)
    return Task(
        model=LinearModel,
        loss=loss,
        data=list(zip(x, y, strict=True)),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05),
        batch_size=4,
    )


class Roles:
    """Processes of a run as threads: `start` one by its rank; one that dies is started again, once."""

    def __init__(self, strategy: str, workers: int, *, timeout_s: float = 60.0) -> None:
        self.job = replace(job_for(task(), strategy, steps=STEPS, workers=workers), timeout_s=timeout_s)
        servers = self.job.strategy.num_server_processes
        self.ranks = PsRanks(
            servers=tuple(range(1 + workers, 1 + workers + servers)),
            workers=tuple(range(1, 1 + workers)),
            names=tuple(f"rank {rank}" for rank in range(1 + workers + servers)),
        )
        self.said: list[str] = []
        self.deaths: list[int] = []
        self.failures: dict[int, BaseException] = {}
        self.threads: list[threading.Thread] = []
        self.address = "tcp:127.0.0.1:0"
        self.moves = False
        """Whether who is started again is on another host then."""

        self._leader = ""
        self._listens = threading.Event()

    def _process_group(self) -> ProcessGroup:
        place = ProcessPlace(
            rank=0, world=len(self.ranks.names), kind="specification", role="chief", index=0, host="a"
        )
        control_server = ControlServer(place, TERMS, TOKEN, settings=FAST)
        self._leader = control_server.listen("tcp")
        self._listens.set()
        return ProcessGroup(place, control_server, TOKEN, "", Security.loopback(), 20.0)

    def start(self, *ranks: int, act: Callable[[Any], None] | None = None) -> None:
        for rank in ranks:
            thread = threading.Thread(target=self._run, args=(rank, act), name=f"rank {rank}", daemon=True)
            self.threads.append(thread)
            thread.start()

    def _run(self, rank: int, act: Callable[[Any], None] | None) -> None:
        assert self._listens.wait(240)
        host = f"another{rank}" if self.moves and rank in self.deaths else f"h{rank}"
        place = ProcessPlace(
            rank=rank, world=len(self.ranks.names), kind="specification", index=rank, host=host
        )
        strategy = replace(self.job.strategy, link="tcp")
        # It is the leader that loses its patience first.
        job = replace(self.job, strategy=strategy, listens_at=self.address, timeout_s=60.0)
        with open_control_connection(
            place, "the chief", self._leader, TOKEN, TERMS, timeout_s=20.0, settings=FAST
        ) as line:
            if act is not None:
                act(line)
            try:
                line.end(remote.take_part(line, job))
                return
            except Killed:
                self.deaths.append(rank)
            except BaseException as error:
                self.failures[rank] = error
                line.fail(error)
                return
        self.start(rank)  # by whoever looks after it

    def train(self, run_path: Path | None = None, resume_version: int | None = None) -> tuple[nn.Module, Any]:
        """Lead, here; the trained model and what came out."""
        if run_path is not None:
            self.job = replace(self.job, plan=replace(self.job.plan, checkpoint_every=4))
        with self._process_group() as process_group:
            trained = self._lead(process_group, run_path, resume_version)
        self.join()
        return trained

    def _lead(
        self, process_group: ProcessGroup, run_path: Path | None, resume_version: int | None
    ) -> tuple[nn.Module, Any]:
        job = self.job
        job = replace(
            job,
            strategy=replace(job.strategy, link="tcp"),
            run_path=run_path,
            keep_checkpoints=2,
            resume_version=resume_version,
        )
        remote = RemoteMembers(
            control_server=process_group.control_server, ranks=self.ranks, say=self.said.append
        )
        with ServerTraining(job, most_workers=job.workers, remote=remote) as training:
            outcome = training.run(on_rows=lambda rows: None, on_event=self._note)
            return training.model(), outcome

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("what") == "every shard":
            whole_again.set()

    def join(self) -> None:
        for thread in self.threads:
            thread.join(20)
            assert not thread.is_alive()


def kept(path: Path, strategy: str, workers: int) -> Path:
    """A run directory that an audit understands."""
    config = {"task": "a line", "strategy": strategy, "workers": workers, "steps": STEPS, "seed": 0}
    RunDirectory.create(path, {**config, "samples": 24, "batch_size": 4, "parameters": {}}).close()
    return path


def audited(path: Path, outcome: Any) -> Audit:
    directory = RunDirectory.open(path)
    directory.write_summary(server_summary(outcome))
    directory.close()
    return audit_run(path).found


def require_audited(path: Path, outcome: Any) -> None:
    found = audited(path, outcome)
    assert not found.violations, found.violations
    assert not found.missing, found.missing
    assert not found.lost


def test_roles_at_lines_train_to_the_weights_of_a_plain_loop() -> None:
    roles = Roles("ps servers=2", workers=2)
    roles.start(4, 1, 3, 2)  # in any order
    model, outcome = roles.train()
    assert not roles.failures
    for name, value in mh.fit(task(), "single", steps=STEPS).model.named_parameters():
        assert torch.allclose(model.get_parameter(name), value, rtol=0, atol=1e-9), name
    assert int(model.get_buffer("seen")) == STEPS
    assert outcome.totals["samples"] == 4 * STEPS
    assert [shard["staleness"] for shard in outcome.shards] == [((0, 2 * STEPS),)] * 2


@pytest.mark.parametrize("kept_in", ["one directory", "directories apart", "directories that are lost"])
def test_who_dies_and_comes_again_takes_its_slot_and_its_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept_in: str
) -> None:
    """A worker in the middle of a step, and a server in the middle of a snapshot; nothing is lost with replicas."""
    there = tmp_path / "there"
    there.mkdir()
    if kept_in != "one directory":
        monkeypatch.setattr(remote, "record_mark", lambda path: None)
        monkeypatch.setattr(tempfile, "tempdir", str(there))
    strategy = "ps servers=2 replicas=1 consistency=async"
    path = kept(tmp_path / "run", strategy, 2)
    roles = Roles(strategy, workers=2)
    roles.moves = kept_in == "directories that are lost"
    monkeypatch.setitem(killed_at, "rank 1", 3)
    whole_again.clear()
    monkeypatch.setattr(sys.modules[__name__], "waits_from", [STEPS - 3])
    saved: list[str] = []

    def dies_saving(line: Any) -> None:
        give = line.give

        def give_or_die(name: str, chunks: Any) -> None:
            saved.append(name)
            if len(saved) == 2:
                raise Killed
            give(name, chunks)

        line.give = give_or_die

    roles.start(1, 2, 4)
    roles.start(3, act=dies_saving)
    _, outcome = roles.train(path)
    assert sorted(roles.deaths) == [1, 3]
    assert not roles.failures
    assert {one["what"] for one in outcome.recoveries} == {"slot 0", "every shard"}
    if not roles.moves:
        require_audited(path, outcome)
        assert not any(there.iterdir())  # all of it was sent
        return
    (lost,) = outcome.unrecorded
    assert lost.startswith("worker.process-3.jsonl is on the host of rank 1, which died")
    found = audited(path, outcome)
    assert not found.violations, found.violations
    assert lost in found.missing


def test_a_run_goes_on_from_the_snapshots_that_the_leader_keeps(tmp_path: Path) -> None:
    path = kept(tmp_path / "run", "ps servers=2", 1)
    first = Roles("ps servers=2", workers=1)
    first.start(1, 2, 3)
    whole, _ = first.train(path)
    strategy = Strategy.parse("ps servers=2")
    assert isinstance(strategy, Ps)
    ShardSnapshots(path, 2).remove_after(8)
    point = resume_point(path, strategy)
    assert point is not None
    assert point.version == 8
    again = Roles("ps servers=2", workers=1)
    again.start(1, 2, 3)
    model, outcome = again.train(path, resume_version=8)
    for name, value in whole.named_parameters():
        assert torch.equal(model.get_parameter(name), value), name
    assert outcome.totals["samples"] == 4 * (STEPS - 8)


def test_a_role_that_nobody_starts_is_named_in_time_and_no_records_are_left_on_other_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    monkeypatch.setattr(remote, "record_mark", lambda path: None)
    monkeypatch.setattr(tempfile, "tempdir", str(there))
    roles = Roles("ps", workers=1, timeout_s=1.0)
    roles.start(1)
    with pytest.raises(PeerTimeout, match="rank 2 did not connect within 1 s; start it"):
        roles.train(kept(tmp_path / "run", "ps", 1))
    roles.join()
    assert "rank 2 did not connect" in str(roles.failures[1])
    assert not any(there.glob("manyhands-*"))


@pytest.mark.parametrize(
    ("say", "report"),
    [
        (
            lambda line: line.send(remote.WANTS.write(remote.SnapshotWanted(shard=-1, version=None))),
            "of shard -1 of 1",
        ),
        (
            lambda line: line.send({"kind": "StepComputed", "step": "one"}),
            "of a StepComputed is not hexadecimal",
        ),
        (lambda line: line.give("buffers", [b"nonsense"]), "8 bytes are not tensors"),
    ],
)
def test_who_sends_what_nobody_may_send_is_dismissed_and_the_run_goes_on(
    say: Callable[[Any], None], report: str
) -> None:
    roles = Roles("ps", workers=1)

    def lies(line: Any) -> None:
        def lie(*_: Any, **__: Any) -> None:  # it has its part by now
            say(line)
            over = line.wait_over(10.0)
            assert report in over.sentence, over
            raise Killed

        line.mark = lie

    roles.start(2)
    roles.start(1, act=lies)
    _, outcome = roles.train()
    assert roles.deaths == [1]
    assert any("rank 1 sent an invalid message" in one and report in one for one in roles.said), roles.said
    assert outcome.totals["samples"] == 4 * STEPS


def test_records_of_another_host_stay_until_the_leader_has_them_and_are_taken_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    row = b'{"row": 1}\n'
    part = remote.TakePart(
        member=3,
        serves=False,
        number=0,
        token="t",
        threads=1,
        resume_version=None,
        keeps=True,
        records=None,
        buffers=False,
    )
    records = remote._Records(part, "worker 0")
    written = records.path / "updates" / "worker.process-3.jsonl"
    written.write_bytes(row)
    lost = Broken(0, "the leader is lost", is_lost=True)
    dead = SimpleNamespace(leader="the chief", over=lost, give=lambda name, chunks: None)
    with pytest.raises(Aborted, match="the leader is lost"):
        records.send(dead, 10.0)  # type: ignore[arg-type]
    assert written.read_bytes() == row, "who comes in its place sends it"

    (run := tmp_path / "run").mkdir()
    (run / "updates").mkdir()
    job = replace(job_for(task(), "ps", steps=1, workers=1), run_path=run)
    keeper = RunKeeper(job, None, None, lambda sentence: None)  # type: ignore[arg-type]
    asked: list[str] = []

    def give(name: str, chunks: Iterable[bytes]) -> None:
        data = bytearray(b"".join(chunks))
        for _ in range(2):  # as where one died before it heard that all had come
            keeper.take(Shipment.parse(name, 1), data)

    def check(keys: list[str]) -> bool:
        assert written.exists(), "the leader has yet to answer"
        asked.extend(keys)
        return False

    store = SimpleNamespace(check=check)
    records.send(SimpleNamespace(leader="the chief", over=None, give=give, store=store), 10.0)  # type: ignore[arg-type]
    assert asked
    assert not records.path.exists()
    assert (run / "updates" / "worker.process-3.jsonl").read_bytes() == row
    name, rows = written.name, row.count(b"\n")
    assert keeper.counted({"recorded": {name: rows}}) == {"recorded": {name: rows}}
    resumed = RunKeeper(job, None, None, lambda sentence: None)  # type: ignore[arg-type]
    none = {"recorded": {name: 0}}  # of one that had nothing left to compute
    assert resumed.counted(none) == {"recorded": {name: rows}}


def test_a_role_that_cannot_do_its_part_ends_the_run_with_its_sentence() -> None:
    roles = Roles("ps", workers=1)
    roles.address = "tcp:192.0.2.1:7"  # no interface here has that address
    roles.start(1, 2)
    with pytest.raises(UserError, match=r"192\.0\.2\.1"):
        roles.train()
    roles.join()
    assert "192.0.2.1" in str(roles.failures[1])
