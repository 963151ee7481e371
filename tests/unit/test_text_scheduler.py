"""Which texts are computed together, in virtual time: they join, leave, move, are refused and cancelled."""

from __future__ import annotations

import random

import pytest

from manyhands.errors import UserError
from manyhands.serving.batching import BatchLimits, KillReplica, RefuseRequest
from manyhands.serving.text_dispatch import CancelText, SendText, TextDispatch
from manyhands.serving.text_scheduler import (
    RowMove,
    TextLimits,
    TextRefused,
    TextRequest,
    TextScheduler,
    TokensOfRow,
    TokenWritten,
)

END = 99


def scheduler(**limits: int) -> TextScheduler:
    return TextScheduler(TextLimits(**limits), context=8, end_token=END)


def text(number: int, prompt: list[int], tokens: int, until: float = 1e9) -> TextRequest:
    return TextRequest(number=number, prompt=prompt, tokens=tokens, until=until)


def test_texts_join_and_leave_between_tokens() -> None:
    core = scheduler(rows=2)
    for number, tokens in enumerate((1, 3, 2)):
        assert core.submit(text(number, [number] * 2, tokens)) == []
    step, _ = core.plan(0.0)
    assert step is not None
    assert step.starts == (TokensOfRow(0, [0, 0], 0), TokensOfRow(1, [1, 1], 0))
    assert (step.extends, step.moves, step.places) == ((), (), (0, 0))
    assert core.record([5, 6]) == [TokenWritten(0, 5, True), TokenWritten(1, 6, False)]
    step, _ = core.plan(0.0)  # text 0 is complete: text 1 moves into its row, and text 2 joins behind it
    assert step is not None
    assert step.moves == (RowMove(1, 0, 2),)
    assert step.starts == (TokensOfRow(1, [2, 2], 0),)
    assert step.extends == (TokensOfRow(0, [6], 2),)
    assert step.places == (0, 1)
    assert core.record([7, END]) == [TokenWritten(2, 7, False), TokenWritten(1, None, True)]
    step, _ = core.plan(0.0)
    assert step is not None
    assert (step.moves, step.extends) == ((RowMove(1, 0, 2),), (TokensOfRow(0, [7], 2),))
    assert core.record([8]) == [TokenWritten(2, 8, True)]
    assert core.plan(0.0) == (None, [])
    assert core.is_idle


def test_a_step_computes_prompts_within_a_limit_and_at_least_one() -> None:
    core = scheduler(rows=4, prefill=4)
    for number, length in enumerate((5, 2, 2, 1)):
        core.submit(text(number, [0] * length, 9))
    found = []
    while not found or found[-1]:
        step, _ = core.plan(0.0)
        assert step is not None
        found.append([one.row for one in step.starts])
        core.record([1] * len(step.places))
    assert found == [[0], [1, 2], [3], []]


def test_a_text_beyond_the_positions_continues_from_its_newest_half() -> None:
    core = scheduler()
    core.submit(text(0, [1, 2, 3, 4, 5, 6, 7], 9))
    seen = []
    for token in range(10, 19):
        step, _ = core.plan(0.0)
        assert step is not None
        seen += [("start", list(one.tokens)) for one in step.starts]
        seen += [("extend", one.cached) for one in step.extends]
        core.record([token])
    assert seen == [
        ("start", [1, 2, 3, 4, 5, 6, 7]),
        ("extend", 7),
        ("start", [6, 7, 10, 11][-4:]),
        *(("extend", place) for place in (4, 5, 6, 7)),
        ("start", [12, 13, 14, 15, 16][-4:]),
        ("extend", 4),
    ]


def test_a_full_queue_refuses_and_deadlines_hold_in_it_and_in_rows() -> None:
    core = scheduler(rows=1, waiting=1)
    core.submit(text(0, [1], 5, until=3.0))
    core.plan(0.0)
    core.record([1])
    core.submit(text(1, [1], 5, until=2.0))
    (refused,) = core.submit(text(2, [1], 5))
    assert (refused.number, refused.status) == (2, 503)
    assert "1 texts are already waiting" in refused.sentence
    step, (late,) = core.plan(2.0)
    assert late.number == 1
    assert "ended after 0 of 5 tokens" in late.sentence
    assert step is not None
    core.record([1])
    step, (late,) = core.plan(3.0)
    assert step is None
    assert (late.number, late.status) == (0, 503)
    assert "ended after 2 of 5 tokens; ask for fewer" in late.sentence
    assert core.is_idle


