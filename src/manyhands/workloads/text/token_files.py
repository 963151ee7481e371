"""Files of tokens, mapped into memory: a folder of shards, the tokenizer that made them, and what they hold.

    offset  0   MHTOKENS     magic
    offset  8   uint32       version, 1
    offset 12   uint32       bytes of a token: 2 (uint16) or 4 (uint32)
    offset 16   uint64       tokens
    offset 24   uint64       documents
    offset 32   32 bytes     SHA-256 of the tokenizer's definition
    offset 64   32 bytes     SHA-256 of what follows
    offset 96   tokens, zeros up to a multiple of 8, and the start of each document (uint64)

All numbers are little-endian. A header is written last, and a file gets its name when it is whole. The length of a file
follows from its header, so one that is cut off is noticed without being read.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from manyhands.data.store.atomic import (
    WriteFailed,
    read_object,
    reason,
    sync_directory,
    write_all,
    write_json,
)
from manyhands.errors import DataError, UserError, num_of
from manyhands.native.closeable import Closeable
from manyhands.workloads.text.tokenizer import TOKENIZER_FILE, TextTokenizer, tokenizer_of_json

INDEX_FILE = "tokens.json"
_MAGIC, _VERSION = b"MHTOKENS", 1
_HEADER = struct.Struct("<8sIIQQ32s32s")
_DTYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
_HASHED_BYTES = 1 << 24
_MOST = 1 << 48  # tokens of a file: a larger number is damage


class ShardHeader(NamedTuple):
    """What a file of tokens says of itself."""

    dtype: np.dtype[Any]
    tokens: int
    documents: int
    tokenizer: str
    body: str  # the hash of what follows the header

    @property
    def starts_offset(self) -> int:
        return _HEADER.size + -(-self.tokens * self.dtype.itemsize // 8) * 8

    @property
    def num_bytes(self) -> int:
        return self.starts_offset + 8 * self.documents

    def to_bytes(self) -> bytes:
        counts = self.dtype.itemsize, self.tokens, self.documents
        return _HEADER.pack(
            _MAGIC, _VERSION, *counts, bytes.fromhex(self.tokenizer), bytes.fromhex(self.body)
        )


def shard_name(number: int) -> str:
    return f"shard-{number:05}.tokens"


def read_header(path: Path, tokenizer: str | None = None) -> ShardHeader:
    """The header of a whole file of the tokenizer with this hash; DataError says what it is instead."""
    try:
        with path.open("rb") as file:
            raw, size = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path} cannot be read: {reason(error)}") from error
    if raw[:8] != _MAGIC:
        raise DataError(f"{path} is not a file of tokens: it does not begin with {_MAGIC.decode()}")
    if len(raw) < _HEADER.size:
        raise DataError(f"{path} is cut off: it has {size} bytes, fewer than its header; tokenize again")
    _, version, itemsize, tokens, documents, made_by, body = _HEADER.unpack(raw)
    if version != _VERSION:
        raise DataError(f"{path} has version {version} of files of tokens; this manyhands reads {_VERSION}")
    if itemsize not in _DTYPES or tokens > _MOST or documents > tokens:
        about = f"{tokens} tokens of {itemsize} bytes in {documents} documents"
        raise DataError(f"{path} is damaged: its header announces {about}; tokenize again")
    header = ShardHeader(_DTYPES[itemsize], tokens, documents, made_by.hex(), body.hex())
    if size != header.num_bytes:
        what = "is cut off" if size < header.num_bytes else "continues after its end"
        raise DataError(f"{path} {what}: it has {size} bytes instead of {header.num_bytes}; tokenize again")
    if tokenizer is not None and header.tokenizer != tokenizer:
        other = f"{header.tokenizer[:12]}…, not {tokenizer[:12]}…"
        raise DataError(f"{path} was made by another tokenizer ({other}); tokenize the text with this one")
    return header


@dataclass(frozen=True, slots=True, eq=False)
class TokenShard:
    """One file: its tokens and where its documents start, both mapped into memory."""

    header: ShardHeader
    tokens: NDArray[Any]
    starts: NDArray[np.int64]


def open_shard(path: Path, tokenizer: str | None = None) -> TokenShard:
    header = read_header(path, tokenizer)
    body = np.memmap(path, np.uint8, mode="r")
    stop = _HEADER.size + header.tokens * header.dtype.itemsize
    starts = body[header.starts_offset :].view("<i8")
    # Every token is in a document, and every document has one.
    bounds = np.concatenate(([-1], starts, [header.tokens]))
    if starts[:1].tolist() != [0][: header.tokens] or not (bounds[:-1] < bounds[1:]).all():
        raise DataError(f"{path} is damaged: its documents do not start one after another; tokenize again")
    return TokenShard(header=header, tokens=body[_HEADER.size : stop].view(header.dtype), starts=starts)


def proven_shard(path: Path, tokenizer: str) -> ShardHeader | None:
    """The header of a finished file, whose hash is that of its content; None where it is none of this tokenizer."""
    try:
        header = read_header(path, tokenizer)
        hasher = hashlib.sha256()
        with path.open("rb") as file:
            file.seek(_HEADER.size)
            while piece := file.read(_HASHED_BYTES):
                hasher.update(piece)
    except (DataError, OSError):
        return None
    return header if hasher.hexdigest() == header.body else None


class ShardWriter(Closeable):
    """Writes one file, which gets its name at `finish`; closed before that, it leaves nothing."""

    def __init__(self, path: Path, dtype: np.dtype[Any], tokenizer: str) -> None:
        self.path, self.num_tokens = path, 0
        self._dtype, self._tokenizer = dtype, tokenizer
        self._starts, self._hasher = array("Q"), hashlib.sha256()
        self._temporary = path.with_name(f".{path.name}.writing")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._file = os.open(self._temporary, flags, 0o666)
        os.lseek(self._file, _HEADER.size, os.SEEK_SET)

    def add(self, tokens: NDArray[Any], starts: Sequence[int]) -> None:
        """The next tokens, and which of them begin a document."""
        self._starts.extend(start + self.num_tokens for start in starts)
        self._put(tokens.astype(self._dtype, copy=False).tobytes())
        self.num_tokens += len(tokens)

    def finish(self) -> ShardHeader:
        try:
            self._put(bytes(-self.num_tokens * self._dtype.itemsize % 8))
            self._put(np.frombuffer(self._starts, np.uint64).astype("<u8").tobytes())
            hashes = self._tokenizer, self._hasher.hexdigest()
            header = ShardHeader(self._dtype, self.num_tokens, len(self._starts), *hashes)
            os.lseek(self._file, 0, os.SEEK_SET)
            write_all(self._file, header.to_bytes())
            os.fsync(self._file)
            self._temporary.replace(self.path)
            sync_directory(self.path.parent)
        except OSError as error:
            raise WriteFailed(f"{self.path} could not be written: {reason(error)}") from error
        self.close()
        return header

    def close(self) -> None:
        if self._file >= 0:
            file, self._file = self._file, -1
            os.close(file)
            self._temporary.unlink(missing_ok=True)

    def _put(self, content: bytes) -> None:
        self._hasher.update(content)
        try:
            write_all(self._file, content)
        except OSError as error:
            raise WriteFailed(f"{self.path} could not be written: {reason(error)}") from error


def write_tokens_index(folder: Path, settings: dict[str, Any], shards: Sequence[ShardHeader] | None) -> None:
    """What a folder is made from; and, once it is finished, what it holds."""
    found = settings if shards is None else settings | {"shards": [_listed(one) for one in shards]}
    write_json(folder / INDEX_FILE, found)


def read_tokens_index(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / INDEX_FILE)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{folder} holds no tokens: there is no {INDEX_FILE}; see `manyhands tokenize`"
        ) from None


def _listed(header: ShardHeader) -> dict[str, Any]:
    return {"tokens": header.tokens, "documents": header.documents, "sha256": header.body}


class TokenFiles:
    """A finished folder of tokens, its shards opened when they are first read; it is sent to workers as its path."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        index = read_tokens_index(self.folder)
        if "shards" not in index:
            raise DataError(
                f"{self.folder} is not finished; continue it by `manyhands tokenize` with --resume"
            )
        try:
            self._sha256 = str(index["tokenizer"])
            self._listed = [(one["tokens"], one["documents"], one["sha256"]) for one in index["shards"]]
        except (KeyError, TypeError):
            raise DataError(f"{self.folder / INDEX_FILE} is damaged; tokenize again") from None
        self._shards: dict[int, TokenShard] = {}
        for number in range(len(self._listed)):  # what is wrong is said now, not in the middle of a run
            header = read_header(self._path(number), self._sha256)
            if (header.tokens, header.documents, header.body) != self._listed[number]:
                raise DataError(
                    f"{self._path(number)} is not the file that {INDEX_FILE} lists; tokenize again"
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenFiles, (self.folder.absolute(),)

    def __repr__(self) -> str:
        return f"TokenFiles({str(self.folder)!r}): {num_of(self.num_tokens, 'token')}"

    @property
    def num_tokens(self) -> int:
        return sum(tokens for tokens, _, _ in self._listed)

    @property
    def num_documents(self) -> int:
        return sum(documents for _, documents, _ in self._listed)

    @property
    def shard_tokens(self) -> list[int]:
        """How many tokens each shard holds."""
        return [tokens for tokens, _, _ in self._listed]

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        path = self.folder / TOKENIZER_FILE
        try:
            found = tokenizer_of_json(path.read_text("utf-8"), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error
        if found.sha256 != self._sha256:
            raise DataError(f"{path} is not the tokenizer of {self.folder}; tokenize the text again")
        return found

    def shard(self, number: int) -> TokenShard:
        if number not in self._shards:
            self._shards[number] = open_shard(self._path(number), self._sha256)
        return self._shards[number]

    def document(self, number: int) -> NDArray[Any]:
        """The tokens of one document."""
        if not 0 <= number < self.num_documents:
            raise UserError(f"document is {number}; it must be in 0..{self.num_documents - 1}")
        for at, (_, documents, _) in enumerate(self._listed):
            if number < documents:
                shard = self.shard(at)
                stop = int(shard.starts[number + 1]) if number + 1 < documents else shard.header.tokens
                return shard.tokens[int(shard.starts[number]) : stop]
            number -= documents
        raise AssertionError("unreachable")

    def _path(self, number: int) -> Path:
        return self.folder / shard_name(number)
