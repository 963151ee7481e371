"""Actors as processes: whole batches, weights within the lag, replays to the byte, and faults of every kind."""

from __future__ import annotations

import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import manyhands as mh
from acted import SPEC, Bold, Once, Walk, job, learned, raises_always
from descriptors import open_descriptors
from manyhands.errors import Desync, ManyhandsError, UserError
from manyhands.workloads.rl.acting import Actor
from manyhands.workloads.rl.actors import Actors, ActorSettings
from manyhands.workloads.rl.environments import open_environments
from manyhands.workloads.rl.episodes import Episode
from manyhands.workloads.rl.rollouts import Rollouts
from manyhands.workloads.rl.stepping import Environments
from manyhands.workloads.rl.ticket_log import audit_tickets, read_tickets
from manyhands.workloads.rl.tickets import audit


class SlowWalk(Walk):
    def observed(self) -> object:
        return super().observed() / 2


START = {"weight": torch.tensor([0.1, 0.2])}


def settings(**given: float) -> ActorSettings:
    return ActorSettings(**{"actors": 3, "environments": 2, "rollouts_per_update": 3, **given})  # type: ignore[arg-type]


def copied(rollouts: Rollouts) -> Rollouts:
    return Rollouts(*(one.clone() for one in rollouts))


def trained(
    actors: Actors, updates: int, each: Callable[[int], None] = lambda update: None
) -> tuple[list[float], list[Episode]]:
    """The weights after so many updates, and the episodes that ended."""
    state, episodes = START, []
    with actors:
        for update in range(updates):
            each(update)
            state = learned(state, actors.collect(state, update))
            episodes += actors.episodes
    return state["weight"].tolist(), episodes


def test_without_lag_actors_act_as_this_process_does() -> None:
    asked = job(6)
    here = [Actor(asked.make(2), SPEC, range(first, first + 2), asked.seed) for first in (0, 2, 4)]
    policy, expected, state = Bold(), SPEC.empty(6), START
    actors = Actors(asked, settings(), START)
    with actors:
        for update in range(20):
            policy.load_state_dict(state)
            episodes = [
                one._replace(environment=one.environment + 2 * number)
                for number, actor in enumerate(here)
                for one in actor.act(policy, expected.part(2 * number, 2 * number + 2), update)
            ]
            rollouts = actors.collect(state, update)
            for found, right in zip(rollouts, expected, strict=True):
                assert torch.equal(found, right)
            assert actors.episodes == episodes
            state = learned(state, rollouts)
    facts = actors.facts()
    assert (facts.frames, facts.rollouts) == (20 * 6 * 5, 20 * 6)
    assert dict(facts.lags) == {0: 60}
    assert facts.replaced == []


def test_actors_run_ahead_of_a_slow_learner_by_the_lag_and_no_further() -> None:
    actors = Actors(job(4), settings(actors=2, lag=3), START)
    versions: list[int] = []

    def wait_until_actors_wait(update: int) -> None:
        if update:
            done = (update + 3) * 3  # all that the version published before lets them begin
            assert within(lambda: len(actors.log) == done)

    with actors:
        state = START
        for update in range(12):
            wait_until_actors_wait(update)
            rollouts = actors.collect(state, update)
            versions = rollouts.versions[::2, 0].tolist()  # two rows a ticket
            logged = {row.ticket.number: row.ticket.version for row in actors.log}
            assert versions == [logged[number] for number in range(3 * update, 3 * update + 3)]
            state = learned(state, rollouts)
    assert set(actors.facts().lags) == {0, 1, 2, 3}
    assert versions == [8, 8, 8]
    assert audit(actors.log, 3, 3, 12) == []


