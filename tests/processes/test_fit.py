"""`fit` with real worker processes: the weights of the plain loop, resumed, broken, slowed and killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import manyhands as mh
import warm
from equality import OPTIMIZERS, distance, make_task, same_bits, train_plainly
from manyhands.data.store.rundir import RunDirectory
from manyhands.errors import NonFinite, UserError, WorkerFailed
from manyhands.native.threads import choose_functions


@pytest.mark.parametrize(
    ("strategy", "workers", "optimizer"),
    [
        ("mirrored", 2, "adamw"),
        pytest.param("allreduce buckets=512", 3, "momentum", marks=pytest.mark.soak),
        ("allreduce algorithm=ring", 2, "momentum"),
        pytest.param("allreduce algorithm=butterfly buckets=512", 3, "adamw", marks=pytest.mark.soak),
        pytest.param("allreduce algorithm=hierarchical group=2", 4, "momentum", marks=pytest.mark.soak),
        pytest.param("allreduce algorithm=all-to-all", 2, "adamw", marks=pytest.mark.soak),
    ],
)
def test_real_processes_end_with_the_weights_of_the_plain_loop(
    strategy: str, workers: int, optimizer: str
) -> None:
    task = make_task(OPTIMIZERS[optimizer])
    reference = train_plainly(task)
    run = mh.fit(task, strategy, workers=workers, steps=50, seed=0)
    assert distance(run.model.state_dict(), reference) < 1e-9
    assert len(run.history.loss) == 50
    assert run.summary["steps"] == 50
    assert run.summary["strategy"] == strategy
    assert run.summary["bytes_sent"] > 0


def _compiler_is_imported() -> bool:
    return "torch._dynamo.convert_frame" in sys.modules


@pytest.mark.filterwarnings("ignore:hogwild on a dense model")
@pytest.mark.parametrize(
    "strategy", ["mirrored", "central", "ps", "hogwild", "local", "allreduce elastic=yes"]
)
def test_workers_begin_with_functions_chosen_and_without_torchs_compiler(strategy: str) -> None:
    task = make_task(OPTIMIZERS["adamw"])

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        assert not _compiler_is_imported()
        assert choose_functions.cache_info().currsize == 1
        return task.loss(model, batch)

    assert mh.fit(replace(task, loss=loss), strategy, workers=2, steps=4).summary["steps"] == 4


def test_a_compiled_model_is_trained_to_the_same_weights() -> None:
    task = make_task(OPTIMIZERS["adamw"])

    def loss(model: torch.nn.Module, batch: Any) -> torch.Tensor:
        compiled = torch.compile(task.loss, backend="eager")
        found: torch.Tensor = compiled(model, batch)
        assert _compiler_is_imported()
        return found

    run = mh.fit(replace(task, loss=loss), "mirrored", workers=2, steps=4, seed=0)
    plain = mh.fit(task, "mirrored", workers=2, steps=4, seed=0)
    assert distance(run.model.state_dict(), plain.model.state_dict()) < 1e-9


def test_the_summary_says_what_others_rely_on() -> None:
    run = mh.fit(make_task(OPTIMIZERS["sgd"]), "mirrored", workers=2, steps=8)
    summary = run.summary
    assert {
        "strategy",
        "workers",
        "steps",
        "seconds",
        "samples_per_s",
        "final",
        "bytes_sent",
        "messages_sent",
    } <= summary.keys()
    assert [row["worker"] for row in summary["per_worker"]] == [0, 1]
    for row in summary["per_worker"]:
        assert {"compute_s", "exchange_s", "wait_s"} <= row.keys()
    assert summary["samples"] == 2 * 45
    assert summary["final"]["loss"] == run.history.loss[-1]
    assert json.loads(json.dumps(summary)) == summary


def test_closures_of_a_scripts_main_reach_the_workers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, manyhands as mh
            scale = 2.0
            class Net(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.linear = torch.nn.Linear(3, 1)
                def forward(self, x):
                    return self.linear(x) * scale
            x = torch.randn(20, 3)
            task = mh.Task(model=Net, loss=lambda net, batch: (net(batch[0]) - batch[1]).square().mean(),
                           data=(x, x.sum(1, keepdim=True)), batch_size=10,
                           optimizer=lambda p: torch.optim.SGD(p, lr=0.02))
            run = mh.fit(task, "mirrored", workers=2, steps=40)
            assert run.history.loss[-1] < 0.2 * run.history.loss[0], run.history.loss
            print("trained")
            """
        )
    )
    done = warm.run(
        [sys.executable, script], trains=True, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.stdout.strip() == "trained", done.stderr


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    return RunDirectory.open(path, lock=False).checkpoints().load().model


@pytest.mark.parametrize("strategy", ["single", pytest.param("mirrored", marks=pytest.mark.soak)])
def test_resume_continues_to_the_weights_of_an_uninterrupted_run(strategy: str, tmp_path: Path) -> None:
    task = make_task(OPTIMIZERS["adamw"])
    workers = 1 if strategy == "single" else 2
    options = mh.Options(checkpoint_every=4)
    whole = mh.fit(task, strategy, workers=workers, steps=30, out=tmp_path / "whole", options=options)
    mh.fit(task, strategy, workers=workers, steps=14, out=tmp_path / "parts", options=options)
    resumed = mh.fit(
        task, strategy, workers=workers, steps=30, out=tmp_path / "parts", resume=True, options=options
    )
    assert resumed.summary["resumed_from_step"] == 14
    assert same_bits(whole.model.state_dict(), resumed.model.state_dict())
    assert resumed.history.loss == whole.history.loss
    assert [row["step"] for row in resumed.history.steps] == list(range(1, 31))


@pytest.mark.soak
def test_dropout_and_schedules_resume_to_the_same_bits(tmp_path: Path) -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 1))

    x = torch.arange(80.0).reshape(20, 4) / 80
    task = mh.Task(
        model=build,
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(x, x.sum(1, keepdim=True)),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.05),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20),
        batch_size=8,
    )
    whole = mh.fit(task, "mirrored", workers=2, steps=20)
    mh.fit(task, "mirrored", workers=2, steps=7, out=tmp_path / "run")
    resumed = mh.fit(task, "mirrored", workers=2, steps=20, out=tmp_path / "run", resume=True)
    assert same_bits(whole.model.state_dict(), resumed.model.state_dict())


