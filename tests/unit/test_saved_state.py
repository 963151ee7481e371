"""What a checkpoint holds comes back to the last bit: optimizers and schedulers go on as if never stopped."""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler

from manyhands.data.store.checkpoint import CheckpointStore, Snapshot
from manyhands.data.store.state_tree import flatten, restore_optimizer, unflatten
from manyhands.data.store.tensorfile import encode_tensors
from manyhands.errors import UserError


def assert_same(left: Any, right: Any, where: str = "") -> None:
    """Equal in type and in every bit of every number."""
    assert type(left) is type(right), where
    if isinstance(left, Tensor):
        assert (left.dtype, left.shape) == (right.dtype, right.shape), where
        assert list(encode_tensors({"x": left})) == list(encode_tensors({"x": right})), where
    elif isinstance(left, float):
        assert struct.pack("d", left) == struct.pack("d", right), where
    elif isinstance(left, dict):
        assert left.keys() == right.keys(), where
        for key in left:
            assert_same(left[key], right[key], f"{where}.{key}")
    elif isinstance(left, list | tuple):
        assert len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{where}.{index}")
    else:
        assert left == right, where


# ---- optimizers: saved, loaded and continued gives the bits of not stopping ----

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p, 0.01),
    "Adam tensor lr": lambda p: torch.optim.Adam(p, torch.tensor(0.01), foreach=False),
    "Adam fused": lambda p: torch.optim.Adam(p, 0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1, lr_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.9),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.1, t0=2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.5, max_iter=3, history_size=4),
    "LBFGS line search": lambda p: torch.optim.LBFGS(p, 0.5, max_iter=3, line_search_fn="strong_wolfe"),
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, 0.01),
    "Muon": lambda p: torch.optim.Muon(p, 0.01),
}
DTYPES = (torch.float32, torch.float64, torch.bfloat16)


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    classes = {name for name in torch.optim.__all__ if isinstance(getattr(torch.optim, name, None), type)}
    assert classes - {"Optimizer"} == {name.split()[0] for name in OPTIMIZERS}


class Training:
    """A small regression on two matrices (and a third that no loss reaches); batch k is a function of k."""

    def __init__(self, name: str, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        self.sparse = name == "SparseAdam"
        shapes = [(6, 3), (3, 2), (4, 4)]
        self.parameters = [
            nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype)) for shape in shapes
        ]
        self.optimizer = OPTIMIZERS[name](self.parameters[:1] if self.sparse else self.parameters)

    def run(self, first: int, last: int) -> None:
        for k in range(first, last):
            generator = torch.Generator().manual_seed(k)
            indices = torch.randint(0, 6, (8,), generator=generator)
            target = torch.randn(8, 2, generator=generator, dtype=torch.float64).to(self.parameters[0].dtype)
            self.optimizer.step(partial(self.closure, indices, target))

    def closure(self, indices: Tensor, target: Tensor) -> float:
        self.optimizer.zero_grad()
        embedded = nn.functional.embedding(indices, self.parameters[0], sparse=self.sparse)
        loss = ((embedded @ self.parameters[1] - target) ** 2).mean()
        torch.autograd.backward(loss)
        return float(loss.detach())

    def state(self) -> dict[str, Tensor]:
        return {str(index): parameter.detach() for index, parameter in enumerate(self.parameters)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_optimizer_continues_to_the_same_bits(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    uninterrupted = Training(name, dtype, seed=1)
    uninterrupted.run(0, 7)

    first = Training(name, dtype, seed=1)
    first.run(0, 4)
    store = CheckpointStore(tmp_path)
    store.save(Snapshot(step=4, model=first.state(), optimizer=first.optimizer.state_dict()))
    loaded = store.load()
    second = Training(name, dtype, seed=2)
    with torch.no_grad():
        for parameter, saved in zip(second.parameters, loaded.model.values(), strict=True):
            parameter.copy_(saved)
    restore_optimizer(second.optimizer, loaded.optimizer)
    assert_same(second.optimizer.state_dict(), first.optimizer.state_dict())
    second.run(4, 7)

    assert_same(second.state(), uninterrupted.state())
    assert_same(second.optimizer.state_dict(), uninterrupted.optimizer.state_dict())


def test_the_state_of_another_optimizer_is_refused_with_what_differs() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    adam = torch.optim.Adam(parameters, 0.1).state_dict()
    with pytest.raises(UserError, match=r"the settings .*betas.* where SGD has dampening.*momentum"):
        restore_optimizer(torch.optim.SGD(parameters, 0.1), adam)
    two = torch.optim.Adam([*parameters, nn.Parameter(torch.zeros(3))], 0.1)
    with pytest.raises(UserError, match=r"groups of \[1\] parameters, this one of \[2\]"):
        restore_optimizer(two, adam)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5, 6], 0.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 9),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3, 2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
}


