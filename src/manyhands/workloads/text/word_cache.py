"""Tokens of words that have been seen before, looked up instead of made again.

Byte-level BPE of GPT-2 and WordPiece never let a token reach over the last white space before a word, so the tokens of
a text are those of its words one after the other, each with the white space before it; and most words of a text are
words that it had before. Whether that holds for a tokenizer is tried on a text that has every case of it. Where it does
not, as with tokenizers that join `!` to a line break, texts are encoded whole.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from manyhands.workloads.text.tokenizer import TextTokenizer

# Several white spaces and the word behind them: the last may belong to the word, or all to what is not ASCII.
_RUNS = re.compile(rb"([ \t\n\v\f\r]{2,}[^ \t\n\v\f\r]*)")
_MOST_WORDS = 1 << 17  # 20 MB
_MOST_WORD_BYTES = 64  # longer ones do not come again
_PROBE = "One two, (three)\nFour é  5 six!\n\nseven\t\t eight...\r\nnine 1234567 it's  \u00a0ten\u3000 «Δ»\n"


class WordCache:
    """Encodes texts; a few megabytes of words are remembered."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[bytes, bytes] = {}
        (whole,) = tokenizer.encode([_PROBE])
        parts = tokenizer.encode([_text_of(unit).decode() for unit in units(_PROBE.encode())])
        self.applies = whole == [token for part in parts for token in part]

    def encode(self, texts: Sequence[bytes]) -> list[bytes]:
        """The tokens of each text, as uint32."""
        if not self.applies:
            return self._made(texts)
        split = [units(text) for text in texts]
        known = self._known
        new = list({word for words in split for word in words}.difference(known))
        known.update(zip(new, self._made([_text_of(word) for word in new]), strict=True))
        found = [b"".join(map(known.__getitem__, words)) for words in split]
        if len(known) > _MOST_WORDS:
            known.clear()
        else:
            for word in new:
                if len(word) > _MOST_WORD_BYTES:
                    del known[word]
        return found

    def _made(self, texts: Sequence[bytes]) -> list[bytes]:
        encoded = self._tokenizer.encode([text.decode() for text in texts])
        return [np.array(ids, "<u4").tobytes() for ids in encoded]


def units(text: bytes) -> list[bytes]:
    """The words of a text, for `_text_of`: without the space before them, or with one behind them if there is none."""
    found = list[bytes]()
    for at, part in enumerate(_RUNS.split(text)):
        if at % 2:
            found.append(part + b" ")
        elif part:
            first, *words = part.replace(b"\n", b" \n").split(b" ")
            if first:
                found.append(first + b" ")
            found += words
    return found


def _text_of(unit: bytes) -> bytes:
    if unit.endswith(b" "):
        return unit[:-1]
    return unit if unit.startswith(b"\n") else b" " + unit
