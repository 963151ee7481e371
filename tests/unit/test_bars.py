"""A bar that follows work of others: all of it is told, once, and a failure is not hidden."""

from __future__ import annotations

import threading

import pytest

from manyhands.observe.draw.bars import following


def test_all_that_is_done_is_reported_once() -> None:
    done, report = [0.0], []
    seen = threading.Event()

    def advance(amount: float) -> None:
        report.append(amount)
        seen.set()

    with following(lambda: done[0], advance):
        done[0] = 7.0
        assert seen.wait(240)
        done[0] = 10.0
    assert sum(report) == 10.0
    assert "bar" not in {thread.name for thread in threading.enumerate()}


def test_what_goes_back_takes_nothing_away() -> None:
    done, report = [5.0], []
    with following(lambda: done[0], report.append):
        done[0] = 3.0
    assert sum(report) in (3.0, 5.0), "as far as it was seen"
    assert min(report) >= 0


def test_an_error_of_the_work_comes_through() -> None:
    with pytest.raises(KeyError, match="work"), following(lambda: 0.0, lambda _: None):
        raise KeyError("work")
