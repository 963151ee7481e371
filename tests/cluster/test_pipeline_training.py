"""What a training under `pipeline` has besides its gradients: replicas, memory, checkpoints, evaluation, refusals."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from equality import OPTIMIZERS, distance, make_task, same_bits, train_plainly
from manyhands.data.store.checkpoint import CheckpointStore, Loaded
from manyhands.errors import Desync, NonFinite, UserError
from manyhands.strategies.pipeline.exchange import PipelineExchange
from manyhands.strategies.pipeline.schedules import MOST_HELD, SCHEDULES
from manyhands.strategies.pipeline.stage_messages import ChainPart, Passed, StageBorders, StageMessages
from pipelines import Ended, adamw, sgd, task_of, train_alone, train_in_stages


def equal(ended: Ended, expected: Ended) -> None:
    assert ended.losses == pytest.approx(expected.losses, rel=1e-9)
    assert distance(ended.weights, expected.weights) < 1e-9


def start_from(ended: Ended, step: int) -> Loaded:
    """What a checkpoint of `ended` loads as."""
    return Loaded(
        step=step,
        model=copy.deepcopy(ended.weights),
        optimizer=copy.deepcopy(ended.optimizer),
        extra={},
        score=None,
        path=Path(),
    )


@pytest.mark.parametrize("text", ["pipeline microbatches=2", "pipeline microbatches=3 schedule=zb-h1"])
def test_replicas_share_out_the_batch(text: str) -> None:
    task = task_of("transformer")  # whose first and last layers share their weights
    equal(train_in_stages(task, text, workers=4, steps=4), train_alone(task, 4))


@pytest.mark.parametrize(
    ("name", "text", "workers"),
    [
        ("transformer", "pipeline tensor=2 data=2", 8),
        ("transformer", "pipeline microbatches=2 schedule=interleaved tensor=2 recompute=yes", 4),
        ("transformer", "pipeline schedule=zb-h1 tensor=2", 4),
        ("cnn", "pipeline schedule=zb-h1 tensor=3", 6),
        ("cnn", "pipeline stages=1 schedule=interleaved tensor=2", 2),
    ],
)
def test_layers_of_stages_are_sliced(name: str, text: str, workers: int) -> None:
    task = task_of(name, clip_norm=0.5)
    expected, ended = train_alone(task, 3), train_in_stages(task, text, workers, steps=3)
    equal(ended, expected)
    for position, state in expected.optimizer["state"].items():
        for key, value in state.items():
            assert torch.allclose(ended.optimizer["state"][position][key], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("text", ["pipeline microbatches=3", "pipeline stages=2 microbatches=2 data=4"])
def test_parameters_that_nobody_or_somebody_reaches_are_stepped_as_alone(text: str) -> None:
    task = make_task(OPTIMIZERS["momentum"])  # some workers have no samples at all in short batches
    ended = train_in_stages(task, text, 8 if "data" in text else 2, steps=12)
    assert distance(ended.weights, train_plainly(task, 12)) < 1e-9


def test_gradients_are_clipped_by_the_norm_of_all_stages() -> None:
    for clipped in ({"clip_norm": 0.05}, {"clip_value": 0.001}):
        task = task_of("transformer", sgd, **clipped)
        equal(train_in_stages(task, "pipeline stages=3", 3, steps=3), train_alone(task, 3))
        assert (
            distance(train_alone(task, 3).weights, train_alone(task_of("transformer", sgd), 3).weights) > 1e-3
        )


def test_samples_weigh_what_the_task_says() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels, reduction="none")

    weights = torch.arange(25) % 4  # every fourth weighs nothing
    task = replace(task_of("cnn", sgd), loss=loss, weights=weights)
    equal(train_in_stages(task, "pipeline", 2, steps=3), train_alone(task, 3))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1"])
def test_recomputed_activations_give_the_same_gradients_and_running_statistics(schedule: str) -> None:
    layers = (nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(147, 5))
    task = replace(task_of("cnn"), model=partial(copy.deepcopy, nn.Sequential(*layers).double()))
    text = f"pipeline schedule={schedule}"
    kept = train_in_stages(task, text, 2, steps=3)
    again = train_in_stages(task, f"{text} recompute=yes", 2, steps=3)
    assert same_bits(again.weights, kept.weights)
    assert int(kept.weights["1.num_batches_tracked"]) == 4 + 4 + 3, "each micro-batch counts once"


def flip_a_bit(exchange: PipelineExchange) -> None:
    """Have worker 2 hold something else than its copy after the second step: it is the replica of worker 0."""
    apply = exchange.apply
    done = 0

    def apply_and_flip() -> None:
        nonlocal done
        apply()
        done += 1
        if exchange.rank == 2 and done == 2:
            named = dict(exchange.part.parameters(nn.Identity()))
            held = named["0.weight"]
            assert held is not None
            assert named["8.weight"] is None, "another stage's"
            held.detach().view(-1)[:1].view(torch.int64).bitwise_xor_(1)

    exchange.apply = apply_and_flip  # type: ignore[method-assign]


def test_each_part_is_compared_with_its_copies() -> None:
    task = task_of("cnn", sgd)
    text = "pipeline stages=2 microbatches=2"
    train_in_stages(task, text, workers=4, steps=2, check_every=1)
    report = r"after step 2 .* ranks 0 and 2 differ in '0\.weight'; after step 1 they still did"
    with pytest.raises(Desync, match=report):
        train_in_stages(task, text, workers=4, steps=3, check_every=1, spoil=flip_a_bit)


def test_a_turn_is_slow_before_it_sends_and_what_passes_between_slices_is_told_apart() -> None:
    table = SCHEDULES["gpipe"](2, 1)
    layer = ChainPart(0, 0, [nn.Linear(2, 2)])
    happened: list[str] = []
    post = StageMessages(0, range(2), {}, 1.0)
    post.send = lambda *_: happened.append("sent")  # type: ignore[method-assign]
    borders = StageBorders(table, 0, [layer], post)
    borders.slow_down = lambda _: happened.append("slow")
    borders.passed = lambda: Passed(300, {1: 100})
    forward, backward = table.of_stage(0)
    with borders.timed(forward):
        borders.send_output(layer, 0, torch.zeros(1, 2))
    with borders.timed(backward):
        pass
    borders.send_output(layer, 0, torch.zeros(1, 2))  # of an evaluation
    assert happened == ["slow", "sent", "slow", "sent"]
    computed, waited, *_ = times = borders.take_times()
    assert [one.waited_for for one in times] == [None, 1, None, 1]
    assert (waited.begin_ns, waited.end_ns - waited.begin_ns) == (computed.end_ns, 100)
    assert [one.exchange_ns for one in times] == [0, 200, 0, 200]


def test_running_statistics_of_sliced_stages_are_put_together() -> None:
    layers = (nn.Conv2d(1, 5, 3, bias=False), nn.BatchNorm2d(5), nn.ReLU(inplace=True), nn.Flatten())
    model = nn.Sequential(*layers, nn.Linear(245, 5)).double()
    task = replace(task_of("cnn"), model=partial(copy.deepcopy, model))
    whole = train_in_stages(task, "pipeline stages=1", 1, steps=3)
    sliced = train_in_stages(task, "pipeline stages=1 tensor=3", 3, steps=3)
    assert sliced.exchanges[0].summary()["layers"][1]["how"] == "inside units=5 channels"
    assert distance(sliced.weights, whole.weights) < 1e-9


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_activations_kept_are_those_of_the_schedule(schedule: str) -> None:
    ended = train_in_stages(
        task_of("lstm"), f"pipeline stages=3 microbatches=8 schedule={schedule}", 3, steps=1
    )
    for stage, exchange in enumerate(ended.exchanges):
        assert exchange.stage.most_kept == MOST_HELD[schedule](exchange.table, stage)


def test_a_run_goes_on_under_another_number_of_stages_and_alone() -> None:
    task = task_of("transformer", adamw)
    whole = train_alone(task, 6)
    begun = train_in_stages(task, "pipeline stages=3", 3, steps=2)
    further = train_in_stages(task, "pipeline schedule=gpipe", 2, steps=4, start=start_from(begun, 2))
    ended = train_alone(task, 6, start=start_from(further, 4))
    assert distance(ended.weights, whole.weights) < 1e-9
    assert further.optimizer["param_groups"] == train_alone(task, 4).optimizer["param_groups"]
    back = train_in_stages(task, "pipeline", 2, steps=6, start=start_from(train_alone(task, 3), 3))
    assert distance(back.weights, whole.weights) < 1e-9


@pytest.mark.parametrize(
    ("name", "text", "workers"),
    [
        ("transformer", "pipeline stages=4 tensor=2", 8),
        ("transformer", "pipeline stages=2 schedule=naive data=2", 4),
        ("cnn", "pipeline schedule=interleaved", 2),
        ("cnn", "pipeline stages=3 schedule=zb-h1", 3),
        ("lstm", "pipeline stages=2 schedule=gpipe tensor=3", 6),
        ("lstm", "pipeline stages=3 microbatches=2 schedule=wavefront", 3),
    ],
)
def test_the_checkpoint_of_each_is_whole_and_single_goes_on(
    name: str, text: str, workers: int, tmp_path: Path
) -> None:
    task = task_of(name, adamw)
    train_in_stages(task, text, workers, steps=2, folder=tmp_path)
    loaded = CheckpointStore(tmp_path).load(2)
    task.model().load_state_dict(loaded.model)
    saved = {position: set(state) for position, state in loaded.optimizer["state"].items()}
    ended, whole = train_alone(task, 4, start=loaded), train_alone(task, 4)
    assert saved == {position: set(state) for position, state in whole.optimizer["state"].items()}
    assert distance(ended.weights, whole.weights) < 1e-9
    assert ended.losses == pytest.approx(whole.losses[2:], rel=1e-9)


def test_evaluation_is_that_of_one_process() -> None:
    def accuracy(model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return (model(images).argmax(1) == labels).double().mean()

    task = task_of("cnn", adamw)
    task = replace(task, evaluation=task.data, metrics={"accuracy": accuracy})
    expected = [row["metrics"] for row in train_alone(task, 2).rows if "metrics" in row]
    for text, workers in (("pipeline stages=3", 3), ("pipeline schedule=interleaved", 4)):
        ended = train_in_stages(task, text, workers, steps=2)
        assert [row["metrics"] for row in ended.rows if "metrics" in row] == [pytest.approx(expected[0])]


def test_losses_that_are_not_finite_stop_all_workers_and_are_reported_by_the_last_stage() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(model(images), labels) / 0.0

    task = replace(task_of("cnn"), loss=loss)
    with pytest.raises(NonFinite, match="worker 2, step 1: the loss is not finite"):
        train_in_stages(task, "pipeline stages=3", 3, steps=2)


def test_an_output_that_changes_its_shape_between_microbatches_is_refused_by_name() -> None:
    class Ragged(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, : 5 + int(x.shape[0] == 2 and torch.is_grad_enabled())]

    model = nn.Sequential(nn.Flatten(), Ragged(), nn.Linear(5, 5)).double()
    task = replace(task_of("cnn"), model=partial(copy.deepcopy, model))
    sentence = (
        "stage 0, micro-batch 3: its output has shape (2, 6), but that of micro-batch 0 has (3, 5); only the first "
        "dimension (the batch) may differ; pad the others"
    )
    with pytest.raises(UserError, match=re.escape(sentence)):
        train_in_stages(task, "pipeline schedule=gpipe cuts=2", 2, steps=1)


def test_a_layer_that_gives_no_tensor_cannot_end_a_stage() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x

    class First(nn.Module):
        def forward(self, x: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return x[0]

    model = nn.Sequential(nn.Flatten(), Two(), First(), nn.Linear(81, 5)).double()
    task = replace(task_of("cnn"), model=partial(copy.deepcopy, model))
    with pytest.raises(
        UserError, match="stage 0, micro-batch 0: Two returns a tuple; stages exchange one tensor"
    ):
        train_in_stages(task, "pipeline cuts=2", 2, steps=1)
    equal(train_in_stages(task, "pipeline cuts=3", 2, steps=1), train_alone(task, 1))


def test_frozen_layers_and_stages_without_parameters_train_as_alone() -> None:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(81, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5)
    )
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    task = replace(task_of("cnn"), model=partial(copy.deepcopy, model.double()))
    expected = train_alone(task, 4)
    for text in ("pipeline stages=4 cuts=1,2,3", "pipeline stages=3 cuts=2,3 schedule=zb-h1"):
        equal(train_in_stages(task, text, 4 if "4" in text else 3, steps=4), expected)


def test_sequences_shorter_than_the_slices_are_refused() -> None:
    sentence = "microbatches=7: schedule=wavefront cuts dimension 1 (time) of the input into this many slices"
    with pytest.raises(UserError, match=re.escape(sentence)):
        train_in_stages(task_of("lstm"), "pipeline microbatches=7 schedule=wavefront", 2, steps=1)


def test_a_memory_below_the_need_is_refused_with_it() -> None:
    with pytest.raises(UserError, match=r"memory=1\.0 KiB: no cut of 9 layers into 1 parts fits"):
        train_in_stages(task_of("transformer"), "pipeline stages=1 memory=1KiB", 1, steps=1)
    with pytest.raises(
        UserError, match=r"memory=1\.0 KiB: no cut of 9 layers into 2 parts fits; the best needs .* KiB"
    ):
        train_in_stages(task_of("transformer"), "pipeline memory=1KiB", 2, steps=1)


def test_tasks_pieces_are_cut_over_time_each_by_itself() -> None:
    task = task_of("lstm", sgd, microbatches=3)
    equal(
        train_in_stages(task, "pipeline stages=2 microbatches=3 schedule=wavefront", 2, steps=2),
        train_alone(task, 2),
    )


def test_streams_flow_through_stages() -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(task_of("lstm").data)

    task = replace(task_of("lstm"), data=Stream())
    assert isinstance(task, mh.Task)
    equal(train_in_stages(task, "pipeline", 2, steps=4), train_alone(task, 4))
