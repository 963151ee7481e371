"""Readers of what GloVe reads: vectors, vocabularies, records, corpora, questions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from file_reader import TEXT, Reader, written


def _vectors(kind: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from manyhands.workloads.glove.vector_files import Vectors

        words = ["the", "cat", "sat", "mat", "éß", "猫"]
        vectors = Vectors(words, np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32))
        if kind == "text":
            vectors.save_text(folder / "sample")
        else:
            vectors.save_word2vec(folder / "sample", binary=kind == "binary")

    return make


def _read_vectors(folder: Path) -> object:
    from manyhands.workloads.glove.vector_files import Vectors

    vectors = Vectors.load(folder / "sample")
    return vectors.neighbours(vectors.words[0], 3)


def _read_vocabulary(folder: Path) -> object:
    from manyhands.workloads.glove.vocabulary import Vocabulary

    return Vocabulary.load(folder / "sample").index


def _records(folder: Path) -> None:
    from manyhands.workloads.glove.cooccurrence_files import RECORD, RecordWriter

    rng = np.random.default_rng(2)
    records = np.zeros(200, RECORD)
    records["word"], records["context"] = rng.integers(1, 21, 200), rng.integers(1, 21, 200)
    records["count"] = rng.uniform(0.1, 9, 200)
    with RecordWriter(folder / "sample") as writer:
        writer.write(records)


def _train_records(folder: Path) -> object:
    from manyhands.workloads.glove.cooccurrence_files import shuffle_records
    from manyhands.workloads.glove.learning import GloveOptions, train_glove

    shuffle_records(folder / "sample", folder / "shuffled", seed=1)
    return train_glove(folder / "shuffled", 20, GloveOptions(dim=4, passes=1))


def _count_corpus(folder: Path) -> object:
    from manyhands.workloads.glove.corpus import Corpus
    from manyhands.workloads.glove.counting import count_cooccurrence
    from manyhands.workloads.glove.vocabulary import count_words

    corpus = Corpus(folder / "sample")
    vocabulary = count_words(corpus, min_count=1, workers=1)
    return count_cooccurrence(
        corpus, vocabulary, folder / "counts", window=3, workers=1, memory_bytes=64 << 20
    )


def _read_questions(folder: Path) -> object:
    from manyhands.workloads.glove.analogies import read_questions

    return read_questions(folder / "sample")


def _read_pairs(folder: Path) -> object:
    from manyhands.workloads.glove.analogies import read_pairs

    return read_pairs(folder / "sample")


ROWS = (
    Reader(name="vectors-text", make=_vectors("text"), read=_read_vectors),
    Reader(name="vectors-word2vec", make=_vectors("word2vec"), read=_read_vectors),
    Reader(name="vectors-binary", make=_vectors("binary"), read=_read_vectors),
    Reader(name="vocabulary", make=written("the 30\ncat 12\néß 7\n猫 1\n".encode()), read=_read_vocabulary),
    Reader(name="records", make=_records, read=_train_records),
    Reader(name="corpus", make=written(TEXT), read=_count_corpus),
    Reader(name="questions", make=written(b": capitals\nathens greece oslo norway\n: gram\na b c d\n"),
           read=_read_questions),
    Reader(name="pairs", make=written(b"cat\tdog\t7.5\nmat\that\t3\n# a comment\nthe\ta\t1.0\n"), read=_read_pairs),
)  # fmt: skip
