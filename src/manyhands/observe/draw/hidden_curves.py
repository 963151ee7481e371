"""Finds curves of a chart that overlap, so that the last one drawn would hide the others.

Synchronous strategies take the very same steps: their losses over steps are one line. Such curves are drawn as
stripes of all their colours, and said to be one.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

__all__ = ["overlapping"]

_NEAR = 1.5  # distance in picture units below which a stroke hides another
_SAMPLES = 48
_ALIKE = 0.95  # share of the samples that must be near
_SHARED = 0.9  # share of a curve's width that must overlap with the other

Points = Sequence[tuple[float, float]]


def overlapping(curves: Sequence[Points]) -> list[tuple[int, ...]]:
    """Return groups of two or more curve numbers that nearly coincide.

    Curves are points in units of the picture, in the order of x; one without a point is in no group.
    """
    groups: list[tuple[int, ...]] = []
    free = [number for number, points in enumerate(curves) if points]
    while free:
        first, *others = free
        alike = [other for other in others if _are_alike(curves[first], curves[other])]
        if alike:
            groups.append((first, *alike))
        free = [other for other in others if other not in alike]
    return groups


def _are_alike(one: Points, other: Points) -> bool:
    begin, end = max(one[0][0], other[0][0]), min(one[-1][0], other[-1][0])
    widest = max(points[-1][0] - points[0][0] for points in (one, other))
    if end - begin < _SHARED * widest:
        return False
    places = [begin + (end - begin) * n / (_SAMPLES - 1) for n in range(_SAMPLES)]
    near = sum(abs(_height(one, x) - _height(other, x)) <= _NEAR for x in places)
    return near >= _ALIKE * _SAMPLES


def _height(points: Points, x: float) -> float:
    """Interpolate the curve's y at x."""
    right = bisect.bisect_left(points, x, key=lambda point: point[0])
    if right == 0 or right == len(points):
        return points[min(right, len(points) - 1)][1]
    (x0, y0), (x1, y1) = points[right - 1], points[right]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)
