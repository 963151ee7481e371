"""`gpt` and `bert` under the strategies: the mean over the tokens of a batch, whatever the split."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from equality import OPTIMIZERS, distance, train_plainly
from manyhands.data.batches import BatchPlan, BatchSource
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.lora import Lora, add_adapters
from manyhands.workloads.tasks import build
from manyhands.workloads.text.masking import IGNORED

STEPS = 4
TINY = {"context": 12, "layers": 2, "width": 12, "heads": 3, "batch_size": 7, "evaluation_bytes": 200}
STRATEGIES = [
    ("mirrored", 3),
    ("allreduce algorithm=ring", 2),
    ("central", 2),
    ("sharded", 3),
    ("pipeline stages=2 microbatches=2", 2),
    ("tensor slices=2", 2),
    ("tensor slices=2 data=2", 4),
]


def in_double(task: mh.Task) -> mh.Task:
    torch.manual_seed(0)
    template = task.model().double()
    return replace(
        task,
        model=lambda: copy.deepcopy(template),
        optimizer=OPTIMIZERS["adamw"],
        evaluation=None,
        metrics={},
    )


def uneven() -> mh.Task:
    """Rows of 2 to 9 tokens, padded: a row weighs as many as it has targets."""
    drawn = torch.Generator().manual_seed(5)
    lengths = torch.randint(2, 10, (30,), generator=drawn)
    rows = torch.randint(0, 17, (30, 9), generator=drawn)
    rows[torch.arange(9) >= lengths[:, None]] = IGNORED

    def loss(model: nn.Module, batch: Any) -> Tensor:
        targets = batch[:, 1:]
        scores = model(batch[:, :-1].clamp(min=0))
        each = F.cross_entropy(scores.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
        return each.sum(1) / (targets != IGNORED).sum(1)

    torch.manual_seed(0)
    template = GPT(context=8, layers=2, width=12, heads=3, vocabulary=17).double()
    return mh.Task(
        model=lambda: copy.deepcopy(template),
        loss=loss,
        data=rows,
        weights=lengths - 1,
        optimizer=OPTIMIZERS["adamw"],
        batch_size=7,
    )


def plain_loop(task: mh.Task, steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of a loop with torch's own mean over all targets of the batch."""
    model, losses = task.model(), []
    optimizer = task.optimizer(model.parameters())
    plan, source = BatchPlan(len(task.data), task.batch_size, 0), BatchSource(task.data)
    for step in range(steps):
        batch = torch.as_tensor(source.fetch(plan.indices(step))).long()
        optimizer.zero_grad()
        scores = model(batch[:, :-1].clamp(min=0))
        loss = F.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.state_dict(), losses


def bert_distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Softmax takes the bias of keys away: its gradient is 0 but for rounding, and so is what AdamW makes of it."""
    keys = [name for name in ours if name.endswith("key.bias")]
    assert all((ours[name] - theirs[name]).abs().max() < 1e-9 for name in keys)
    kept = [name for name in ours if name not in keys]
    return distance({name: ours[name] for name in kept}, {name: theirs[name] for name in kept})


# Averaged weights are those of averaged gradients where the optimizer's step is linear in these.
BY_SGD = [("local steps=1", 3)]
OTHERS = [
    ("ps", 2),
    ("pipeline stages=2 data=2 microbatches=2", 4),
    ("pipeline stages=2 tensor=2 microbatches=2", 4),
]


@pytest.mark.parametrize(("strategy", "workers"), [("single", 1), *STRATEGIES, *OTHERS, *BY_SGD])
def test_uneven_rows_train_on_the_mean_over_tokens(strategy: str, workers: int) -> None:
    task = uneven()
    if (strategy, workers) in BY_SGD:
        task = replace(task, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    run = mh.fit(task, strategy, workers=workers, steps=STEPS, seed=0)
    weights, losses = plain_loop(task, STEPS)
    assert distance(run.model.state_dict(), weights) < 1e-9
    assert run.history.loss == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize(("strategy", "workers"), STRATEGIES)
def test_bert_trains_as_one_process_does(strategy: str, workers: int) -> None:
    task = in_double(build("bert", **TINY))
    alone = mh.fit(task, "single", steps=STEPS, seed=0)
    run = mh.fit(task, strategy, workers=workers, steps=STEPS, seed=0)
    assert bert_distance(run.model.state_dict(), alone.model.state_dict()) < 1e-9


def test_fifty_steps_have_the_weights_and_losses_of_a_plain_loop() -> None:
    task = in_double(build("gpt", **TINY))
    run = mh.fit(task, "mirrored", workers=2, steps=50, seed=0)
    weights, losses = plain_loop(task, 50)
    assert distance(run.model.state_dict(), weights) < 1e-9
    assert run.history.loss == pytest.approx(losses, rel=1e-9)


ADAPTED = [
    ("mirrored", 3),
    ("allreduce algorithm=ring", 2),
    ("central", 2),
    ("sharded", 3),
    ("ps servers=2", 2),
    ("pipeline stages=2 microbatches=2", 2),
]
# Base weights too, to compute with them; and what passes from stage to stage.
GATHERS = ("sharded", "pipeline stages=2 microbatches=2")


@pytest.mark.parametrize(("strategy", "workers"), ADAPTED)
def test_adapters_learn_as_in_one_process_and_nothing_else_is_sent(strategy: str, workers: int) -> None:
    """The base keeps its bits; what is sent are gradients of adapters, and adapters: 3 % of the weights."""
    task = in_double(build("gpt", **TINY))
    torch.manual_seed(0)
    template = GPT(context=12, layers=2, width=12, heads=3, vocabulary=256).double()
    before = {name: value.clone() for name, value in template.state_dict().items()}
    add_adapters(template, Lora(rank=2, alpha=4.0, layers=("c_attn",)))
    task = replace(task, model=lambda: copy.deepcopy(template))
    wanted = train_plainly(task, STEPS)
    run = mh.fit(task, strategy, workers=workers, steps=STEPS, seed=0)
    found = run.model.state_dict()
    assert distance(found, wanted) < 1e-9
    assert distance(found, template.state_dict()) > 1e-3  # it learned
    assert all(torch.equal(found[name], value) for name, value in before.items())
    if strategy not in GATHERS:
        adapters = sum(one.nbytes for one in template.parameters() if one.requires_grad)
        assert run.summary["sent"]["gradients"]["bytes_sent"] <= 2 * workers * STEPS * adapters


@pytest.mark.parametrize(("strategy", "workers"), [*STRATEGIES[:-1], ("ps", 2)])
def test_labels_of_texts_are_learned_as_in_one_process(strategy: str, workers: int, tmp_path: Path) -> None:
    """Rows of different lengths, whose padding nobody sees: through the stages of a pipeline as well."""
    texts = [f"{'a' * (number % 7 + 1)}{number},{number % 3}" for number in range(60)]
    (tmp_path / "rows.csv").write_text("\n".join(["text,label", *texts]))
    sizes = {name: TINY[name] for name in ("context", "layers", "width", "heads", "batch_size")}
    task = in_double(build("bert", task="classification", data=tmp_path / "rows.csv", **sizes))
    run = mh.fit(task, strategy, workers=workers, steps=STEPS, seed=0)
    assert bert_distance(run.model.state_dict(), train_plainly(task, STEPS)) < 1e-9
