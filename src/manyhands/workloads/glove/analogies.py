"""Analogies such as Athens : Greece = Oslo : ?, as Mikolov et al. (2013) ask them, and how many come out right.

A file of questions has lines of four words, and lines `: name` that begin a section. The answer is the word nearest
in cosine to b − a + c, of unit vectors, the three given words excluded. Sections whose name begins with "gram" are
syntactic, the others semantic. A question with a word that has no vector is left out and counted as such.

And how well cosines order pairs of words as people do: Spearman's rank correlation on files such as WordSim-353. Such a
file has lines `word TAB word TAB score`; lines that begin with # are comments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from manyhands.data.store.atomic import reason
from manyhands.errors import DataError
from manyhands.observe.draw.bars import Bars
from manyhands.workloads.glove.vector_files import Vectors

_PRODUCTS = 1 << 24  # cosines computed at once: 64 MiB


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A named list of questions (a, b, c, d): a is to b as c is to d."""

    name: str
    questions: tuple[tuple[str, str, str, str], ...]

    @property
    def semantic(self) -> bool:  # about the world, not about grammar
        return not self.name.startswith("gram")


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionScore:
    """How a section went: of `asked` questions `known` had vectors for all their words, and `right` were answered."""

    name: str
    semantic: bool
    asked: int
    known: int
    right: int

    @property
    def accuracy(self) -> float:
        """The share of the known questions that came out right; 0 where none is known."""
        return self.right / self.known if self.known else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalogyScore:
    """All sections, and their sums."""

    sections: tuple[SectionScore, ...]

    @property
    def total(self) -> SectionScore:
        return self._sum("total", (False, True))

    @property
    def semantic(self) -> SectionScore:
        return self._sum("semantic", (True,))

    @property
    def syntactic(self) -> SectionScore:
        return self._sum("syntactic", (False,))

    def _sum(self, name: str, semantic: tuple[bool, ...]) -> SectionScore:
        sections = [one for one in self.sections if one.semantic in semantic]
        counts = {key: sum(getattr(one, key) for one in sections) for key in ("asked", "known", "right")}
        return SectionScore(name=name, semantic=semantic == (True,), **counts)


def _lines(what: str, path: Path | str) -> list[bytes]:
    try:
        return Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"{what} {path} cannot be read: {reason(error)}") from error


def read_questions(path: Path | str) -> list[Section]:
    """The sections of a file; a DataError names the line that is no question."""
    sections: list[tuple[str, list[tuple[str, str, str, str]]]] = []
    for number, line in enumerate(_lines("questions", path), 1):
        try:
            fields = line.decode().split()
        except UnicodeDecodeError:
            raise DataError(f"{path}, line {number}: not UTF-8 text") from None
        if not fields:
            continue
        if fields[0].startswith(":"):
            sections.append((" ".join(fields).removeprefix(":").strip(), []))
            continue
        if len(fields) != 4:
            raise DataError(f"{path}, line {number}: a question has 4 words, not {len(fields)}")
        sections = sections or [("questions", [])]
        a, b, c, d = fields
        sections[-1][1].append((a, b, c, d))
    if not any(questions for _, questions in sections):
        raise DataError(f"{path} holds no questions")
    return [Section(name=name, questions=tuple(questions)) for name, questions in sections]


def ask_analogies(vectors: Vectors, sections: Sequence[Section], bars: Bars | None = None) -> AnalogyScore:
    """Answer every question whose words all have vectors; words are looked up as they are, else in lower case."""
    total, unit = sum(len(section.questions) for section in sections), vectors.unit
    step = max(1, _PRODUCTS // max(1, len(unit)))
    scores: list[SectionScore] = []
    with (bars or Bars()).phase("analogies", total, "questions") as phase:
        for section in sections:
            rows = [[vectors.find(word) for word in question] for question in section.questions]
            known = np.array([row for row in rows if None not in row], np.int64).reshape(-1, 4)
            counts = {"asked": len(rows), "known": len(known), "right": 0}
            for start in range(0, len(known), step):
                a, b, c, d = known[start : start + step].T
                # The length of the target changes no order, so it is left as it is.
                cosines = (unit[b] - unit[a] + unit[c]) @ unit.T
                for given in (a, b, c):
                    cosines[np.arange(len(d)), given] = -np.inf
                counts["right"] += int(np.count_nonzero(cosines.argmax(axis=1) == d))
            scores.append(SectionScore(name=section.name, semantic=section.semantic, **counts))
            phase.advance(len(rows))
    return AnalogyScore(sections=tuple(scores))


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
    pairs: list[Pair] = []
    for number, line in enumerate(_lines("pairs", path), 1):
        if not line.strip() or line.startswith(b"#"):
            continue
        try:
            one, other, score = line.decode().strip().split("\t")[:3]
            pairs.append(Pair(one=one.strip(), other=other.strip(), score=float(score)))
        except ValueError:  # too few fields, no number, no UTF-8
            wanted = "two words and a number, separated by tabs"
            raise DataError(f"{path}, line {number}: {line[:60]!r} is not {wanted}") from None
    if not pairs:
        raise DataError(f"{path} holds no pairs of words")
    return pairs


def compare_similarity(vectors: Vectors, pairs: list[Pair]) -> SimilarityScore:
    """Spearman's correlation of cosine and score; words are looked up as they are, else in lower case."""
    found = [(vectors.find(pair.one), vectors.find(pair.other), pair.score) for pair in pairs]
    known = [(one, other, score) for one, other, score in found if one is not None and other is not None]
    ones, others, scores = np.array(known, np.float64).reshape(-1, 3).T
    units = vectors.unit[ones.astype(np.int64)], vectors.unit[others.astype(np.int64)]
    correlation = spearman(np.einsum("ij,ij->i", *units), scores)
    return SimilarityScore(correlation=correlation, asked=len(pairs), known=len(known))


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
