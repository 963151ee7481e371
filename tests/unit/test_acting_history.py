"""What a page tells of acting, from rows of a history."""

from __future__ import annotations

from typing import Any

import pytest

from manyhands.observe.analyse.curves import HistoryCurves
from manyhands.observe.analyse.view import ActingView


def row(step: int, **facts: Any) -> dict[str, Any]:
    return {"step": step, "loss": 0.5, "at_s": step / 10, **facts}


def seen(*rows: dict[str, Any]) -> ActingView | None:
    history = HistoryCurves()
    for one in rows:
        assert history.add(one)
    return history.acting.view(2.0)


def test_a_run_that_does_not_act_has_none() -> None:
    assert seen(row(1), row(2, episodes=1, episode_return=5.0)) is None


def test_returns_are_of_the_last_hundred_episodes_over_frames_and_seconds() -> None:
    view = seen(
        row(1, frames=10, episodes=60, episode_return=1.0),
        row(2),  # another update with the same batch
        row(3, frames=10, episodes=60, episode_return=2.0),
        row(4, frames=10),
        row(5, frames=10, episodes=100, episode_return=4.0),
    )
    assert view is not None
    assert view.returns is not None
    assert view.returns.values == (1.0, 1.5, 4.0)
    assert view.returns.steps == (10, 20, 40)
    assert view.returns.seconds == pytest.approx((2.1, 2.3, 2.5))
    assert (view.frames, view.episodes, view.frames_per_s, view.updates_per_s) == (40, 220, 80, 10)


def test_lags_and_waits_add_up() -> None:
    waits = {"acted_s": 0.3, "actors_waited_s": 0.1, "learner_waited_s": 0.05}
    view = seen(
        row(1, frames=8, lags={"0": 3, "1": 1}, **waits),
        row(2, frames=8, lags={"1": 4}, dropped=2, replaced=1, **waits),
    )
    assert view is not None
    assert view.lags == {0: 3, 1: 5}
    assert (view.learner_waited, view.actors_waited) == pytest.approx((0.5, 0.25))
    assert (view.dropped, view.replaced) == (2, 1)
    assert view.returns is None


@pytest.mark.parametrize(
    "facts", [{"frames": "many"}, {"frames": -3}, {"frames": 1e400}, {"frames": 5, "lags": {"x": 1, "2": "y", "3": -1}},
              {"frames": 5, "lags": 7, "acted_s": "long", "dropped": None, "episodes": 2, "episode_return": "high"}]
)  # fmt: skip
def test_rows_that_no_run_writes_are_harmless(facts: dict[str, Any]) -> None:
    view = seen(row(1, frames=5), row(2, **facts))
    assert view is not None
    assert view.lags == {}
    assert view.episodes == 0
