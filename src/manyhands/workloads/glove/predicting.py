"""Words to words: what trained vectors answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from manyhands.errors import UserError
from manyhands.workloads.exporting import Export, ExportAsked
from manyhands.workloads.glove.vector_files import Vectors
from manyhands.workloads.predictor import Predictor, ReadAs

__all__ = ["VectorsPredictor", "export_vectors", "open_vectors"]

_VECTORS_FILE = "vectors.txt"
_LONGEST = 1000  # what is near to a word that is none is looked for letter by letter


class VectorsPredictor(Predictor[list[str]]):
    """The words nearest to a word, or to a sum of words as `king - man + woman`."""

    takes: ClassVar[str] = "a word, or words with + and - between them"

    def __init__(self, vectors: Vectors) -> None:
        self.vectors = vectors

    def blocks(self, source: str, read_as: ReadAs) -> Iterator[list[str]]:
        self.check_read_as(read_as)
        yield self.inputs([source])

    def inputs(self, values: Sequence[Any]) -> list[str]:
        for number, value in enumerate(values):
            if not isinstance(value, str) or not value.strip():
                raise UserError(f"input {number} is {str(value)[:40]!r}; it must be {self.takes}")
            if len(value) > _LONGEST:
                raise UserError(f"input {number} has {len(value):,} letters; {_LONGEST:,} at most")
            try:
                self.vectors.signed_rows(value)
            except UserError as error:
                raise UserError(f"input {number}: {error}") from error
        return [str(value) for value in values]

    def together(self, parts: Sequence[list[str]]) -> list[str]:
        return [words for part in parts for words in part]

    def answers(self, inputs: list[str]) -> list[Any]:
        return [
            [
                {"word": word, "similarity": round(float(near), 6)}
                for word, near in self.vectors.combine(words)
            ]
            for words in inputs
        ]

    def lines(self, inputs: list[str]) -> Iterator[str]:
        return (
            f"{near['word']} {near['similarity']:.4f}" for answer in self.answers(inputs) for near in answer
        )

    @property
    def example(self) -> Any:
        """The most frequent word that can be asked: no sign, and none that is too long or falls apart."""
        words = self.vectors.words
        return next((word for word in words if self._can_be_asked(word)), words[0])

    def _can_be_asked(self, word: str) -> bool:
        try:
            self.inputs([word])
        except UserError:
            return False
        return True


def open_vectors(path: Path) -> VectorsPredictor:
    return VectorsPredictor(Vectors.load(path / _VECTORS_FILE if path.is_dir() else path))


def export_vectors(asked: ExportAsked) -> Export:
    raise UserError(f"{asked.run} holds word vectors, which are a file already: {asked.own(_VECTORS_FILE)}")
