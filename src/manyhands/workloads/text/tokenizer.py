"""Byte-level BPE and WordPiece by the `tokenizers` library: trained on a text, or read from a file.

Byte-level BPE is that of GPT-2 (Radford et al. 2019), whose `<|endoftext|>` ends each document. WordPiece is that of
BERT (Devlin et al. 2018), in which `##` marks a piece that continues a word. What looks like a special token within a
text is text: nobody who writes a document can end it, or mask a part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.data.file_reader import read_text
from manyhands.errors import DataError, UserError, first_line, printable

TOKENIZER_FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
BERT_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
TRAINED_KINDS = ("bpe", "wordpiece")
_LEAST = {"bpe": 257, "wordpiece": 32}  # 256 bytes and the end; special tokens and a small alphabet
_LIMIT_BYTES = 1 << 28
_CONTINUES = "##"
_PROBE = ("One two,", " three", " (four) é", " 5! six")


@dataclass(frozen=True, slots=True, eq=False)
class TextTokenizer:
    """A tokenizer and what the rest of the text workload asks about it; `library` is the `tokenizers.Tokenizer`."""

    library: Any
    json: str
    """Its definition, as `tokenizer.json` holds it."""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.json.encode()).hexdigest()

    @property
    def vocabulary_size(self) -> int:
        """One more than the largest id."""
        return 1 + int(max(self.library.get_vocab().values()))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest that holds every id: a larger vocabulary would wrap silently in 16 bits."""
        return np.dtype("<u2" if self.vocabulary_size <= 1 << 16 else "<u4")

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of tokens that no text has: never a target, and never drawn as a replacement.

        What stands for an unknown word, and the end of a document, are in texts.
        """
        added = self.library.get_added_tokens_decoder()
        named = {self.id_of(token) for token in BERT_TOKENS}
        found = named.union(int(at) for at, one in added.items() if one.special)
        return tuple(sorted(one for one in found - {self.end_id, self.unknown_id} if one is not None))

    @property
    def unknown_id(self) -> int | None:
        """The token that stands for what the vocabulary does not have, where there is one."""
        token = getattr(self.library.model, "unk_token", None)
        return None if token is None else self.id_of(token)

    @property
    def end_id(self) -> int | None:
        """The token that ends each document, where the vocabulary has one."""
        return self.id_of(END_OF_TEXT)

    def id_of(self, token: str) -> int | None:
        found: int | None = self.library.token_to_id(token)
        return found

    def require_id(self, token: str) -> int:
        found = self.id_of(token)
        if found is None:
            raise UserError(
                f"the tokenizer has no token {token}; give one that has, such as BERT's vocab.txt"
            )
        return found

    def continues_word(self) -> NDArray[np.bool_]:
        """For each id, whether its token continues the word before it; UserError where tokens do not say so."""
        if type(self.library.model).__name__ != "WordPiece":
            raise UserError(
                "whole words need a WordPiece tokenizer, whose pieces say where a word continues; leave them out"
            )
        found = np.zeros(self.vocabulary_size, np.bool_)
        for token, at in self.library.get_vocab().items():
            found[at] = token.startswith(_CONTINUES) and token != _CONTINUES
        return found

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""
        return [one.ids for one in self.library.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Iterable[int]) -> str:
        text: str = self.library.decode([int(one) for one in ids], skip_special_tokens=False)
        return text

    def as_pretrained(self, most_tokens: int) -> dict[str, str]:
        """The files, by name, that `AutoTokenizer.from_pretrained` of transformers reads; rows of BERT's have ends."""
        library = _library().Tokenizer.from_str(self.json)
        ids = {token: self.id_of(token) for token in (END_OF_TEXT, *BERT_TOKENS)}
        named = {f"{token[1:-1].lower()}_token": token for token in BERT_TOKENS if ids[token] is not None}
        if ids[END_OF_TEXT] is not None:
            named |= dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT)
        first, last = (("[CLS]", ids["[CLS]"]), ("[SEP]", ids["[SEP]"]))
        if library.post_processor is None and None not in (first[1], last[1]):
            library.post_processor = _library().processors.BertProcessing(last, first)
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": most_tokens, **named}
        return {TOKENIZER_FILE: library.to_str(), "tokenizer_config.json": json.dumps(about, indent=2) + "\n"}

    def joins_pieces(self) -> bool:
        """Whether a text that is cut before a space between two words has the tokens of the whole text."""
        whole, *pieces = self.encode(["".join(_PROBE), *_PROBE])
        return whole == [token for piece in pieces for token in piece]


