"""Text into files of tokens, beside the `tokenizers` library alone.

    python benchmarks/tokenizing.py [--rounds 3] [--megabytes 4] [--json benchmarks/results/tokenizing.json]

Ours is the whole of `tokenize`: processes start, read JSON lines, encode, and write and sync the files. The library has
the documents in memory, encodes a thousand at a time on all cores by threads of its own, and its ids are put into one
array; nothing is written. Both have as many threads or processes as there are cores, take turns within each round, and
the median counts. In the first round their tokens are compared.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from manyhands.data.file_reader import standard_library_text
from manyhands.workloads.text.documents import Documents
from manyhands.workloads.text.token_files import TokenFiles
from manyhands.workloads.text.tokenizer import read_tokenizer, train_tokenizer
from manyhands.workloads.text.tokenizing import TokenizerChoice, tokenize
from results_read import data_file

AT_ONCE = 1000
DOCUMENT = 4000  # characters
VOCABULARY = 8192


def documents_of(text: str) -> list[str]:
    return [text[at : at + DOCUMENT] for at in range(0, len(text), DOCUMENT)]


def cases(folder: Path, megabytes: float) -> Iterator[tuple[str, str, list[str], Path]]:
    """Texts and tokenizers: names, documents and the tokenizer's file."""
    size = int(megabytes * 1e6)
    texts = {"Python's source": standard_library_text(size)}
    wiki = data_file("wiki-50mb.txt.gz")
    if wiki is not None:
        with gzip.open(wiki, "rt") as file:
            texts["Wikipedia"] = file.read(size)
    for name, text in texts.items():
        documents = documents_of(text)
        path = folder / f"{len(name)}.json"
        path.write_text(train_tokenizer("bpe", documents[:1000], VOCABULARY).json)
        yield name, f"BPE, {VOCABULARY:,}", documents, path
        pieces = data_file("bert_base_uncased_vocab.txt")
        if pieces is not None:
            path = folder / "bert.json"
            path.write_text(read_tokenizer(pieces).json)
            yield name, "WordPiece, 30,522", documents, path


def by_library(documents: list[str], tokenizer: Path, method: str) -> NDArray[np.uint16]:
    library = read_tokenizer(tokenizer).library
    encode = getattr(library, method)
    found = []
    for at in range(0, len(documents), AT_ONCE):
        for one in encode(documents[at : at + AT_ONCE], add_special_tokens=False):
            found.append(np.array(one.ids, np.uint16))
    return np.concatenate(found)


def by_us(path: Path, tokenizer: Path, workers: int) -> NDArray[Any]:
    with tempfile.TemporaryDirectory(dir=path.parent) as out:
        choice = TokenizerChoice(path=tokenizer)
        made = tokenize(Documents(paths=[path]), choice, Path(out) / "tokens", workers=workers)
        files = TokenFiles(Path(out) / "tokens")
        tokens = np.concatenate([files.shard(at).tokens for at in range(len(files.shard_tokens))])
        end = made.tokenizer.end_id
        return tokens if end is None else tokens[tokens != end]


def measure(folder: Path, rounds: int, megabytes: float) -> Iterator[dict[str, Any]]:
    """A row for each text and tokenizer."""
    workers = len(os.sched_getaffinity(0))
    for text, tokenizer, documents, definition in cases(folder, megabytes):
        path = folder / "documents.jsonl"
        path.write_text("\n".join(json.dumps({"text": one}) for one in documents))
        contenders: dict[str, Callable[[], NDArray[Any]]] = {
            "manyhands": lambda: by_us(path, definition, workers),  # noqa: B023
            "encode_batch": lambda: by_library(documents, definition, "encode_batch"),  # noqa: B023
            "encode_batch_fast": lambda: by_library(documents, definition, "encode_batch_fast"),  # noqa: B023
        }
        times: dict[str, list[float]] = {name: [] for name in contenders}
        found: dict[str, NDArray[Any]] = {}
        for number in range(rounds):
            for name, run in contenders.items():
                began = time.perf_counter()
                found[name] = run()
                times[name].append(time.perf_counter() - began)
            if not number:
                assert all(np.array_equal(found["manyhands"], one) for one in found.values())
        size = sum(len(one.encode()) for one in documents) / 1e6
        medians = {name: statistics.median(one) for name, one in times.items()}
        rates = {name: size / one for name, one in medians.items()}
        ratio = rates["manyhands"] / max(rates["encode_batch"], rates["encode_batch_fast"])
        shown = "  ".join(f"{name} {rate:.2f} MB/s" for name, rate in rates.items())
        print(f"{text}, {tokenizer}: {shown}  {ratio:.2f}×", flush=True)
        yield {
            "text": text,
            "tokenizer": tokenizer,
            "megabytes": size,
            "tokens": len(found["manyhands"]),
            "mb_per_s": rates,
            "rounds_s": times,
            "times_library": ratio,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=4)
    asked = parser.parse_args()
    result: dict[str, Any] = {
        "cores": len(os.sched_getaffinity(0)),
        "tokenizers": version("tokenizers"),
        "rounds": asked.rounds,
        "load_average": os.getloadavg()[0],
        "rows": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(Path(folder), asked.rounds, asked.megabytes):
            result["rows"].append(row)
            if asked.json is not None:
                asked.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
