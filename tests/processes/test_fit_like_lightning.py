"""What `fit` has as Lightning's Trainer: best weights, what is logged, samplers, scaled losses, traces.

Each against torch's own or a plain loop, under several strategies and numbers of workers.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import SubsetRandomSampler, WeightedRandomSampler

import manyhands as mh
from manyhands.data.batches import BatchPlan, weighted_draw
from manyhands.engine.profiler import ProfiledSteps, StepProfiler
from manyhands.errors import UserError
from manyhands.workloads.exporting import export_run
from three_classes import accuracy, loss, network, samples, task

STEPS = 20


def turned(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Uphill from step 8 on: the best evaluation comes before."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 if step < 8 else -1.0 - 0.1 * step)


def plain_loop(
    draw: Any = None, clip: float | None = None, scheduler: Any = turned
) -> tuple[list[dict[str, Tensor]], list[dict[str, float]]]:
    """The weights after each step, and the learning rate and gradient norm of each."""
    inputs, labels = samples(60, 1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    schedule = scheduler(optimizer)
    plan = BatchPlan(60, 12, 0, draw)
    states, rows = [], []
    for step in range(STEPS):
        chosen = torch.from_numpy(plan.indices(step).copy())
        loss(model, (inputs[chosen], labels[chosen])).backward()
        rate = optimizer.param_groups[0]["lr"]
        norm = nn.utils.clip_grad_norm_(model.parameters(), float("inf") if clip is None else clip)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        states.append({name: one.clone() for name, one in model.state_dict().items()})
        rows.append({"lr": rate, "grad_norm": float(norm)})
    return states, rows


def assert_same(run: mh.Run, state: dict[str, Tensor]) -> None:
    for name, mine in run.model.state_dict().items():
        torch.testing.assert_close(mine, state[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("single", 1),
        ("mirrored", 3),
        ("allreduce elastic=yes", 2),
        ("sharded", 2),
        ("hogwild order=turns", 2),
        ("pipeline", 2),
        ("tensor slices=2", 2),
    ],
)
def test_the_best_weights_are_those_of_the_plain_loop_at_that_step(strategy: str, workers: int) -> None:
    states, _ = plain_loop()
    every = {"evaluate_every": 3, "restore_best": True}
    run = mh.fit(task(scheduler=turned), strategy, workers=workers, steps=STEPS, options=mh.Options(**every))
    losses = {row["step"]: row["metrics"]["evaluation_loss"] for row in run.history.evaluations}
    best = min(losses, key=lambda step: losses[step])
    assert best < STEPS, "or nothing was restored"
    assert run.summary["best_step"] == best
    assert_same(run, states[best - 1])
    assert run.summary["final"]["evaluation_loss"] == losses[best]
    assert run.summary["final"]["loss"] == run.history.loss[best - 1]
    assert any(f"evaluation_loss {losses[best]:.6g} after step {best}" in one for one in run.summary["notes"])


def test_the_best_weights_by_the_metric_of_early_stopping(tmp_path: Path) -> None:
    """Stopped after the best: the resumed run still has it, from its checkpoint; and `max` is the other way round."""
    stopping = mh.EarlyStopping(metric="accuracy", mode="max", patience=100)
    made = task(scheduler=turned, metrics={"accuracy": accuracy})
    options = mh.Options(evaluate_every=2, restore_best=True, early_stopping=stopping)
    whole = mh.fit(made, "mirrored", workers=2, steps=STEPS, options=options)
    accuracies = {row["step"]: row["metrics"]["accuracy"] for row in whole.history.evaluations}
    best = max(accuracies, key=lambda step: accuracies[step])  # the first of several
    assert 0 < best < 14
    assert whole.summary["best_step"] == best
    assert_same(whole, plain_loop()[0][best - 1])
    out = tmp_path / "run"
    mh.fit(made, "mirrored", workers=2, steps=15, options=options, out=out)
    resumed = mh.fit(made, "mirrored", workers=2, steps=STEPS, options=options, out=out, resume=True)
    assert resumed.summary["resumed_from_step"] == 15
    assert resumed.summary["best_step"] == best
    assert_same(resumed, plain_loop()[0][best - 1])


def test_the_best_step_is_the_last_one_where_the_evaluation_at_the_end_is_better() -> None:
    """After step 10, where none was due."""
    options = mh.Options(evaluate_every=4, restore_best=True)
    run = mh.fit(task(), "single", steps=10, options=options)
    losses = {row["step"]: row["metrics"]["evaluation_loss"] for row in run.history.evaluations}
    assert min(losses, key=lambda step: losses[step]) == run.summary["best_step"] == 10
    assert run.summary["final"]["evaluation_loss"] == losses[10]


@pytest.mark.parametrize(("scheduler", "every"), [(turned, 3), (None, 4)])
def test_a_run_is_loaded_and_exported_with_the_weights_that_it_ended_with(
    scheduler: Any, every: int, tmp_path: Path
) -> None:
    """The best ones; of the second run those after step 10, where no evaluation was due."""
    made, out = task(scheduler=scheduler), tmp_path / "run"
    options = mh.Options(evaluate_every=every, restore_best=True, checkpoint_every=5)
    run = mh.fit(made, "mirrored", workers=2, steps=10 + 10 * (every == 3), out=out, options=options)
    assert (run.summary["best_step"] == 10) == (every == 4)
    assert_same(run, mh.load(out, made).state_dict())
    exported = export_run(out, task=made)
    assert exported.steps == run.summary["best_step"]
    assert exported.before["evaluation_loss"] == pytest.approx(run.summary["final"]["evaluation_loss"])


def test_best_weights_where_they_cannot_be_are_refused() -> None:
    options = mh.Options(restore_best=True)
    with pytest.raises(UserError, match="restore_best: workers of ps take turns evaluating"):
        mh.fit(task(), "ps", workers=2, steps=2, options=options)
    with pytest.raises(UserError, match="restore_best: the task has no evaluation data"):
        mh.fit(task(evaluation=None), "single", steps=2, options=options)
    with pytest.raises(
        UserError, match=r"restore_best: under federated .* has a model of its own after the last"
    ):
        mh.fit(task(), "federated clients=4 personal=finetune:1", rounds=1, options=options)


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [
        ("single", 1),
        ("mirrored", 2),
        ("allreduce algorithm=ring link=tcp", 3),
        ("central", 2),
        ("sharded", 2),
        ("hogwild order=turns", 2),
        ("pipeline", 2),
        ("tensor slices=2", 2),
    ],
)
def test_the_learning_rate_and_the_gradients_norm_are_those_of_the_plain_loop(
    strategy: str, workers: int, tmp_path: Path
) -> None:
    _, rows = plain_loop(clip=0.5)
    file = tmp_path / "run.csv"
    options = mh.Options(log=["lr", "grad_norm"], callbacks=[mh.CsvLogger(file)])
    clipped = task(scheduler=turned, clip_norm=0.5)
    run = mh.fit(clipped, strategy, workers=workers, steps=STEPS, options=options)
    for mine, theirs in zip(run.history.steps, rows, strict=True):
        assert mine["lr"] == pytest.approx(theirs["lr"])
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-9)
    written = [row for row in csv.DictReader(file.read_text().splitlines()) if row["loss"]]
    assert float(written[3]["grad_norm"]) == pytest.approx(rows[3]["grad_norm"], rel=1e-9)
    assert float(written[9]["lr"]) == pytest.approx(rows[9]["lr"])


def test_what_is_logged_is_on_the_page_and_in_tensorboard(tmp_path: Path) -> None:
    from manyhands.observe.draw.page import write_report
    from manyhands.observe.draw.tensorboard import write_run

    groups = task(
        optimizer=lambda parameters: torch.optim.SGD(
            [{"params": one, "lr": 0.1 * place} for place, one in enumerate(parameters, 1)]
        )
    )
    options = mh.Options(log=["lr", "grad_norm"])
    run = mh.fit(groups, "single", steps=5, out=tmp_path / "run", options=options)
    last = run.history.steps[-1]
    assert [last[name] for name in ("lr", "lr_1", "lr_2", "lr_3")] == pytest.approx([0.1, 0.2, 0.3, 0.4])
    page = write_report(tmp_path / "run").read_text()
    assert "Learning rate" in page
    assert "Gradient norm" in page
    write_run(tmp_path / "run", tmp_path / "board")
    written = b"".join(one.read_bytes() for one in (tmp_path / "board").rglob("*") if one.is_file())
    assert b"optimizer/lr_1" in written
    assert b"optimizer/grad_norm" in written
    assert "optimizer" not in write_report(_plain(tmp_path / "plain")).read_text().lower()


def _plain(out: Path) -> Path:
    mh.fit(task(), "single", steps=2, out=out)
    return out


def test_what_cannot_be_logged_is_refused() -> None:
    for given, strategy, words in (
        (["lr"], "ps", "log=lr: the servers of ps take the steps"),
        (["grad_norm"], "federated", "log=grad_norm: a round has no gradient"),
    ):
        with pytest.raises(UserError, match=words):
            mh.fit(task(), strategy, options=mh.Options(log=given))
    with pytest.raises(UserError, match="log: 'norm' is not known; allowed: lr, grad_norm; did you mean"):
        mh.Options(log=["lr", "norm"])
    with pytest.raises(UserError, match=r"log='lr': must be a list, such as \['lr', 'grad_norm'\]"):
        mh.Options(log="lr")


WEIGHTS = torch.tensor([0.0, *([1.0] * 39), *([4.0] * 20)])


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), ("mirrored", 3), ("ps servers=1", 2)])
def test_a_weighted_sampler_gives_the_same_batches_to_all(
    strategy: str, workers: int, replacement: bool, tmp_path: Path
) -> None:
    """Those of a plain loop over the same draws; also when the run goes on from the middle of an epoch."""
    sampler = WeightedRandomSampler(WEIGHTS.tolist(), 40, replacement=replacement)

    def draw(epoch: int) -> Any:
        return weighted_draw(WEIGHTS.double().numpy(), 40, 0, epoch, replacement=replacement)

    inputs, labels = samples(60, 1)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    plan = BatchPlan(40, 12, 0, draw)
    for step in range(10):
        chosen = torch.from_numpy(plan.indices(step).copy())
        loss(model, (inputs[chosen], labels[chosen])).backward()
        optimizer.step()
        optimizer.zero_grad()
    run = mh.fit(task(sampler=sampler), strategy, workers=workers, steps=10)
    assert_same(run, model.state_dict())
    assert run.summary["samples"] == 40 + 40 + 24, "an epoch has the sampler's number of samples"
    if strategy != "ps servers=1":
        mh.fit(task(sampler=sampler), strategy, workers=workers, steps=5, out=tmp_path / "run")
        goes_on = {"steps": 10, "out": tmp_path / "run", "resume": True}
        assert_same(mh.fit(task(sampler=sampler), strategy, workers=workers, **goes_on), model.state_dict())


def test_samplers_that_make_no_sense_are_refused() -> None:
    for sampler, words in (
        (SubsetRandomSampler([1, 2]), "sampler is a SubsetRandomSampler; it must be torch's Weighted"),
        (WeightedRandomSampler([1.0] * 9, 9), r"sampler.weights has the shape \(9,\)"),
        (WeightedRandomSampler([1.0] * 59 + [float("nan")], 9), r"sampler.weights\[59\] is nan"),
        (WeightedRandomSampler(WEIGHTS.tolist(), 60, replacement=False), "but 59 have a weight above 0"),
    ):
        with pytest.raises(UserError, match=words):
            task(sampler=sampler)
    drawn = WeightedRandomSampler(WEIGHTS.tolist(), 40)
    with pytest.raises(UserError, match=r"task\.sampler: clients of strategy federated"):
        mh.fit(task(sampler=drawn), "federated clients=4", rounds=1)


def half_task(**fields: Any) -> mh.Task:
    """In float32, with inputs so large that the first scaled gradients overflow in float16."""
    inputs, labels = samples(60, 1)

    def model() -> nn.Module:
        return network().float()

    large = (inputs.float() * 20, labels)
    return task(model=model, data=large, evaluation=large, **fields)


def scaled_loop(steps: int) -> tuple[dict[str, Tensor], list[bool]]:
    """With torch's own GradScaler: the weights, and which steps it left out."""
    inputs, labels = samples(60, 1)
    model = network().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    scaler = torch.amp.GradScaler("cpu")
    plan, skipped = BatchPlan(60, 12, 0), []
    for step in range(steps):
        chosen = torch.from_numpy(plan.indices(step).copy())
        with torch.autocast("cpu", dtype=torch.float16):
            value = loss(model, (inputs[chosen].float() * 20, labels[chosen]))
        scaler.scale(value).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        skipped.append(scaler.get_scale() < before)
        optimizer.zero_grad()
        schedule.step()
    return model.state_dict(), skipped


