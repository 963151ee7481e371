"""Elastic all-reduce, the decisions: deaths at every point, two at once, joins and removals, from seeds."""

from __future__ import annotations

import pytest

from elastic_model import Run, elastic_complaints
from manyhands.errors import UserError
from manyhands.places.place import AddWorker, RemoveWorker
from manyhands.strategies.allreduce.elastic.elastic_membership import ElasticMembership
from manyhands.strategies.common.membership import MAX_DEATHS

STEPS = 8


def _finished(run: Run) -> None:
    """It is over, somebody left weights that every step is in once, and no more was done twice than was changed."""
    assert run.is_over, run.failed
    left = [worker.trained for worker in run.workers.values() if worker.left_weights]
    assert left, "whoever leaves the weights may die afterwards"
    assert all([step for step, _ in trained] == list(range(run.steps)) for trained in left)
    assert run.core.redone <= run.core.changes


def _strike_by_chance(run: Run) -> None:
    if run.losses >= 12:
        return
    alive, dice = run.present(), run.chance
    if len(alive) > 2 and dice.random() < 0.01:
        many = 2 if dice.random() < 0.3 and len(alive) > 3 else 1
        for worker in dice.sample(alive, many):
            if dice.random() < 0.2:
                run.silent(worker)
            else:
                run.kill(worker, noticed_after=dice.randrange(20))


def test_without_a_death_every_step_is_everybodys_and_none_is_done_twice() -> None:
    for seed in range(20):
        run = Run(workers=3, steps=STEPS, seed=seed).go()
        _finished(run)
        assert (run.core.changes, run.core.redone) == (0, 0)
        assert all(slots == (0, 1, 2) for _, slots in run.workers[0].trained)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_worker_may_die_at_every_single_point(victim: int) -> None:
    ticks = Run(workers=3, steps=STEPS, seed=victim).go().ticks
    redone = set()
    for moment in range(1, ticks, 2):

        def strike(run: Run, moment: int = moment) -> None:
            if run.ticks == moment and not run.workers[victim].dead:
                run.kill(run.workers[victim], noticed_after=moment % 7)

        run = Run(workers=3, steps=STEPS, seed=victim).go(strike)
        _finished(run)
        redone.add(run.core.redone)
    assert redone == {0, 1}  # some deaths are met before a step is begun or after it is taken, some are not


@pytest.mark.parametrize("block", range(4))
def test_many_deaths_at_random_points_leave_the_survivors_alike(block: int) -> None:
    losses = joins = 0
    for seed in range(block * 150, block * 150 + 150):
        run = Run(workers=4, steps=STEPS, seed=seed).go(_strike_by_chance)
        if run.failed:  # all that had the state may be hit, or one slot too often
            assert (
                "no worker that has the state" in run.failed
                or "is left" in run.failed
                or "in a row" in run.failed
            )
            continue
        _finished(run)
        losses += run.losses
        joins += run.core.view.epoch
    assert losses > 300
    assert joins > 300


@pytest.mark.parametrize("seed", range(60))
def test_whoever_takes_part_in_a_change_may_die_in_it(seed: int) -> None:
    """The first death at work, and then each time one of those whom it concerns: a newcomer, its donor, rank 0."""
    run = Run(workers=4, steps=STEPS, seed=seed)

    def strike(run: Run) -> None:
        alive, view = run.present(), run.core.view
        if run.losses == 0 and run.ticks > 100 + seed:
            run.kill(alive[-1])
        elif (
            0 < run.losses < 4
            and sum(w.has_state for w in alive) >= 2
            and run.ticks % 5 == 0
            and view.epoch > 1
        ):
            newcomers = [worker for worker in alive if not worker.has_state]
            donor = [worker for worker in alive if worker.member == view.donor]
            first = [worker for worker in alive if worker.slot == 0]
            for worker in ([newcomers, donor, first][seed % 3])[:1]:
                run.kill(worker, noticed_after=seed % 4)

    run.go(strike)
    assert run.losses >= 1
    _finished(run)


def test_workers_are_added_and_removed_at_borders_and_cost_nothing_that_was_computed() -> None:
    for seed in range(60):
        run = Run(workers=2, steps=12, seed=seed)

        def change(run: Run) -> None:
            if run.ticks == 100:
                run.change(AddWorker())
            if run.ticks == 220:
                run.change(RemoveWorker(slot=0))

        run.go(change)
        _finished(run)
        assert run.core.redone == 0
        slots = [slots for _, slots in next(w for w in run.workers.values() if w.left_weights).trained]
        assert slots[0] == (0, 1)
        assert sorted(slots, key=slots.index) == slots  # each membership in one piece
        assert len(set(slots)) <= 3


def test_too_few_end_the_run_and_are_named() -> None:
    run = Run(workers=3, steps=STEPS, seed=5, min_workers=2)

    def strike(run: Run) -> None:
        if run.ticks == 150:
            for member in (0, 2):
                run.kill(run.workers[member])

    run.go(strike)
    assert run.failed == "1 worker is left, but min_workers=2: member 0 was killed; member 2 was killed"
    alone = Run(workers=1, steps=STEPS, seed=5)
    alone.go(lambda run: run.kill(run.workers[0]) if run.ticks == 40 else None)
    assert alone.failed == "no worker is left, but min_workers=1: member 0 was killed"


def test_a_slot_whose_workers_die_again_and_again_ends_the_run() -> None:
    run = Run(workers=2, steps=10_000, seed=1)

    def strike(run: Run) -> None:
        for worker in run.present():
            if worker.slot == 1 and run.ticks > 50:
                run.kill(worker)

    run.go(strike)
    assert f"worker 1 was lost {MAX_DEATHS} times in a row" in run.failed


def test_what_makes_no_sense_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="min_workers=3 must be between 1 and the number of workers, 2"):
        ElasticMembership(workers=2, min_workers=3)
    core = ElasticMembership(workers=2, min_workers=2)
    core.begin()
    with pytest.raises(UserError, match="slot=7: there is no such worker; there are 0, 1"):
        core.handle(RemoveWorker(slot=7))
    with pytest.raises(UserError, match="slot=0: 1 worker would be left, but min_workers=2"):
        core.handle(RemoveWorker(slot=0))


@pytest.mark.parametrize("block", range(3))
def test_the_simulators_faults_leave_every_run_as_promised(block: int) -> None:
    seeds = range(block * 50, block * 50 + 50)
    assert {seed: found for seed in seeds if (found := elastic_complaints(seed))} == {}


@pytest.mark.parametrize("seed", [29, 145, 216, 286, 1160, 1449, 2408, 2903])
def test_seeds_that_hung_once(seed: int) -> None:
    """A worker dismissed while it said that it is ready; all who had the state removed while others came."""
    assert elastic_complaints(seed) == []


def test_the_last_who_has_the_state_stays_until_a_new_member_has_it() -> None:
    run = Run(workers=1, steps=40, seed=3)

    def change(run: Run) -> None:
        if run.ticks == 30:
            run.change(AddWorker())
            run.change(RemoveWorker(slot=0))

    run.go(change)
    _finished(run)
    slots = [slots for _, slots in next(w for w in run.workers.values() if w.left_weights).trained]
    assert set(slots) == {(0,), (0, 1), (1,)}
