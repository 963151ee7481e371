"""Which optimizers may be cut, which stay whole, which are rejected; steps of pieces against torch's plain steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim

from manyhands.engine.fusing import may_fuse, take_step
from manyhands.errors import UserError
from manyhands.facts import Stepping
from manyhands.strategies.common.sharding.optimizers import (
    _stand_ins,
    cannot_step,
    stepping_for,
)
from manyhands.strategies.common.sharding.sliced_optimizer import Piece, SlicedOptimizer
from published_optimizers import ClippedByAll, Lamb, Muon, Prodigy, Shampoo

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


SHAPES = ((6, 5), (6,), (3, 6), (3,), (2, 3, 2, 2), ())


def parameters_of(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in shapes or SHAPES]


class PerTensor(optim.SGD):
    """Scales each step by the norm of its tensor."""

    def step(self, closure: Any = None) -> Any:
        for one in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            one.grad.div_(one.grad.norm() + 1)
        return super().step(closure)


class BegunByItsConstructor(optim.SGD):
    """Has its state before the first step, as torch's Adagrad had for long."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, lr=lr)
        for one in (one for group in self.param_groups for one in group["params"]):
            self.state[one] = {"seen": torch.full_like(one, 0.5), "calls": torch.tensor(0.0), "word": "begun"}

    def step(self, closure: Any = None) -> Any:
        for one in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            state = self.state[one]
            state["seen"].addcmul_(one.grad, one.grad)
            state["calls"] += 1
            one.grad.div_(state["seen"].sqrt() * state["calls"])
        return super().step(closure)


class CountsCalls(optim.SGD):
    """Decays its rate with each call, as optimizers do that count steps by group."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.9
        return super().step(closure)


class Stacked(optim.SGD):
    """Works item by item, on state of another shape than the parameter's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            state = self.state[one].setdefault("both", torch.zeros(2, *one.shape, dtype=one.dtype))
            state[0].add_(one.grad)
            one.sub_(state[0], alpha=0.1)