@pytest.mark.filterwarnings(
    "ignore:Detected call of .lr_scheduler:UserWarning"
)  # the plain loop skips the first
@pytest.mark.parametrize(
    ("strategy", "workers", "tolerance"),
    [
        ("single", 1, 0.0),
        ("mirrored", 2, 5e-3),  # halves of a batch round otherwise
        ("allreduce algorithm=ring link=tcp", 2, 5e-3),
        ("sharded", 2, 5e-3),
        ("pipeline", 2, 5e-3),
        ("tensor slices=2", 2, 5e-3),
    ],
)
def test_float16_is_scaled_as_by_torchs_own_scaler(
    strategy: str, workers: int, tolerance: float, tmp_path: Path
) -> None:
    state, skipped = scaled_loop(16)
    assert 0 < sum(skipped) < 10
    made = half_task(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5),
        clip_norm=1.0,
    )
    options = mh.Options(autocast="float16")
    run = mh.fit(made, strategy, workers=workers, steps=16, options=options)
    assert [row.get("skipped", False) for row in run.history.steps] == skipped
    for name, mine in run.model.state_dict().items():
        torch.testing.assert_close(mine, state[name], rtol=0, atol=tolerance)
    mh.fit(
        made, strategy, workers=workers, steps=skipped.index(True) + 2, options=options, out=tmp_path / "run"
    )
    goes_on = {"workers": workers, "steps": 16, "out": tmp_path / "run", "resume": True}
    resumed = mh.fit(made, strategy, options=options, **goes_on)
    for mine, whole in zip(resumed.model.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(mine, whole)


def test_float16_where_no_step_can_be_left_out_is_refused() -> None:
    for strategy in ("ps", "hogwild", "central", "federated clients=4", "local steps=2"):
        with pytest.raises(UserError, match=r"autocast=float16: strategy .* cannot leave out the steps"):
            mh.fit(half_task(), strategy, workers=2, options=mh.Options(autocast="float16"))
    with pytest.raises(UserError, match="autocast='float8'"):
        mh.Options(autocast="float8")


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("single", 1), ("mirrored", 2), ("hogwild order=turns", 2), ("pipeline", 2), ("ps", 2)],
)
def test_a_trace_has_the_asked_steps_of_each_worker(strategy: str, workers: int, tmp_path: Path) -> None:
    """As torch's profiler writes it: it marks every step of an optimizer by itself."""
    profiler = mh.TorchProfiler(tmp_path / "traces", first=3, steps=2)
    run = mh.fit(task(), strategy, workers=workers, steps=8, options=mh.Options(callbacks=[profiler]))
    assert run.summary["steps"] == 8
    assert sorted(one.name for one in (tmp_path / "traces").iterdir()) == [
        f"worker-{worker}.json" for worker in range(workers)
    ]
    for worker in range(workers):
        trace = json.loads((tmp_path / "traces" / f"worker-{worker}.json").read_text())
        names = [one.get("name", "") for one in trace["traceEvents"]]
        assert any(name == "aten::addmm" for name in names)
        if not strategy.startswith(("hogwild", "ps")):  # whose steps are not the optimizer's own
            assert sum(name.startswith("Optimizer.step#SGD") for name in names) == 2


