"""A fetched batch equals what torch's own DataLoader yields for the same indices, for every form of data."""

from __future__ import annotations

import tracemalloc
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
)

from manyhands.data.batches import BatchPlan, BatchSource, weighted_draw
from manyhands.errors import UserError

N = 23
CHOICES = ([4], [22, 0, 7, 7, 13], list(range(N)))
Point = namedtuple("Point", ["x", "y"])

generator = torch.Generator().manual_seed(0)
X = torch.randn(N, 3, 4, generator=generator)
Y = torch.randint(0, 5, (N,), generator=generator)
XN, YN = X.numpy().copy(), Y.numpy().copy()


class Squares(Dataset[Any]):
    """A map-style dataset in plain Python; `make` shapes its samples."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        return self.make(index)


class InBatches(Squares):
    """Answers only in batches, so a source that ignores `__getitems__` fails."""

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("asked for a single sample")

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert type(indices) is list
        return [self.make(index) * len(indices) for index in indices]


class Doubled(TensorDataset):
    """A subclass with its own samples must not be gathered behind its back."""

    def __getitem__(self, index: int) -> Any:
        return tuple(2 * tensor[index] for tensor in self.tensors)


class NoGetitems(Squares):
    __getitems__ = None  # how a dataset says that it has none


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


# what BatchSource is given, and the dataset that DataLoader is given for it
SAME: dict[str, Any] = {
    "tensor": X,
    "tensor 1-d": Y,
    "tensor transposed": X.transpose(1, 2),
    "tensor channels last": torch.randn(N, 3, 4, 4).to(memory_format=torch.channels_last),
    "tensor expanded": X[:1].expand(N, 3, 4),
    "tensor strided rows": torch.randn(2 * N, 3)[::2],
    "tensor bool": Y > 2,
    "tensor half": X.half(),
    "tensor bfloat16": X.bfloat16(),
    "tensor complex": torch.complex(X, X),
    "tensor of no features": torch.zeros(N, 0),
    "parameter": torch.nn.Parameter(X.clone()),
    "TensorDataset": TensorDataset(X, Y),
    "TensorDataset of one": TensorDataset(X),
    "TensorDataset subclass": Doubled(X, Y),
    "StackDataset": StackDataset(X, TensorDataset(Y)),
    "StackDataset by name": StackDataset(image=X, label=Squares(float)),
    "ConcatDataset": ConcatDataset([TensorDataset(X[:5], Y[:5]), TensorDataset(X[5:], Y[5:])]),
    "Subset": Subset(TensorDataset(X.repeat(2, 1, 1), Y.repeat(2)), list(range(2 * N - 1, 0, -2))),
    "Subset of Subset": Subset(Subset(TensorDataset(X, Y), range(N)), torch.randperm(N).tolist()),
    "Subset from the end": Subset(TensorDataset(X, Y), list(range(-N, 0))),
    "Subset of python": Subset(Squares(float), list(range(N))),
    "Subset of array": Subset(XN, np.arange(N)[::-1]),
    "array": XN,
    "array 1-d": YN,
    "array transposed": XN.transpose(0, 2, 1),
    "array of strings": np.array([f"sample {i}" for i in range(N)]),
    "floats": Squares(float),
    "ints": Squares(int),
    "strings": Squares(str),
    "bytes": Squares(lambda i: bytes([i])),
    "bools": Squares(lambda i: i % 2 == 0),
    "numpy scalars": Squares(np.float32),
    "pairs": Squares(lambda i: (X[i], int(Y[i]))),
    "lists": Squares(lambda i: [XN[i], float(i)]),
    "named tuples": Squares(lambda i: Point(X[i], i)),
    "dicts": Squares(lambda i: {"x": X[i], "nested": {"y": [i, i + 1]}}),
    "batched getter": InBatches(lambda i: torch.full((2,), float(i))),
    "getter that is None": NoGetitems(float),
    "list of samples": [(X[i], int(Y[i])) for i in range(N)],
    "list of numbers": list(range(N)),
    "dict by number": {i: X[i] for i in range(N)},
    "range": range(N),
}
FORMS: dict[str, tuple[Any, Any]] = {name: (data, data) for name, data in SAME.items()} | {
    "tuple of tensors": ((X, Y), TensorDataset(X, Y)),
    "list of tensors": ([X, Y], TensorDataset(X, Y)),
    "tuple of one tensor": ((X,), TensorDataset(X)),
    "array read-only": (np.broadcast_to(XN[:1], XN.shape), XN[:1].repeat(N, axis=0)),
    "tuple of arrays": ((XN, YN), StackDataset(XN, YN)),
    "tuple of both": ((X, YN), StackDataset(X, YN)),
    "dict of tensors": ({"x": X, "y": Y}, StackDataset(x=X, y=Y)),
    "dict of arrays": ({"x": XN, "y": Y}, StackDataset(x=XN, y=Y)),
}


def reference(dataset: Any, indices: list[int], collate: Any = None) -> Any:
    (batch,) = DataLoader(dataset, batch_sampler=[indices], collate_fn=collate)
    return batch


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, Tensor):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert ours.requires_grad == theirs.requires_grad
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, np.ndarray):
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, list | tuple):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_is_the_data_loaders(form: str) -> None:
    data, dataset = FORMS[form]
    source = BatchSource(data)
    assert len(source) == N
    for indices in CHOICES:
        expected = reference(dataset, indices)
        assert_same(source.fetch(indices), expected)
        assert_same(source.fetch(np.array(indices)), expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_custom_collate_is_given_the_same_samples(form: str) -> None:
    data, dataset = FORMS[form]
    assert_same(BatchSource(data, list).fetch([3, 1]), reference(dataset, [3, 1], list))


@pytest.mark.parametrize("dtype", list("?bBhHiIlfdeFD"))
def test_every_numeric_dtype_of_numpy(dtype: str) -> None:
    array = np.arange(N).astype(dtype)
    for data in (array, np.stack([array, array], axis=1)):
        assert_same(BatchSource(data).fetch([5, 0]), reference(data, [5, 0]))


def test_a_whole_epoch_equals_a_shuffled_data_loader() -> None:
    """The plan's batches, handed to DataLoader as its batch sampler."""
    plan = BatchPlan(N, 5, seed=4)
    batches = [plan.indices(step).tolist() for step in range(plan.batches_per_epoch)]
    source = BatchSource((X, Y))
    for indices, expected in zip(
        batches, DataLoader(TensorDataset(X, Y), batch_sampler=batches), strict=True
    ):
        assert_same(source.fetch(indices), expected)


