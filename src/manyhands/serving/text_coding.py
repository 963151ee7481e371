"""How a trained model of text writes text as tokens: byte by byte, or by the tokenizer that its run keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from manyhands.data.file_reader import VOCABULARY, decode, encode
from manyhands.errors import UserError
from manyhands.workloads.exporting import kept_file, recorded_options
from manyhands.workloads.language.bert import BEGIN, END, FIRST_BYTE, MASK
from manyhands.workloads.text.tokenizer import TOKENIZER_FILE, TextTokenizer, tokenizer_of_json


@dataclass(frozen=True, kw_only=True, slots=True)
class TextCoding:
    """Text to tokens and back. A model may have scores for more tokens, which pad its vocabulary: none is written."""

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    vocabulary: int
    unit: str = "byte"
    end_of_text: int | None = None
    """A token that ends a text that a model writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskedCoding(TextCoding):
    """The same where tokens are filled in, in rows that have a first and a last token of their own."""

    begin: int
    end: int
    mask: int
    never: tuple[int, ...]
    """Tokens that are never filled in."""

    def row(self, text: str) -> list[int]:
        """The text's tokens, `mask` for each [MASK] in it."""
        known = [self.encode(part) for part in text.split("[MASK]")]
        return [self.begin, *known[0], *(one for part in known[1:] for one in (self.mask, *part)), self.end]


def _bytes_to_text(tokens: Sequence[int]) -> str:
    return decode(np.asarray(tokens, np.uint8))


BYTES = TextCoding(encode=lambda text: encode(text).tolist(), decode=_bytes_to_text, vocabulary=VOCABULARY)
MASKED_BYTES = MaskedCoding(
    encode=lambda text: [FIRST_BYTE + byte for byte in encode(text).tolist()],
    decode=lambda tokens: _bytes_to_text([token - FIRST_BYTE for token in tokens]),
    vocabulary=FIRST_BYTE + VOCABULARY,
    begin=BEGIN,
    end=END,
    mask=MASK,
    never=tuple(range(FIRST_BYTE)),
)


def coding_of(path: Path) -> TextCoding:
    """That of a run, or of a file of `manyhands export`."""
    tokenizer = tokenizer_of(path)
    return BYTES if tokenizer is None else coding_by(tokenizer)


def coding_by(tokenizer: TextTokenizer) -> TextCoding:
    return TextCoding(
        encode=lambda text: tokenizer.encode([text])[0],
        decode=tokenizer.decode,
        vocabulary=tokenizer.vocabulary_size,
        unit="token",
        end_of_text=tokenizer.end_id,
    )


def masked_coding_of(path: Path) -> MaskedCoding:
    """The same of a model that fills in what is masked."""
    tokenizer = tokenizer_of(path)
    if tokenizer is None:
        return MASKED_BYTES
    return MaskedCoding(
        encode=lambda text: tokenizer.encode([text])[0],
        decode=tokenizer.decode,
        vocabulary=tokenizer.vocabulary_size,
        unit="token",
        begin=tokenizer.require_id("[CLS]"),
        end=tokenizer.require_id("[SEP]"),
        mask=tokenizer.require_id("[MASK]"),
        never=(*tokenizer.special_ids, tokenizer.require_id("[UNK]")),
    )


def tokenizer_of(path: Path) -> TextTokenizer | None:
    """That which a run, or a file of `manyhands export`, keeps; None where its texts are read byte by byte."""
    text = kept_file(path, TOKENIZER_FILE)
    if text is not None:
        return tokenizer_of_json(text, f"{path}: {TOKENIZER_FILE}")
    options = recorded_options(path)
    made_of = options.get("tokenizer" if options.get("task") == "classification" else "data")
    if made_of is not None:
        raise UserError(
            f"{path} has lost its {TOKENIZER_FILE}; copy it there from where it was trained: {made_of}"
        )
    return None
