"""Which optimizers may be cut, which stay whole, which are refused; steps of pieces against torch's plain steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from manyhands.errors import UserError
from manyhands.sharding.optimizers import is_elementwise, may_fuse
from manyhands.sharding.pieces import Piece
from manyhands.sharding.slices import SlicedOptimizer

ELEMENTWISE: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
    "dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.1, lr_decay=1e-2, weight_decay=1e-2),
    "adam": lambda p: optim.Adam(p, lr=0.1, weight_decay=1e-2),
    "amsgrad": lambda p: optim.Adam(p, lr=0.1, amsgrad=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adamax": lambda p: optim.Adamax(p, lr=0.1),
    "nadam": lambda p: optim.NAdam(p, lr=0.1),
    "radam": lambda p: optim.RAdam(p, lr=0.1),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "rprop": lambda p: optim.Rprop(p, lr=0.1),
    "asgd": lambda p: optim.ASGD(p, lr=0.1),
}


class Careful(optim.SGD):
    """Somebody's own, which might do anything."""


class Declared(optim.SGD):
    elementwise = True


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torchs_elementwise_optimizers_are_known(name: str) -> None:
    assert is_elementwise(ELEMENTWISE[name]([nn.Parameter(torch.ones(3))]))


@pytest.mark.parametrize("kind", [optim.Adafactor, optim.Muon, Careful])
def test_others_keep_tensors_whole(kind: type[optim.Optimizer]) -> None:
    assert not is_elementwise(kind([nn.Parameter(torch.ones(3, 3))]))  # type: ignore[call-arg]


def test_an_optimizer_may_declare_itself() -> None:
    assert is_elementwise(Declared([nn.Parameter(torch.ones(3))]))


@pytest.mark.parametrize(("kind", "fix"), [(optim.LBFGS, "AdamW"), (optim.SparseAdam, r"sparse=False.*Adam")])
def test_what_can_not_work_is_refused_by_name_with_a_way_out(kind: type[optim.Optimizer], fix: str) -> None:
    class Derived(kind):  # type: ignore[misc,valid-type]
        pass

    for refused in (kind, Derived):
        with pytest.raises(UserError, match=rf"optimizer {refused.__name__} .*{fix}"):
            is_elementwise(refused([nn.Parameter(torch.ones(3))]))  # type: ignore[call-arg]


PIECES = ([Piece(0, 0, 13)], [Piece(0, 13, 20), Piece(1, 0, 7)])  # of parameters with 20 and 7 items


