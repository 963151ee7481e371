"""The rule by which slices go: every one once, within the credit, the most urgent first, and no deadlock."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

from manyhands.errors import UserError
from manyhands.strategies.allreduce.priority.exchange import LateOptimizer, ParameterGuard, exposed
from manyhands.strategies.allreduce.priority.sender import Desk, SendOrder, cut
from manyhands.wire.flat_layout import lay_out

SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=12)


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    sizes = draw(SIZES)
    priorities = draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
    return sizes, priorities, draw(st.integers(1, 60))


@given(plans(), st.randoms(use_true_random=False))
def test_each_slice_goes_once_within_the_credit_the_most_urgent_of_the_ready_first(
    plan: tuple[list[int], list[int], int], chance: random.Random
) -> None:
    sizes, priorities, credit = plan
    order = SendOrder(sizes, priorities, credit)
    ready: set[int] = set()
    sent: list[int] = []
    flying: list[int] = []
    while not order.is_over:
        if missing := set(range(len(sizes))) - ready:
            ready |= {chance.choice(sorted(missing))}
        chosen = order.next(ready)
        for number in chosen:
            waiting = [one for one in ready if one not in sent]
            assert number == min(waiting, key=lambda one: (priorities[one], one))
            sent.append(number)
            flying.append(number)
        assert order.in_flight_bytes == sum(sizes[one] for one in flying)
        assert order.in_flight_bytes <= credit or len(flying) == 1, (
            "one that is larger than the credit goes alone"
        )
        if flying and (chance.random() < 0.5 or not missing):
            order.arrived(flying.pop(chance.randrange(len(flying))))
    assert sorted(sent) == list(range(len(sizes)))


class Worker:
    """One worker of a made-up crew: its gradients come in an order of its own, then it closes the step."""

    def __init__(self, plan: tuple[list[int], list[int], int], comes: list[int]) -> None:
        sizes, priorities, credit = plan
        self.desk = Desk(SendOrder(sizes, priorities, credit), len(sizes))
        self.comes = comes
        self.is_closed = False
        self.sent: list[int] = []

    def compute(self) -> None:
        if self.comes:
            self.desk.filled(self.comes.pop())
        elif not self.is_closed:
            self.is_closed = True
            self.desk.closed()

    @property
    def is_done(self) -> bool:
        return self.is_closed and not self.comes


@given(plans(), st.integers(1, 5), st.booleans(), st.randoms(use_true_random=False))
def test_workers_agree_whatever_comes_first_on_each_and_nobody_waits_for_ever(
    plan: tuple[list[int], list[int], int], world: int, alike: bool, chance: random.Random
) -> None:
    """All exchange reports when all want to, as a collective does; who does not want to goes on computing."""
    count = len(plan[0])
    first = chance.sample(range(count), count)
    children = [
        Worker(plan, list(first) if alike else chance.sample(range(count), count)) for _ in range(world)
    ]
    exchanges = 0
    while not all(worker.desk.is_over for worker in children):
        unwilling = [worker for worker in children if not worker.desk.wants_to_report]
        if unwilling:
            assert not all(worker.is_done for worker in unwilling), "somebody will never want to: a knot"
            chance.choice([worker for worker in children if not worker.is_done]).compute()
            continue
        exchanges += 1
        reports = [worker.desk.report() for worker in children]
        for worker in children:
            chosen = worker.desk.choose(reports)
            assert set(chosen) <= set.intersection(*map(set, reports))
            for number in chosen:
                worker.desk.order.arrived(number)
                worker.sent.append(number)
    assert all(worker.sent == children[0].sent for worker in children)
    assert sorted(children[0].sent) == list(range(count))
    assert all(worker.is_done for worker in children), "the last slice goes when all have closed"
    assert exchanges <= count * (world + 1) + 1


def test_a_step_that_is_called_off_sends_nothing_more() -> None:
    desk = Desk(SendOrder([1, 1], [0, 1], 1), 2)
    desk.filled(0)
    desk.filled(1)
    assert not desk.wants_to_report, "it has everything, and says so when it is closed"
    desk.closed()
    assert desk.wants_to_report
    assert desk.choose([desk.report()], called_off=True) == ()
    assert desk.is_over
    assert not desk.wants_to_report


def test_who_has_told_all_it_has_says_nothing_until_there_is_more() -> None:
    desk = Desk(SendOrder([1, 1], [0, 1], 1), 2)
    assert not desk.wants_to_report
    desk.filled(1)
    mine = desk.report()
    assert desk.choose([mine, frozenset()]) == ()
    assert not desk.wants_to_report
    desk.filled(0)
    desk.closed()
    assert desk.choose([desk.report(), frozenset({0, 1})]) == (0,)
    assert not desk.wants_to_report, "one is on its way"
    desk.order.arrived(0)
    assert desk.wants_to_report
    assert not desk.is_over


@given(
    st.lists(st.tuples(st.integers(0, 300), st.sampled_from([torch.float32, torch.float64])), max_size=12),
    st.integers(1, 2000),
    st.integers(1, 900),
)
def test_slices_cover_every_item_once_and_are_small(
    parameters: list[tuple[int, torch.dtype]], cap: int, most: int
) -> None:
    layouts = lay_out(parameters, cap)
    covered: dict[int, list[int]] = {number: [0] * layout.count for number, layout in enumerate(layouts)}
    for one in cut(layouts, most):
        parcel, item = one.parcel, one.parcel.dtype.itemsize
        assert 0 < parcel.num_bytes <= max(most, 64)
        assert parcel.priority == min(one.parameters)
        for at in range(parcel.begin // item, parcel.end // item):
            covered[parcel.number][at] += 1
        inside = {
            slot.parameter
            for slot in layouts[parcel.number].slots
            if slot.count
            and slot.offset < parcel.end // item
            and parcel.begin // item < slot.offset + slot.count
        }
        assert inside <= set(one.parameters)
    assert all(count == 1 for counts in covered.values() for count in counts)


def test_waiting_for_others_is_told_from_bytes_on_their_way() -> None:
    blocked = [(100, 200), (300, 310)]
    late = [(1, (0, 120)), (2, (150, 160)), (1, (205, 290))]
    assert exposed(blocked, late) == (80, {1: 20, 2: 10})
    assert exposed([], late) == (0, {})


@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
        lambda p: optim.AdamW(p, lr=0.02),
        lambda p: optim.AdamW(p, lr=torch.tensor(0.02), weight_decay=0.1),
    ],
)
def test_parameters_stepped_one_by_one_have_the_bits_of_all_at_once(make: object) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [make(model.parameters()) for model in models]  # type: ignore[operator]
    schedules = [optim.lr_scheduler.LinearLR(one, 1.0, 0.1, total_iters=4) for one in optimizers]
    late = LateOptimizer(optimizers[1])
    optimizers[1]._opt_called = True  # as `Computer.build` has it: torch warns of a schedule that goes first
    for _ in range(4):
        gradients = [torch.randn_like(one) for one in models[0].parameters()]
        for parameter, gradient in zip(models[0].parameters(), gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizers[0].step()
        schedules[0].step()
        late.allow()
        schedules[1].step()  # which is one step ahead of what is stepped now
        for parameter, gradient in reversed(list(zip(models[1].parameters(), gradients, strict=True))):
            late.step({parameter: gradient})
            assert parameter.grad is None
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]


def test_optimizers_that_need_everything_at_once_are_refused() -> None:
    with pytest.raises(UserError, match=r"optimizer LBFGS .* under allreduce order=priority"):
        LateOptimizer(optim.LBFGS(nn.Linear(2, 2).parameters()))


class Odd(nn.Module):
    """Reads parameters that are not its own, under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.cells = nn.LSTM(3, 3)
        self.free = nn.Parameter(torch.ones(3))
        self.alias = self.second.weight.data.view(-1)


