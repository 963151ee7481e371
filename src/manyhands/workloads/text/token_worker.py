"""A process that turns pieces of text into tokens: `python -m manyhands.workloads.text.token_worker`, stdin a socket.

It is sent the tokenizer, then requests, one at a time; it ends when the other side closes the socket, or dies. A frame
is its length (uint64) and its bytes. A request is the number of pieces, the length of each with whether a document ends
there in the lowest bit, and the pieces; the answer is the number of tokens of each, and the tokens.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from manyhands.errors import WorkerFailed
from manyhands.native.closeable import Closeable
from manyhands.workloads.text.documents import TextPiece
from manyhands.workloads.text.tokenizer import TextTokenizer, tokenizer_of_json

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


_LENGTH = struct.Struct("<Q")
_MOST_FRAME_BYTES = 1 << 32
_ANSWER_S = 120.0  # a request takes less than one
_END_S = 10.0

EncodedPieces = tuple[NDArray[np.uint32], NDArray[np.uint32]]
"""The number of tokens of each piece, and all tokens."""


class EncodingProcess(Closeable):
    """One such process, of which one thread asks; WorkerFailed says how it ended, or that it does not answer."""

    def __init__(self, number: int, tokenizer: TextTokenizer) -> None:
        self._number = number
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(_ANSWER_S)
        # Each process is one of several: it computes with one thread.
        one_thread = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        above = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, (above, os.environ.get("PYTHONPATH"))))
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=theirs.fileno(),
                env={**os.environ, **one_thread, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C is for the command, which closes the socket
            )
        self._send(tokenizer.json.encode())

    def encode(self, pieces: Sequence[TextPiece]) -> EncodedPieces:
        sizes = [2 * len(piece.text) + piece.ends for piece in pieces]
        request = np.array([len(sizes), *sizes], "<u4").tobytes()
        self._send(b"".join((request, *(piece.text for piece in pieces))))
        try:
            answer = _received(self._socket)
        except TimeoutError:
            raise self._failed(f"has not answered for {_ANSWER_S:.0f} s") from None
        except OSError:
            answer = None
        if answer is None:
            raise self._ended()
        if not answer[0]:
            raise self._failed(f"raised {bytes(answer[1:]).decode(errors='replace')}")
        found = np.frombuffer(answer, "<u4", offset=4)
        return found[: len(pieces)], found[len(pieces) :]

    def close(self) -> None:
        self._socket.close()
        if self._process.returncode is None:
            self._process.kill()
            self._process.wait(_END_S)

    def _send(self, content: bytes) -> None:
        try:
            _send(self._socket, content)
        except TimeoutError:
            raise self._failed(f"has taken no text for {_ANSWER_S:.0f} s") from None
        except OSError:
            raise self._ended() from None

    def _ended(self) -> WorkerFailed:
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return self._failed("has closed its connection")
        how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return self._failed(how)

    def _failed(self, how: str) -> WorkerFailed:
        who = f"tokenizing process {self._number} (process {self._process.pid})"
        return WorkerFailed(f"{who} {how}; finished shards are kept: continue with --resume", self._number)


def _send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(content)))
    connection.sendall(content)


def _received(connection: socket.socket) -> bytearray | None:
    """The next frame; None where the other side has closed."""
    head = _exactly(connection, _LENGTH.size)
    if head is None:
        return None
    (size,) = _LENGTH.unpack(head)
    if size > _MOST_FRAME_BYTES:
        raise OSError(f"a frame of {size} bytes")
    return _exactly(connection, size)


def _exactly(connection: socket.socket, num_bytes: int) -> bytearray | None:
    content = bytearray(num_bytes)
    view = memoryview(content)
    while view:
        got = connection.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return content


def _answer(words: WordCache, end: bytes, request: bytearray) -> bytes:
    (count,) = struct.unpack_from("<I", request)
    sizes = np.frombuffer(request, "<u4", count, 4)
    stops = 4 + 4 * count + np.cumsum(sizes >> 1, dtype=np.int64)
    starts = stops - (sizes >> 1)
    found = words.encode([bytes(request[start:stop]) for start, stop in zip(starts, stops, strict=True)])
    if end:
        found = [tokens + end if size & 1 else tokens for size, tokens in zip(sizes, found, strict=True)]
    counts = np.fromiter(map(len, found), "<u4", count) // 4
    return b"".join((b"\1\0\0\0", counts.tobytes(), *found))


def main() -> None:
    with socket.socket(fileno=os.dup(0)) as connection:
        try:
            definition = _received(connection)
            if definition is None:
                return
            tokenizer = tokenizer_of_json(definition.decode())
            words = WordCache(tokenizer)
            end = b"" if tokenizer.end_id is None else struct.pack("<I", tokenizer.end_id)
            while (request := _received(connection)) is not None:
                try:
                    answer = _answer(words, end, request)
                except Exception as error:
                    answer = b"\0" + f"{type(error).__name__}: {error}".encode()
                _send(connection, answer)
        except OSError:  # the command has ended
            return


if __name__ == "__main__":
    main()