def learning_rates(scheduler: Any, optimizer: torch.optim.Optimizer, steps: int) -> Iterator[float]:
    for _ in range(steps):
        optimizer.step()
        scheduler.step(1.0) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else scheduler.step()
        yield optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_restored_scheduler_continues_to_the_same_rates(name: str, tmp_path: Path) -> None:
    def fresh() -> tuple[Any, torch.optim.Optimizer]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], 0.1, momentum=0.9)
        return SCHEDULERS[name](optimizer), optimizer

    expected = list(learning_rates(*fresh(), 8))
    scheduler, optimizer = fresh()
    head = list(learning_rates(scheduler, optimizer, 4))
    store = CheckpointStore(tmp_path)
    extra = {"scheduler": scheduler.state_dict()}
    store.save(Snapshot(step=4, model={}, optimizer=optimizer.state_dict(), extra=extra))
    loaded = store.load()
    scheduler, optimizer = fresh()
    restore_optimizer(optimizer, loaded.optimizer)
    scheduler.load_state_dict(loaded.extra["scheduler"])
    assert head + list(learning_rates(scheduler, optimizer, 4)) == expected
    assert len(set(expected)) > 1


# ---- trees ----

UNICODE = st.characters(exclude_categories=["Cs"])  # what UTF-8 has: without a word each character is tried
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(UNICODE),
    st.sampled_from([torch.tensor(2.5), torch.empty(0, 3), torch.arange(4), torch.tensor([math.inf])]),
    st.builds(Counter, st.dictionaries(st.integers(), st.integers())),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(
            st.one_of(st.text(UNICODE, max_size=4), st.integers(), st.just("$tuple")), inner, max_size=3
        ),
    ),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(tree=TREES)
def test_a_tree_comes_back_equal_through_json(tree: Any) -> None:
    tensors, meta = flatten(tree)
    text = json.dumps(meta, allow_nan=False)
    assert_same(unflatten(tensors, json.loads(text)), tree)


def test_one_tensor_in_two_places_comes_back_as_one_and_equal_paths_do_not_mix() -> None:
    shared, one, other = torch.ones(2), torch.zeros(1), torch.ones(1)
    tensors, meta = flatten({"a": shared, "b": [shared], "c": {"d": one}, "c.d": other, "s": shared[:1]})
    tree = unflatten(tensors, meta)
    assert tree["a"] is tree["b"][0] is shared
    assert (tree["c"]["d"], tree["c.d"]) == (one, other)
    assert len(tensors) == 4


Pair = namedtuple("Pair", "a b")


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        ({"optimizer": {"state": {0: {"rate": Decimal(1)}}}}, "optimizer.state.0.rate is a Decimal"),
        ({"extra": [1, {2, 3}]}, "extra.1 is a set"),
        ({"extra": b"x"}, "extra is a bytes"),
        ({"extra": 1j}, "extra is a complex"),
        ({"extra": Pair(1, 2)}, "extra is a Pair"),
        ({"extra": lambda: 0}, "extra is a function"),
        ({"extra": {(1, 2): 3}}, r"extra has the key \(1, 2\), a tuple"),
    ],
)
def test_what_a_tree_can_not_hold_is_refused_by_its_path(tree: Any, named: str) -> None:
    with pytest.raises(UserError, match=named):
        flatten(tree)


