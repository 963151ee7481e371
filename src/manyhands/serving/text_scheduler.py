"""Which texts get their next token together: a pure core, continuous batching (Orca, Yu et al. 2022).

    submit ──► queue ──► row ──► row ──► …        plan: who joins, leaves and moves, and what a step computes
               first in, first out                record: the tokens that the step chose

A step computes one token of every text that has a row. A text joins as soon as a row is free, and leaves after its last
token, so that no text waits for the end of another. When it joins, its prompt is computed at once; a step takes prompts
of at most `prefill` tokens together, so that a long one does not stop the other texts for long. Rows in use are always
the first ones: when a text leaves, the last row moves into its place.

A text longer than the model's positions continues from its newest half: the start of its window moves, and the window
is computed anew. Which tokens a token depends on is thus a function of its text alone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from manyhands.errors import check_count
from manyhands.workloads.language.sampling import Sampling


@dataclass(frozen=True, kw_only=True, slots=True)
class TextLimits:
    """Limits of one worker that generates texts."""

    rows: int = 16  # texts that are computed together
    waiting: int = 256  # texts that may wait for a row; one more is refused
    prefill: int = 2048  # tokens of prompts in a step, or one prompt
    cache_bytes: int = 2 << 30  # for keys and values: it may leave fewer rows

    def __post_init__(self) -> None:
        for name in ("rows", "waiting", "prefill", "cache_bytes"):
            check_count(name, getattr(self, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRequest:
    """One text to continue."""

    number: int
    prompt: Sequence[int]
    tokens: int  # to write
    how: Sampling = field(default_factory=Sampling)
    until: float = math.inf  # when it is refused


@dataclass(frozen=True, slots=True)
class TokensOfRow:
    """The tokens to compute in a row that has `cached` tokens of its text already."""

    row: int
    tokens: Sequence[int]
    cached: int


@dataclass(frozen=True, slots=True)
class RowMove:
    """The text of row `source`, of which `cached` tokens are computed, moves to row `target`."""

    source: int
    target: int
    cached: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TextStep:
    """What to compute: first the moves in their order, then a token for each of `starts` and `extends`."""

    moves: tuple[RowMove, ...]
    starts: tuple[TokensOfRow, ...]
    extends: tuple[TokensOfRow, ...]
    how: tuple[Sampling, ...]
    places: tuple[int, ...]  # the number that each token has among those written for its text


@dataclass(frozen=True, slots=True)
class TokenWritten:
    """A token of the text `number`; None where the model ended the text instead."""

    number: int
    token: int | None
    is_last: bool


@dataclass(frozen=True, slots=True)
class TextRefused:
    """The text `number` will not be continued; an HTTP status and one sentence."""

    number: int
    status: int
    sentence: str


TextEvent: TypeAlias = TokenWritten | TextRefused


@dataclass(slots=True, eq=False)
class _Text:
    request: TextRequest
    tokens: list[int]  # the prompt and what is written
    begin: int = 0  # of the window that the model sees
    cached: int = 0  # tokens from `begin` on that are computed
    is_over: bool = False

    @property
    def num_written(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


class TextScheduler:
    """The texts of one worker; times are seconds of any one clock."""

    def __init__(self, limits: TextLimits, context: int, end_token: int | None = None) -> None:
        self.limits, self._context, self._end_token = limits, context, end_token
        self._waiting: deque[_Text] = deque()  # the oldest first
        self._rows: list[_Text] = []
        self._computed: tuple[_Text, ...] = ()  # those of the last step, in its order

    @property
    def is_idle(self) -> bool:
        return not self._rows and not self._waiting

    def submit(self, request: TextRequest) -> list[TextRefused]:
        if len(self._waiting) >= self.limits.waiting:
            sentence = f"{len(self._waiting)} texts are already waiting; try again in a moment."
            return [TextRefused(request.number, 503, sentence)]
        self._waiting.append(_Text(request, list(request.prompt)))
        return []

    def cancel(self, number: int) -> None:
        """Nobody wants this text any more; one that is unknown has ended already."""
        for text in (*self._waiting, *self._rows):
            text.is_over |= text.request.number == number

    def plan(self, now: float) -> tuple[TextStep | None, list[TextRefused]]:
        """The next step, None where there is nothing to compute; and the texts whose time is over."""
        refused = self._past_deadline(now)
        self._waiting = deque(text for text in self._waiting if not text.is_over)
        moves = self._vacate()
        starts, extends = self._prompts(), list[tuple[int, _Text]]()
        started = {row for row, _ in starts}
        extends = [(row, text) for row, text in enumerate(self._rows) if row not in started and text.cached]
        self._computed = tuple(text for _, text in (*starts, *extends))
        if not self._computed and not moves:
            return None, refused
        return TextStep(
            moves=moves,
            starts=tuple(TokensOfRow(row, text.tokens[text.begin :], 0) for row, text in starts),
            extends=tuple(TokensOfRow(row, text.tokens[-1:], text.cached) for row, text in extends),
            how=tuple(text.request.how for text in self._computed),
            places=tuple(text.num_written for text in self._computed),
        ), refused

    def record(self, tokens: Sequence[int], finite: Sequence[bool] | None = None) -> list[TextEvent]:
        """The tokens that the planned step has chosen, in its order, and which of them have finite scores."""
        written = list[TextEvent]()
        for text, token, good in zip(self._computed, tokens, finite or [True] * len(tokens), strict=True):
            text.cached = len(text.tokens) - text.begin
            if text.is_over:  # cancelled while the step was computed
                continue
            if not good:
                text.is_over = True
                sentence = "the model's scores are not finite: its training diverged"
                written.append(TextRefused(text.request.number, 500, sentence))
                continue
            is_end = token == self._end_token
            if not is_end:
                text.tokens.append(token)
            text.is_over = is_end or text.num_written == text.request.tokens
            written.append(TokenWritten(text.request.number, None if is_end else token, text.is_over))
        return written

    def _past_deadline(self, now: float) -> list[TextRefused]:
        refused = []
        for text in (*self._waiting, *self._rows):
            if now >= text.request.until and not text.is_over:
                text.is_over = True
                sentence = (
                    f"The time for this request ended after {text.num_written} of {text.request.tokens} tokens; "
                    "ask for fewer, or try again later."
                )
                refused.append(TextRefused(text.request.number, 503, sentence))
        return refused

    def _vacate(self) -> tuple[RowMove, ...]:
        moves = []
        for row in reversed(range(len(self._rows))):
            if self._rows[row].is_over:
                last = self._rows.pop()  # rows behind this one are all going on
                if row < len(self._rows):
                    self._rows[row] = last
                    moves.append(RowMove(len(self._rows), row, last.cached))
        return tuple(moves)

    def _prompts(self) -> list[tuple[int, _Text]]:
        """The rows whose whole window is computed in this step, among them those of texts that join."""
        found, left = list[tuple[int, _Text]](), self.limits.prefill
        for row, text in enumerate(self._rows):
            if len(text.tokens) - text.begin > self._context:
                text.begin, text.cached = len(text.tokens) - max(1, self._context // 2), 0
            size = len(text.tokens) - text.begin
            if not text.cached and (not found or size <= left):
                found.append((row, text))
                left -= size
        while self._waiting and len(self._rows) < self.limits.rows:
            size = len(self._waiting[0].tokens)
            if found and size > left:
                break
            found.append((len(self._rows), self._waiting[0]))
            self._rows.append(self._waiting.popleft())
            left -= size
        return found