def read_through(act: object) -> list[set[int]]:
    """Which parameters are waited for, in turn, where all are pending."""
    model = Odd()
    waited: list[set[int]] = []

    def wait(numbers: object) -> None:
        waited.append(set(numbers))  # type: ignore[call-overload]
        guard.pending -= set(waited[-1])

    guard = ParameterGuard(model, list(model.parameters()), wait)
    guard.pending.update(range(len(list(model.parameters()))))
    with guard:
        act(model)  # type: ignore[operator]
    guard.close()
    return waited


def test_whoever_reads_a_parameter_waits_for_that_one_only() -> None:
    x = torch.zeros(2, 3)
    names = [name for name, _ in Odd().named_parameters()]
    number = names.index
    assert read_through(lambda model: model.second(model.first(x))) == [
        {number("first.weight"), number("first.bias")},
        {number("second.weight"), number("second.bias")},
    ]
    assert read_through(lambda model: x @ model.second.weight) == [{number("second.weight")}]
    assert read_through(lambda model: model.alias.sum()) == [{number("second.weight")}]
    assert read_through(lambda model: torch.cat([model.free, x[0]])) == [{number("free")}]
    assert read_through(
        lambda model: torch.nn.functional.linear(x, bias=model.free, weight=torch.eye(3))
    ) == [{number("free")}]
    assert read_through(lambda model: model.cells(x[None])) == [
        {index for index, name in enumerate(names) if name.startswith("cells.")}
    ]
    assert read_through(lambda _: x + 1) == []


def test_what_does_not_say_whose_memory_it_reads_waits_for_all() -> None:
    everything = set(range(len(list(Odd().parameters()))))
    assert everything in read_through(lambda _: torch.eye(3).to_sparse() @ torch.ones(3, 1))