def tokenizer_of_json(text: str, name: str = "the tokenizer") -> TextTokenizer:
    """From the content of a `tokenizer.json`; padding and truncation, which such files may ask for, are left out."""
    with _damage_named(name):
        library = _library().Tokenizer.from_str(text)
    return _wrapped(library)


def read_tokenizer(path: Path | str) -> TextTokenizer:
    """From a `tokenizer.json`, or from a list of word pieces, one a line, such as BERT's vocab.txt."""
    text = read_text(path, limit_bytes=_LIMIT_BYTES)
    if Path(path).suffix == ".json":
        return tokenizer_of_json(text, str(path))
    tokens = text.removesuffix("\n").split("\n")
    tokens = [token.removesuffix("\r") for token in tokens]
    first: dict[str, int] = {}
    for at, token in enumerate(tokens):
        if not token or first.setdefault(token, at) != at:
            what = f"repeats {printable(token)!r} of line {first[token] + 1}" if token else "is empty"
            raise DataError(
                f"{path}, line {at + 1} {what}; a vocabulary has each word piece once, one a line"
            )
    for token in BERT_TOKENS:
        if token not in first:
            raise DataError(
                f"{path} has no line {token}; a vocabulary of word pieces has {', '.join(BERT_TOKENS)}"
            )
    # Uncased vocabularies have neither capitals nor accents.
    is_cased = any(token != token.lower() for token in tokens if token[0] != "[")
    return _wrapped(_word_pieces(first, lowercase=not is_cased))


def train_tokenizer(kind: str, texts: Iterable[str], vocabulary: int) -> TextTokenizer:
    """Learn at most `vocabulary` tokens from `texts`: `bpe` of bytes, or `wordpiece` in lower case."""
    least = _LEAST.get(kind)
    if least is None:
        raise UserError(f"train is {kind!r}; allowed: {', '.join(TRAINED_KINDS)}")
    if vocabulary < least:
        raise UserError(f"vocabulary is {vocabulary}; {kind} needs at least {least}")
    tokenizers = _library()
    settings = {"vocab_size": vocabulary, "show_progress": False}
    if kind == "bpe":
        pre = tokenizers.pre_tokenizers.ByteLevel
        library = tokenizers.Tokenizer(tokenizers.models.BPE())
        library.pre_tokenizer = pre(add_prefix_space=False)
        library.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            special_tokens=[END_OF_TEXT], initial_alphabet=sorted(pre.alphabet()), **settings
        )
    else:
        library = _word_pieces({}, lowercase=True)
        trainer = tokenizers.trainers.WordPieceTrainer(
            # each letter may begin a word or continue one
            special_tokens=list(BERT_TOKENS),
            limit_alphabet=min(1000, (vocabulary - len(BERT_TOKENS)) // 2),
            **settings,
        )
    library.train_from_iterator(texts, trainer)
    return _wrapped(library)


def _word_pieces(vocabulary: dict[str, int], *, lowercase: bool) -> Any:
    tokenizers = _library()
    library = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    library.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    library.decoder = tokenizers.decoders.WordPiece()
    if vocabulary:
        library.add_special_tokens(list(BERT_TOKENS))
    return library


def _wrapped(library: Any) -> TextTokenizer:
    library.no_padding()
    library.no_truncation()
    if not library.get_vocab_size():
        raise DataError("the tokenizer has no token; give one with a vocabulary")
    library.encode_special_tokens = True
    return TextTokenizer(library, library.to_str())


@contextmanager
def _damage_named(name: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:  # the library's own panics are no Exception
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            said = printable(first_line(error), 200)
            raise DataError(f"{name} is not a tokenizer that `tokenizers` can read: {said}") from error
        raise


def _library() -> Any:
    try:
        import tokenizers
        import tokenizers.trainers
    except ImportError:
        raise UserError(
            "tokens of text need the package tokenizers, which is not installed: pip install 'manyhands[text]'"
        ) from None
    return tokenizers
