"""When a run ends because its evaluations no longer improve."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from manyhands.engine.options import EarlyStopping, StoppingCount
from manyhands.errors import UserError


def ended_at(values: list[float], **rule: Any) -> int | None:
    """Which evaluation ends the run, from 1."""
    patience = StoppingCount(EarlyStopping(metric="score", **rule))
    for number, value in enumerate(values, start=1):
        if patience.add(number, {"score": value, "other": 0.0}):
            return number
    return None


@pytest.mark.parametrize(
    ("values", "rule", "expected"),
    [
        ([5, 4, 3, 2, 1], {"patience": 1}, None),
        ([5, 4, 4, 4, 4], {"patience": 2}, 4),
        ([5, 6, 4, 6, 6], {"patience": 2}, 5),
        ([5, 6, 6], {"patience": 3}, None),
        ([5, 4.95, 4.9, 4.85], {"patience": 2, "min_delta": 0.1}, 3),
        ([1, 2, 3, 3, 3], {"patience": 2, "mode": "max"}, 5),
        ([1, 2, 3, 4], {"patience": 1, "mode": "min"}, 2),
        ([math.nan, math.nan], {"patience": 2}, 2),
        ([math.nan, 3, math.nan, 2, 2], {"patience": 2}, None),
        ([math.inf, 3, 3], {"patience": 2}, None),
    ],
)
def test_the_run_ends_after_as_many_evaluations_that_were_not_better(
    values: list[float], rule: dict[str, Any], expected: int | None
) -> None:
    assert ended_at(values, **rule) == expected


def test_a_resumed_run_goes_on_counting_where_it_was() -> None:
    values = [5.0, 4.0, 4.5, 3.9, 4.2, 4.1, 4.0]
    whole = StoppingCount(EarlyStopping(metric="score", patience=3))
    ends = [whole.add(number, {"score": value}) for number, value in enumerate(values)]
    assert ends == [False] * 6 + [True]
    for cut in range(1, len(values)):
        first, second = (StoppingCount(EarlyStopping(metric="score", patience=3)) for _ in range(2))
        for number, value in enumerate(values[:cut]):
            first.add(number, {"score": value})
        second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
        assert [
            second.add(number, {"score": value}) for number, value in enumerate(values[cut:], cut)
        ] == ends[cut:]


def test_the_best_of_another_metric_says_nothing() -> None:
    accuracy, loss = (StoppingCount(EarlyStopping(metric=name, patience=1)) for name in ("accuracy", "loss"))
    accuracy.add(1, {"accuracy": 0.9})
    loss.restore(accuracy.state())
    assert not loss.add(2, {"loss": 5.0}), "the first that is seen is the best so far"


def test_the_sentence_names_the_best() -> None:
    patience = StoppingCount(EarlyStopping(metric="score", patience=1, min_delta=0.5, mode="max"))
    assert patience.state()["best"] is None
    patience.add(10, {"score": 0.25})
    patience.add(20, {"score": 0.5})
    assert patience.sentence == (
        "score has not risen by more than 0.5 in 1 evaluations; the best was 0.25 after step 10"
    )


@pytest.mark.parametrize(
    ("rule", "report"),
    [
        ({"patience": 0}, "patience is 0; it must be an integer above 0"),
        ({"min_delta": -1.0}, "min_delta is -1.0; it must be at least 0"),
        ({"min_delta": math.nan}, "min_delta is nan"),
        ({"mode": "maximum"}, "mode is 'maximum'; allowed: min, max; did you mean 'max'"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(rule: dict[str, Any], report: str) -> None:
    with pytest.raises(UserError, match=report):
        EarlyStopping(**rule)