def test_scores_that_are_not_finite_end_their_text_alone() -> None:
    core = scheduler()
    core.submit(text(0, [1], 5))
    core.submit(text(1, [1], 5))
    core.plan(0.0)
    first, second = core.record([3, 3], [False, True])
    assert isinstance(first, TextRefused)
    assert (first.number, first.status) == (0, 500)
    assert second == TokenWritten(1, 3, False)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_every_text_gets_its_tokens_or_an_end(seed: int) -> None:
    """Rows are dense, no row has two texts, what is cached is what was computed, and nothing is forgotten."""
    rng = random.Random(seed)
    core = scheduler(rows=rng.randint(1, 5), waiting=6, prefill=rng.randint(1, 20))
    wanted: dict[int, int] = {}
    written: dict[int, int] = {}
    ended: dict[int, str] = {}
    rows: dict[int, list[int]] = {}  # what a cache would hold
    now = 0.0
    for number in range(2000):
        now += rng.random()
        if number < 200 and rng.random() < 0.5:
            wanted[number], written[number] = rng.randint(1, 20), 0
            prompt = [rng.randint(0, 9) for _ in range(rng.randint(1, 8))]
            if core.submit(text(number, prompt, wanted[number], now + rng.choice([5.0, 1e9]))):
                ended[number] = "refused"
        unfinished = [one for one in wanted if one not in ended]
        if unfinished and rng.random() < 0.1:
            cancelled = rng.choice(unfinished)
            core.cancel(cancelled)
            ended[cancelled] = "cancelled"
        step, late = core.plan(now)
        ended |= {one.number: "late" for one in late if one.number not in ended}
        if step is None:
            continue
        for move in step.moves:
            rows[move.target] = rows[move.source][: move.cached]
        for one in step.starts:
            rows[one.row] = list(one.tokens)
        for one in step.extends:
            assert len(rows[one.row]) == one.cached
            rows[one.row] += one.tokens
        used = sorted(one.row for one in (*step.starts, *step.extends))
        assert len(set(used)) == len(used) <= core.limits.rows
        assert all(1 <= len(rows[row]) <= 8 for row in used)
        for event in core.record([rng.choice([1, 2, 3, 4, END]) for _ in step.places]):
            assert isinstance(event, TokenWritten)
            assert event.number not in ended
            written[event.number] += event.token is not None
            if event.is_last:
                assert event.token is None or written[event.number] == wanted[event.number]
                ended[event.number] = "complete"
    assert core.is_idle
    assert ended.keys() == wanted.keys()
    assert {"complete", "cancelled"} <= set(ended.values())


def test_limits_are_at_least_one() -> None:
    with pytest.raises(UserError, match="rows=0 must be an integer of at least 1"):
        TextLimits(rows=0)


LIMITS = BatchLimits(deadline_s=10.0, waiting=3)


def test_a_text_goes_to_the_worker_with_the_fewest_and_to_another_when_that_dies() -> None:
    core = TextDispatch(LIMITS)
    assert core.asked(1, 0.0) == []
    assert core.waiting_inputs == 1
    assert core.ready(7, 1.0) == [SendText(7, 1, 9.0)]
    core.ready(8, 1.0)
    assert core.asked(2, 1.0) == [SendText(8, 2, 10.0)]
    assert core.ended(2) == [CancelText(8, 2)]
    assert core.asked(3, 2.0) == [SendText(8, 3, 10.0)]
    assert core.gone(7, 3.0) == [SendText(8, 1, 7.0)]
    core.asked(4, 3.0)
    (refused,) = core.asked(5, 3.0)
    assert isinstance(refused, RefuseRequest)
    assert "3 texts are already being written" in refused.sentence
    first, *_ = core.gone(8, 4.0)
    assert first == RefuseRequest(1, 503, "2 workers died while writing this text; it was abandoned.")
    assert core.waiting_inputs == 2
    assert core.ended(3) == []


def test_a_worker_that_says_nothing_is_killed_and_its_text_refused() -> None:
    core = TextDispatch(LIMITS)
    core.ready(7, 0.0)
    core.asked(1, 20.0)
    assert core.wakes_at == 30.0
    core.heard(7, 25.0)
    assert core.look(30.0) == []
    assert core.wakes_at == 31.0
    refused, cancelled = core.look(31.0)
    assert isinstance(refused, RefuseRequest)
    assert "not complete within 10 s" in refused.sentence
    assert cancelled == CancelText(7, 1)
    core.asked(2, 31.0)
    assert core.look(41.0) == [KillReplica(7)]
    assert core.asked(3, 41.0) == [], "it waits for another worker"
    assert core.wakes_at == 42.0