def within(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    """Whether it comes true in time."""
    ends = select.poll()
    for _ in range(round(seconds / 0.005)):
        if condition():
            return True
        ends.poll(5)
    return False


def test_an_asynchronous_run_with_kills_is_replayed_to_the_byte(tmp_path: Path) -> None:
    before = open_descriptors()
    draw = random.Random(5)
    path = tmp_path / "tickets.jsonl"
    actors = Actors(job(6), settings(lag=2, replacements=20), START, record=path)
    killed: list[int] = []

    def kill(update: int) -> None:
        if update % 5 == 3:
            pids = actors.pids
            killed.append(pids[draw.choice(list(pids))])
            os.kill(killed[-1], signal.SIGKILL)
            assert within(lambda: len(actors.facts().replaced) == len(killed))

    weights, episodes = trained(actors, 40, kill)
    facts = actors.facts()
    assert len(killed) == 8
    assert audit(actors.log, 3, 2, 40) == []
    assert facts.dropped == sum(row.dropped for row in actors.log) > 0

    (record,) = read_tickets(path)
    assert record.rows == actors.log[: len(record.rows)]  # what ended after the last batch changed nothing
    assert audit_tickets([record]) == []
    again = Actors(job(6), settings(lag=2), START, replayed=record)
    assert trained(again, 40) == (weights, episodes)
    assert again.facts().lags == facts.lags
    assert open_descriptors() <= before
    with pytest.raises(UserError, match="the log ends before update"):
        trained(Actors(job(6), settings(lag=2), START, replayed=record), 60)
    with pytest.raises(UserError, match="lag=1, but the recorded run had lag=2"):
        Actors(job(6), settings(lag=1), START, replayed=record)
    other = replace(job(6), make=partial(open_environments, SlowWalk))
    with pytest.raises(Desync, match="the batch of update 0 has other bytes"):
        trained(Actors(other, settings(lag=2), START, replayed=record), 40)


def test_a_replay_needs_every_actor_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "tickets.jsonl"
    trained(Actors(job(6), settings(lag=1), START, record=path), 10)
    again = Actors(job(6), settings(lag=1), START, replayed=read_tickets(path)[0])

    def kill(update: int) -> None:
        if update == 5:
            os.kill(again.pids[1], signal.SIGKILL)

    with pytest.raises(ManyhandsError, match=r"actor 1 was killed by SIGKILL.*lost during a replay"):
        trained(again, 10, kill)


@pytest.mark.parametrize("lag", [0, 2])
def test_a_stopped_actor_is_replaced(lag: int) -> None:
    actors = Actors(job(6), settings(lag=lag, timeout_s=2.5), START)
    stopped: list[int] = []

    def stop(update: int) -> None:
        if update == 3:
            stopped.append(actors.pids[2])
            os.kill(stopped[0], signal.SIGSTOP)

    trained(actors, 12, stop)
    (sentence,) = actors.facts().replaced
    assert sentence.startswith("actor 2 is stopped (SIGSTOP, or a debugger), ")
    assert audit(actors.log, 3, lag, 12) == []
    assert not Path(f"/proc/{stopped[0]}").exists()


def test_a_hanging_environment_is_named_by_its_line_and_replaced(tmp_path: Path) -> None:
    actors = Actors(job(6, Once(tmp_path / "hung", "hang")), settings(timeout_s=2.5), START)
    trained(actors, 6)
    (sentence,) = actors.facts().replaced
    assert "took no step for 2.5 s and is in time.sleep(1000) (acted.py:" in sentence
    assert "in step 2 of its rollout 1, after" in sentence
    assert actors.facts().dropped == 1


def test_an_environment_that_ends_the_process_is_replaced(tmp_path: Path) -> None:
    actors = Actors(job(6, Once(tmp_path / "left", "leave")), settings(), START)
    trained(actors, 6)
    (sentence,) = actors.facts().replaced
    assert "exited with status 7" in sentence


def test_an_environment_that_always_raises_ends_the_run_with_one_sentence() -> None:
    actors = Actors(job(6, raises_always), settings(replacements=2), START)
    with pytest.raises(UserError) as raised:
        trained(actors, 5)
    said = r"actor (\d) failed: environment (\d) raised ZeroDivisionError: the walk fell over, in step 4 of episode 0"
    found = re.match(said, str(raised.value))
    assert found is not None
    assert int(found[2]) == 2 * int(found[1]), "its number among those of all actors"
    assert str(raised.value).endswith("it had been replaced 2 times, as often as replacements=2 allows")
    assert "\n" not in str(raised.value)


def missing_game(count: int) -> Environments:
    raise UserError("environment: there is no game here")


def test_environments_that_cannot_be_made_end_the_run_at_once() -> None:
    actors = Actors(replace(job(6), make=missing_game), settings(), START)
    with pytest.raises(UserError, match=r"actor \d failed: environment: there is no game here") as raised:
        trained(actors, 1)
    assert str(raised.value).endswith("no game here")
    assert actors.facts().replaced == []


def test_what_cannot_be_sent_is_said() -> None:
    lock = threading.Lock()
    asked = replace(job(6), make=lambda count: lock)  # type: ignore[arg-type,return-value]
    with pytest.raises(UserError, match=r"environment and policy cannot be sent to actors .*lock"):
        trained(Actors(asked, settings(), START), 1)


def test_the_actors_of_a_run_are_born_with_their_worker(tmp_path: Path) -> None:
    def walk() -> Walk:
        name = Path("/proc/self/comm").read_text().strip()
        (tmp_path / f"{os.getpid()}.{name}").touch()
        return Walk()

    task = mh.rl.task(
        policy=Bold,
        algorithm=mh.rl.Impala(),
        environment=walk,
        environments=4,
        length=3,
        actors=2,
        episodes=1,
    )
    mh.fit(task, steps=3, workers=1)
    assert [path.suffix for path in tmp_path.iterdir()].count(".mh child") == 2


LEARNER = """
import sys
from test_rl_actors import START, Actors, job, settings
with Actors(job(6), settings(), START) as actors:
    actors.collect(START, 0)
    print(*actors.pids.values(), flush=True)
    sys.stdin.read()
"""


def test_actors_end_with_a_learner_that_is_killed() -> None:
    folders = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    path = os.pathsep.join([*folders, *sys.path])
    with subprocess.Popen(
        [sys.executable, "-c", LEARNER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
    ) as learner:
        assert learner.stdout is not None
        pids = [int(one) for one in learner.stdout.readline().split()]
        assert len(pids) == 3
        held = [os.pidfd_open(pid) for pid in pids]
        learner.kill()
    assert all(ended(one) for one in held)


def ended(pidfd: int) -> bool:
    try:
        return bool(select.select([pidfd], [], [], 10)[0])
    finally:
        os.close(pidfd)
