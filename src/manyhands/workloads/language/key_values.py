"""The keys and values of tokens that a transformer has seen, so that each next token is computed alone.

Row r of the cache belongs to one text; its place p is the text's token p. A place is written before it is attended to,
and a token attends to its own place and those before it: what an earlier text left behind them is never seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from manyhands.engine.device import moved
from manyhands.workloads.language.presets import ModelSizes


@dataclass(frozen=True, slots=True)
class LayerCache:
    """The part of a step's cache that one attention layer reads and writes."""

    keys: Tensor
    values: Tensor
    step: CacheStep

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of (rows, heads, time, features) to all that their texts have so far."""
        step, length = self.step, query.shape[2]
        if step.is_start:
            self.keys[step.rows, :, :length] = key
            self.values[step.rows, :, :length] = value
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)
        places = step.places[:, 0]
        self.keys[step.rows, :, places] = key[:, :, 0]
        self.values[step.rows, :, places] = value[:, :, 0]
        keys, values = (held[step.taken, :, : step.span] for held in (self.keys, self.values))
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=step.mask)


@dataclass(frozen=True, slots=True)
class CacheStep:
    """Which rows and places the tokens of one forward pass have."""

    cache: KeyValueCache
    rows: Tensor
    places: Tensor  # (rows, time)
    last: Tensor  # in each row, the index in time whose scores are wanted
    is_start: bool  # the tokens are the first of their texts, padded at the end; else one more token of each
    taken: slice | Tensor  # the same rows; a slice reads them without a copy
    span: int  # places up to the longest text's
    mask: Tensor | None = None  # (rows, 1, 1, span), of one more token: what it sees

    def layer(self, number: int) -> LayerCache:
        keys, values = self.cache.held[number]
        return LayerCache(keys, values, self)


class KeyValueCache:
    """Room for `rows` texts of as many tokens as the model has positions, in the type and on the device of `like`."""

    def __init__(self, sizes: ModelSizes, rows: int, like: Tensor) -> None:
        shape = (sizes.layers, 2, rows, sizes.heads, sizes.context, sizes.width // sizes.heads)
        self.held = like.new_zeros(shape)  # not empty: what is masked must be finite

    @staticmethod
    def bytes_per_row(sizes: ModelSizes, like: Tensor) -> int:
        return 2 * sizes.layers * sizes.context * sizes.width * like.element_size()

    def move(self, source: int, target: int, length: int) -> None:
        """Row `target` becomes the first `length` places of row `source`."""
        self.held[:, :, target, :, :length] = self.held[:, :, source, :, :length]

    def start(self, rows: Sequence[int], lengths: Sequence[int]) -> CacheStep:
        """The step that computes the first tokens of these rows, padded to the longest."""
        device, longest = self.held.device, max(lengths)
        held, ends = moved(torch.tensor([rows, lengths]), device)
        return CacheStep(
            cache=self,
            rows=held,
            places=torch.arange(longest, device=device).expand(len(rows), longest),
            last=ends - 1,
            is_start=True,
            taken=held,
            span=longest,
        )

    def extend(self, rows: Sequence[int], lengths: Sequence[int]) -> CacheStep:
        """The step that computes one more token of each row, whose text has `lengths` tokens before it."""
        device, span = self.held.device, max(lengths) + 1
        held, places = moved(torch.tensor([rows, lengths]), device)
        mask = torch.arange(span, device=device) <= places[:, None]
        return CacheStep(
            cache=self,
            rows=held,
            places=places[:, None],
            last=torch.zeros_like(places),
            is_start=False,
            taken=slice(len(rows)) if list(rows) == list(range(len(rows))) else held,
            span=span,
            mask=mask[:, None, None],
        )
