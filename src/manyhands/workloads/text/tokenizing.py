"""Documents into files of tokens, by several processes, within a memory limit, and continued after a crash.

    files ─▶ pieces ─▶ chunks ═▶ processes ═▶ tokens in the order of the text ─▶ shard-00000.tokens …

This process reads and writes; the others encode. Where a shard begins follows from the text alone, so a finished one is
kept by who continues, once its hash is proven, and the result has the same bytes for any number of processes.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from manyhands.data.store.atomic import make_output, reason, require_empty, write_atomically
from manyhands.errors import DataError, UserError, check_count, format_bytes, num_of
from manyhands.native.closeable import Closeable
from manyhands.workloads.text.documents import PIECE_BYTES, Documents, TextPiece
from manyhands.workloads.text.token_files import (
    INDEX_FILE,
    ShardHeader,
    ShardWriter,
    proven_shard,
    read_tokens_index,
    shard_name,
    write_tokens_index,
)
from manyhands.workloads.text.token_worker import EncodedPieces, EncodingProcess
from manyhands.workloads.text.tokenizer import (
    TOKENIZER_FILE,
    TRAINED_KINDS,
    TextTokenizer,
    read_tokenizer,
    train_tokenizer,
)

SHARD_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 18
_MOST_DOCUMENTS = 1 << 22  # of a shard: their starts are in memory until it is written
_MOST_PIECES = 1 << 14  # of a chunk
_OWN_BYTES, _PROCESS_BYTES = 200 << 20, 150 << 20  # measured: 100 MB each, with room
_OF_DEFINITION = 32
"""Bytes of memory for each byte of a tokenizer's definition: 16 of word pieces and 26 of BPE, measured."""


@dataclass(frozen=True, kw_only=True)
class TokenizerChoice:
    """Which tokenizer: one from a file, or one trained on the text."""

    path: Path | None = None
    train: str | None = None
    vocabulary: int = 8192
    train_bytes: int = 1 << 30
    """Text to train on, from the beginning."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.train is None):
            kinds = ", ".join(TRAINED_KINDS)
            raise UserError(f"give --tokenizer FILE, or --train with one of {kinds}, and not both")

    def make(self, documents: Documents) -> TextTokenizer:
        if self.path is not None:
            return read_tokenizer(self.path)
        return train_tokenizer(str(self.train), _training_texts(documents, self.train_bytes), self.vocabulary)

    def settings(self) -> dict[str, Any]:
        if self.path is not None:
            return {"train": None}
        return {"train": self.train, "vocabulary": self.vocabulary, "train_bytes": self.train_bytes}


class Tokenized(NamedTuple):
    """What was made."""

    tokenizer: TextTokenizer
    shards: tuple[ShardHeader, ...]
    kept: int
    """Shards that were finished before, of which nothing was encoded again."""
    text_bytes: int
    seconds: float
    """Without the tokenizer's training."""

    def summary(self) -> dict[str, Any]:
        return {
            "tokens": sum(shard.tokens for shard in self.shards),
            "documents": sum(shard.documents for shard in self.shards),
            "shards": len(self.shards),
            "kept_shards": self.kept,
            "vocabulary": self.tokenizer.vocabulary_size,
            "tokenizer": self.tokenizer.sha256,
            "text_bytes": self.text_bytes,
            "seconds": self.seconds,
        }


