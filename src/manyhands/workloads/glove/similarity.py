"""How well cosines order pairs of words as people do: Spearman's rank correlation on files such as WordSim-353.

A file has lines `word TAB word TAB score`; lines that begin with # are comments.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyhands.data.store.atomic import reason
from manyhands.errors import DataError
from manyhands.workloads.glove.vector_files import Vectors

__all__ = ["Pair", "SimilarityScore", "compare_similarity", "read_pairs", "spearman"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two words and how similar people find them."""

    one: str
    other: str
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarityScore:
    """The rank correlation over the `known` pairs, of `asked`, whose words have vectors; NaN where it is undefined."""

    correlation: float
    asked: int
    known: int


def read_pairs(path: Path | str) -> list[Pair]:
    """The pairs of a file; a DataError names the line that is none."""
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"pairs {path} cannot be read: {reason(error)}") from error
    pairs: list[Pair] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith(b"#"):
            continue
        try:
            one, other, score = line.decode().strip().split("\t")[:3]
            pairs.append(Pair(one=one.strip(), other=other.strip(), score=float(score)))
        except ValueError:  # too few fields, no number, no UTF-8
            raise DataError(
                f"{path}, line {number}: {line[:60]!r} is not two words and a number with tabs between"
            ) from None
    if not pairs:
        raise DataError(f"{path} holds no pairs of words")
    return pairs


def compare_similarity(vectors: Vectors, pairs: list[Pair]) -> SimilarityScore:
    """Spearman's correlation of cosine and score; words are looked up as they are, else in lower case."""
    rows: list[tuple[int, int]] = []
    scores: list[float] = []
    for pair in pairs:
        one, other = vectors.find(pair.one), vectors.find(pair.other)
        if one is not None and other is not None:
            rows.append((one, other))
            scores.append(pair.score)
    places = np.array(rows, np.int64).reshape(-1, 2)
    cosines = np.einsum("ij,ij->i", vectors.unit[places[:, 0]], vectors.unit[places[:, 1]])
    return SimilarityScore(correlation=spearman(cosines, scores), asked=len(pairs), known=len(rows))


def spearman(one: ArrayLike, other: ArrayLike) -> float:
    """The correlation of ranks, equal values sharing the mean of theirs; NaN for fewer than 2 different values."""
    first, second = _ranks(np.asarray(one)), _ranks(np.asarray(other))
    first -= first.mean() if len(first) else 0.0
    second -= second.mean() if len(second) else 0.0
    length = float(np.sqrt((first @ first) * (second @ second)))
    return float(first @ second) / length if length > 0 else float("nan")


def _ranks(values: NDArray[np.generic]) -> NDArray[np.float64]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    mean: NDArray[np.float64] = ends - (counts - 1) / 2
    return mean[place]
