"""Rows of two spans of a text, and whether they belong together: what BERT learns beside masked tokens.

    text     a b c d e f g h …        together   [CLS] a b [SEP] c d [SEP]
    next     (Devlin et al. 2018)     apart      [CLS] a b [SEP] the second span of another row [SEP]
    order    (ALBERT, Lan et al. 2019)  apart    [CLS] c d [SEP] a b [SEP]

In half of the rows the spans are apart. Which these are, and what stands there, is drawn from (seed, epoch, row): new
in each epoch, and the same under any strategy and number of workers.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from manyhands.data.batches import BatchedDataset
from manyhands.data.randomness import mix
from manyhands.errors import UserError
from manyhands.workloads.text.masking import Masking
from manyhands.workloads.text.packing import TokenRows, tensors
from manyhands.workloads.text.token_files import TokenFiles

_OWN = 2  # draws of its own beside those of the masks


class SpanPairs(BatchedDataset):
    """Rows of at most `length`: [CLS], a span, [SEP], one of as many tokens, [SEP]; masked anew in each epoch.

    A batch is that of `MaskedWindows`, with `segments` (rows, time), 0 or 1, and `apart` (rows,), which is 1 where the
    spans do not belong together: `next_sentence_label` of transformers.
    """

    def __init__(self, files: TokenFiles, length: int, masking: Masking, kind: str) -> None:
        if length < 5:
            raise UserError(
                f"length is {length}; two spans need at least 5, for [CLS], two tokens and two [SEP]"
            )
        self._span, self._kind, self._masking = (length - 3) // 2, kind, masking
        self._first, self._end = (files.tokenizer.require_id(token) for token in ("[CLS]", "[SEP]"))
        self._windows = TokenRows(files, 2 * self._span, 2 * self._span)

    def __len__(self) -> int:
        return len(self._windows)

    def batch(self, indices: NDArray[np.int64], epoch: int) -> dict[str, Tensor]:
        indices, span = np.asarray(indices), self._span
        drawn = [mix(self._masking.seed, epoch, int(row), _OWN) for row in indices]
        apart = np.array([draw & 1 for draw in drawn], np.int64)
        tokens = self._windows.rows(indices).tokens
        one, other = tokens[:, :span], tokens[:, span:]
        if self._kind == "order":
            one, other = (np.where(apart[:, None], *pair) for pair in ((other, one), (one, other)))
        elif len(self) > 1:
            by = np.array([1 + (draw >> 1) % (len(self) - 1) for draw in drawn], np.int64)
            strange = self._windows.rows((indices + by) % len(self)).tokens[:, span:]
            other = np.where(apart[:, None], strange, other)
        else:
            apart[:] = 0  # there is no other row
        rows = np.full((len(indices), 2 * span + 3), self._end)
        rows[:, 0], rows[:, 1 : span + 1], rows[:, span + 2 : -1] = self._first, one, other
        segments = np.broadcast_to(np.arange(rows.shape[1]) > span + 1, rows.shape).astype(np.int64)
        masked = self._masking.mask(rows, indices, epoch)
        return tensors(masked._asdict() | {"segments": segments, "apart": apart})
