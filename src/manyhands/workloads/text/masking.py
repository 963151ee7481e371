"""Masked language modelling: which tokens are predicted, and what stands in their place (Devlin et al. 2018).

A share of a row's tokens are targets, 15 %. Of those 80 % become [MASK], 10 % another token, and 10 % stay as they are;
a special token or padding is never a target, and never drawn as a replacement. What is drawn follows from (seed, epoch,
row) alone, so masks are new in each epoch (Liu et al. 2019) and the same for any workers.

A row of n tokens that may be masked has `targets_of(n)` targets, so the number of targets of a batch is known before it
is drawn. With whole words, words are taken in random order while they fit in that number, all pieces of each.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.data.randomness import mix
from manyhands.errors import UserError
from manyhands.workloads.text.tokenizer import TextTokenizer

IGNORED = -100  # the label of what is not predicted, as torch's cross_entropy has it
_KEPT, _REPLACED = 0.1, 0.2  # of targets: a tenth stays, and another is replaced
_LAST = np.uint64(2**64 - 1)


class MaskedRows(NamedTuple):
    """What a model reads, the places of the targets in each row in order, and what it has to predict there.

    Every row has as many places, which a row with fewer targets fills with others, whose label is `IGNORED`.
    """

    tokens: NDArray[np.int64]
    places: NDArray[np.int64]
    labels: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Masking:
    """How rows are masked; a pure function of the rows, their numbers, the epoch and the seed."""

    mask_id: int
    """The token that stands for what is masked."""
    vocabulary: int
    """Ids are below this; an embedding that is padded to a multiple has more rows."""
    special_ids: tuple[int, ...]
    """Neither targets nor replacements."""
    rate: float = 0.15
    """The share of targets."""
    continues_word: NDArray[np.bool_] | None = None
    """For each id, whether it continues a word: then whole words are masked. None: single tokens."""
    seed: int = 0
    _ordinary: NDArray[np.int64] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 0 < self.rate < 1:
            raise UserError(f"rate is {self.rate!r}; it must be above 0 and below 1")
        specials = {*self.special_ids, self.mask_id}
        if not all(0 <= one < self.vocabulary for one in specials):
            raise UserError(
                f"special_ids and mask_id must be in 0..{self.vocabulary - 1}; got {sorted(specials)}"
            )
        ordinary = np.setdiff1d(np.arange(self.vocabulary), sorted(specials))
        if len(ordinary) < 2:
            raise UserError(
                f"vocabulary is {self.vocabulary}, of which {len(ordinary)} are no special tokens; give more"
            )
        object.__setattr__(self, "_ordinary", ordinary)

    @classmethod
    def of(cls, tokenizer: TextTokenizer, *, whole_words: bool = False, **settings: Any) -> Masking:
        """For the tokens of a tokenizer with [MASK]."""
        return cls(
            mask_id=tokenizer.require_id("[MASK]"),
            vocabulary=tokenizer.vocabulary_size,
            special_ids=tokenizer.special_ids,
            continues_word=tokenizer.continues_word() if whole_words else None,
            **settings,
        )

    def targets_of(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many of so many tokens are targets: their share, rounded, and one at least where there is any."""
        return np.minimum(counts, np.maximum(1, (counts * self.rate + 0.5).astype(np.int64)))

    def mask(self, rows: NDArray[Any], numbers: NDArray[np.int64], epoch: int) -> MaskedRows:
        """Rows of tokens, with `numbers` as their numbers in the data, as they are read in `epoch`."""
        tokens = np.array(rows, np.int64)
        if tokens.size and not 0 <= tokens.min() <= tokens.max() < self.vocabulary:
            raise UserError(
                f"rows hold ids from {tokens.min()} to {tokens.max()}; the vocabulary has 0..{self.vocabulary - 1}"
            )
        order, fate, drawn = _drawn(self.seed, epoch, numbers, tokens.shape[1])
        ordinary = np.isin(tokens, self._ordinary)
        if self.continues_word is None:
            wanted = self.targets_of(ordinary.sum(1))
            place = np.argsort(np.argsort(np.where(ordinary, order, _LAST), 1, kind="stable"), 1)
            targets = ordinary & (place < wanted[:, None])
        else:
            found = zip(tokens, order, ordinary, strict=True)
            targets = np.array([self._whole_words(*one) for one in found], np.bool_).reshape(tokens.shape)
        room = int(self.targets_of(np.array(tokens.shape[1])))
        places = np.argsort(~targets, 1, kind="stable")[:, :room]
        labels = np.where(targets, tokens, IGNORED)
        labels = np.take_along_axis(labels, places, 1)
        tokens[targets & (fate >= _REPLACED)] = self.mask_id
        other = targets & (fate >= _KEPT) & (fate < _REPLACED)
        tokens[other] = self._ordinary[(drawn[other] * len(self._ordinary)).astype(np.int64)]
        return MaskedRows(tokens, places, labels)

    def _whole_words(
        self, row: NDArray[np.int64], order: NDArray[np.uint64], ordinary: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """The targets of one row; a word that began before it is a word of the pieces that are in it."""
        assert self.continues_word is not None
        first = ~self.continues_word[row] | ~ordinary
        first[1:] |= ~ordinary[:-1]
        first[:1] = True
        begins = np.flatnonzero(first)
        ends = np.append(begins[1:], len(row))
        room, targets = int(self.targets_of(ordinary.sum())), np.zeros(len(row), np.bool_)
        for word in np.argsort(order[begins], kind="stable"):
            pieces = slice(begins[word], ends[word])
            if ordinary[begins[word]] and ends[word] - begins[word] <= room:
                targets[pieces] = True
                room -= int(ends[word] - begins[word])
        return targets


def _drawn(seed: int, epoch: int, numbers: NDArray[np.int64], count: int) -> tuple[NDArray[Any], ...]:
    """For each row, `count` random keys to sort by, and twice as many numbers from 0 to 1: outputs of SplitMix64."""
    first = np.array([mix(seed, epoch, int(number)) for number in numbers], np.uint64)
    state = first[:, None] + np.arange(1, 3 * count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    state ^= state >> np.uint64(31)
    order, fate, drawn = np.split(state, 3, axis=1)
    return order >> np.uint64(1), *((one >> np.uint64(11)) * 2.0**-53 for one in (fate, drawn))
