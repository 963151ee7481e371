"""Loss scaling in the user's own loop: what is scaled and skipped is what one process would, and wrong use is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from equality import distance, same_bits
from manyhands.errors import Aborted, UserError
from manyhands.interop.own_loop.worker_group import WorkerGroup
from own_loop import Nobody, mlp, on_workers, regression, weights


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


def test_a_gradient_that_overflows_on_one_worker_makes_all_skip_the_step() -> None:
    def loop(group: Any) -> dict[str, torch.Tensor]:
        model = mlp().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = (column.float() for column in regression().tensors)
        y[7] = 3e38  # one sample, so one worker
        loader = DataLoader(TensorDataset(x, y), batch_size=13)
        model, optimizer, loader = group.prepare(model, optimizer, loader)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        scales = []
        for _ in range(3):
            for a, b in loader:
                scaler.scale(nn.functional.mse_loss(model(a), b)).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
        assert set(scales) == {128.0, 256.0}, "it fell where a step was skipped, and grew where not"
        return {**weights(model), "scales": torch.tensor(scales)}

    require_scaled_alike(loop, on_workers(3, loop))


def require_scaled_alike(
    loop: Callable[[Any], dict[str, torch.Tensor]], found: list[dict[str, torch.Tensor]]
) -> None:
    reference = loop(Nobody())
    assert all(same_bits(found[0], other) for other in found)
    assert distance(found[0], reference) < 1e-5
    assert torch.equal(found[0]["scales"], reference["scales"])


class Spiked(nn.Module):
    """A spike in the data overflows the gradient of one single number, which one worker owns."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp().float()
        self.height = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor, spike: torch.Tensor) -> torch.Tensor:
        return self.body(x) + self.height * spike


def adamw(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **settings)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adamw": adamw,
    "adamw-fused": lambda model: adamw(model, fused=True),  # which would unscale by itself
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=0.05),  # tensors stay whole
}


@pytest.mark.parametrize("clips", [True, False])
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("at", [0, 12])  # in the share of the first worker, or of the last
def test_a_prepared_scaler_scales_and_skips_under_central_as_in_one_process(
    at: int, world: int, optimizer_name: str, clips: bool
) -> None:
    def loop(group: Any) -> dict[str, torch.Tensor]:
        model = Spiked()
        optimizer = OPTIMIZERS[optimizer_name](model)
        x, y = (column.float() for column in regression().tensors)
        spikes = torch.zeros_like(y)
        spikes[at], y[at] = 3e38, 100.0  # far off, so that the first step of each epoch overflows
        loader = DataLoader(TensorDataset(x, spikes, y), batch_size=13)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
        model, optimizer, loader, scaler = group.prepare(model, optimizer, loader, scaler)
        scales = []
        for _ in range(2):
            for a, spike, b in loader:
                scaler.scale(nn.functional.mse_loss(model(a, spike), b)).backward()
                if clips:
                    scaler.unscale_(optimizer)
                    group.clip_grad_norm_(0.5)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                scales.append(scaler.get_scale())
        assert scales == [128.0, 128.0, 256.0, 256.0] * 2, (
            "it fell where a step was skipped, and grew where not"
        )
        return {**weights(model), "scales": torch.tensor(scales)}

    require_scaled_alike(loop, on_workers(world, loop, strategy="central"))


def _clip(_group: WorkerGroup, model: nn.Module, _optimizer: Any, _scaler: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)


def _clip_twice(group: WorkerGroup, model: nn.Module, _optimizer: Any, _scaler: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    group.clip_grad_norm_(1.0)


def _replace(_group: WorkerGroup, model: nn.Module, _optimizer: Any, _scaler: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.grad / 2


def _unscale(_group: WorkerGroup, _model: nn.Module, optimizer: Any, scaler: torch.amp.GradScaler) -> None:
    scaler.unscale_(optimizer)


def _nothing(*_: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("between", "scales", "fused", "report"),
    [
        (_clip, False, False, "clip with group.clip_grad_norm_"),
        (_clip_twice, False, False, "clip with group.clip_grad_norm_"),
        (_replace, False, False, "clip with group.clip_grad_norm_"),
        (_nothing, True, False, "give it to group.prepare"),
        (_nothing, True, True, "give it to group.prepare"),
        (_unscale, True, False, "give it to group.prepare"),
    ],
)
def test_central_refuses_what_would_see_a_part_of_the_gradient(
    between: Any, scales: bool, fused: bool, report: str
) -> None:
    def loop(group: WorkerGroup) -> None:
        model = mlp()
        model, optimizer = group.prepare(model, torch.optim.AdamW(model.parameters(), fused=fused))
        scaler = torch.amp.GradScaler("cpu", enabled=scales)
        x, y = regression().tensors
        scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
        between(group, model, optimizer, scaler)
        scaler.step(optimizer)

    found = on_workers(2, loop, strategy="central", errors=True)
    assert all(isinstance(error, UserError | Aborted) for error in found), found
    assert any(report in str(error) for error in found)


@pytest.mark.parametrize(("strategy", "enabled"), [("mirrored", True), ("central", False)])
def test_a_scaler_that_needs_nothing_stays_what_it_is(strategy: str, enabled: bool) -> None:
    def loop(group: WorkerGroup) -> bool:
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        return group.prepare(scaler) is scaler

    assert on_workers(2, loop, strategy=strategy) == [True, True]


def test_a_prepared_scaler_goes_on_from_where_the_given_one_was() -> None:
    def loop(group: WorkerGroup) -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", 8.0, growth_factor=3.0, backoff_factor=0.25, growth_interval=5)
        scaler.load_state_dict({**scaler.state_dict(), "scale": 32.0, "_growth_tracker": 4})
        return group.prepare(scaler).state_dict()

    expected = {
        "scale": 32.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 5,
        "_growth_tracker": 4,
    }
    assert on_workers(2, loop, strategy="central") == [expected] * 2


@pytest.mark.parametrize(
    ("dtype", "own", "report"),
    [
        (torch.float16, True, "leave out model.half()"),
        (torch.float32, False, "its own optimizer"),
    ],
)
def test_a_prepared_scaler_refuses_what_it_can_not_unscale(
    dtype: torch.dtype, own: bool, report: str
) -> None:
    def loop(group: WorkerGroup) -> None:
        model = nn.Linear(6, 1).to(dtype)
        other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
        optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
        model, optimizer, scaler = group.prepare(model, optimizer, scaler)
        scaler.scale(model(torch.ones(2, 6, dtype=dtype)).sum()).backward()
        scaler.step(optimizer if own else other)

    found = on_workers(2, loop, strategy="central", errors=True)
    assert any(isinstance(error, UserError) and report in str(error) for error in found), found


def test_after_the_group_an_optimizer_takes_any_scaler_again() -> None:
    def loop(group: WorkerGroup) -> Any:
        model = mlp()
        return group.prepare(model, adamw(model))

    for model, optimizer in on_workers(2, loop, strategy="central"):
        before = weights(model)
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(model(torch.ones(1, 6).double()).sum()).backward()
        scaler.step(optimizer)  # AdamW itself refuses scales, where it is not fused
        assert not same_bits(weights(model), before)