def tokenize(
    documents: Documents,
    choice: TokenizerChoice,
    out: Path | str,
    *,
    workers: int = 2,
    memory_bytes: int = 2 << 30,
    shard_bytes: int = SHARD_BYTES,
    resume: bool = False,
) -> Tokenized:
    """Write the tokens of `documents` to the folder `out`, for `TokenFiles` to read."""
    out = Path(out)
    for name, value in (("workers", workers), ("shard_bytes", shard_bytes)):
        check_count(name, value)
    if not resume:
        require_empty(out)
    _check_memory("", workers, memory_bytes)
    settings = _settings(documents, choice, shard_bytes)
    make_output(out)
    tokenizer = _tokenizer(documents, choice, out, settings, resume=resume)
    _check_memory(tokenizer.json, workers, memory_bytes)
    began = time.perf_counter()
    kept: dict[int, ShardHeader] = {}
    for file in sorted(out.glob("shard-*.tokens")) if resume else ():
        number, header = int(file.stem.partition("-")[2]), proven_shard(file, tokenizer.sha256)
        if header is not None:
            kept[number] = header
    counted = _Counted(documents, may_cut=tokenizer.joins_pieces())
    chunks = _chunks(counted, shard_bytes)
    with _Encoding(tokenizer, workers) as encoding:
        encoded = encoding.in_order(chunk for chunk in chunks if chunk.shard not in kept)
        written = _write_shards(out, tokenizer, encoded)
    if not written and not kept:
        raise DataError(f"{', '.join(map(str, documents.paths))}: there is no text; give a file with some")
    shards = tuple(header for _, header in sorted({**kept, **written}.items()))
    write_tokens_index(out, {**settings, "tokenizer": tokenizer.sha256}, shards)
    seconds = time.perf_counter() - began
    return Tokenized(tokenizer, shards, len(kept), counted.num_bytes, seconds)


def _settings(documents: Documents, choice: TokenizerChoice, shard_bytes: int) -> dict[str, Any]:
    """What decides the content of the folder; who continues has to ask for the same."""
    files = []
    for path in documents.paths:
        try:
            found = os.stat(path)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {reason(error)}") from error
        files.append({"name": path.name, "bytes": found.st_size, "changed_ns": found.st_mtime_ns})
    about = {"files": files, "split": documents.split, "field": documents.field, "shard_bytes": shard_bytes}
    return {"version": 1, **about, **choice.settings()}


def _tokenizer(
    documents: Documents, choice: TokenizerChoice, out: Path, settings: Mapping[str, Any], *, resume: bool
) -> TextTokenizer:
    """The one that the folder was begun with; else the chosen one, which is then stored there."""
    file = out / TOKENIZER_FILE
    if resume and (out / INDEX_FILE).exists():
        begun = read_tokens_index(out)
        for name, value in settings.items():
            if begun.get(name) != value:
                raise UserError(
                    f"--resume: {out} was begun with {name} {begun.get(name)!r}, and now it is {value!r}; give the "
                    "same, or another --out"
                )
        tokenizer = read_tokenizer(file)
        if tokenizer.sha256 != begun.get("tokenizer"):
            raise DataError(f"{file} is not the tokenizer that {out} was begun with; choose another --out")
        if choice.path is not None and read_tokenizer(choice.path).sha256 != tokenizer.sha256:
            raise UserError(
                f"--resume: {out} was begun with another tokenizer than {choice.path}; give that one"
            )
        return tokenizer
    tokenizer = choice.make(documents)
    write_atomically(file, [tokenizer.json.encode()])
    write_tokens_index(out, {**settings, "tokenizer": tokenizer.sha256}, None)
    return tokenizer


def _check_memory(definition: str, workers: int, memory_bytes: int) -> None:
    each = _PROCESS_BYTES + _OF_DEFINITION * len(definition)
    needed = _OWN_BYTES + workers * each
    if memory_bytes < needed:
        raise UserError(
            f"memory is {format_bytes(memory_bytes)}, but {num_of(workers, 'worker')} may take "
            f"{format_bytes(needed)}; give more, or fewer workers"
        )


def _training_texts(documents: Documents, most_bytes: int) -> Iterator[str]:
    for piece in documents:
        yield piece.text.decode()
        most_bytes -= len(piece.text)
        if most_bytes <= 0:
            return


