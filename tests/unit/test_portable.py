"""State that goes to another process as bytes comes back equal."""

from __future__ import annotations

import math

import pytest
import torch

from manyhands.data.store.checkpoint import Loaded
from manyhands.data.store.state_tree import pack_tree, unpack_tree
from manyhands.errors import ManyhandsError


def test_a_tree_with_tensors_comes_back_equal() -> None:
    shared = torch.randn(3, 4, dtype=torch.float64)
    tree = {
        "model": {"a.weight": shared, "b.weight": shared, "half": torch.ones(2, dtype=torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.99)}]},
        "rows": [{"step": 1, "loss": math.inf}],
        "none": None,
    }
    back = unpack_tree(b"".join(pack_tree(tree)))
    assert torch.equal(back["model"]["a.weight"], shared)
    assert back["model"]["b.weight"] is back["model"]["a.weight"]
    assert back["model"]["half"].dtype == torch.bfloat16
    assert back["optimizer"]["state"][0]["step"].item() == 3.0
    assert back["optimizer"]["param_groups"] == [{"betas": (0.9, 0.99)}]
    assert (back["rows"], back["none"]) == (tree["rows"], None)


@pytest.mark.parametrize("data", [b"", b"\xff" * 40, (2).to_bytes(8, "little") + b"{}", b"\0" * 8 + b"xx"])
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ManyhandsError, match="invalid state of a run"):
        unpack_tree(data)


@pytest.mark.parametrize(
    "tree",
    [
        None,
        [],
        {},
        {"step": "3", "model": {}, "optimizer": {}, "extra": {}},
        {"step": 3, "model": [], "optimizer": {}, "extra": {}},
        {"step": 3, "model": {}, "optimizer": {}},
    ],
)
def test_a_tree_that_is_no_state_is_refused_by_name(tree: object) -> None:
    with pytest.raises(ManyhandsError, match="sent an invalid state"):
        Loaded.of(unpack_tree(b"".join(pack_tree(tree))))


def test_a_state_goes_to_another_process_and_is_the_same_there() -> None:
    weights = torch.arange(4.0)
    given = Loaded.of({"step": 3, "model": {"w": weights}, "optimizer": {"rate": 0.5}, "extra": {"seed": 1}})
    back = Loaded.of(unpack_tree(b"".join(pack_tree(given.tree))))
    assert (back.step, back.optimizer, back.extra) == (3, {"rate": 0.5}, {"seed": 1})
    assert torch.equal(back.model["w"], weights)
