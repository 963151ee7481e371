"""Windows over files of tokens, as the data of a task: rows of one length, without padding.

    shard      the cat sat . ⏎ | a dog ran ⏎ | it was late and …
    windows    [the cat sat . ⏎]
                           [⏎ a dog ran ⏎]           length 4: each row has the token that follows, too
                                      [⏎ it was late and]

Documents follow one another, and a row holds what falls into it. Either attention reaches over their ends, or it stays
within each: then a batch has the number of each token's document in its row, and its position in it. A row never
reaches over the end of a shard; what is left there is shorter than a row. Which rows a batch has is decided by the
run's plan: the same for any strategy and number of workers, and after a resume. A batch copies its own rows alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from manyhands.data.batches import BatchedDataset
from manyhands.errors import UserError, check_count, num_of
from manyhands.workloads.text.masking import IGNORED, Masking
from manyhands.workloads.text.token_files import TokenFiles


class _Rows(NamedTuple):
    """Rows of tokens, and where they lie: each token's document in the row, and its position in it."""

    tokens: NDArray[np.int64]
    documents: NDArray[np.int64] | None
    positions: NDArray[np.int64] | None


class TokenRows:
    """Rows of `size` consecutive tokens, one every `step`."""

    def __init__(self, files: TokenFiles, size: int, step: int, *, within: bool = False) -> None:
        self._files, self._size, self._step, self._within = files, size, step, within
        counts = [max(0, (tokens - size) // step + 1) for tokens in files.shard_tokens]
        self._ends = np.cumsum(counts)
        if not sum(counts):
            longest = max(files.shard_tokens, default=0)
            raise UserError(
                f"{files.folder} has no row of {num_of(size, 'token')}: its longest file has {longest}; give a shorter "
                "length or more text"
            )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def ends_within(self) -> NDArray[np.int64]:
        """How many documents begin in each row, after its first token."""
        found, before = [np.zeros(0, np.int64)], 0
        for number, end in enumerate(self._ends):
            begins = np.arange(end - before) * self._step
            starts = np.unique(
                self._files.shard(number).starts
            )  # a document without tokens begins where the next does
            upto = (np.searchsorted(starts, begins + by, side="right") for by in (self._size - 1, 0))
            found.append(np.subtract(*upto))
            before = end
        return np.concatenate(found)

    def rows(self, indices: NDArray[np.int64]) -> _Rows:
        indices = np.asarray(indices)
        if indices.size and not 0 <= indices.min() <= indices.max() < len(self):
            raise IndexError(f"rows {indices.min()} to {indices.max()} are asked for; there are {len(self)}")
        numbers = np.searchsorted(self._ends, indices, side="right")
        tokens = np.empty((len(indices), self._size), np.int64)
        documents, positions = (np.empty_like(tokens) if self._within else None for _ in range(2))
        for number in np.unique(numbers):
            mine, shard = numbers == number, self._files.shard(int(number))
            before = self._ends[number - 1] if number else 0
            begins = (indices[mine] - before)[:, None] * self._step
            at = begins + np.arange(self._size)
            tokens[mine] = shard.tokens[at]
            if documents is not None and positions is not None:
                found = np.searchsorted(shard.starts, at, side="right") - 1
                documents[mine] = found - found[:, :1]
                positions[mine] = at - np.maximum(shard.starts[found], begins)
        return _Rows(tokens, documents, positions)


class TokenWindows(BatchedDataset):
    """Rows of `length` tokens and the one that follows them; neighbours share one token, so each is predicted once.

    A batch is a tensor (rows, length + 1) of int64. With `within_documents` it is a dict of three such tensors:
    `tokens`, `documents` and `positions`; see `next_tokens` and `document_mask`. A row then weighs `num_targets` in a
    mean over tokens.
    """

    def __init__(self, files: TokenFiles, length: int, *, within_documents: bool = False) -> None:
        check_count("length", length)
        self._length, self._windows = length, TokenRows(files, length + 1, length, within=within_documents)

    def __len__(self) -> int:
        return len(self._windows)

    @property
    def num_targets(self) -> NDArray[np.int64]:
        """Of each row, within documents: a document's first token is predicted by nothing."""
        return self._length - self._windows.ends_within()

    def batch(self, indices: NDArray[np.int64], epoch: int) -> Tensor | dict[str, Tensor]:
        del epoch
        rows = self._windows.rows(indices)
        if rows.documents is None:
            return torch.from_numpy(rows.tokens)
        return tensors(rows._asdict())


class MaskedWindows(BatchedDataset):
    """Rows of `length`: [CLS], consecutive tokens, [SEP]; masked anew in each epoch.

    A batch is a dict of tensors of int64: `tokens` (rows, length), the `places` of the targets in each row, the
    `labels` there.
    """

    def __init__(self, files: TokenFiles, length: int, masking: Masking | None = None) -> None:
        if length < 3:
            raise UserError(f"length is {length}; it must be at least 3, for [CLS], a token and [SEP]")
        tokenizer = files.tokenizer
        self._masking = masking or Masking.of(tokenizer)
        self._first, self._last = tokenizer.require_id("[CLS]"), tokenizer.require_id("[SEP]")
        self._windows = TokenRows(files, length - 2, length - 2)

    def __len__(self) -> int:
        return len(self._windows)

    def batch(self, indices: NDArray[np.int64], epoch: int) -> dict[str, Tensor]:
        rows = self._windows.rows(indices)
        whole = np.pad(rows.tokens, ((0, 0), (1, 1)))
        whole[:, 0], whole[:, -1] = self._first, self._last
        return tensors(self._masking.mask(whole, indices, epoch)._asdict())


class MaskedDocuments(BatchedDataset):
    """Rows of `length`: [CLS], one document or a piece of one, [SEP], [PAD]; masked anew in each epoch.

    A batch is that of `MaskedWindows`, with `seen`, which positions attention may look at: (rows, 1, 1, length).
    `num_targets` of each row are what it weighs in a mean over tokens.
    """

    def __init__(self, files: TokenFiles, length: int, masking: Masking) -> None:
        if length < 3:
            raise UserError(f"length is {length}; it must be at least 3, for [CLS], a token and [SEP]")
        self._files, self._length, self._masking = files, length, masking
        self._special = [files.tokenizer.require_id(token) for token in ("[CLS]", "[SEP]", "[PAD]")]
        begins, counts, self._shard_ends = [], [], []
        for number, tokens in enumerate(files.shard_tokens):
            starts = np.asarray(files.shard(number).starts)
            sizes = np.diff(starts, append=tokens)
            pieces = -(-sizes // (length - 2))
            piece = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            begins.append(np.repeat(starts, pieces) + piece * (length - 2))
            counts.append(np.minimum(np.repeat(sizes, pieces) - piece * (length - 2), length - 2))
            self._shard_ends.append(sum(map(len, begins)))
        self._begins, self._counts = np.concatenate(begins), np.concatenate(counts)
        self.num_targets = masking.targets_of(self._counts)

    def __len__(self) -> int:
        return len(self._begins)

    def batch(self, indices: NDArray[np.int64], epoch: int) -> dict[str, Tensor]:
        first, last, padding = self._special
        rows, counts = np.full((len(indices), self._length), padding), self._counts[indices]
        rows[:, 0] = first
        for row, index, count in zip(rows, indices, counts, strict=True):
            shard = self._files.shard(int(np.searchsorted(self._shard_ends, index, side="right")))
            begin = self._begins[index]
            row[1 : count + 1] = shard.tokens[begin : begin + count]
            row[count + 1] = last
        seen = np.arange(self._length) < counts[:, None] + 2
        masked = self._masking.mask(rows, indices, epoch)
        return tensors(masked._asdict() | {"seen": seen[:, None, None]})


def next_tokens(batch: Mapping[str, Tensor]) -> Tensor:
    """What each of the first `length` tokens predicts: the next, or `IGNORED` where that begins another document."""
    documents = batch["documents"]
    return batch["tokens"][:, 1:].masked_fill(documents[:, 1:] != documents[:, :-1], IGNORED)


def losses_of_rows(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy of each row's targets: what a task's loss gives whose rows weigh as many as they have."""
    each = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    losses: Tensor = each.reshape(targets.shape).sum(1) / (targets != IGNORED).sum(1).clamp(min=1)
    return losses


def document_mask(documents: Tensor) -> Tensor:
    """Where causal attention may look, (rows, 1, time, time) of bool: `attn_mask` of `scaled_dot_product_attention`."""
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


def tensors(arrays: dict[str, NDArray[Any]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.ascontiguousarray(one)) for name, one in arrays.items()}