def test_a_batch_is_a_copy() -> None:
    for data in (X.clone(), XN.copy()):
        batch = BatchSource(data).fetch([0, 1])
        batch.zero_()
        assert_same(BatchSource(data).fetch([0, 1]), reference(X, [0, 1]))


def test_a_memory_mapped_array_is_read_by_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", XN)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert_same(BatchSource(mapped).fetch([7, 2]), reference(X, [7, 2]))


@pytest.mark.parametrize("data", [X, XN, (X, Y), Subset(TensorDataset(X), range(N)), list(range(N))])
def test_an_index_outside_the_data_is_an_index_error(data: Any) -> None:
    with pytest.raises(IndexError):
        BatchSource(data).fetch([0, N])


def test_an_empty_share_has_no_batch() -> None:
    with pytest.raises(ValueError, match="empty share"):
        BatchSource(X).fetch([])


class Unsized:
    def __getitem__(self, index: int) -> int:
        return index


class Unmeasured(Unsized):
    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Stream(), r"data is .*Stream, which can only be iterated.*give a map-style dataset.*list\(\.\.\.\)"),
        ((i for i in range(3)), "data is builtins.generator, which can only be iterated"),
        ({1, 2}, "data is builtins.set, which has no __getitem__"),
        (Unsized(), "which has no __len__"),
        (Unmeasured(), "without a length"),
        (None, "data is builtins.NoneType, which has no __len__ and __getitem__"),
        (DataLoader(TensorDataset(X)), "data is a DataLoader; give data=loader.dataset"),
        ("corpus.txt", "data is 'corpus.txt'; read the file first"),
        (torch.tensor(1.0), "without a length"),
        ((X, Y[:-1]), r"tensors of different lengths: data\[0\] has 23, data\[1\] has 22"),
        ({"x": X, "y": YN[1:]}, r"data\['x'\] has 23, data\['y'\] has 22"),
        ((X, [1, 2]), r"data\[1\] is builtins.list; beside tensors it must be"),
        ({"x": "text"}, r"data\['x'\] is builtins.str"),
        ((X, torch.tensor(1.0)), r"data\[1\] is a single number"),
        (X[:0], "data is empty"),
        ((X[:0], Y[:0]), "data is empty"),
        ([], "data is empty"),
        ({}, "data is empty"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else type(value).__name__,
)
def test_data_that_can_not_be_used_is_refused(data: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        BatchSource(data)


def test_messages_name_the_field() -> None:
    with pytest.raises(UserError, match="evaluation is empty"):
        BatchSource([], field="evaluation")


@pytest.mark.parametrize("replacement", [True, False])
def test_draws_by_weight_have_the_distribution_of_torchs_sampler(replacement: bool) -> None:
    """By chi-square, each against the expected counts and both against each other, at one in a million."""
    from scipy import stats
    from torch.utils.data import WeightedRandomSampler

    weights = np.array([0.0, 1.0, 2.0, 3.0, 4.0, 0.5, 1.5])
    count, epochs = (50, 400) if replacement else (3, 6000)
    ours = np.concatenate(
        [weighted_draw(weights, count, 7, epoch, replacement=replacement) for epoch in range(epochs)]
    )
    torch.manual_seed(0)
    theirs = np.concatenate(
        [list(WeightedRandomSampler(weights.tolist(), count, replacement)) for _ in range(epochs)]
    )
    mine, other = (np.bincount(drawn, minlength=len(weights)) for drawn in (ours, theirs))
    assert mine[0] == other[0] == 0
    assert stats.chi2_contingency([mine[1:], other[1:]]).pvalue > 1e-6
    if replacement:
        shares = weights[1:] / weights.sum()
        assert stats.chisquare(mine[1:], shares * len(ours)).pvalue > 1e-6
    else:
        assert all(len(set(ours[begin : begin + 3])) == 3 for begin in range(0, len(ours), 3))
        first = np.bincount(ours[::3], minlength=len(weights))
        assert stats.chisquare(first[1:], weights[1:] / weights.sum() * epochs).pvalue > 1e-6


def test_draws_by_weight_follow_from_seed_and_epoch() -> None:
    weights = np.array([1.0, 1e-300, 3.0])
    one, same, other, later = (
        weighted_draw(weights, 20, seed, epoch, replacement=True)
        for seed, epoch in ((0, 0), (0, 0), (1, 0), (0, 1))
    )
    assert one.tolist() == same.tolist()
    assert one.tolist() not in (other.tolist(), later.tolist())
    assert set(one) <= {0, 2}


def test_a_batch_of_windows_over_a_text_copies_those_windows_alone() -> None:
    text = np.zeros(1 << 26, np.uint8)
    windows = np.lib.stride_tricks.sliding_window_view(text, 1025)[::1024]
    source = BatchSource(windows)
    tracemalloc.start()
    try:
        batch = source.fetch([5, 60_000, 7])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert batch.shape == (3, 1025)
    assert batch.is_contiguous()
    assert peak < 1 << 20
