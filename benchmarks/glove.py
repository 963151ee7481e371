"""GloVe beside plain C of the published algorithms, and over more and more workers.

    python benchmarks/glove.py --part train      records per CPU-second, one thread, beside C; and over two threads
    python benchmarks/glove.py --part count --corpus FILE      tokens per second, beside C
    python benchmarks/glove.py --part workers    records per second and final cost: serial, locked, HOGWILD!

Contenders take turns within each round, so that a busy moment of the machine meets all of them; the median over
rounds is reported. Without `--records` or `--corpus` the data are drawn: words by Zipf's law, counts that follow from
hidden vectors, so that there is something to learn. Each part keeps its place in the results file; parts that were
not run stay as they are.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from glove_peers import build_counter, build_trainer, compiler
from manyhands.workloads.glove.cooccurrence_files import RECORD, open_records
from manyhands.workloads.glove.corpus import Corpus
from manyhands.workloads.glove.counting import count_cooccurrence
from manyhands.workloads.glove.learning import GloveOptions, train_glove
from manyhands.workloads.glove.vocabulary import count_words

RESULTS = Path(__file__).resolve().parent / "results" / "glove.json"
WORKERS = (1, 2, 4, 8, 16)
WINDOW = 15


def draw_records(path: Path, count: int, size: int) -> None:
    """Words by Zipf's law; logarithms of counts from biases, hidden vectors of 8 items, and noise."""
    drawn = np.random.default_rng(7)
    chances = np.cumsum(1.0 / np.arange(1, size + 1) ** 0.75)
    hidden = drawn.normal(0.0, 0.5, (2, size, 8)).astype(np.float32)
    biases = -0.2 * np.log(np.arange(1, size + 1))
    records = np.empty(count, RECORD)
    for begin in range(0, count, 1 << 20):
        part = records[begin : begin + (1 << 20)]
        word, context = (np.searchsorted(chances, drawn.random(len(part)) * chances[-1]) for _ in range(2))
        logs = np.einsum("ij,ij->i", hidden[0][word], hidden[1][context]) + biases[word] + biases[context]
        part["word"], part["context"] = word + 1, context + 1
        part["count"] = np.exp(logs + drawn.normal(2.5, 0.3, len(part))).clip(1 / 15)
    records.tofile(path)


def draw_text(path: Path, tokens: int, size: int) -> None:
    """One long line of words by Zipf's law."""
    drawn = np.random.default_rng(7)
    chances = np.cumsum(1.0 / np.arange(1, size + 1))
    with path.open("w") as out:
        for begin in range(0, tokens, 1 << 20):
            ranks = np.searchsorted(chances, drawn.random(min(tokens - begin, 1 << 20)) * chances[-1])
            out.write(" ".join(map("w{}".format, ranks.tolist())) + " ")


