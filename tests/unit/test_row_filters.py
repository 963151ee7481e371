"""The filters of row gradients: their text, what is sent and what stays, and which rows a shard marks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Optimizer

from manyhands import Strategy
from manyhands.errors import UserError
from manyhands.optim import FTRL, ProximalSGD
from manyhands.strategies.common.tables.filter_setting import RowFilters, parse_filters
from manyhands.strategies.common.tables.row_filters import HeldRows, is_due, require_filters, rests
from manyhands.strategies.common.tables.row_tables import RowGradient, RowTable, place
from manyhands.strategies.ps.strategy import Ps

WEIGHT = [nn.Parameter(torch.zeros(4, 2))]
SHARES = st.none() | st.floats(0, 1, exclude_max=True)


@given(SHARES, SHARES)
def test_a_text_is_read_as_it_is_shown(kkt: float | None, significant: float | None) -> None:
    filters = RowFilters(kkt=kkt, significant=significant)
    assert parse_filters(str(filters)) == filters
    strategy = Ps(filter=filters)
    assert Strategy.parse(str(strategy)) == strategy


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kkz", "unknown filter 'kkz'; .*'kkt'"),
        ("kkt:", "'' must be a number of at least 0 and below 1, as in kkt:0.1"),
        ("kkt:1", "'1' must be a number"),
        ("significant:nan", "'nan' must be a number"),
        ("significant:-0.1", "'-0.1' must be a number"),
        ("kkt+kkt:0.2", "kkt is given twice"),
        ("none+kkt", "none cannot be combined"),
    ],
)
def test_a_text_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        Strategy.parse(f"ps filter={text}")


def test_every_row_is_due_in_one_batch_of_16_and_none_is_left_out() -> None:
    rows = torch.arange(2000)
    due = torch.stack([is_due(rows, batch) for batch in range(320)])
    assert abs(due.double().mean().item() - 1 / 16) < 0.002
    assert int(due.sum(dim=0).min()) >= 5, "of 20 on average"
    assert torch.equal(is_due(rows[7::13], 5), due[5][7::13]), "whoever asks about whichever rows"


@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.sampled_from([RowFilters(significant=0.3), RowFilters(kkt=0.1), RowFilters(kkt=0.1, significant=0.3)]),
    st.sampled_from([partial(FTRL, l1=300.0), partial(FTRL, l1=60.0)]),
)
def test_what_was_sent_and_what_is_kept_is_what_was_given(
    seed: int, filters: RowFilters, make: Callable[[list[nn.Parameter]], Optimizer]
) -> None:
    draw = torch.Generator().manual_seed(seed)
    held = HeldRows(filters, (9, 2), torch.float64, make([nn.Parameter(torch.zeros(9, 2))]), workers=2)
    total, arrived = torch.zeros(9, 2, dtype=torch.float64), torch.zeros(9, 2, dtype=torch.float64)
    stayed = 0
    for batch in range(30):
        rows = torch.randperm(9, generator=draw)[:6].sort().values
        gradients = torch.randint(-9, 10, (6, 2), generator=draw).double()
        values = torch.where(torch.rand(6, 1, generator=draw) < 0.5, -0.0, 1.0).double().expand(6, 2)
        total[rows] += gradients
        sent, given = held.choose(rows, gradients, values, batch)
        arrived[rows[sent]] += given[sent]
        stayed += int((~sent).sum())
    assert held.kept is not None
    assert torch.equal(arrived + held.kept, total)
    assert stayed > 0


def test_a_resting_row_keeps_no_more_than_lets_its_weight_leave_0_in_time() -> None:
    batch = next(number for number in range(100) if not is_due(torch.arange(2), number).any())
    held = HeldRows(RowFilters(kkt=0.5), (2, 1), torch.float32, FTRL(WEIGHT, l1=8.0), workers=4)
    values, gradients = torch.full((2, 1), -0.0), torch.tensor([[0.6], [-0.3]])
    sent = [held.choose(torch.arange(2), gradients, values, batch)[0].tolist() for _ in range(4)]
    assert sent == [[False, False], [True, False], [False, False], [True, True]]


def test_significant_is_what_is_above_the_fraction_of_the_largest_item() -> None:
    batch = next(number for number in range(100) if not is_due(torch.arange(4), number).any())
    held = HeldRows(RowFilters(significant=0.1), (4, 2), torch.float32, SGD(WEIGHT, lr=0.1))
    gradients = torch.tensor([[0.0, -10.0], [1.0, 0.5], [1.5, 0.0], [0.0, 0.9]])
    rows, values = torch.arange(4), torch.ones(4, 2)
    sent, _ = held.choose(rows, gradients, values, batch)
    assert sent.tolist() == [True, False, True, False]
    sent, given = held.choose(rows, gradients, values, batch)
    assert sent.tolist() == [True, True, True, True], "what stayed counts with what comes"
    assert torch.equal(given[1], 2 * gradients[1])


def test_under_proximal_descent_what_stays_of_a_resting_row_is_dropped() -> None:
    batch = next(number for number in range(100) if not is_due(torch.arange(2), number).any())
    held = HeldRows(RowFilters(kkt=0.1, significant=0.5), (2, 1), torch.float32, ProximalSGD(WEIGHT, l1=1.0))
    values = torch.tensor([[-0.0], [0.0]])
    sent, _ = held.choose(torch.arange(2), torch.tensor([[3.0], [4.0]]), values, batch)
    assert sent.tolist() == [False, True]
    assert held.kept is not None
    assert held.kept.tolist() == [[0.0], [0.0]]


def test_gradients_that_are_not_finite_go_to_the_shard_and_nothing_stays() -> None:
    held = HeldRows(RowFilters(kkt=0.1, significant=0.5), (2, 1), torch.float32, FTRL(WEIGHT, l1=1.0))
    gradients = torch.tensor([[1.0], [float("nan")]])
    sent, given = held.choose(torch.arange(2), gradients, torch.full((2, 1), -0.0), 1)
    assert sent.all()
    assert given is gradients
    assert held.kept is not None
    assert not held.kept.any()


def test_a_batch_without_rows_sends_none() -> None:
    held = HeldRows(RowFilters(significant=0.5), (2, 1), torch.float32, SGD(WEIGHT, lr=0.1))
    sent, _ = held.choose(torch.arange(0), torch.zeros(0, 1), torch.zeros(0, 1), 0)
    assert not len(sent)


def test_a_shard_marks_the_rows_that_nothing_pulls_at() -> None:
    """Two rows of FTRL whose sums are 0.5 and 0.95 of l1, one that leaves 0, one half of which does."""
    table = RowTable("table", torch.zeros(4, 2), FTRL, place(4, 1))
    table.slack = 0.1
    settings = FTRL([nn.Parameter(torch.zeros(1))], lr=0.5, l1=2.0).param_groups[0]
    one = RowGradient(
        rows=torch.arange(4), values=torch.tensor([[0.5, 0.5], [0.95, 0.0], [3.0, 3.0], [3.0, 0.0]])
    )
    table.apply(one, settings)
    assert rests(table.values).tolist() == [True, True, False, False]
    table.apply(one, settings)
    assert rests(table.values).tolist() == [True, False, False, False]
    assert (table.values[1] == 0).all()


def test_a_shard_marks_rows_by_the_last_gradient_under_proximal_descent() -> None:
    table = RowTable("table", torch.zeros(2, 1), ProximalSGD, place(2, 1))
    table.slack = 0.1
    for pulls, resting in (
        ((0.85, -0.85), [True, True]),
        ((0.95, 1.1), [False, False]),
        ((-0.85, 0.0), [True, True]),
    ):
        gradient = RowGradient(rows=torch.arange(2), values=torch.tensor(pulls)[:, None])
        table.apply(gradient, {"lr": 0.5, "l1": 1.0})
        assert rests(table.values).tolist() == resting


def test_without_the_filter_no_zero_is_marked() -> None:
    table = RowTable("table", torch.zeros(1, 1), ProximalSGD, place(1, 1))
    table.apply(RowGradient(rows=torch.arange(1), values=torch.zeros(1, 1)), {"lr": 0.5, "l1": 1.0})
    assert not rests(table.values).any()


def test_kkt_needs_a_penalty_and_a_filter_a_table() -> None:
    parameter = [nn.Parameter(torch.zeros(3))]
    kkt, significant = RowFilters(kkt=0.1), RowFilters(significant=0.1)
    require_filters(kkt, FTRL(parameter, l1=1.0), [("table", 0)])
    require_filters(significant, SGD(parameter, lr=0.1), [("table", 0)])
    require_filters(RowFilters(), SGD(parameter, lr=0.1), [])
    with pytest.raises(UserError, match="no row-sparse table to filter"):
        require_filters(significant, SGD(parameter, lr=0.1), [])
    for optimizer in (SGD(parameter, lr=0.1), FTRL(parameter)):
        with pytest.raises(UserError, match=r"kkt needs an L1 penalty, which .* table 'table'"):
            require_filters(kkt, optimizer, [("table", 0)])