@pytest.mark.parametrize(
    "meta", [{"$tensor": "x"}, {"$code": "x"}, {"$items": [1]}, {"$tuple": [], "more": 1}]
)
def test_json_that_no_tree_gave_is_refused(meta: Any) -> None:
    with pytest.raises(ValueError, match=r"missing|unknown form|pairs"):
        unflatten({}, meta)


# ---- tensors: read back by the safetensors library ----


def test_every_dtype_and_layout_is_read_back_by_the_library(tmp_path: Path) -> None:
    bucket = torch.randn(30)
    tensors = {
        "transposed": torch.randn(4, 3).T,
        "strided": torch.randn(10)[::3],
        "expanded": torch.randn(1, 3).expand(2, 3),
        "in a bucket": bucket[:12].view(3, 4),
        "next in the bucket": bucket[12:],
        "overlapping": bucket[6:18],
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(1.5),
        "parameter": nn.Parameter(torch.randn(2)),
        "larger than a chunk": torch.randn(3, 1 << 19),
        "naïve 名": torch.ones(1),
    }
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
        tensors[str(dtype)] = torch.randn(3).to(dtype)
    for dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool):
        tensors[str(dtype)] = torch.tensor([1, 0, 1]).to(dtype)
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"".join(encode_tensors(tensors)))
    read = safetensors.torch.load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype, name
        assert torch.equal(read[name].double(), tensor.detach().double()), name


def test_tied_weights_are_stored_once_and_come_back_under_both_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1000, 8)
            self.head = nn.Linear(8, 1000, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    store = CheckpointStore(tmp_path)
    path = store.save(Snapshot(step=1, model=model.state_dict(), optimizer={})) / "model.safetensors"
    assert path.stat().st_size < 1.1 * model.embed.weight.nbytes
    assert_same(store.load().model, dict(model.state_dict()))
    other = Tied()
    safetensors.torch.load_model(other, path)
    assert torch.equal(other.head.weight, model.head.weight)


@pytest.mark.parametrize(
    ("model", "optimizer", "named"),
    [
        ({"spectrum": torch.zeros(2, dtype=torch.complex64)}, {}, "'spectrum' is a .* of torch.complex64"),
        ({"grid": torch.eye(2).to_sparse()}, {}, "'grid' is a torch.sparse_coo tensor"),
        ({"ghost": torch.empty(2, device="meta")}, {}, "'ghost' is a meta tensor"),
        ({"__metadata__": torch.zeros(1)}, {}, "named '__metadata__'"),
        ({}, {"grid": torch.eye(2).to_sparse()}, "'optimizer.grid' is a torch.sparse_coo tensor"),
    ],
)
def test_a_tensor_the_format_can_not_hold_is_refused_by_name(
    model: Any, optimizer: Any, named: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=named):
        CheckpointStore(tmp_path).save(Snapshot(step=2, model=model, optimizer=optimizer))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("bits", ["7ff8000000000001", "fff8000000000000", "7ff0000000000001"])
def test_a_nan_comes_back_with_its_bits(bits: str) -> None:
    """A NaN can carry a number in its bits; what was saved is what is loaded."""
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    tensors, meta = flatten({"x": value})
    assert_same(unflatten(tensors, json.loads(json.dumps(meta))), {"x": value})


@pytest.mark.parametrize("text", ["", "nan", "3ff0000000000000", "7ff800000000001", "7FF8000000000001 "])
def test_bits_that_are_no_nan_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not the bits of a NaN"):
        unflatten({}, {"$nan": text})
