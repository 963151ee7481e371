"""What acting gave in a run of reinforcement learning, from the rows of its history."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping
from typing import Any

from manyhands.observe.analyse.thinned import ThinnedCurve
from manyhands.observe.analyse.view import ActingView
from manyhands.observe.record.checked_values import number, whole

__all__ = ["ActingHistory"]

_EPISODES = 100  # whose mean return is shown, as usual in the field
_MAX_LAGS = 1000  # in a distribution
_SUMS = ("dropped", "replaced", "learner_waited_s", "actors_waited_s", "acted_s")


class ActingHistory:
    """The frames, returns and waits of a run, in bounded memory; rows that tell of no acting change nothing."""

    def __init__(self) -> None:
        self._returns = ThinnedCurve("return")
        self._newest: deque[tuple[int, float]] = deque()  # episodes of a row, and their mean return
        self._frames = self._episodes = self._updates = 0
        self._seconds = 0.0
        self._lags: Counter[int] = Counter()
        self._sums: Counter[str] = Counter()

    def add(self, row: Mapping[str, Any], at_s: float) -> None:
        """Add the row of a step that was taken after so many seconds."""
        frames = whole(row.get("frames"))
        self._updates += bool(self._frames or frames)
        self._seconds = max(self._seconds, at_s)
        if frames is None or frames < 1:
            return
        self._frames += frames
        for name in _SUMS:
            self._sums[name] += max(0, number(row.get(name, 0)) or 0)  # type: ignore[assignment]
        lags = row.get("lags")
        for lag, count in lags.items() if isinstance(lags, Mapping) else ():
            if str(lag).isdecimal() and (whole(count) or 0) > 0:
                self._lags[min(int(str(lag)[:9]), _MAX_LAGS)] += int(count)
        episodes, mean = whole(row.get("episodes")), number(row.get("episode_return"))
        if episodes is not None and episodes > 0 and mean is not None:
            self._episodes += episodes
            self._newest.append((episodes, mean))
            while sum(count for count, _ in self._newest) - self._newest[0][0] >= _EPISODES:
                self._newest.popleft()
            total = sum(count for count, _ in self._newest)
            self._returns.add(self._frames, at_s, sum(count * one for count, one in self._newest) / total)

    def view(self, later_s: float, episode: bytes = b"") -> ActingView | None:
        """None of a run that does not act; its clock began `later_s` after the first event."""
        if not self._frames:
            return None
        seconds = self._seconds or 1.0
        acted, waited = self._sums["acted_s"], self._sums["actors_waited_s"]
        return ActingView(
            frames=self._frames,
            episodes=self._episodes,
            frames_per_s=self._frames / seconds,
            updates_per_s=self._updates / seconds,
            returns=self._returns.curve(later_s) if self._episodes else None,
            lags=dict(sorted(self._lags.items())),
            learner_waited=min(1.0, self._sums["learner_waited_s"] / seconds),
            actors_waited=waited / (acted + waited) if acted + waited else 0.0,
            dropped=int(self._sums["dropped"]),
            replaced=int(self._sums["replaced"]),
            episode=episode,
        )
