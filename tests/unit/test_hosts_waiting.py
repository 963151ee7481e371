"""Asking until something is so: how often, and for how long."""

from __future__ import annotations

import time

from manyhands.places.external.run_store import comes_true


def test_it_is_asked_until_it_is_so_and_no_longer() -> None:
    answers = iter([False, False, True])
    assert comes_true(lambda: next(answers), 30.0)
    assert next(answers, None) is None


def test_the_time_is_kept_and_the_last_question_comes_at_its_end() -> None:
    asked_s: list[float] = []
    begin_s = time.monotonic()

    def never() -> bool:
        asked_s.append(time.monotonic() - begin_s)
        return False

    assert not comes_true(never, 0.2)
    assert asked_s[-1] >= 0.2
    assert 2 <= len(asked_s) < 12  # ever less often
    assert not comes_true(never, -1.0)  # over already: asked once all the same
