"""Fragments in turn and beside the next steps, held against replicas that are trained and merged by hand here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from equality import OPTIMIZERS, distance, same_bits
from manyhands.data.store.checkpoint import CheckpointStore
from manyhands.errors import UserError
from manyhands.strategies.local.fragments import FragmentPlan, cut
from replicas import Parameters, by_hand, mean, small_task, train


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


class ByHand:
    """Streaming DiLoCo as the paper has it: what each fragment's SGD with Nesterov momentum makes of the centre.

    `turns` has, for each fragment, its parameters and the steps within a round after which it leaves and is merged.
    """

    def __init__(self, turns: list[tuple[range, int, int]], every: int, own: float, steps: int) -> None:
        self.turns, self.every, self.own, self.steps = turns, every, own, steps
        self.centre: list[Any] = []
        self.under_way: dict[int, list[torch.Tensor]] = {}

    def start(self, parameters: list[torch.Tensor]) -> None:
        self.centre = [torch.nn.Parameter(one.detach().clone()) for one in parameters]
        self.sgd = [
            torch.optim.SGD([self.centre[index] for index in piece], lr=0.7, momentum=0.9, nesterov=True)
            for piece, _, _ in self.turns
        ]

    def leave(self, turn: int, parameters: Parameters) -> None:
        piece = self.turns[turn][0]
        self.under_way[turn] = [
            mean(tuple(self.centre[at].detach() - mine[at] for mine in parameters)) for at in piece
        ]

    def merge(self, turn: int, parameters: Parameters, own: float) -> None:
        for at, gradient in zip(self.turns[turn][0], self.under_way.pop(turn), strict=True):
            self.centre[at].grad = gradient
        self.sgd[turn].step()
        for mine in parameters:
            for at in self.turns[turn][0]:
                mine[at].copy_(own * mine[at] + (1 - own) * self.centre[at].detach())

    def after(self, step: int, parameters: Parameters) -> None:
        if step == self.steps:
            for turn in list(self.under_way):
                self.merge(turn, parameters, self.own)
            for turn in range(len(self.turns)):
                self.leave(turn, parameters)
                self.merge(turn, parameters, 0.0)
            return
        within = (step - 1) % self.every + 1
        for turn, (_, leaves, merged) in enumerate(self.turns):
            if within == merged and turn in self.under_way:
                self.merge(turn, parameters, self.own)
            if within == leaves:
                self.leave(turn, parameters)
                if leaves == merged:
                    self.merge(turn, parameters, self.own)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("text", "turns", "own"),
    [
        ("local steps=4 overlap=2", [(range(4), 2, 4)], 0.5),
        ("local steps=4 overlap=3 keep=0.25", [(range(4), 1, 4)], 0.25),
        ("local steps=4 fragments=2", [(range(1), 2, 2), (range(1, 4), 4, 4)], 0.0),
        ("local steps=6 fragments=2 overlap=2", [(range(1), 1, 3), (range(1, 4), 4, 6)], 0.5),
        ("local steps=6 fragments=2 overlap=1 keep=0", [(range(1), 2, 3), (range(1, 4), 5, 6)], 0.0),
    ],
)
@pytest.mark.parametrize("steps", [18, 23])  # 23 ends while a fragment is under way
def test_a_run_is_streaming_diloco_by_hand(
    text: str, turns: list[tuple[range, int, int]], own: float, steps: int, optimizer: str
) -> None:
    task = small_task(OPTIMIZERS[optimizer])
    hand = ByHand(turns, int(text.split()[1].removeprefix("steps=")), own, steps)
    hand.start(list(task.model().parameters()))
    replicas = by_hand(task, 2, steps, hand.after)
    for link in ("shared", "tcp"):
        results = train(task, f"{text} outer=nesterov link={link}", 2, steps)
        for result, replica in zip(results, replicas, strict=True):
            assert distance(dict(result.model.state_dict()), replica) < 1e-9
        assert results[0].weights is not None
        assert distance(dict(results[0].weights), replicas[0]) < 1e-9, "the last step leaves all equal"


@pytest.mark.parametrize("overlap", [0, 1, 2, 3])
def test_on_a_quadratic_the_centre_follows_the_closed_form(overlap: int) -> None:
    """Of x² / 2, SGD makes r = (1 - lr) ** n of x in n steps: so each round is a linear map of replica and centre."""
    rate, every, rounds, own = 0.1, 4, 3, 0.5 if overlap else 0.0
    task = quadratic(rate)
    result = train(task, f"local steps={every} overlap={overlap}", 2, every * rounds)[0]
    replica = centre = 3.0
    left = 1 - rate
    for number in range(1, rounds + 1):
        sent = replica * left ** (every - overlap)
        there = sent * left**overlap
        centre = sent  # the mean step: where all replicas were
        replica = own * there + (1 - own) * centre
        if number == rounds:
            centre = replica  # the last step averages what is there by then
    assert result.weights is not None
    [weight] = result.weights.values()
    assert weight.item() == pytest.approx(centre, rel=1e-12)


def quadratic(rate: float) -> Any:
    import manyhands as mh

    class One(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = torch.nn.Parameter(torch.tensor(3.0, dtype=torch.float64))

    return mh.Task(
        model=One,
        loss=lambda model, batch: model.x.square() / 2 + 0 * batch[0].sum(),
        data=(torch.zeros(16, 1, dtype=torch.float64),),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        batch_size=4,
    )


@pytest.mark.parametrize(
    "text",
    [
        "local steps=4 overlap=2 outer=nesterov link=tcp codec=int8",
        "local steps=4 fragments=2 overlap=1 outer=nesterov",
        "local steps=4 overlap=3 first=3 link=tcp codec=int4",
    ],
)
def test_a_run_resumed_in_the_middle_ends_with_the_same_bits(text: str, tmp_path: Path) -> None:
    """Replicas differ at the checkpoint: it has those of all workers, with what their optimizers keep."""
    task, store = small_task(OPTIMIZERS["adamw"], batch_size=13), CheckpointStore(tmp_path, keep=10)
    whole = train(task, text, 2, 18, store)
    kept = store.load(8)
    assert len(kept.extra["exchange"]["replicas"]) == 2
    resumed = train(task, text, 2, 18, store, kept)
    assert same_bits(dict(whole[0].model.state_dict()), dict(resumed[0].model.state_dict()))
    assert all(same_bits(dict(one.model.state_dict()), dict(whole[0].model.state_dict())) for one in whole)


def test_without_overlap_and_in_one_piece_it_is_what_it_was() -> None:
    task = small_task(OPTIMIZERS["sgd"])
    plain = train(task, "local steps=4 outer=nesterov", 2, 12)[0]
    same = train(task, "local steps=4 outer=nesterov fragments=1 overlap=0", 2, 12)[0]
    assert same_bits(dict(plain.model.state_dict()), dict(same.model.state_dict()))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("local steps=8 overlap=8", "use at most 7"),
        ("local steps=8 fragments=4 overlap=2", "use at most 1"),
        ("local steps=3 fragments=4", "give as many steps at least"),
        ("local steps=inf overlap=2", "take turns within a number of steps"),
        ("local overlap=-1", "overlap=-1: must be an integer of at least 0"),
        ("local fragments=0", "fragments=0: must be an integer of at least 1"),
        ("local keep=0.3", "without overlap nothing is mixed"),
        ("local overlap=2 keep=1", "must be at least 0 and below 1"),
        ("local overlap=2 outer=elastic", "both have a centre"),
        ("local fragments=2 gossip=yes", "both average the replicas"),
        ("local overlap=2 link=tcp codec=auto", "codecs are compared on a whole model"),
    ],
)
def test_settings_that_make_no_sense_are_refused_in_one_sentence(text: str, sentence: str) -> None:
    from manyhands.strategy import Strategy

    with pytest.raises(UserError) as error:
        Strategy.parse(text)
    assert sentence in str(error.value)


def test_more_fragments_than_tensors_are_refused() -> None:
    with pytest.raises(UserError, match="only 4 tensors to train"):
        train(small_task(OPTIMIZERS["sgd"]), "local fragments=5", 2, 8)


def test_a_plan_reads_as_a_table() -> None:
    plan = FragmentPlan(steps=8, fragments=2, overlap=2)
    assert {step: plan.sent(step) for step in range(1, 13) if plan.sent(step) is not None} == {
        2: 0,
        6: 1,
        10: 0,
    }
    assert {step: plan.merged(step) for step in range(1, 13) if plan.merged(step) is not None} == {
        4: 0,
        8: 1,
        12: 0,
    }
    assert cut([1, 1, 1, 1], 2) == [range(2), range(2, 4)]
    assert cut([100, 1, 1], 3) == [range(1), range(1, 2), range(2, 3)]
