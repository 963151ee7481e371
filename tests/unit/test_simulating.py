"""A task in virtual time: the numbers of the plain loop, times in closed form, and the directory of a live run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import manyhands as mh
from manyhands.cli.forecast_commands import parse_seconds
from manyhands.cli.main import app
from manyhands.engine.options import Options, Slowdown
from manyhands.engine.request import Length
from manyhands.errors import NonFinite, UserError
from manyhands.foresight.simulate.simulated_spec import NetworkModel, SimulatedConditions
from manyhands.foresight.simulate.simulated_training import fit_simulated
from manyhands.observe.analyse.explain import explain
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import read_run_events
from manyhands.strategies.ps.audit import audit_run
from manyhands.strategies.ps.replay import replay

INSTANT = NetworkModel(latency_s=0.0)
QUIET = Options(progress="none")


def task(*, norm: bool = False, lr: float = 0.05) -> mh.Task:
    x = torch.randn(48, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    y = x.sum(1, keepdim=True)

    def model() -> torch.nn.Module:
        layers = [torch.nn.BatchNorm1d(3, dtype=torch.float64)] if norm else []
        return torch.nn.Sequential(*layers, torch.nn.Linear(3, 1, dtype=torch.float64))

    return mh.Task(
        name="sum",
        model=model,
        loss=lambda module, batch: (module(batch[0]) - batch[1]).square().mean(),
        data=(x, y),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=lr),
        batch_size=12,
        evaluation=(x[:12], y[:12]),
    )


def simulated(
    strategy: str, conditions: SimulatedConditions, out: Path | None = None, **more: object
) -> mh.Run:
    given = {"workers": 3, "length": Length(steps=12), **more}
    return fit_simulated(task(), strategy, out=out, conditions=conditions, options=QUIET, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["ps", "ps servers=2", "ps servers=2 replicas=1"])
def test_synchronous_steps_end_with_the_weights_of_the_plain_loop(strategy: str) -> None:
    plain = mh.fit(task(), "single", steps=12, options=QUIET)
    run = simulated(strategy, SimulatedConditions(step_s=0.1))
    for ours, reference in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(ours, reference, rtol=1e-9, atol=1e-12)
    assert np.allclose(run.history.loss, plain.history.loss, rtol=1e-9)
    assert [row["step"] for row in run.history.evaluations] == [4, 8, 12]
    assert run.history.evaluations[-1]["metrics"]["evaluation_loss"] == pytest.approx(
        plain.history.evaluations[-1]["metrics"]["evaluation_loss"], rel=1e-9
    )


def test_the_time_of_a_synchronous_run_is_that_of_its_slowest_worker() -> None:
    slow = SimulatedConditions(step_s=0.3, network=INSTANT, slow=(Slowdown(worker=1, factor=4),))
    # a third of a batch takes 0.1 s, and 0.4 s on worker 1
    assert simulated("ps", slow).summary["seconds"] == pytest.approx(12 * 0.4)


def test_latency_and_bandwidth_are_on_the_way_of_every_step() -> None:
    num_bytes = 2 * 64  # three weights and a bias, each from a cache line on
    network = NetworkModel(latency_s=0.01, bandwidth_bytes_per_s=num_bytes / 0.05)
    run = simulated("ps", SimulatedConditions(step_s=0.1, network=network), workers=1)
    # 12 pushes and 11 answers, each with its bytes; then some messages without any say that all is over
    expected = 12 * 0.1 + (12 + 11) * (0.01 + 0.05)
    assert expected <= run.summary["seconds"] <= expected + 10 * 0.01


def test_asynchronous_workers_pass_by_one_that_is_slow_from_a_step_on() -> None:
    slow = SimulatedConditions(
        step_s=0.1, network=INSTANT, slow=(Slowdown(worker=2, factor=100, from_step=6),)
    )
    run = simulated("ps consistency=async", slow)
    steps = [one["steps"] for one in run.summary["per_worker"]]
    assert steps[2] == min(steps) < max(steps)
    assert sum(steps) == 12


def test_a_run_leaves_what_a_live_one_leaves(tmp_path: Path) -> None:
    conditions = SimulatedConditions(step_s=0.1, slow=(Slowdown(worker=1, factor=5),))
    run = simulated(
        "ps servers=2 consistency=bounded:2", conditions, tmp_path / "run", length=Length(steps=30)
    )
    events = read_run_events(tmp_path / "run" / "events")
    assert [role.name for role in events.roles] == [
        *(f"worker-{n}" for n in range(3)),
        "server-0",
        "server-1",
    ]
    assert not events.notes
    worker = events.roles[0]
    computed = worker.of(EventKind.COMPUTE)["duration_ns"]
    assert np.allclose(computed, 0.1e9)
    assert set(worker.of(EventKind.WAIT)["peer"].tolist()) == {1}
    sent = {int(one) for one in worker.of(EventKind.SEND)["message"]}
    received = events.roles[3].of(EventKind.RECEIVE)
    assert sent & {int(one) for one in received["message"][received["peer"] == 0]}
    applied = [role.of(EventKind.APPLY) for role in events.roles[3:]]
    assert [len(one) for one in applied] == [30, 30]
    found = explain(events.roles, synchronous=False)
    assert found.steps == 30
    assert run.summary["slow"][0]["worker"] == 1
    assert audit_run(tmp_path / "run").found.verdict.value == "complete"


@pytest.mark.parametrize("norm", [False, True])
def test_a_run_can_be_replayed_to_the_same_bytes(tmp_path: Path, norm: bool) -> None:
    conditions = SimulatedConditions(step_s=0.1, spread=0.5)
    fit_simulated(
        task(norm=norm),
        "ps consistency=async",
        workers=3,
        length=Length(steps=12),
        out=tmp_path / "run",
        conditions=conditions,
        options=QUIET,
    )
    again = replay(tmp_path / "run", task(norm=norm))
    assert again.first_difference is None
    assert again.same_bytes is True


def test_the_same_seed_gives_the_same_run_and_another_one_another(tmp_path: Path) -> None:
    conditions = SimulatedConditions(step_s=0.1, spread=0.5)
    files = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        simulated("ps consistency=async", conditions, tmp_path / name, seed=seed)
        files.append((tmp_path / name / "metrics.jsonl").read_bytes())
    assert files[0] == files[1] != files[2]


def test_a_simulated_run_cannot_be_resumed_as_a_live_one(tmp_path: Path) -> None:
    simulated("ps", SimulatedConditions(step_s=0.1), tmp_path / "run")
    with pytest.raises(UserError, match="it was simulated"):
        mh.fit(task(), "ps", workers=3, steps=24, out=tmp_path / "run", resume=True)


def test_a_rate_too_large_for_stale_gradients_is_reported() -> None:
    with pytest.raises(NonFinite, match=r"worker \d, step \d+: .*not finite"):
        fit_simulated(
            mh.Task(
                name="steep",
                model=lambda: torch.nn.Linear(1, 1),
                loss=lambda module, batch: module(batch[0]).square().mean() * 1e30,
                data=(torch.ones(8, 1) * 1e10,),
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e10),
                batch_size=4,
            ),
            "ps consistency=async",
            workers=2,
            length=Length(steps=20),
            conditions=SimulatedConditions(step_s=0.1),
            options=QUIET,
        )


@pytest.mark.parametrize(
    ("strategy", "conditions", "message"),
    [
        ("allreduce", SimulatedConditions(), "the simulator runs only parameter servers; use ps"),
        ("ps link=tcp codec=bf16", SimulatedConditions(), "codec=bf16 cannot be simulated; leave it out"),
        ("ps push=parameters", SimulatedConditions(), "push=parameters cannot be simulated"),
        ("ps", SimulatedConditions(slow=(Slowdown(worker=3, factor=2),)), "there is no worker 3 among 3"),
    ],
)
def test_what_cannot_be_simulated_gets_a_sentence(
    strategy: str, conditions: SimulatedConditions, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        simulated(strategy, conditions)


def test_times_are_read_with_their_unit() -> None:
    assert [parse_seconds("--x", text) for text in ("2s", "1.5ms", "50us", "3 ms")] == pytest.approx(
        [2, 0.0015, 5e-5, 0.003]
    )
    for text in ("12", "-1s", "1h", "ms"):
        with pytest.raises(UserError, match=r"--x .* is not a time; write it as 2s, 10ms or 50us"):
            parse_seconds("--x", text)


def test_the_command_ends_with_a_report_and_what_to_do_next(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["simulate", "digits", "--strategy", "ps consistency=aware:softsync:30", "--workers", "30"]
    words += [
        "--steps",
        "4",
        "--compute",
        "10ms",
        "--bandwidth",
        "1Gbit",
        "--out",
        str(out),
        "--progress",
        "none",
    ]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert f"report  {out / 'report.html'}" in done.output
    assert f"manyhands explain {out}" in done.output
    assert "30 workers" in done.output
    assert (out / "checkpoints" / "step-00000004").is_dir()
    assert "times are virtual" in (out / "report.html").read_text()
