"""The user's own loop where each worker holds a part of the model: the plain loop's weights, and whole states."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from equality import distance, same_bits
from manyhands.errors import UserError
from manyhands.interop.own_loop.worker_group import WorkerGroup
from own_loop import (
    Nobody,
    mlp,
    on_workers,
    plain_loop,
    regression,
    require_equal,
    rich_loop,
    shuffled,
    weights,
)

CUT = (("sharded", 2), ("sharded", 4), ("tensor", 3), ("tensor slices=2", 4))


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("strategy", "world"), [("tensor", 2), ("tensor slices=2", 4)])
@pytest.mark.parametrize("loop", [plain_loop, rich_loop])
def test_sliced_models_end_with_the_weights_of_plain_pytorch(
    loop: Callable[..., dict[str, torch.Tensor]], strategy: str, world: int
) -> None:
    require_equal(lambda group: loop(group, epochs=2), world, strategy)


def steps(group: Any, model: nn.Module, optimizer: Any, loader: Any, epochs: int = 1) -> None:
    """Accumulation over two batches of different sizes, and clipping."""
    for _ in range(epochs):
        for number, (x, y) in enumerate(loader):
            with group.no_sync() if number % 2 == 0 else nullcontext():
                (nn.functional.mse_loss(model(x), y) / 2).backward()
            if number % 2:
                group.clip_grad_norm_(0.3)
                optimizer.step()
                optimizer.zero_grad()


def made() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)


def with_a_resume(group: Any) -> dict[str, torch.Tensor]:
    """An epoch, evaluations in between, everything by `state_dict()` into new objects, and another epoch."""
    model, optimizer, scheduler = made()
    model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
    steps(group, model, optimizer, loader)
    scheduler.step()
    model.eval()
    with torch.no_grad():
        for x, _ in loader:
            model(x)
    model.train()
    states = deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    steps(group, model, optimizer, loader)  # which the states must not follow
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    scheduler.load_state_dict(states[2])
    steps(group, model, optimizer, loader)
    return weights(model)


@pytest.mark.parametrize(("strategy", "world"), CUT)
def test_states_are_whole_and_load_back(strategy: str, world: int) -> None:
    require_equal(with_a_resume, world, strategy)


@pytest.mark.parametrize(("strategy", "world"), CUT)
def test_whole_states_are_those_of_one_process(strategy: str, world: int) -> None:
    def body(group: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        model, optimizer, _ = made()
        model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
        steps(group, model, optimizer, loader)
        return weights(model), optimizer.state_dict()

    found, (expected, expected_optimizer) = on_workers(world, body, strategy=strategy), body(Nobody())
    for model, optimizer in found:
        assert list(model) == list(expected)
        assert distance(model, expected) < 1e-9
        assert optimizer["param_groups"] == expected_optimizer["param_groups"]
        assert optimizer["state"].keys() == expected_optimizer["state"].keys()
        for number, state in expected_optimizer["state"].items():
            assert optimizer["state"][number].keys() == state.keys()
            assert distance(optimizer["state"][number], state) < 1e-9


@pytest.mark.parametrize(("strategy", "world"), CUT)
def test_a_checkpoint_goes_from_one_strategy_to_another(strategy: str, world: int, tmp_path: Path) -> None:
    def first(group: Any) -> None:
        model, optimizer, _ = made()
        model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
        steps(group, model, optimizer, loader)
        group.save(tmp_path, step=2, extra={"epoch": 1})

    def second(group: Any) -> dict[str, torch.Tensor]:
        model, optimizer, _ = made()
        model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
        assert group.load(tmp_path).extra == {"epoch": 1}
        steps(group, model, optimizer, loader)
        return weights(model)

    on_workers(world, first, strategy=strategy)
    in_parts, [whole] = on_workers(world, second, strategy=strategy), on_workers(1, second)
    assert distance(in_parts[0], whole) < 1e-9
    assert same_bits(in_parts[0], in_parts[-1])


@pytest.mark.parametrize(("strategy", "world"), CUT)
def test_the_model_is_whole_and_plain_after_the_group(strategy: str, world: int) -> None:
    models: list[nn.Module] = []
    x = regression().tensors[0]

    def body(group: WorkerGroup) -> dict[str, torch.Tensor]:
        model, optimizer, _ = made()
        model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
        steps(group, model, optimizer, loader)
        models.append(model)
        return weights(model)

    found = on_workers(world, body, strategy=strategy)
    expected = mlp()
    expected.load_state_dict(found[0])
    for model in models:
        assert [type(one) for one in model.modules()] == [type(one) for one in expected.modules()]
        assert torch.equal(model(x), expected(x))


@pytest.mark.parametrize(("strategy", "world"), CUT)
def test_gradient_scalers_are_obeyed_by_all(strategy: str, world: int) -> None:
    def body(group: Any) -> dict[str, torch.Tensor]:
        model, optimizer, _ = made()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        scaled = group.prepare(model, optimizer, shuffled(regression()), scaler)
        model, optimizer, loader, scaler = scaled
        for number, (x, y) in enumerate(loader):
            loss = nn.functional.mse_loss(model(x), y)
            broken = number == 1 and getattr(group, "rank", 0) == 0  # in one worker's share of one batch
            scaler.scale(loss * torch.inf if broken else loss).backward()
            scaler.unscale_(optimizer)
            group.clip_grad_norm_(0.3)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return weights(model)

    require_equal(body, world, strategy)


def mistake(strategy: str, body: Callable[[WorkerGroup, nn.Module, Any, Any], Any]) -> str:
    def work(group: WorkerGroup) -> None:
        model, optimizer, _ = made()
        model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
        x, y = next(iter(loader))
        nn.functional.mse_loss(model(x), y).backward()
        body(group, model, optimizer, x)

    found = on_workers(2, work, strategy=strategy, errors=True)
    return next(str(one) for one in found if isinstance(one, UserError))


@pytest.mark.parametrize("strategy", ["sharded", "tensor"])
def test_torchs_own_clipping_of_a_part_is_refused(strategy: str) -> None:
    def clip(_: WorkerGroup, model: nn.Module, optimizer: Any, __: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()

    assert "clip with group.clip_grad_norm_" in mistake(strategy, clip)


@pytest.mark.parametrize("strategy", ["sharded", "tensor"])
def test_a_scaler_that_was_not_prepared_is_refused(strategy: str) -> None:
    def scale(_: WorkerGroup, model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(x).mean()).backward()
        scaler.step(optimizer)

    assert "a GradScaler that was not prepared" in mistake(strategy, scale)


def test_a_state_that_only_one_worker_asks_for_names_both() -> None:
    def ask(group: WorkerGroup, model: nn.Module, optimizer: Any, _: Any) -> None:
        if group.is_main:
            model.state_dict()
        optimizer.step()

    said = mistake("sharded", ask)
    assert "worker 0 is in state_dict(), worker 1 is in optimizer.step()" in said


def test_whoever_reads_a_sharded_parameter_has_it_whole_and_keeps_only_copies() -> None:
    def body(group: WorkerGroup) -> None:
        model, optimizer, _ = made()
        kept = list(model.parameters())
        model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
        assert all(one.isnan().all() for one in kept), "they are not here"
        expected = list(mlp().parameters())
        assert all(map(torch.equal, model.parameters(), expected))
        before = model[0].weight.detach()
        steps(group, model, optimizer, loader)
        assert torch.equal(before, expected[0]), "a view of what was read stays what it was"
        assert not torch.equal(model[0].weight, before)
        assert all(one.isnan().all() for one in kept[2:])

    on_workers(2, body, strategy="sharded")


def test_one_worker_may_evaluate_a_sharded_model_alone() -> None:
    data = regression()

    def body(group: WorkerGroup) -> float:
        model, optimizer, _ = made()
        model, optimizer, loader = group.prepare(model, optimizer, shuffled(data))
        steps(group, model, optimizer, loader)
        error = 0.0
        if group.is_main:
            with torch.no_grad():
                for x, y in DataLoader(data, batch_size=15):
                    error += float(nn.functional.mse_loss(model(x), y)) / 3
        steps(group, model, optimizer, loader)
        return error

    plain, optimizer, _ = made()
    nobody = Nobody()
    nobody.prepare(plain)
    steps(nobody, plain, optimizer, shuffled(data))
    with torch.no_grad():
        expected = float(nn.functional.mse_loss(plain(data.tensors[0]), data.tensors[1]))
    assert on_workers(3, body, strategy="sharded") == [pytest.approx(expected, abs=1e-9), 0.0, 0.0]


def test_a_layer_that_is_computed_again_in_backward_is_there_again() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = torch.utils.checkpoint.checkpoint(self.layers, x, use_reentrant=False)
            return result

    def body(group: Any) -> dict[str, torch.Tensor]:
        model = Twice()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
        steps(group, model, optimizer, loader, epochs=2)
        return weights(model)

    require_equal(body, 2, "sharded")


def test_slices_share_a_batch_so_gathered_rows_are_those_of_the_batch() -> None:
    def body(group: WorkerGroup) -> torch.Tensor:
        model, optimizer, _ = made()
        model, optimizer, loader = group.prepare(model, optimizer, DataLoader(regression(), batch_size=15))
        with pytest.raises(UserError, match="under this strategy 2 workers compute on the same"):
            group.prepare(DataLoader(regression()), split=False)
        return torch.cat([group.gather(x) for x, _ in loader])

    for rows in on_workers(4, body, strategy="tensor slices=2"):
        assert torch.equal(rows, regression().tensors[0])


PIPELINES = (
    ("pipeline", 2),
    ("pipeline schedule=gpipe microbatches=3", 4),
    ("pipeline stages=3 schedule=zb-h1", 3),
    ("pipeline tensor=2 cuts=1", 4),
)


def squared(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def by_steps(group: Any) -> dict[str, torch.Tensor]:
    """One call in place of two lines, with accumulation, clipping, a schedule, an evaluation and a resume inside."""
    model, optimizer, scheduler = made()
    model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
    states: Any = None
    for epoch in range(3):
        for number, batch in enumerate(loader):
            with group.no_sync() if number % 2 == 0 else nullcontext():
                group.step(batch, squared)
            if number % 2:
                group.clip_grad_norm_(0.3)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        if epoch == 0:
            states = deepcopy((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()))
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    scheduler.load_state_dict(states[2])
    model.eval()
    with torch.no_grad():
        losses = torch.stack([group.step(batch, squared) for batch in loader])
    model.train()
    for batch in loader:
        group.step(batch, squared)
        group.step(batch, squared)  # both are exchanged, and add up
        optimizer.step()
        optimizer.zero_grad()
    return {**weights(model), "losses": losses}


@pytest.mark.parametrize(
    ("strategy", "world"), [*PIPELINES, *CUT, ("mirrored", 3), ("allreduce", 2)], ids=lambda one: str(one)
)
def test_one_call_in_place_of_two_lines_is_the_same_everywhere(strategy: str, world: int) -> None:
    require_equal(by_steps, world, strategy)


def test_nobody_can_call_a_model_that_is_cut_into_stages() -> None:
    def call(group: WorkerGroup) -> None:
        model, optimizer, _ = made()
        model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
        for x, _ in loader:
            model(x)

    found = on_workers(2, call, strategy="pipeline", errors=True)
    assert all("give a batch and a function loss(model, batch) to group.step" in str(one) for one in found)


@pytest.mark.parametrize(("strategy", "world"), PIPELINES[:2])
def test_stages_are_saved_whole_and_are_a_plain_model_after_the_group(
    strategy: str, world: int, tmp_path: Path
) -> None:
    models: list[nn.Module] = []

    def body(group: Any) -> dict[str, torch.Tensor]:
        model, optimizer, _ = made()
        models.append(model)
        model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
        if group.load(tmp_path) is None:
            for batch in loader:
                group.step(batch, squared)
                optimizer.step()
                optimizer.zero_grad()
            group.save(tmp_path, step=4)
        return weights(model)

    [alone] = on_workers(1, body)
    found = on_workers(world, body, strategy=strategy)
    assert all(same_bits(one, alone) for one in found), "the checkpoint of one process, cut and whole again"
    assert all(same_bits(weights(model), alone) for model in models)
    (x, _), expected = regression().tensors, mlp()
    expected.load_state_dict(alone)
    assert all(torch.equal(model(x), expected(x)) for model in models)


def test_a_batch_that_only_one_stage_steps_names_the_stage_that_waits() -> None:
    def body(group: WorkerGroup) -> None:
        model, optimizer, _ = made()
        model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
        batch = next(iter(loader))
        if group.is_main:
            group.step(batch, squared)

    found = on_workers(2, body, strategy="pipeline", errors=True, timeout_s=2.0)
    assert any("stage 1" in str(one) or "worker 1" in str(one) or "rank 1" in str(one) for one in found), (
        found
    )


def accuracy(model: nn.Module, batch: Any) -> float:
    return float((model(batch[0]) > batch[1]).double().mean())


def normed() -> nn.Module:
    torch.manual_seed(1)
    layers = (
        nn.Linear(6, 8),
        nn.BatchNorm1d(8),
        nn.Tanh(),
        nn.Linear(8, 4),
        nn.BatchNorm1d(4),
        nn.Linear(4, 1),
    )
    return nn.Sequential(*layers).double()


@pytest.mark.parametrize("buffers", ["broadcast", "mean"])
@pytest.mark.parametrize(
    ("strategy", "world"), [("sharded", 3), ("tensor slices=2", 4), ("pipeline cuts=3 microbatches=2", 4)]
)
def test_running_statistics_are_alike_and_whole(strategy: str, world: int, buffers: str) -> None:
    def body(group: Any) -> dict[str, torch.Tensor]:
        model = normed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model, optimizer, loader = group.prepare(model, optimizer, DataLoader(regression(), batch_size=15))
        for batch in loader:
            group.step(batch, squared)
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found = [group.step(batch, accuracy) for batch in loader]
        return {**weights(model), "accuracy": torch.stack(found)}

    found = on_workers(world, body, strategy=strategy, buffers=buffers)
    assert all(same_bits(found[0], other) for other in found)
    assert found[0]["1.num_batches_tracked"].item() == 3 * (2 if "pipeline" in strategy else 1)
    assert found[0]["4.running_mean"].abs().max() > 0
    alone = normed()
    alone.load_state_dict({name: value for name, value in found[0].items() if name != "accuracy"})
    alone.eval()
    with torch.no_grad():
        expected = [accuracy(alone, batch) for batch in DataLoader(regression(), batch_size=15)]
    assert found[0]["accuracy"].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("strategy", "world"), [("sharded", 3), ("tensor", 2), ("pipeline", 2)])
def test_all_stop_after_the_same_step(strategy: str, world: int) -> None:
    def body(group: WorkerGroup) -> int:
        model, optimizer, _ = made()
        model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
        taken = 0
        for _ in range(100):
            for batch in loader:
                group.step(batch, squared)
                optimizer.step()
                optimizer.zero_grad()
                taken += 1
                if taken == 5 and group.rank == world - 1:
                    group.stop()
        assert group.is_stopped
        return taken

    assert on_workers(world, body, strategy=strategy) == [6] * world


@pytest.mark.parametrize(("strategy", "world"), CUT)
def test_zero_grad_of_the_model_is_that_of_the_optimizer(strategy: str, world: int) -> None:
    def body(group: Any) -> dict[str, torch.Tensor]:
        model, optimizer, _ = made()
        model, optimizer, loader = group.prepare(model, optimizer, shuffled(regression()))
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            nn.functional.mse_loss(model(x), 2 * y).backward()
            optimizer.step()
            model.zero_grad()
        return weights(model)

    require_equal(body, world, strategy)


def test_a_compiled_model_is_rejected() -> None:
    def body(group: WorkerGroup) -> None:
        model = mlp()
        model._orig_mod = mlp()  # type: ignore[assignment]  # as torch.compile keeps it
        group.prepare(model, torch.optim.SGD(model.parameters()))

    found = on_workers(2, body, strategy="sharded", errors=True)
    assert "prepare got a model of torch.compile: sharded frees and gathers parameters" in str(found[0])