def median_of(rounds: int, contenders: dict[str, Callable[[], float]]) -> dict[str, float]:
    """The median of what each contender gives, all of them in each round."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, measure in contenders.items():
            found[name].append(measure())
    return {name: statistics.median(values) for name, values in found.items()}


def second_pass(path: Path, size: int, dim: int, strategy: str, workers: int) -> tuple[float, float]:
    """Records per second of wall time and of CPU time, of a second pass: all is compiled and in its place."""
    marks: list[tuple[float, float]] = []
    options = GloveOptions(dim=dim, passes=2, x_max=10.0)
    train_glove(
        path,
        size,
        options,
        strategy=strategy,
        workers=workers,
        after_pass=lambda *_: marks.append((time.perf_counter(), time.process_time())),
    )
    count = len(open_records(path))
    (wall, cpu), (wall_end, cpu_end) = marks
    return count / (wall_end - wall), count / (cpu_end - cpu)


def peer_pass(library: ctypes.CDLL, records: NDArray[np.void], size: int, dim: int) -> float:
    """Records per CPU-second of the C loop, on records in memory; of a second pass, as ours is."""
    rows = np.random.default_rng(0).uniform(-0.5, 0.5, 2 * size * (dim + 1)) / dim
    squares, settings = np.ones_like(rows), np.array([10.0, 0.75, 0.05])
    arrays = [ctypes.c_void_p(array.ctypes.data) for array in (rows, squares, records)]
    numbers = [ctypes.c_int64(number) for number in (len(records), size, dim)]
    library.train(*arrays, *numbers, ctypes.c_void_p(settings.ctypes.data))
    began = time.thread_time()
    cost = library.train(*arrays, *numbers, ctypes.c_void_p(settings.ctypes.data))
    assert np.isfinite(cost)
    return len(records) / (time.thread_time() - began)


def compare_training(path: Path, size: int, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """One row per dimension."""
    library = build_trainer(folder) if compiler() else None
    sample = np.array(open_records(path)[:500_000])
    rows = []
    for dim in (50, 100, 300):
        contenders: dict[str, Callable[[], float]] = {
            "one thread, per CPU-second": lambda dim=dim: second_pass(path, size, dim, "single", 1)[1],  # type: ignore[misc]
            "one thread, per second": lambda dim=dim: second_pass(path, size, dim, "single", 1)[0],  # type: ignore[misc]
            "two threads, per second": lambda dim=dim: second_pass(path, size, dim, "hogwild", 2)[0],  # type: ignore[misc]
        }
        if library is not None:
            contenders["C, per CPU-second"] = lambda dim=dim: peer_pass(library, sample, size, dim)  # type: ignore[misc]
        found = median_of(rounds, contenders)
        row: dict[str, Any] = {"dim": dim, "records_per_s": found}
        if library is None:
            row["skipped"] = "C: there is no C compiler here"
        else:
            row["times_c"] = found["one thread, per CPU-second"] / found["C, per CPU-second"]
        row["two_over_one"] = found["two threads, per second"] / found["one thread, per second"]
        rows.append(row)
        print(json.dumps(row))
    return rows


def compare_counting(corpus: Path, rounds: int, folder: Path) -> dict[str, Any]:
    """Tokens per second of counting co-occurrence, the vocabulary being known."""
    text = Corpus(corpus)
    vocabulary = count_words(text, workers=2)
    vocabulary.save(folder / "vocab.txt")
    plain = folder / "plain.txt"
    with plain.open("wb") as out:
        for block in text.blocks():
            out.write(block.data)
    tokens = sum(len(line.split()) for line in plain.open("rb"))
    records: dict[str, int] = {}

    def ours(workers: int) -> float:
        began = time.perf_counter()
        records["ours"] = count_cooccurrence(
            Corpus(plain), vocabulary, folder / "ours.bin", window=WINDOW, workers=workers
        )
        return tokens / (time.perf_counter() - began)

    contenders = {"one worker": lambda: ours(1), "two workers": lambda: ours(2)}
    result: dict[str, Any] = {"corpus": corpus.name, "tokens": tokens, "words": len(vocabulary.words)}
    if compiler():
        program = build_counter(folder)
        command = [str(program), str(plain), str(folder / "vocab.txt"), str(folder / "c.bin"), str(WINDOW)]

        def peer() -> float:
            began = time.perf_counter()
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            records["C"] = int(done.stdout)
            return tokens / (time.perf_counter() - began)

        contenders["C, one thread"] = peer
    else:
        result["skipped"] = "C: there is no C compiler here"
    ours(2)  # compiles
    found = median_of(rounds, contenders)
    assert len(set(records.values())) == 1, records
    result |= {"window": WINDOW, "records": records["ours"], "tokens_per_s": found}
    if "C, one thread" in found:
        result["times_c"] = found["two workers"] / found["C, one thread"]
    print(json.dumps(result))
    return result


def compare_workers(path: Path, size: int, passes: int, most: int) -> list[dict[str, Any]]:
    """One row per order and number of workers: records per second over all passes, and the final cost."""
    options = GloveOptions(passes=passes, x_max=10.0)
    asked = [("serial", "single", 1)]
    for workers in WORKERS:
        if workers <= most:
            asked += [
                ("locked", "hogwild order=locked", workers),
                ("turns", "hogwild order=turns", workers),
                ("HOGWILD!", "hogwild", workers),
            ]
    for _, strategy, _ in asked[:4]:
        train_glove(path, size, GloveOptions(passes=1, x_max=10.0), strategy=strategy)  # compiles
    rows: list[dict[str, Any]] = []
    for name, strategy, workers in asked:
        result = train_glove(path, size, options, strategy=strategy, workers=workers)
        row = {
            "order": name,
            "workers": workers,
            "records_per_s": result.records_per_s,
            "cost": result.costs[-1],
        }
        first = rows[0] if rows else row
        row["speedup"] = result.records_per_s / first["records_per_s"]
        row["cost_over_serial"] = result.costs[-1] / first["cost"]
        rows.append(row)
        print(json.dumps(row))
    return rows


def facts() -> dict[str, Any]:
    return {
        "cores": len(os.sched_getaffinity(0)),
        "load_before": os.getloadavg()[0],
        "machine": platform.machine(),
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("train", "count", "workers", "all"), default="all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--records", type=Path, help="shuffled co-occurrence records, in place of drawn ones")
    parser.add_argument(
        "--words", type=int, default=52_421, help="the vocabulary's size, drawn or of --records"
    )
    parser.add_argument("--count", type=int, default=3_000_000, help="records to draw")
    parser.add_argument("--corpus", type=Path, help="text to count, in place of a drawn one")
    parser.add_argument("--tokens", type=int, default=4_000_000, help="tokens to draw")
    parser.add_argument("--passes", type=int, default=5, help="of --part workers")
    parser.add_argument("--most", type=int, default=WORKERS[-1], help="workers of --part workers, at most")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args()
    parts = ("train", "count", "workers") if asked.part == "all" else (asked.part,)
    results: dict[str, Any] = json.loads(asked.out.read_text()) if asked.out.exists() else {}
    with tempfile.TemporaryDirectory(prefix="manyhands-glove-") as name:
        folder = Path(name)
        records = asked.records or folder / "records.bin"
        if asked.records is None and {"train", "workers"} & set(parts):
            draw_records(records, asked.count, asked.words)
        corpus = asked.corpus or folder / "drawn.txt"
        if asked.corpus is None and "count" in parts:
            draw_text(corpus, asked.tokens, asked.words)
        for part in parts:
            about = {**facts(), "data": "drawn"}
            if part == "count":
                about["data"] = corpus.name
                rows: Any = compare_counting(corpus, asked.rounds, folder)
            else:
                about |= {"data": records.name, "records": len(open_records(records)), "words": asked.words}
                if part == "train":
                    rows = compare_training(records, asked.words, asked.rounds, folder)
                else:
                    rows = compare_workers(records, asked.words, asked.passes, asked.most)
            results[part] = {**about, "rows": rows}
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