class Listing(optim.SGD):
    """Keeps its parameters in a list besides, as LBFGS does: whoever shows it others is not heard."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.listed = [one for group in self.param_groups for one in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in (one for one in self.listed if one.grad is not None):
            one.sub_(one.grad)


WAYS = (Stepping.APART, Stepping.IN_TURN, Stepping.IN_PIECES)


def ways_of(optimizer: optim.Optimizer) -> tuple[Stepping, ...]:
    return tuple(way for way in WAYS if not cannot_step(optimizer, way))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_torchs_elementwise_optimizers_step_in_every_way(name: str) -> None:
    assert ways_of(ELEMENTWISE[name](parameters_of())) == WAYS


WHOLE = (Stepping.APART, Stepping.IN_TURN)
REACH: dict[str, tuple[Callable[[Any], optim.Optimizer], tuple[Stepping, ...]]] = {
    "adafactor": (lambda p: optim.Adafactor(p), WHOLE),
    "torch's muon": (lambda p: optim.Muon([one for one in p if one.dim() == 2]), WHOLE),
    "per tensor": (lambda p: PerTensor(p, lr=0.1), WHOLE),
    "lamb": (lambda p: Lamb(p, clip=None), WHOLE),
    "muon": (Muon, WHOLE),
    "shampoo": (Shampoo, WHOLE),
    "state of another shape": (lambda p: Stacked(p), WHOLE),
    "counts calls": (lambda p: CountsCalls(p, lr=0.1), (Stepping.APART, Stepping.IN_PIECES)),
    "lamb with a norm of all": (Lamb, ()),
    "prodigy": (Prodigy, ()),
    "prodigy from next to nothing": (lambda p: Prodigy(p, d0=1e-6), ()),
    "clips by all": (ClippedByAll, ()),
    "clips by all, seldom": (lambda p: ClippedByAll(p, clip=1e3), ()),
    "a list of its own": (Listing, ()),
    "lbfgs": (lambda p: optim.LBFGS(p), ()),
    "sparse adam": (lambda p: optim.SparseAdam(p), ()),
}


@pytest.mark.parametrize("name", REACH)
def test_a_trial_finds_how_far_an_optimizer_looks(name: str) -> None:
    make, ways = REACH[name]
    assert ways_of(make(parameters_of())) == ways


@pytest.mark.parametrize("name", ["clips by all", "lamb", "prodigy"])
def test_a_warm_up_that_begins_with_zero_hides_nothing(name: str) -> None:
    make, ways = REACH[name]
    optimizer = make(parameters_of())
    optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert optimizer.param_groups[0]["lr"] == 0
    assert ways_of(optimizer) == ways


def test_a_trial_leaves_optimizer_parameters_and_generators_alone() -> None:
    optimizer = ClippedByAll(parameters_of())
    heard: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: heard.append("a step"))
    before, drawn = copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
    cannot_step(optimizer, Stepping.IN_PIECES)
    assert optimizer.state_dict() == before
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not heard
    for one in optimizer.param_groups[0]["params"]:
        assert one.grad is None
        assert torch.equal(one, torch.ones_like(one))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
def test_a_trial_takes_parameters_on_several_devices() -> None:
    """As slices of layers are, while the parameters that stay whole are still on the CPU."""
    parameters = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(4, 3, device="cuda"))]
    optimizer = optim.SGD(parameters, lr=0.1, momentum=0.9)
    assert cannot_step(optimizer, Stepping.IN_PIECES) == ""


def test_many_groups_cost_no_more_than_few() -> None:
    one_each = optim.AdamW([{"params": [one], "lr": 0.1} for one in parameters_of(*[(4, 3), (4,)] * 200)])
    assert len(_stand_ins(one_each)) == 4
    assert not cannot_step(one_each, Stepping.IN_PIECES)


def test_what_fits_no_way_is_rejected_with_the_reason_and_a_way_out() -> None:
    with pytest.raises(
        UserError,
        match=r"^optimizer Prodigy would train a different model under central than in one process: it combines "
        r"parameters \(.*\); use strategy=mirrored or allreduce, or another optimizer, such as AdamW$",
    ):
        stepping_for(Prodigy(parameters_of()), (Stepping.IN_PIECES, Stepping.APART), "central")


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
    with pytest.raises(UserError, match="split over the workers"):
        workers.optimizers[0].state_dict()
    workers.sliced[0].close()
    assert workers.optimizers[0].state_dict()["state"] == {}


def test_a_group_added_later_is_refused() -> None:
    workers = Workers(lambda p: optim.SGD(p, lr=0.1))
    workers.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(UserError, match=r"now hold \[2, 1\] parameters, but held \[2\]"):
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
        lambda p: PerTensor(p),
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
        sliced.step([torch.ones(3)], rate=0.5)


def test_gradients_that_are_brought_are_let_go_after_the_step() -> None:
    parameter = nn.Parameter(torch.ones(4))
    values = torch.ones(4)
    sliced = SlicedOptimizer(optim.SGD([parameter], lr=0.5), [Piece(0, 1, 3)], [parameter], [values])
    sliced.step([torch.ones(2)], rate=0.5)
    assert values.tolist() == [1, 0.75, 0.75, 1]
    sliced.step([None])
    assert values.tolist() == [1, 0.75, 0.75, 1]
    assert all(owned.proxy.grad is None for owned in sliced._owned)


@pytest.mark.parametrize("way", Stepping)
def test_state_of_the_constructor_is_there_in_the_trial(way: Stepping) -> None:
    assert cannot_step(BegunByItsConstructor(parameters_of(), lr=0.1), way) == ""


@pytest.mark.parametrize("name", ["sgd", "momentum", "adagrad", "adam", "adamw", "rmsprop"])
def test_a_step_in_one_pass_is_torch_s_own_and_leaves_the_optimizer_as_it_was(name: str) -> None:
    whole, fused = parameters_of(*SHAPES), parameters_of(*SHAPES)
    for one, other in zip(whole, fused, strict=True):
        other.data.copy_(one.data)
    plain, fused_one = ELEMENTWISE[name](whole), ELEMENTWISE[name](fused)
    settings = [
        {key: value for key, value in group.items() if key != "params"} for group in fused_one.param_groups
    ]
    for step in range(3):
        for one, other in zip(whole, fused, strict=True):
            one.grad = torch.full_like(one, 0.1 * (step + 1))
            other.grad = one.grad.clone()
        plain.step()
        take_step(fused_one, on_cpu=True)
    for one, other in zip(whole, fused, strict=True):
        torch.testing.assert_close(one, other)
    assert settings == [
        {key: value for key, value in group.items() if key != "params"} for group in fused_one.param_groups
    ]
