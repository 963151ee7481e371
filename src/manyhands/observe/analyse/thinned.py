"""A curve of bounded length for runs of any length: evenly thinned points."""

from __future__ import annotations

import math

from manyhands.observe.analyse.view import Curve

__all__ = ["MAX_POINTS", "ThinnedCurve"]

MAX_POINTS = 400  # of a curve as it is shown


class ThinnedCurve:
    """A curve of bounded size: keeps all points, then every second, every fourth and so on, and always the newest."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._points: list[tuple[float, float, float]] = []
        self._newest: tuple[float, float, float] | None = None
        self._seen = 0
        self._stride = 1

    def add(self, step: float, seconds: float, value: float) -> None:
        """Add one point; a value that is not finite is left out."""
        if not math.isfinite(value):
            return
        self._newest = (step, seconds, value)
        if self._seen % self._stride == 0:
            self._points.append(self._newest)
            if len(self._points) >= MAX_POINTS:
                self._points = self._points[::2]
                self._stride *= 2
        self._seen += 1

    def curve(self, later_s: float = 0.0) -> Curve:
        points = list(self._points)
        if self._newest is not None and points[-1] is not self._newest:
            points.append(self._newest)
        return Curve(
            name=self.name,
            steps=tuple(step for step, _, _ in points),
            seconds=tuple(seconds + later_s for _, seconds, _ in points),
            values=tuple(value for _, _, value in points),
        )
