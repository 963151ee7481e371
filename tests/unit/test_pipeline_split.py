"""Cutting a chain: the best of all cuts, within a memory, and what cannot be cut."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from manyhands.errors import UserError
from manyhands.strategies.pipeline.cuts import LayerCost, balanced, check_cuts, part_bytes, parts_of, planned
from manyhands.strategies.pipeline.schedule_cost import most_held
from manyhands.strategies.pipeline.schedules import MOST_HELD, SCHEDULES

MIB = 1 << 20


def every_cut(layers: int, parts: int) -> list[tuple[int, ...]]:
    return list(itertools.combinations(range(1, layers), parts - 1))


def slowest(costs: list[float], cuts: tuple[int, ...]) -> float:
    return max(sum(costs[place] for place in places) for places in parts_of(cuts, len(costs)))


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_has_a_cheaper_slowest_part(seed: int) -> None:
    draw = random.Random(seed)
    layers = draw.randint(1, 9)
    costs = [draw.choice([0.0, 1.0, draw.random() * 5]) for _ in range(layers)]
    for parts in range(1, layers + 1):
        found = balanced(costs, parts)
        assert found is not None
        check_cuts(found, layers, parts)
        assert slowest(costs, found) == pytest.approx(
            min(slowest(costs, cuts) for cuts in every_cut(layers, parts))
        )


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("recompute", [False, True])
def test_within_a_memory_the_best_of_what_fits_or_the_least_need_is_reported(
    seed: int, recompute: bool
) -> None:
    draw = random.Random(seed)
    layers = [
        LayerCost(
            seconds=draw.random(),
            held_bytes=draw.randint(1, 20) * MIB,
            activation_bytes=draw.randint(0, 8) * MIB,
            input_bytes=draw.randint(0, 3) * MIB,
        )
        for _ in range(draw.randint(2, 8))
    ]
    stages = draw.randint(2, len(layers))
    need = part_bytes(layers, [stages - part for part in range(stages)], recompute=recompute)

    def most(cuts: tuple[int, ...]) -> int:
        return max(need(part, one.start, one.stop) for part, one in enumerate(parts_of(cuts, len(layers))))

    cuts = every_cut(len(layers), stages)
    least = min(map(most, cuts))
    seconds = [layer.seconds for layer in layers]
    for limit in (least, least + 10 * MIB):
        found = planned(layers, stages, 1, need, limit)
        assert most(found) <= limit
        fitting = [one for one in cuts if most(one) <= limit]
        assert slowest(seconds, found) == pytest.approx(min(slowest(seconds, one) for one in fitting))
    with pytest.raises(UserError, match=rf"the best needs .* give memory={least // MIB}MiB"):
        planned(layers, stages, 1, need, least - 1)


@pytest.mark.parametrize(
    ("cuts", "sentence"),
    [
        ((3,), "cuts=3: 3 parts need 2 cuts, not 1"),
        ((3, 3), "cuts=3,3: must ascend between 1 and 5"),
        ((0, 3), "cuts=0,3: must ascend between 1 and 5"),
        (
            (3, 6),
            "cuts=3,6: must ascend between 1 and 5; each is the first layer of a part",
        ),
    ],
)
def test_cuts_of_ones_own_must_make_the_parts(cuts: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        check_cuts(cuts, 6, 3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_activations_that_a_cut_counts_with_are_those_of_the_schedule(name: str) -> None:
    for stages, microbatches in ((1, 1), (2, 4), (4, 8)):
        table = SCHEDULES[name](stages, microbatches)
        held = most_held(table, by_part=True)
        for stage in range(stages):
            of_stage = sum(held[part] for part in range(stage, table.parts, stages))
            assert of_stage >= MOST_HELD[name](table, stage) >= max(held[stage::stages])
            if table.chunks == 1:
                assert of_stage == MOST_HELD[name](table, stage)
