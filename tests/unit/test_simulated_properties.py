"""What must hold for every run of the parameter server: checked on hundreds of simulated ones, with faults.

Every update is in a step once or reported; the bound of every read; what was acknowledged survives any single death; at
the end nothing waits, and a backup has what its primary has; every run ends once the faults stop. The judge
(`foresight.simulate.witness`) looks at what stores held and workers read. A judge that cannot fail is worth nothing:
broken servers are put before it.
"""

from __future__ import annotations

import re
import runpy
from itertools import product
from pathlib import Path

import pytest

from manyhands.foresight.simulate.driver import simulate
from manyhands.strategies.ps.actions import Action, Keep
from manyhands.strategies.ps.ps_messages import Forward, Message, Push
from manyhands.strategies.ps.shard_replica import ServerCore
from simulated import PROMISES, complaints, drawn, ending, severed, stormy
from simulated_mutants import GUARDS, MUTANTS, UNSEEN, config_of, patched, runs_until_caught

SEEDS_PER_CASE = 12


@pytest.mark.parametrize("replicas", [0, 1])
@pytest.mark.parametrize("consistency", PROMISES)
def test_every_promise_is_kept_whatever_goes_wrong(consistency: str, replicas: int) -> None:
    for seed in range(SEEDS_PER_CASE):
        for draw in (drawn, stormy, ending):
            spec = draw(seed, consistency, replicas)
            assert complaints(spec) == [], f"seed {seed}: {spec}"


@pytest.mark.parametrize("replicas", [0, 1])
def test_in_lockstep_every_update_is_of_one_version_of_all_shards(replicas: int) -> None:
    """Wherever between its messages to several shards a worker dies or stops."""
    for seed in range(20):
        assert complaints(severed(seed, "sync", replicas)) == [], f"seed {seed}"


FAILED_ONCE = [
    ("drawn", 1317, "sync:1", 0),
    ("drawn", 1411, "aware:bounded:2", 0),
    ("drawn", 700071, "bounded:1", 1),
    ("drawn", 700071, "sync:1", 0),
    ("drawn", 800176, "aware:softsync:3", 1),
    ("drawn", 800244, "softsync:2", 0),
    ("drawn", 800677, "softsync:2", 0),
    ("drawn", 20079, "sync:1", 1),
    ("stormy", 7, "async", 1),
    ("stormy", 16, "bounded:1", 1),
    ("stormy", 103, "softsync:1", 1),
    ("stormy", 103, "sync:1", 1),
    (
        "stormy",
        985283336607,
        "sync:1",
        0,
    ),  # a push completes two steps, of which one waited since before a restore
    ("stormy", 106, "aware:bounded:2", 1),
    ("stormy", 106, "softsync:2", 1),
    ("stormy", 111, "aware:softsync:3", 1),
    ("stormy", 111, "bounded:1", 1),
    ("stormy", 111, "sync:2", 1),
    ("stormy", 129, "bounded:3", 1),
    ("stormy", 234, "softsync:1", 1),
    ("stormy", 20003, "bounded:1", 1),
    ("stormy", 20003, "sync:2", 0),
    ("stormy", 20045, "sync", 0),
    ("stormy", 20051, "sync:1", 1),
    ("drawn", 90142, "sync:1", 1),
    ("stormy", 90123, "sync:1", 1),
    ("stormy", 90164, "sync:2", 1),
    ("stormy", 300182, "sync", 1),
    ("stormy", 20053, "aware:bounded:2", 0),
    ("stormy", 5000009, "aware:bounded:2", 0),
    ("stormy", 5002295, "softsync:2", 0),
    ("stormy", 64400112, "sync", 0),
    ("drawn", 701486, "aware:bounded:2", 0),
    ("stormy", 37, "sync", 1),
]
"""Every run that ever broke a promise, with a server or with a judge of its time."""


@pytest.mark.parametrize(("generator", "seed", "consistency", "replicas"), FAILED_ONCE)
def test_what_failed_once_does_not_fail_again(
    generator: str, seed: int, consistency: str, replicas: int
) -> None:
    draw = {"drawn": drawn, "stormy": stormy, "ending": ending}[generator]
    assert complaints(draw(seed, consistency, replicas)) == []


