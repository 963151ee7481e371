"""Reinforcement learning under strategies: the same weights however environments are split, bounds on lag, replay."""

from __future__ import annotations

import base64
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from acted import ActorKiller, in_sight
from commands import run_command
from manyhands.errors import DataError, UserError
from manyhands.observe.analyse.follow import existing_run
from manyhands.observe.draw.page import report
from manyhands.strategies.ps.audit import audit_run
from manyhands.workloads.rl.policy_gradients import PolicyGradient
from manyhands.workloads.rl.rl_task import DEFAULTS, RLOptions, rl
from manyhands.workloads.rl.run_tickets import audit_run_tickets, log_of, starts_of

pytestmark = pytest.mark.timeout(120)
QUIET = mh.Options(progress="none", allow_overload=True)


class _Space:
    def __init__(self, **about: Any) -> None:
        self.__dict__.update(about)


class Corridor:
    """Walk right to the end of a corridor of five places, for a reward of 1; a step now and then slips."""

    observation_space = _Space(shape=(2,), dtype=np.dtype(np.float64))
    action_space = _Space(n=2, start=0, dtype=np.dtype(np.int64), shape=())

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None:
            self._chance = np.random.default_rng(seed)
        self._place, self._steps = 0, 0
        return self._seen(), {}

    def _seen(self) -> Any:
        return np.array([self._place / 4, self._chance.random()])

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        slips = self._chance.random() < 0.1
        self._place = max(0, self._place + (1 if (action == 1) != slips else -1))
        self._steps += 1
        return self._seen(), float(self._place == 4), self._place == 4, self._steps == 12, {}

    def close(self) -> None: ...


def policy(dtype: torch.dtype = torch.float64) -> nn.Module:
    return mh.rl.ActorCritic((2,), 2, hidden=16).to(dtype)


def corridor(
    algorithm: PolicyGradient | None = None, environments: int = 7, environment: Any = Corridor, **actors: Any
) -> mh.Task:
    return mh.rl.task(
        policy=policy,
        algorithm=algorithm or mh.rl.A2C(),
        environment=environment,
        environments=environments,
        length=8,
        optimizer=partial(torch.optim.Adam, lr=1e-2),
        episodes=4,
        **actors,
    )


def weights(model: nn.Module) -> Tensor:
    return torch.cat([one.detach().flatten() for one in model.parameters()])


@pytest.mark.parametrize("strategy", ["mirrored", "allreduce algorithm=ring", "central"])
@pytest.mark.parametrize("algorithm", [mh.rl.A2C(), mh.rl.PPO(minibatches=2, epochs=2)], ids=["a2c", "ppo"])
def test_three_workers_learn_what_one_learns(strategy: str, algorithm: PolicyGradient) -> None:
    alone = mh.fit(corridor(algorithm), "single", workers=1, steps=12, options=QUIET)
    together = mh.fit(corridor(algorithm), strategy, workers=3, steps=12, options=QUIET)
    assert torch.allclose(weights(alone.model), weights(together.model), rtol=0, atol=1e-9)
    untrained = policy()
    assert not torch.allclose(weights(alone.model), weights(untrained), atol=1e-2)


@pytest.mark.filterwarnings("ignore:hogwild on a dense model")
@pytest.mark.parametrize("strategy", ["mirrored", "hogwild", "ps consistency=async", "local steps=4"])
def test_the_corridor_is_learned(strategy: str) -> None:
    run = mh.fit(corridor(), strategy, workers=2, steps=240, options=QUIET)
    assert (
        run.summary["final"]["return"] >= 0.75
    )  # 0 for one that does not walk; slips can cost a late arrival


def test_a_run_with_a_bound_on_lag_is_audited_and_replayed_to_the_same_bytes(tmp_path: Path) -> None:
    strategy = "ps consistency=bounded:2"
    run = mh.fit(corridor(), strategy, workers=3, steps=40, out=tmp_path / "run", options=QUIET)
    assert run.path is not None
    found = audit_run(run.path).found
    assert not found.violations
    assert not found.missing
    again = mh.replay(run.path, corridor())
    assert again.first_difference is None
    assert again.same_bytes


@pytest.mark.parametrize("strategy", ["pipeline", "tensor"])
def test_a_strategy_without_whole_models_is_refused(strategy: str) -> None:
    with pytest.raises(UserError, match="made by acting with the model: acting needs a complete model"):
        mh.fit(corridor(), strategy, workers=2, steps=2, options=QUIET)


@pytest.mark.parametrize("workers", [1, 2])
def test_actors_without_lag_make_the_run_synchronous(workers: int) -> None:
    """Their environments are others than a worker's own, but the same in every run."""
    task = partial(corridor, mh.rl.Impala(), environments=8, actors=4, lag=0)
    runs = [mh.fit(task(), "mirrored", workers=workers, steps=10, options=QUIET) for _ in range(2)]
    first, second = (weights(run.model) for run in runs)
    assert torch.equal(first, second)
    assert {row["policy_lag"] for row in runs[0].history if "policy_lag" in row} == {0}