def test_a_step_that_is_repeated_is_traced_on(tmp_path: Path) -> None:
    """As where an elastic worker was interrupted in it."""
    profiler = StepProfiler(ProfiledSteps(folder=str(tmp_path), first=1, steps=1), worker=0)
    profiler.before(0)
    profiler.before(0)
    profiler.after()
    assert json.loads((tmp_path / "worker-0.json").read_text())["traceEvents"]


def test_a_trace_that_cannot_be_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    late = mh.TorchProfiler(tmp_path / "traces", first=30)
    mh.fit(task(), "single", steps=4, options=mh.Options(callbacks=[late]))
    assert "the run ended before step 30; there is no trace" in caplog.text
    cut = mh.TorchProfiler(tmp_path / "cut", first=4, steps=30)
    mh.fit(task(), "single", steps=4, options=mh.Options(callbacks=[cut]))
    assert (tmp_path / "cut" / "worker-0.json").exists(), "of a run that ended in it"
    with pytest.raises(UserError, match="TorchProfiler: a run takes one"):
        mh.fit(task(), "single", steps=4, options=mh.Options(callbacks=[late, cut]))
    with pytest.raises(UserError, match="TorchProfiler: steps is 0; it must be an integer of at least 1"):
        mh.TorchProfiler(tmp_path, steps=0)