class Workers:
    """Two workers' optimizers over one copy of two parameters, beside a plain optimizer of the same kind."""

    def __init__(self, make: Callable[[Any], optim.Optimizer], dtype: torch.dtype = torch.float64) -> None:
        self._generator = torch.Generator().manual_seed(3)
        self.values = [torch.randn(shape, generator=self._generator).to(dtype) for shape in ((4, 5), (7,))]
        self._gradients = [torch.zeros_like(value) for value in self.values]
        self.plain = [nn.Parameter(value.clone()) for value in self.values]
        self.reference = make(self.plain)
        self._models = [[nn.Parameter(value) for value in self.values] for _ in PIECES]
        self.optimizers = [make(parameters) for parameters in self._models]
        self.sliced = [
            SlicedOptimizer(optimizer, pieces, parameters, self.values, self._gradients)
            for optimizer, pieces, parameters in zip(self.optimizers, PIECES, self._models, strict=True)
        ]

    def step(self, *, reached: tuple[bool, bool] = (True, True)) -> None:
        for number, gradient in enumerate(self._gradients):
            gradient.copy_(torch.randn(gradient.shape, generator=self._generator))
            self.plain[number].grad = gradient.clone() if reached[number] else None
            for parameters in self._models:
                parameters[number].grad = gradient if reached[number] else None
        self.reference.step()
        for sliced in self.sliced:
            sliced.step()

    def assert_equal(self, tolerance: float) -> None:
        for value, expected in zip(self.values, self.plain, strict=True):
            torch.testing.assert_close(value, expected.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_pieces_take_the_steps_of_whole_parameters(make: Callable[[Any], optim.Optimizer]) -> None:
    workers = Workers(make)
    for number in range(8):
        workers.step(reached=(number != 4, number >= 2))  # one comes late, the other is left out once
        workers.assert_equal(1e-12)
    for optimizer, parameters in zip(workers.optimizers, workers._models, strict=True):
        assert optimizer.param_groups[0]["params"] == parameters
        assert optimizer.param_groups[0].get("fused") is None
        assert not optimizer.state


def test_settings_that_change_between_steps_reach_the_pieces() -> None:
    workers = Workers(lambda p: optim.AdamW(p, lr=0.1))
    schedulers = [
        optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        for optimizer in (workers.reference, *workers.optimizers)
    ]
    for _ in range(5):
        workers.step()
        for scheduler in schedulers:
            scheduler.step()
    workers.assert_equal(1e-12)


def test_a_state_that_is_loaded_replaces_what_the_pieces_had() -> None:
    workers = Workers(lambda p: optim.Adam(p, lr=0.1))
    workers.step()
    saved = copy.deepcopy(workers.reference.state_dict())
    for _ in range(3):
        workers.step()
    for optimizer in (workers.reference, *workers.optimizers):
        optimizer.load_state_dict(copy.deepcopy(saved))
    workers.step()
    workers.assert_equal(1e-12)
    assert all(not optimizer.state for optimizer in workers.optimizers)


def test_looking_into_the_empty_state_loses_nothing() -> None:
    workers = Workers(lambda p: optim.Adam(p, lr=0.1))
    workers.step()
    for optimizer, parameters in zip(workers.optimizers, workers._models, strict=True):
        assert optimizer.state[parameters[0]] == {}  # a defaultdict: the look leaves an entry
    workers.step()
    workers.assert_equal(1e-12)


def test_state_dict_would_miss_the_pieces_and_says_so() -> None:
    workers = Workers(lambda p: optim.Adam(p, lr=0.1))
    with pytest.raises(UserError, match="in pieces"):
        workers.optimizers[0].state_dict()
    workers.sliced[0].close()
    assert workers.optimizers[0].state_dict()["state"] == {}


def test_a_group_added_later_is_refused() -> None:
    workers = Workers(lambda p: optim.SGD(p, lr=0.1))
    workers.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(UserError, match=r"now hold \[2, 1\] parameters and held \[2\]"):
        workers.sliced[0].step()


def test_a_parameter_that_is_not_the_models_is_refused() -> None:
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    with pytest.raises(UserError, match=r"group 0 .* shape \(2, 2\)"):
        SlicedOptimizer(optim.SGD(parameters), [], parameters[:1], [parameters[0].data], [torch.ones(3)])


def fused(make: Callable[[Any], optim.Optimizer], dtype: torch.dtype = torch.float32) -> bool:
    parameter = nn.Parameter(torch.ones(3, dtype=dtype))
    parameter.grad = torch.ones_like(parameter)
    optimizer = make([parameter])
    return may_fuse(optimizer, optimizer.param_groups[0], [parameter], optimizer.state)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "adam", "adamw"])
def test_the_one_pass_step_is_taken_where_the_choice_is_open(name: str) -> None:
    assert fused(ELEMENTWISE[name])
    assert fused(ELEMENTWISE[name], torch.float64)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.AdamW(p, fused=False),
        lambda p: optim.AdamW(p, foreach=False),
        lambda p: optim.AdamW(p, foreach=True),
        lambda p: optim.AdamW(p, lr=torch.tensor(0.1)),
        lambda p: optim.RMSprop(p),
        lambda p: Declared(p),
    ],
)
def test_the_users_choice_stands(make: Callable[[Any], optim.Optimizer]) -> None:
    assert not fused(make)


def test_sixteen_bit_weights_are_rounded_as_torch_rounds_them() -> None:
    assert not fused(ELEMENTWISE["adamw"], torch.bfloat16)
    workers = Workers(ELEMENTWISE["adamw"], torch.bfloat16)
    for _ in range(5):
        workers.step()
    workers.assert_equal(0)


def test_steps_counted_in_float64_are_left_to_the_plain_path() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert not fused(ELEMENTWISE["adagrad"])
        workers = Workers(ELEMENTWISE["adagrad"])
        for _ in range(3):
            workers.step()
        workers.assert_equal(1e-12)
    finally:
        torch.set_default_dtype(torch.float32)


class Rateless(optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("not reached")


def test_an_optimizer_without_a_learning_rate_can_not_be_scaled() -> None:
    parameter = nn.Parameter(torch.ones(3))
    sliced = SlicedOptimizer(Rateless([parameter]), [Piece(0, 0, 3)], [parameter], [parameter.data])
    with pytest.raises(UserError, match="optimizer Rateless has no setting 'lr'"):
        sliced.step_with([torch.ones(3)], rate=0.5)


def test_gradients_that_are_brought_are_let_go_after_the_step() -> None:
    parameter = nn.Parameter(torch.ones(4))
    values = torch.ones(4)
    sliced = SlicedOptimizer(optim.SGD([parameter], lr=0.5), [Piece(0, 1, 3)], [parameter], [values])
    sliced.step_with([torch.ones(2)], rate=0.5)
    assert values.tolist() == [1, 0.75, 0.75, 1]
    sliced.step_with([None])
    assert values.tolist() == [1, 0.75, 0.75, 1]
    assert all(owned.proxy.grad is None for owned in sliced._owned)