class Announcing(ServerCore):
    """Says before each message whether it will keep the gradient, and is held to it."""

    kept = rejected = 0

    def handle(self, message: Message, sender: int) -> list[Action]:
        push = message.entry if isinstance(message, Forward) else message
        if not isinstance(message, Push | Forward) or not isinstance(push, Push) or push.skip:
            return super().handle(message, sender)
        announced = self.keeps(message)
        actions = super().handle(message, sender)
        assert announced == any(isinstance(action, Keep) for action in actions), message
        Announcing.kept += announced
        Announcing.rejected += not announced
        return actions


def test_a_server_knows_before_it_looks_at_a_gradient_whether_it_will_keep_it() -> None:
    Announcing.kept = Announcing.rejected = 0
    for seed, consistency in product(range(12), ("sync", "sync:1", "async", "softsync:2")):
        spec = drawn(seed, consistency, replicas=1)
        simulate(spec, make_server=lambda member, spec: Announcing(config_of(spec), member))
    assert Announcing.kept > 1000
    assert Announcing.rejected > 10


@pytest.mark.parametrize(
    ("name", "consistency", "wanted"),
    [
        ("forgetful", "async", ("twice", "audit: .* but it was already applied")),
        ("forgetful", "bounded:3", ("twice", "audit: .* but it was already applied")),
        ("lax", "bounded:1", ("without update", "audit: .* bounded:1 requires all below")),
        ("lax", "bounded:3", ("without update", "audit: .* bounded:3 requires all below")),
        ("hasty", "async", ("was acknowledged by shard",)),
        ("hasty", "bounded:3", ("was acknowledged by shard",)),
    ],
)
def test_a_broken_server_is_caught_for_the_right_reason(
    name: str, consistency: str, wanted: tuple[str, ...]
) -> None:
    """By the judge and, where the log shows it, by the auditor, within 25 runs."""
    found: list[str] = []
    missing = set(wanted)
    for seed in range(25):
        found += complaints(drawn(seed, consistency, replicas=1), MUTANTS[name].make_server)
        missing = {pattern for pattern in wanted if not re.search(pattern, "\n".join(found))}
        if not missing:
            break
    assert not missing


@pytest.mark.parametrize(
    ("name", "first_seed", "pattern"),
    [
        (
            "hasty",
            3,
            "was acknowledged by shard",
        ),  # 60 runs later than from 0, where its first 65 show nothing
        ("forgetful", 0, "did not end|twice"),
        ("lax", 0, "without update"),
        ("impatient", 0, "was over with update|acknowledged update|ended with update"),
        ("silent", 0, "did not end|does not say so"),
        ("untold", 0, "did not end"),
        ("trusting", 0, "steps of the shards for update"),
        ("forsaking", 1, "steps of the shards for update"),  # 20 runs later, of the 22 that it takes
    ],
)
def test_a_broken_server_is_caught_among_all_runs(name: str, first_seed: int, pattern: str) -> None:
    count, found = runs_until_caught(MUTANTS[name], first_seed, limit=200)
    assert re.search(pattern, "\n".join(found)), f"not within {count} runs: {MUTANTS[name].what}"


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("uncopied", "its backup after|was acknowledged by shard"),
        ("unread", "in no step|did not end|without update"),
        ("alone", "without update"),
        ("sleepy", "did not end"),
        ("stepless", "did not end"),
        ("confirming", "steps of the shards for update"),
        ("gullible", "steps of the shards for update"),
    ],
)
def test_without_a_guard_of_the_one_path_a_run_breaks_a_promise(name: str, pattern: str) -> None:
    """Those that few runs catch; the soak has them all."""
    count, found = runs_until_caught(GUARDS[name], first_seed=0, limit=200)
    assert re.search(pattern, "\n".join(found)), f"not within {count} runs: {GUARDS[name].what}"


@pytest.mark.parametrize("name", UNSEEN)
def test_a_guard_whose_loss_no_run_shows_is_shown_by_its_unit_test(name: str) -> None:
    mutant = UNSEEN[name]
    assert mutant.patch is not None
    assert mutant.unit_test is not None
    file, test = mutant.unit_test
    proof = runpy.run_path(str(Path(__file__).with_name(file)))[test]
    proof()
    with patched(*mutant.patch), pytest.raises(AssertionError):
        proof()