def test_a_run_killed_in_the_middle_resumes_to_the_same_weights(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "manyhands",
        "train",
        "digits",
        "--steps",
        "40",
        "--checkpoint-every",
        "5",
    ]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    warm.run([*command, "--out", whole], check=True, timeout=240, capture_output=True)
    process = warm.Popen([*command, "--out", parts], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 180
        while len(list((parts / "checkpoints").glob("step-*[0-9]"))) < 2:
            assert time.monotonic() < deadline, "no checkpoint was written"
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    warm.run([*command, "--out", parts, "--resume"], check=True, timeout=240, capture_output=True)
    assert same_bits(weights_of(whole), weights_of(parts))
    for path in (whole, parts):
        shutil.rmtree(path)


def test_a_damaged_checkpoint_falls_back_to_the_one_before_and_says_so(tmp_path: Path) -> None:
    task = make_task(OPTIMIZERS["momentum"])
    options = mh.Options(checkpoint_every=5)
    whole = mh.fit(task, "single", steps=20, out=tmp_path / "run", options=options)
    newest = max((tmp_path / "run" / "checkpoints").glob("step-*"))
    file = newest / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    resumed = mh.fit(task, "single", steps=20, out=tmp_path / "run", resume=True, options=options)
    assert resumed.summary["resumed_from_step"] == 15
    assert any("model.safetensors" in note for note in resumed.summary["notes"])
    assert same_bits(whole.model.state_dict(), resumed.model.state_dict())


def breaking_task(bad_sample: int) -> mh.Task:
    """The loss is not finite in the batch that holds `bad_sample`."""
    x = torch.ones(32, 2)
    x[bad_sample] = float("nan")
    return mh.Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1)),
        loss=lambda model, batch: model(batch).square().mean(),
        data=x,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
        batch_size=4,
    )


def test_a_loss_that_is_not_finite_stops_all_and_keeps_the_last_good_checkpoint(tmp_path: Path) -> None:
    from manyhands.data.batches import BatchPlan

    plan = BatchPlan(32, 4, 0)
    step, worker, sample = next(
        (step, worker, int(plan.share(step, worker, 2)[0])) for step in range(3, 8) for worker in (1,)
    )
    with pytest.raises(NonFinite) as caught:
        mh.fit(
            breaking_task(sample),
            "mirrored",
            workers=2,
            steps=8,
            out=tmp_path / "run",
            options=mh.Options(checkpoint_every=1),
        )
    sentence = str(caught.value)
    assert f"worker {worker}, step {step + 1}" in sentence
    assert "'0.weight'" in sentence
    assert f"step-{step:08d}" in sentence
    kept = RunDirectory.open(tmp_path / "run", lock=False)
    assert kept.checkpoints().load().step == step
    assert [row["step"] for row in kept.metrics.read() if "loss" in row] == list(range(1, step + 1))


