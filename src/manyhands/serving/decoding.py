"""The next tokens of several texts by a model: with a cache of keys and values, or by computing each text anew.

`TextEngine` is the driver of `TextScheduler`: it computes what a step says, and chooses the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from manyhands.engine.device import moved
from manyhands.errors import UserError, format_bytes
from manyhands.serving.text_scheduler import (
    TextEvent,
    TextLimits,
    TextRequest,
    TextScheduler,
    TokensOfRow,
)
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.key_values import KeyValueCache
from manyhands.workloads.language.sampling import chosen

_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class TextDecoder(Protocol):
    """Computes the scores that follow the last token of each row."""

    def start(self, rows: Sequence[TokensOfRow]) -> Tensor:
        """(rows, vocabulary), after the first tokens of their texts."""

    def extend(self, rows: Sequence[TokensOfRow]) -> Tensor:
        """The same, after one more token of each."""

    def move(self, source: int, target: int, length: int) -> None: ...


class CachedDecoder:
    """By a model whose attention reads and writes a cache."""

    def __init__(self, model: GPT, rows: int) -> None:
        self._model = model
        self._cache = KeyValueCache(model.sizes, rows, model.transformer.wte.weight)

    def start(self, rows: Sequence[TokensOfRow]) -> Tensor:
        step = self._cache.start([one.row for one in rows], [len(one.tokens) for one in rows])
        scores: Tensor = self._model(_padded(rows, step.rows.device), step)
        return scores

    def extend(self, rows: Sequence[TokensOfRow]) -> Tensor:
        step = self._cache.extend([one.row for one in rows], [one.cached for one in rows])
        scores: Tensor = self._model(_padded(rows, step.rows.device), step)
        return scores

    def move(self, source: int, target: int, length: int) -> None:
        self._cache.move(source, target, length)


class RecomputingDecoder:
    """By any causal model of tokens, which sees each text from its beginning for every token."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        first = next(model.parameters(), None)
        self._device = torch.device("cpu") if first is None else first.device
        self._texts: dict[int, list[int]] = {}

    def start(self, rows: Sequence[TokensOfRow]) -> Tensor:
        self._texts |= {one.row: list(one.tokens) for one in rows}
        return self._scores(rows)

    def extend(self, rows: Sequence[TokensOfRow]) -> Tensor:
        for one in rows:
            self._texts[one.row] += one.tokens
        return self._scores(rows)

    def move(self, source: int, target: int, length: int) -> None:
        self._texts[target] = self._texts[source][:length]

    def _scores(self, rows: Sequence[TokensOfRow]) -> Tensor:
        whole = [TokensOfRow(one.row, self._texts[one.row], 0) for one in rows]
        # The model is causal: scores do not depend on the padding.
        scores: Tensor = self._model(_padded(whole, self._device))
        ends = moved(torch.tensor([len(one.tokens) - 1 for one in whole]), self._device)
        return scores[torch.arange(len(whole), device=self._device), ends]


def _padded(rows: Sequence[TokensOfRow], device: torch.device) -> Tensor:
    longest = max(len(one.tokens) for one in rows)
    padded = [[*one.tokens, *[0] * (longest - len(one.tokens))] for one in rows]
    tokens: Tensor = moved(torch.tensor(padded), device)
    return tokens


def rows_within(model: nn.Module, limits: TextLimits) -> int:
    """How many texts are computed together; UserError where the memory is too small for one."""
    if not isinstance(model, GPT):
        return limits.rows
    each = KeyValueCache.bytes_per_row(model.sizes, model.transformer.wte.weight)
    if each > limits.cache_bytes:
        raise UserError(
            f"one text of this model needs a cache of {format_bytes(each)}, more than cache_bytes="
            f"{format_bytes(limits.cache_bytes)}; allow more"
        )
    return min(limits.rows, limits.cache_bytes // each)


class TextEngine:
    """Writes several texts, a token of each in a step; `vocabulary` tokens of the model have a meaning."""

    def __init__(
        self,
        model: nn.Module,
        limits: TextLimits,
        context: int,
        vocabulary: int,
        end_token: int | None = None,
    ) -> None:
        rows, self._vocabulary = rows_within(model, limits), vocabulary
        self._decoder: TextDecoder = (
            CachedDecoder(model, rows) if isinstance(model, GPT) else RecomputingDecoder(model)
        )
        self._scheduler = TextScheduler(replace(limits, rows=rows), context, end_token)

    @property
    def is_idle(self) -> bool:
        return self._scheduler.is_idle

    def submit(self, request: TextRequest) -> Sequence[TextEvent]:
        return self._scheduler.submit(request)

    def cancel(self, number: int) -> None:
        self._scheduler.cancel(number)

    def step(self, now: float) -> list[TextEvent]:
        """Compute one token of every text that has a row."""
        step, refused = self._scheduler.plan(now)
        events = list[TextEvent](refused)
        if step is None:
            return events
        # Not by cuDNN, which prepares its attention anew for each length of the texts.
        with torch.inference_mode(), sdpa_kernel(_ATTENTION):
            for move in step.moves:
                self._decoder.move(move.source, move.target, move.cached)
            parts = [self._decoder.start(step.starts)] if step.starts else []
            parts += [self._decoder.extend(step.extends)] if step.extends else []
            if not parts:
                return events
            scores = torch.cat(parts)[:, : self._vocabulary]
            finite = scores.isfinite().all(-1)
            tokens = chosen(torch.where(finite[:, None], scores, 0.0), step.how, step.places)
            written, good = torch.stack([tokens, finite.long()]).tolist()  # the one wait for the device
        return [*events, *self._scheduler.record(written, good)]
