"""Moving pictures, read by Pillow: every picture as it was, in few bytes."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest

from manyhands.workloads.rl.moving_picture import moving_picture

PLENTY = 1 << 24


def read(data: bytes) -> tuple[list[Any], list[float]]:
    """The pictures, and for how many milliseconds each is shown."""
    images = pytest.importorskip("PIL.Image", reason="the extra manyhands[images] is not installed")
    found, times = [], []
    with images.open(BytesIO(data)) as moving:
        for number in range(moving.n_frames):
            moving.seek(number)
            found.append(np.asarray(moving.convert("RGB")))
            times.append(moving.info["duration"])
    return found, times


def drawn(count: int, colours: int, seed: int = 0) -> list[Any]:
    """Pictures that differ from one to the next in a part; the third is the second again."""
    chance = np.random.default_rng(seed)
    palette = chance.integers(0, 256, (colours, 3), dtype=np.uint8)
    pictures = [palette[chance.integers(0, colours, (13, 17))]]
    for number in range(1, count):
        picture = pictures[-1].copy()
        if number != 2:
            top, left = chance.integers(0, 10, 2)
            picture[top : top + 3, left : left + 5] = palette[chance.integers(0, colours)]
        pictures.append(picture)
    return pictures


@pytest.mark.parametrize("colours", [2, 256, 5000])
def test_every_picture_is_read_as_it_was(colours: int) -> None:
    pictures = drawn(9, colours)
    found, times = read(moving_picture(pictures, 30, PLENTY))
    assert times == [30] * 9
    for one, other in zip(found, pictures, strict=True):
        assert np.array_equal(one, other)


def test_grays_are_coloured() -> None:
    gray = np.arange(12, dtype=np.uint8).reshape(3, 4)
    (found,), _ = read(moving_picture([gray], 30, PLENTY))
    assert np.array_equal(found, np.stack([gray] * 3, 2))


def test_pictures_are_left_out_where_they_are_too_many_bytes() -> None:
    pictures = drawn(40, 100)
    whole = len(moving_picture(pictures, 30, PLENTY))
    data = moving_picture(pictures, 30, whole // 2)
    assert len(data) <= whole // 2
    found, times = read(data)
    every = round(times[0] / 30)
    assert every in (2, 4, 8)
    for one, other in zip(found, pictures[::every], strict=True):
        assert np.array_equal(one, other)
    assert len(read(moving_picture(pictures, 30, 1))[0]) == 1