def test_a_slow_worker_shows_as_itself() -> None:
    """All steps take equally long; only the split of each worker's time tells who is late."""
    task = make_task(OPTIMIZERS["sgd"])
    run = mh.fit(
        task, "mirrored", workers=3, steps=60, options=mh.Options(slow=mh.Slowdown(worker=1, factor=12))
    )
    rows = run.summary["per_worker"]
    assert rows[1]["compute_s"] > 2 * max(rows[0]["compute_s"], rows[2]["compute_s"])
    for other in (0, 2):
        waits = rows[other]["wait_for_s"]
        assert waits[1] == max(waits)
        assert rows[other]["wait_s"] > rows[1]["wait_s"]


@pytest.mark.parametrize("strategy", ["tensor", "pipeline cuts=1"])
def test_the_others_wait_for_a_slow_worker_where_the_model_is_split(strategy: str) -> None:
    """What a worker stands still for another is waiting, and no exchange: else nobody would wait for who is slow."""
    task = replace(
        make_task(OPTIMIZERS["sgd"]),
        model=lambda: torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 1)),
        loss=lambda model, batch: (model(batch[0].float()) - batch[1].float()).square().mean(),
        data=(torch.ones(32, 8), torch.ones(32, 1)),
        evaluation=None,
    )
    slow = mh.Options(slow=mh.Slowdown(worker=1, factor=40))
    ahead, late = mh.fit(task, strategy, workers=2, steps=15, options=slow).summary["per_worker"]
    assert ahead["wait_for_s"][1] > ahead["exchange_s"]
    assert ahead["wait_s"] > late["wait_s"]


def test_the_error_of_a_worker_comes_with_its_traceback_and_step() -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        if model.weight.grad is None and torch.equal(batch[0][0], torch.ones(2)) and len(batch[0]) == 3:
            raise RuntimeError("the third wheel came off")
        return model(batch[0]).square().mean()

    x = torch.zeros(12, 2)
    x[:] = torch.ones(2)
    task = mh.Task(
        model=lambda: torch.nn.Linear(2, 1),
        loss=loss,
        data=(x,),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        batch_size=5,
    )
    with pytest.raises(WorkerFailed) as caught:  # batches of 5 over 2 workers: worker 0 gets 3
        mh.fit(task, "mirrored", workers=2, steps=4)
    assert caught.value.worker_rank == 0
    assert "the third wheel came off" in str(caught.value)
    assert "step 1" in str(caught.value)


def test_a_worker_killed_while_training_is_named(tmp_path: Path) -> None:
    def loss(model: Any, batch: Any) -> torch.Tensor:
        if os.environ.get("MANYHANDS_TEST_DIES") and len(batch) == 2 and torch.is_grad_enabled():
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch).square().mean()

    os.environ["MANYHANDS_TEST_DIES"] = "1"
    try:
        task = mh.Task(
            model=lambda: torch.nn.Linear(2, 1),
            loss=loss,
            data=torch.ones(10, 2),
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            batch_size=5,
        )
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match=r"worker 1.*SIGKILL") as caught:
            mh.fit(task, "mirrored", workers=2, steps=4, out=tmp_path / "run")
        assert "continue with" not in str(caught.value), "it died before the first checkpoint"
        assert time.monotonic() - began < 60
    finally:
        del os.environ["MANYHANDS_TEST_DIES"]


@pytest.mark.soak
def test_more_workers_than_samples_works_and_says_so() -> None:
    task = mh.Task(
        model=lambda: torch.nn.Linear(2, 1),
        loss=lambda model, batch: model(batch).square().mean(),
        data=torch.ones(2, 2),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    )
    with pytest.warns(UserWarning, match="3 workers share batches of 2 samples"):
        run = mh.fit(task, "mirrored", workers=3, steps=3)
    reference = mh.fit(task, "single", steps=3)
    assert distance(run.model.state_dict(), reference.model.state_dict()) < 1e-6


def test_the_callers_own_generators_are_left_alone() -> None:
    task = make_task(OPTIMIZERS["sgd"])
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    mh.fit(task, "single", steps=2)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"workers": 0}, "workers=0 must be an integer of at least 1"),
        ({"strategy": "alreduce"}, "did you mean 'allreduce'"),
        ({"strategy": "single", "workers": 2}, "single runs one process"),
        ({"steps": 0}, "steps=0"),
        ({"steps": 3, "epochs": 2}, "give one of them"),
        ({"resume": True}, "resume=True needs out="),
        ({"options": mh.Options(slow=mh.Slowdown(worker=4, factor=2))}, "no worker 4"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_starts(arguments: dict[str, Any], part: str) -> None:
    with pytest.raises(UserError, match=part):
        mh.fit(make_task(OPTIMIZERS["sgd"]), **{"strategy": "mirrored", "steps": 3, **arguments})  # type: ignore[arg-type]
