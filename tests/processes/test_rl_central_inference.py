"""Central inference: the rollouts that actors make themselves, weights that change within one, and faults."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from acted import Bold, Once, Walk, job
from descriptors import open_descriptors
from manyhands.errors import ManyhandsError, UserError
from manyhands.workloads.rl.actor_process import ActorJob
from manyhands.workloads.rl.actors import Actors, ActorSettings
from manyhands.workloads.rl.environments import open_environments
from manyhands.workloads.rl.policies import ActorCritic
from manyhands.workloads.rl.policy_gradients import PolicyGradient
from manyhands.workloads.rl.rollouts import Rollouts, RolloutSpec
from manyhands.workloads.rl.run_tickets import audit_run_tickets
from manyhands.workloads.rl.tickets import audit

LENGTH = 7
QUIET = mh.Options(progress="none", allow_overload=True)
START: Mapping[str, Tensor] = {"weight": torch.tensor([0.1, 0.2])}


class DoubleWalk(Walk):
    observation_space = type("Space", (), {"shape": (2,), "dtype": np.dtype(np.float64)})


def critic() -> nn.Module:
    return ActorCritic((2,), 2, hidden=8).double()


def double_job(environments: int) -> ActorJob:
    return replace(
        job(environments),
        make=partial(open_environments, DoubleWalk),
        policy=critic,
        spec=RolloutSpec(
            length=LENGTH,
            observation_shape=(2,),
            observation_dtype=torch.float64,
            precision=torch.float64,
        ),
    )


def settings(**given: float) -> ActorSettings:
    return ActorSettings(
        **{"actors": 3, "environments": 3, "rollouts_per_update": 3, "central": True, "groups": 2, **given}  # type: ignore[arg-type]
    )


def states(count: int) -> list[dict[str, Tensor]]:
    """Weights that differ from each other as much as any."""
    generator = torch.Generator().manual_seed(0)
    shapes = {name: one.shape for name, one in critic().state_dict().items()}
    return [
        {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        for _ in range(count)
    ]


def collected(actors: Actors, given: list[dict[str, Tensor]]) -> list[Rollouts]:
    with actors:
        found = (actors.collect(state, update) for update, state in enumerate(given))
        return [Rollouts(*(one.clone() for one in rollouts)) for rollouts in found]


def test_without_lag_the_rollouts_are_those_of_actors_with_policies_of_their_own() -> None:
    given = states(20)
    runs = [
        collected(Actors(double_job(9), settings(central=central), given[0]), given)
        for central in (False, True)
    ]
    for own, central in zip(*runs, strict=True):
        for name, one, other in zip(own._fields, own, central, strict=True):
            if one.is_floating_point():
                assert torch.allclose(one, other, rtol=0, atol=1e-12), name
            else:
                assert torch.equal(one, other), name
    assert any(bool(one.final_values.any()) for one in runs[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
def test_a_gpu_infers_what_actors_infer_themselves() -> None:
    given = states(20)
    on_gpu = [{name: one.cuda() for name, one in state.items()} for state in given]
    own = collected(Actors(double_job(9), settings(central=False), given[0]), given)
    central = collected(Actors(double_job(9), settings(), on_gpu[0]), on_gpu)
    for one, other in zip(own, central, strict=True):
        assert torch.equal(one.actions, other.actions)
        assert torch.equal(one.versions, other.versions)
        assert torch.allclose(one.log_probs, other.log_probs, rtol=0, atol=1e-10)
        assert torch.allclose(one.final_values, other.final_values, rtol=0, atol=1e-10)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
@pytest.mark.parametrize(
    "algorithm", [mh.rl.Impala(), mh.rl.PPO(epochs=2, minibatches=1)], ids=["impala", "ppo"]
)
@pytest.mark.parametrize("actors", [0, 2])
def test_a_run_learns_on_a_gpu_what_it_learns_on_the_cpu(algorithm: PolicyGradient, actors: int) -> None:
    given = {"actors": actors, "lag": 0, "inference": "central"} if actors else {}
    on_cpu = walked(algorithm, "cpu", environments=6, **given)
    assert torch.allclose(on_cpu, walked(algorithm, "cuda", environments=6, **given), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("actors", "groups"), [(1, 2), (3, 2), (3, 1)])
def test_each_row_is_of_the_version_that_is_stamped_on_it(actors: int, groups: int) -> None:
    given = states(40)
    asked = settings(actors=actors, groups=groups, lag=2)
    acting = Actors(double_job(3 * actors), asked, given[0])
    runs = collected(acting, given)
    policies = []
    for state in given:
        policies.append(critic())
        policies[-1].load_state_dict(state)
    changed = 0
    for update, found in enumerate(runs):
        versions = found.versions
        assert int(versions[:, 0].min()) >= update - 2
        assert int(versions.max()) <= update
        assert bool((versions.diff(dim=1) >= 0).all())
        changed += int((versions.diff(dim=1) > 0).sum())
        for version in versions.unique().tolist():
            rows = versions == version
            scores, _ = policies[version](found.observations[:, :-1][rows])
            expected = scores.log_softmax(1).gather(1, found.actions[rows][:, None]).squeeze(1)
            assert torch.allclose(found.log_probs[rows], expected, rtol=0, atol=1e-12)
    assert changed > 0
    assert audit(acting.log, 3, 2, 40) == []
    assert acting.facts().replaced == []


class Corridor(DoubleWalk):
    """A walk that pays for going up."""

    def step(self, action: int) -> tuple[object, float, bool, bool, dict[str, object]]:
        seen, _, ended, cut, info = super().step(action)
        return seen, float(action), ended, cut, info


def walked(algorithm: PolicyGradient, device: str = "cpu", **given: Any) -> Tensor:
    """The weights after 20 updates."""
    task = mh.rl.task(
        policy=critic,
        algorithm=algorithm,
        environment=Corridor,
        length=LENGTH,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        episodes=1,
        **given,
    )
    run = mh.fit(task, "single", workers=1, steps=20, options=QUIET, device=device)
    return torch.cat([one.detach().cpu().flatten() for one in run.model.parameters()])


@pytest.mark.parametrize("algorithm", [mh.rl.A2C(), mh.rl.Impala()], ids=["a2c", "impala"])
def test_a_run_without_lag_ends_with_the_weights_of_one_whose_actors_infer(algorithm: PolicyGradient) -> None:
    own, central = (
        walked(algorithm, environments=6, actors=2, lag=0, inference=one) for one in ("actor", "central")
    )
    assert torch.allclose(own, central, rtol=0, atol=1e-9)


class Doing(Bold):
    """Calls `then` with how many batches it has been asked, this one included."""

    asked = 0
    then: Callable[[int], None]

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        Doing.asked += 1
        Doing.then(Doing.asked)
        return super().forward(observations)


def doing(then: Callable[[int], None], environments: int = 9) -> ActorJob:
    Doing.asked, Doing.then = 0, then  # type: ignore[assignment]
    return replace(job(environments), policy=Doing)


def collect_often(actors: Actors) -> None:
    for update in range(1000):
        actors.collect(START, update)


def test_actors_that_are_killed_while_they_wait_are_replaced() -> None:
    before = open_descriptors()
    killed: list[int] = []

    def kill(asked: int) -> None:
        """One whose request is being answered: it waits, or will before it goes on."""
        if asked % 25 == 20 and len(killed) < 6:
            own = actors._memory.requests.of_actors
            waiting = [number for number, requests in enumerate(own) if any(one.is_open for one in requests)]
            pid = actors.pids.get(waiting[-1]) if waiting else None
            if pid is not None and pid not in killed:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

    actors = Actors(doing(kill), settings(lag=1, replacements=20), START)
    for update, rollouts in enumerate(collected(actors, [dict(START)] * 60)):
        assert torch.equal(rollouts.final_values != 0, rollouts.truncated & ~rollouts.terminated)
        scores, _ = Bold()(rollouts.observations[:, :-1].flatten(0, 1))
        expected = scores.log_softmax(1).gather(1, rollouts.actions.flatten()[:, None])
        assert torch.allclose(rollouts.log_probs.flatten(), expected.squeeze(1), atol=1e-5)
        assert bool((rollouts.versions[:, 0] >= update - 1).all())
    assert len(killed) >= 3
    facts = actors.facts()
    assert len(facts.replaced) == len(killed)
    assert facts.dropped >= 1
    assert audit(actors.log, 3, 1, 60) == []
    assert open_descriptors() <= before


def test_inference_that_fails_ends_the_run_with_one_sentence() -> None:
    def fail(asked: int) -> None:
        if asked == 30:
            raise ZeroDivisionError("no score for this")

    actors = Actors(doing(fail), settings(lag=1), START)
    with actors:
        held = [os.pidfd_open(pid) for pid in actors.pids.values()]
        with pytest.raises(ManyhandsError) as raised:
            collect_often(actors)
    assert str(raised.value).startswith("central inference with the weights of update ")
    assert str(raised.value).endswith(" failed: ZeroDivisionError: no score for this")
    assert actors.facts().replaced == []
    assert all(ended(one) for one in held)


def test_inference_that_hangs_is_given_up() -> None:
    release = threading.Event()
    actors = Actors(doing(lambda asked: asked == 10 and release.wait()), settings(timeout_s=1.5), START)  # type: ignore[arg-type,return-value,func-returns-value]
    with pytest.raises(ManyhandsError, match=r"central inference has computed one batch for 1\.5 s"), actors:
        collect_often(actors)
    release.set()
    assert actors.facts().replaced == []  # who waited is not to blame


def test_a_hanging_environment_of_the_second_group_is_named_and_replaced(tmp_path: Path) -> None:
    actors = Actors(job(9, Once(tmp_path / "hung", "hang")), settings(timeout_s=2.5), START)
    with actors:
        for update in range(4):
            actors.collect(START, update)
    (sentence,) = actors.facts().replaced
    assert "took no step for 2.5 s and is in time.sleep(1000) (acted.py:" in sentence
    assert actors.facts().dropped == 1


LEARNER = """
import sys, threading
from test_rl_central_inference import START, Actors, doing, settings
reached = threading.Event()
def hang(asked):
    if asked == 5:
        reached.set()
        threading.Event().wait()
with Actors(doing(hang), settings(), START) as actors:
    threading.Thread(target=actors.collect, args=(START, 0), daemon=True).start()
    assert reached.wait(60)
    print(*actors.pids.values(), flush=True)
    sys.stdin.read()
"""


def test_actors_that_wait_end_with_a_learner_that_is_killed() -> None:
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


def test_a_run_is_logged_and_audited_but_not_replayed(tmp_path: Path) -> None:
    task = mh.rl.task(
        policy=critic,
        algorithm=mh.rl.Impala(),
        environment=Corridor,
        environments=4,
        length=LENGTH,
        actors=2,
        lag=1,
        inference="central",
        episodes=1,
    )
    run = mh.fit(task, "mirrored", workers=2, steps=10, out=tmp_path / "run", options=QUIET)
    assert run.path is not None
    found = audit_run_tickets(run.path)
    assert found is not None
    assert (found.verdict, [one.batches for one in found.logs]) == ("complete", [10, 10])
    with pytest.raises(UserError, match='inference="central" is not replayed, as its results depend'):
        mh.replay(run.path, task)