def test_actors_keep_within_the_lag_and_learn() -> None:
    task = corridor(mh.rl.Impala(), environments=8, actors=2, lag=3)
    run = mh.fit(task, "single", workers=1, steps=240, options=QUIET)
    lags = {row["policy_lag"] for row in run.history if "policy_lag" in row}
    assert max(lags) <= 3
    assert sum(row.get("frames", 0) for row in run.history) == 240 * 8 * 8
    lags = [lag for row in run.history for lag, count in row.get("lags", {}).items() for _ in range(count)]
    assert len(lags) == 240 * 2  # tickets
    assert max(map(int, lags)) <= 3
    assert sum(row.get("acted_s", 0) for row in run.history) > 0
    assert run.summary["final"]["return"] >= 0.75


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"lag": 2}, "lag is 2, but without actors nothing is ever behind"),
        ({"actors": 2, "lag": 2}, "lag is 2, but A2C learns from rollouts of the newest weights"),
        ({"actors": 3}, "environments is 7; 3 actors need equally many"),
        (
            {"inference": "central"},
            "inference is central, but without actors the workers act in one batch already",
        ),
        ({"actors": 7, "inference": "gpu"}, "inference is 'gpu'; it must be actor or central"),
    ],
)
def test_actors_that_do_not_fit_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        corridor(**given)


def acted(**given: Any) -> mh.Task:
    return corridor(**{"algorithm": mh.rl.Impala(), "environments": 8, "actors": 4, "lag": 2, **given})


class EndsAfter(mh.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, row: Any) -> None:
        if row["step"] == self.step:
            raise ZeroDivisionError


def verdict(run: Path) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    found = audit_run_tickets(run)
    assert found is not None
    return found.verdict, found.broken, found.missing


@pytest.mark.parametrize(
    ("strategy", "workers"), [("single", 1), ("mirrored", 2), ("ps consistency=bounded:1", 2)]
)
def test_a_run_with_actors_is_audited_and_replayed_to_the_same_bytes(
    strategy: str, workers: int, tmp_path: Path
) -> None:
    """Also where actors are killed meanwhile, which is noticed, and the log has each batch of a PPO once."""
    killer, ppo = ActorKiller(tmp_path / "actors", every=4, kills=5), mh.rl.PPO(epochs=1, minibatches=2)
    task = acted(algorithm=ppo, environment=partial(in_sight, killer.folder, Corridor))
    options = mh.Options(progress="none", allow_overload=True, callbacks=[killer])
    run = mh.fit(task, strategy, workers=workers, steps=40, out=tmp_path / "run", options=options)
    assert run.path is not None
    assert killer.killed == 5
    assert (
        sum("was killed by SIGKILL" in note for note in run.summary["notes"]) >= 4
    )  # the last may not be missed
    assert verdict(run.path) == ("complete", (), ())
    found = audit_run_tickets(run.path)
    assert found is not None
    batches = sum(log.batches for log in found.logs) // (2 if strategy == "mirrored" else 1)
    assert batches == 20 or (
        strategy.startswith("ps") and batches == 21
    )  # where both took odd numbers of steps
    acting = existing_run(run.path).poll().acting
    assert acting is not None
    assert acting.frames == batches * 8 * 8
    assert acting.lags
    assert acting.replaced <= 5
    assert "Policy lag: mean " in report(existing_run(run.path).poll())
    again = mh.replay(run.path, acted(algorithm=ppo))
    assert again.same_bytes
    assert torch.equal(weights(again.model), weights(run.model))
    with pytest.raises(UserError, match="is not a run of this task"):
        mh.replay(run.path, acted(algorithm=ppo, environments=16))


def test_a_resumed_run_continues_its_log_and_is_replayed(tmp_path: Path) -> None:
    """It was ended in the middle of PPO's passes over a batch; a resumed run begins with a new batch."""
    task = partial(acted, algorithm=mh.rl.PPO(epochs=2, minibatches=2))
    kept = mh.Options(progress="none", allow_overload=True, checkpoint_every=7, callbacks=[EndsAfter(18)])
    with pytest.raises(ZeroDivisionError):
        mh.fit(task(), "single", workers=1, steps=30, out=tmp_path / "run", options=kept)
    assert verdict(tmp_path / "run")[::2] == ("incomplete", ("the run did not finish: it has no summary",))
    run = mh.fit(task(), "single", workers=1, steps=30, out=tmp_path / "run", resume=True, options=QUIET)
    assert verdict(tmp_path / "run") == ("complete", (), ())
    starts = starts_of(tmp_path / "run", range(8))
    assert sorted(starts) == [0, 14]
    assert starts[0].end > 14  # beyond the checkpoint
    again = mh.replay(tmp_path / "run", task())
    assert again.same_bytes
    assert torch.equal(weights(again.model), weights(run.model))