class _Counted:
    """Documents, and how many bytes of them came; they may be cut where the tokenizer gives the same tokens then."""

    def __init__(self, documents: Documents, *, may_cut: bool) -> None:
        self._documents, self._may_cut, self.num_bytes = documents, may_cut, 0

    def __iter__(self) -> Iterator[TextPiece]:
        for piece in self._documents:
            if not piece.ends and not self._may_cut:
                raise UserError(
                    "a document is too long for this tokenizer, which gives other tokens where a text is cut; use "
                    f"--split, so that each has at most {format_bytes(PIECE_BYTES)}"
                )
            self.num_bytes += len(piece.text)
            yield piece


class _Chunk(NamedTuple):
    """Pieces that are encoded at once, all of one shard."""

    shard: int
    pieces: list[TextPiece]


def _chunks(pieces: Iterable[TextPiece], shard_bytes: int) -> Iterator[_Chunk]:
    """A shard ends with the document that fills it; one that would fill two is cut."""
    shard, size, documents = 0, 0, 0
    taken: list[TextPiece] = []
    taken_bytes = 0
    for piece in pieces:
        taken.append(piece)
        taken_bytes += len(piece.text)
        documents += piece.ends
        is_full = size + taken_bytes >= shard_bytes or documents >= _MOST_DOCUMENTS
        ends = is_full and (piece.ends or size + taken_bytes >= 2 * shard_bytes)
        if ends or taken_bytes >= _CHUNK_BYTES or len(taken) >= _MOST_PIECES:
            yield _Chunk(shard, taken)
            size, taken, taken_bytes = size + taken_bytes, [], 0
        if ends:
            shard, size, documents = shard + 1, 0, 0
    if taken:
        yield _Chunk(shard, taken)


class _Encoding(Closeable):
    """Processes that encode chunks, each asked by one thread; what they give comes in the order of the chunks."""

    def __init__(self, tokenizer: TextTokenizer, workers: int) -> None:
        self._tokenizer, self._workers = tokenizer, workers
        self._stack = ExitStack()
        self._idle = SimpleQueue[EncodingProcess]()

    def in_order(self, chunks: Iterable[_Chunk]) -> Iterator[tuple[_Chunk, EncodedPieces]]:
        """Two chunks a process are under way at most, whatever the length of the text."""
        threads = self._stack.enter_context(ThreadPoolExecutor(self._workers, "tokenizing"))
        waiting = deque[tuple[_Chunk, Future[EncodedPieces]]]()
        for chunk in chunks:
            if not waiting and self._idle.empty():  # nothing is started where nothing is left to do
                for number in range(self._workers):
                    self._idle.put(self._stack.enter_context(EncodingProcess(number, self._tokenizer)))
            waiting.append((chunk, threads.submit(self._encode, chunk)))
            if len(waiting) > 2 * self._workers:
                first, future = waiting.popleft()
                yield first, future.result()
        while waiting:
            first, future = waiting.popleft()
            yield first, future.result()

    def close(self) -> None:
        self._stack.close()

    def _encode(self, chunk: _Chunk) -> EncodedPieces:
        process = self._idle.get()
        try:
            return process.encode(chunk.pieces)
        finally:
            self._idle.put(process)


def _write_shards(
    out: Path, tokenizer: TextTokenizer, encoded: Iterable[tuple[_Chunk, EncodedPieces]]
) -> dict[int, ShardHeader]:
    written: dict[int, ShardHeader] = {}
    for number, chunks in groupby(encoded, lambda one: one[0].shard):
        with ShardWriter(out / shard_name(number), tokenizer.dtype, tokenizer.sha256) as writer:
            begins = True  # a document that was cut begins again
            for chunk, (counts, tokens) in chunks:
                starts, at = [], 0
                for piece, count in zip(chunk.pieces, counts.tolist(), strict=True):
                    begins |= piece.begins
                    if (
                        begins and count
                    ):  # a document starts with its first token, which may be in a later piece
                        starts.append(at)
                        begins = False
                    at += count
                writer.add(tokens, starts)
            written[number] = writer.finish()
    return written
