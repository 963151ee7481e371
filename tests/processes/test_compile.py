"""`Options(compile=True)`: model and loss become one program, which trains as the plain loop does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters

import manyhands as mh
from manyhands.data.batches import BatchSource
from manyhands.engine.compiled_loss import compiled_loss

# Of torch's own import of its compiler
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")


def _task() -> mh.Task:
    torch.manual_seed(3)
    x = torch.randn(24, 6, dtype=torch.float64)
    return mh.Task(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double(),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        data=(x, x.abs().argmax(1) % 3),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
        batch_size=8,
        microbatches=2,
    )


def test_model_and_loss_are_one_graph_for_all_micro_batches() -> None:
    task = _task()
    plain = mh.fit(task, "single", steps=6)
    counters.clear()
    with torch._inductor.config.patch(compile_threads=1):  # in this thread
        run = mh.fit(task, "single", steps=6, options=mh.Options(compile=True))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    for mine, theirs in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)
    losses = [[row["loss"] for row in one.history] for one in (run, plain)]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-12, atol=1e-12)


def test_every_run_of_a_process_is_compiled() -> None:
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for width in range(1, torch._dynamo.config.recompile_limit + 3):
            counters.clear()
            model = nn.Linear(6, width)
            loss = compiled_loss(lambda model, batch: model(batch).sum(), backend="eager")
            assert float(loss(model, torch.zeros(2, 6)).detach()) == pytest.approx(
                2 * float(model.bias.detach().sum())
            )
            assert counters["stats"]["unique_graphs"] == 1


def test_a_loss_that_was_sent_to_a_worker_is_called_with_a_compiled_model() -> None:
    counters.clear()
    elsewhere: dict[str, object] = {"__name__": "__main__"}  # as a script's functions arrive
    exec("def loss(model, batch): return model(batch).sum()", elsewhere)
    model = nn.Linear(6, 3)
    loss = compiled_loss(elsewhere["loss"], backend="eager")  # type: ignore[arg-type]
    expected = model(torch.ones(2, 6)).sum()
    for _ in range(2):
        assert torch.equal(loss(model, torch.ones(2, 6)), expected)
    assert counters["stats"]["unique_graphs"] == 1


def test_evaluation_batches_are_no_larger_than_micro_batches() -> None:
    sizes = []

    def size(model: nn.Module, batch: object) -> float:
        sizes.append(len(batch[0]))  # type: ignore[index]
        return 0.0

    task = _task()
    data = BatchSource(task.data).fetch(range(9))
    mh.fit(replace(task, evaluation=tuple(data), metrics={"size": size}), "single", steps=1)
    assert sizes == [4, 4, 1]