def test_what_the_log_of_a_run_lacks_is_said(tmp_path: Path) -> None:
    run = mh.fit(acted(), "mirrored", workers=2, steps=10, out=tmp_path / "run", options=QUIET)
    assert run.path is not None
    log = log_of(run.path, range(4, 8))
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:-1]))
    assert verdict(run.path) == (
        "incomplete", (), ("the log of environment 4 ends at step 9, but the run made 10",)
    )  # fmt: skip
    log.write_text("".join(line for line in lines if not line.startswith('{"acted":[5,')))
    kind, broken, _ = verdict(run.path)
    assert (kind, broken[0]) == ("broken", "environments 4 to 7: ticket 5 was never finished")
    log.unlink()
    assert verdict(run.path) == ("incomplete", (), ("no log has the tickets of environment 4",))
    (tmp_path / "run" / "tickets").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="only runs of ps, and runs with actors, can be audited"):
        audit_run(run.path)
    with pytest.raises(DataError, match="cannot be read"):
        mh.replay(run.path, acted())


def test_a_run_whose_log_cannot_be_written_says_so(tmp_path: Path) -> None:
    class InTheWay(mh.Callback):
        def on_begin(self, beginning: Any) -> None:
            (beginning.path / "tickets").touch()

    options = mh.Options(progress="none", allow_overload=True, callbacks=[InTheWay()])
    run = mh.fit(acted(), "single", workers=1, steps=5, out=tmp_path / "run", options=options)
    (note,) = (one for one in run.summary["notes"] if "tickets" in one)
    assert note.endswith("the log of tickets ends; the run continues, but cannot be replayed or audited")


def test_without_actors_there_is_nothing_to_replay_but_the_run(tmp_path: Path) -> None:
    run = mh.fit(corridor(), "single", workers=1, steps=2, out=tmp_path / "run", options=QUIET)
    assert run.path is not None
    with pytest.raises(
        UserError, match="is a run of single without actors: it has no record, and needs none"
    ):
        mh.replay(run.path, corridor())


def test_the_commands_audit_and_replay_a_run_with_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    train = (
        "train",
        "rl",
        "--algorithm",
        "impala",
        "--actors",
        "2",
        "--environments",
        "4",
        "--episodes",
        "2",
    )
    assert run_command(monkeypatch, *train, "--strategy", "single", "--steps", "12", "--out", run) == 0
    capsys.readouterr()
    assert run_command(monkeypatch, "audit", run) == 0
    _, numbers, last = capsys.readouterr().out.splitlines()
    assert numbers.split()[:5] == ["0", "to", "3", "1", "12"]
    assert int(numbers.split()[5]) >= 24  # tickets: actors are ahead
    assert last == "tickets of actors · complete"
    assert run_command(monkeypatch, "replay", run) == 0
    said = capsys.readouterr().out
    assert said.startswith("12 steps replayed in ")
    assert said.endswith("every batch is the recorded one, and the weights are the same bytes\n")
    log = log_of(Path(run), range(4))
    log.write_text(log.read_text().replace('{"update":3', '{"update":4', 1))
    assert run_command(monkeypatch, "audit", run) == 1
    assert "batch 4 was complete where batch 3 was next" in capsys.readouterr().err


def test_the_learning_rate_falls_in_a_line_to_a_twentieth_and_stays_there() -> None:
    task = mh.rl.task(
        policy=policy, algorithm=mh.rl.A2C(), environment=Corridor, decay=20, episodes=2, length=2
    )
    options = mh.Options(progress="none", allow_overload=True, log=["lr"])
    run = mh.fit(task, "mirrored", workers=2, steps=24, options=options)
    rates = [row["lr"] / 7e-4 for row in run.history if "lr" in row]
    assert rates == pytest.approx([max(1 - step / 20, 1 / 20) for step in range(24)])


@pytest.mark.parametrize("algorithm", list(DEFAULTS))
def test_what_is_asked_for_replaces_the_usual_settings_of_an_algorithm(algorithm: str) -> None:
    usual = rl(RLOptions(algorithm=algorithm))
    assert (usual.batch_size, usual.clip_norm) == (
        DEFAULTS[algorithm].environments,
        DEFAULTS[algorithm].clip_norm,
    )
    asked = rl(RLOptions(algorithm=algorithm, environments=6, length=4, clip_norm=0))
    assert (asked.batch_size, asked.data.spec.length, asked.clip_norm) == (6, 4, None)
    assert rl(RLOptions(algorithm=algorithm, clip_norm=2)).clip_norm == 2


def test_a_run_ends_with_an_episode_on_its_page(tmp_path: Path) -> None:
    options = RLOptions(algorithm="a2c", environments=4, episodes=2, clip_norm=0)
    run = mh.fit(rl(options), "mirrored", workers=2, steps=6, out=tmp_path / "run", options=QUIET)
    assert run.path is not None
    episode = (run.path / "episode.png").read_bytes()
    assert episode.startswith(b"\x89PNG")
    assert base64.b64encode(episode).decode() in report(existing_run(run.path).poll())
    hidden = mh.fit(corridor(), "single", workers=1, steps=2, out=tmp_path / "hidden", options=QUIET)
    assert hidden.path is not None
    assert not (hidden.path / "episode.png").exists(), "a corridor cannot be drawn"
    assert 'class="episode"' not in report(existing_run(hidden.path).poll())
