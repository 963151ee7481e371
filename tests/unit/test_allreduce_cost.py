"""Counters and times from the tables equal the closed forms and never beat the lower bounds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from manyhands.errors import UserError
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS, grouped
from manyhands.strategies.common.collectives.schedule import Algorithm
from manyhands.strategies.common.collectives.schedule_proof import cost

ALPHA, BETA, GAMMA = 7919, 13, 5  # integers: sums of them are exact in floating point
WORLDS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 16, 32, 33)


def log2(world: int) -> int:
    """⌈lg P⌉."""
    return (world - 1).bit_length()


@dataclass(frozen=True)
class Form:
    """Closed forms in (P, n): `most` and `least` are the bytes that the busiest and the idlest rank send."""

    steps: Callable[[int], int]
    most: Callable[[int, int], int]
    least: Callable[[int, int], int]
    time: Callable[[int, int], int]
    powers_only: bool = False


def scattered(steps: Callable[[int], int], *, powers_only: bool = False) -> Form:
    """Algorithms that move 2(P-1)/P·n and reduce (P-1)/P·n, the least possible."""

    def moved(world: int, n: int) -> int:
        return 2 * (world - 1) * n // world

    return Form(
        steps,
        moved,
        moved,
        lambda p, n: steps(p) * ALPHA + moved(p, n) * BETA + (p - 1) * n // p * GAMMA,
        powers_only,
    )


FORMS = {
    "all-to-all": Form(
        lambda p: p - 1,
        lambda p, n: (p - 1) * n,
        lambda p, n: (p - 1) * n,
        lambda p, n: (p - 1) * (ALPHA + n * BETA + n * GAMMA),
    ),
    "direct": scattered(lambda p: 2 * (p - 1)),
    "round-robin": scattered(lambda p: 2 * (p - 1)),
    "ring": scattered(lambda p: 2 * (p - 1)),
    "butterfly": scattered(lambda p: 2 * log2(p), powers_only=True),
    "doubling": Form(
        log2,
        lambda p, n: n * log2(p),
        lambda p, n: n * log2(p),
        lambda p, n: log2(p) * (ALPHA + n * BETA + n * GAMMA),
        powers_only=True,
    ),
    "master-worker": Form(
        lambda p: 2 * (p - 1),
        lambda p, n: (p - 1) * n,
        lambda p, n: n if p > 1 else 0,
        lambda p, n: 2 * (p - 1) * ALPHA + 2 * (p - 1) * n * BETA + (p - 1) * n * GAMMA,
    ),
    "tree": Form(
        lambda p: 2 * log2(p),
        lambda p, n: log2(p) * n,
        lambda p, n: n if p > 1 else 0,
        lambda p, n: 2 * log2(p) * (ALPHA + n * BETA) + log2(p) * n * GAMMA,
    ),
}


def test_every_algorithm_has_a_row() -> None:
    assert {*FORMS, "hierarchical"} == set(ALGORITHMS)


CASES = [
    (name, world)
    for name, form in FORMS.items()
    for world in WORLDS
    if not (form.powers_only and world & (world - 1))
]


@pytest.mark.parametrize(("name", "world"), CASES)
def test_counters_and_time_equal_the_closed_form(name: str, world: int) -> None:
    form, n = FORMS[name], world * 24
    found = cost(ALGORITHMS[name], world, n)
    assert found.steps == form.steps(world)
    assert max(found.bytes_sent) == form.most(world, n)
    assert min(found.bytes_sent) == form.least(world, n)
    assert found.time(ALPHA, BETA, GAMMA) == form.time(world, n)


@pytest.mark.parametrize("name", ["butterfly", "doubling"])
@pytest.mark.parametrize("world", [3, 5, 6, 7, 9, 24, 33, 63])
def test_other_worlds_fold_to_the_lower_power_with_two_more_steps(name: str, world: int) -> None:
    lower = 1 << (world.bit_length() - 1)
    n = lower * 24
    found, core = cost(ALGORITHMS[name], world, n), cost(ALGORITHMS[name], lower, n)
    assert found.steps == core.steps + 2
    assert max(found.bytes_sent) == max(core.bytes_sent) + n  # a host also sends the result to its guest
    assert found.bytes_sent[-1] == n  # a guest brings its vector
    assert (
        found.time(ALPHA, BETA, GAMMA) == core.time(ALPHA, BETA, GAMMA) + 2 * (ALPHA + n * BETA) + n * GAMMA
    )


@pytest.mark.parametrize(("groups", "size"), [(2, 2), (3, 4), (4, 3), (8, 8), (1, 6), (6, 1)])
def test_hierarchical_moves_the_least_in_fewer_steps(groups: int, size: int) -> None:
    world = groups * size
    n = world * 24
    found = cost(grouped(size), world, n)
    assert found.steps == 2 * (size - 1) + 2 * (groups - 1)
    assert set(found.bytes_sent) == {2 * (world - 1) * n // world}
    assert found.time(ALPHA, BETA, GAMMA) == (
        found.steps * ALPHA + 2 * (world - 1) * n // world * BETA + (world - 1) * n // world * GAMMA
    )


def test_hierarchical_sends_one_vector_per_group_between_groups() -> None:
    world, size, chunks = 12, 4, 12
    algorithm = grouped(size)
    assert algorithm.chunks(world) == chunks
    for group in range(3):
        members = range(group * size, (group + 1) * size)
        crossing = sum(
            len(send.chunks)
            for rank in members
            for step in algorithm.table(rank, world)
            for send in step.sends
            if send.to not in members
        )
        assert crossing * 3 == 2 * 2 * chunks  # 2(G-1)/G of a vector of `chunks` chunks, with G = 3 groups


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda algorithm: algorithm.name)
def test_no_time_beats_the_lower_bounds(algorithm: Algorithm) -> None:
    for world in WORLDS:
        n = world * algorithm.chunks(world)
        found = cost(algorithm, world, n)
        assert found.time(1, 0, 0) >= log2(world), world
        assert found.time(0, 1, 0) * world >= 2 * (world - 1) * n, world
        assert found.time(0, 0, 1) * world >= (world - 1) * n, world


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda algorithm: algorithm.name)
def test_items_are_never_cut(algorithm: Algorithm) -> None:
    found = cost(algorithm, 5, 7 * 8, item_bytes=8)
    assert all(num_bytes % 8 == 0 for num_bytes in found.bytes_sent)
    assert cost(algorithm, 5, 0).bytes_sent == (0,) * 5
    assert cost(algorithm, 5, 0).messages == found.messages  # an empty message is still a message


@pytest.mark.parametrize(("num_bytes", "item_bytes"), [(-4, 4), (10, 4), (8, 0)])
def test_a_vector_has_an_integer_number_of_items(num_bytes: int, item_bytes: int) -> None:
    with pytest.raises(UserError, match=f"num_bytes={num_bytes}, item_bytes={item_bytes}"):
        cost(ALGORITHMS["ring"], 2, num_bytes, item_bytes)
