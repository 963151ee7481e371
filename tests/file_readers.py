"""Every reader of a user's file or of a run's directory, with a valid sample made by the project's own writers.

`fuzz_files.py` damages the samples. One row per reader: `make` writes the sample into an empty folder, `files` are
those to damage, `read` reads the folder and does with it what the project does.
"""

from __future__ import annotations

import gzip
import io
import json
import struct
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import typer

__all__ = ["READERS", "Reader"]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """One row of the table."""

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], object]
    files: tuple[str, ...] = ("sample",)
    """Patterns of the files to damage, one of which is drawn, and then a file of it."""
    allowed: tuple[type[Exception], ...] = field(default=())
    """Besides ManyhandsError."""
    live: bool = False
    """Whether making the sample takes a real run."""


def _write(text: bytes, name: str = "sample") -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(text) and None


def _sweep_plan() -> Any:
    from manyhands.sweep.plan import SweepPlan, SweepSetting

    settings = (
        SweepSetting(name="learning_rate", values=("0.1", "0.2")),
        SweepSetting(name="seed", values=("0",)),
    )
    return SweepPlan(task="digits", settings=settings, metric="accuracy", common={"--epochs": "1"})


def _sweep(folder: Path) -> None:
    import json

    from manyhands.sweep.run import open_sweep

    open_sweep(folder / "new", _sweep_plan(), resume=False)
    (folder / "new" / "sweep.json").rename(folder / "sweep.json")
    run = folder / "runs" / "0001"
    run.mkdir(parents=True)
    config = {"format": "manyhands run", "version": 1, "config": {"task": "digits"}}
    (run / "config.json").write_text(json.dumps(config))
    (run / "summary.json").write_text(
        json.dumps({"final": {"accuracy": 0.5, "loss": 1.5}, "seconds": 2.0, "samples_per_s": 100.0})
    )


def _sweep_rows(folder: Path) -> object:
    from manyhands.sweep.report import sweep_page
    from manyhands.sweep.results import sentences
    from manyhands.sweep.run import open_sweep, read_plan, sweep_rows

    plan = read_plan(folder / "sweep.json")
    rows = sweep_rows(plan, folder)
    page = sweep_page(plan, rows, sentences(plan, rows), "manyhands sweep", {})
    open_sweep(folder, _sweep_plan(), resume=True)
    return page


# ── data files ────────────────────────────────────────────────────────────────────────────────────────────────────────

_LIBSVM = b"+1 3:1 11:0.5 14:1   # a comment\n-1 1:2.5e-3 7:-4\n\n1 2:1 5:0.125 9:1e2\n-1 4:1\n" * 4
_VOWPAL = (
    b"1 2.0 'tag |user age:0.3 city_paris |words the cat the mat\n-1 |words no:0.5 yes\n1 |user:2 a b:3\n" * 4
)
_TEXT = "the cat sat on the mat; the dog, who was no cat, sat by it: éß — 猫 \n".encode() * 20


def _idx(folder: Path) -> None:
    (folder / "sample").write_bytes(struct.pack(">2xBB3I", 8, 3, 4, 5, 6) + bytes(range(120)))


def _idx_gzip(folder: Path) -> None:
    (folder / "sample").write_bytes(gzip.compress(struct.pack(">2xBB2I", 13, 2, 4, 5) + bytes(80), mtime=0))


def _read_idx(folder: Path) -> object:
    from manyhands.data.idx import read_idx

    return read_idx(folder / "sample", limit_bytes=1 << 26)


def _images(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        pixels = (np.arange(128) % 17).reshape(2, 8, 8)
        if name.endswith("npy"):
            np.save(folder / name, pixels)
        elif name.endswith("json"):
            (folder / name).write_text(json.dumps(pixels.tolist()))
        else:
            from PIL import Image

            Image.fromarray(pixels[0].astype(np.uint8)).save(folder / name)

    return make


def _read_images(name: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        from manyhands.data.images import ImageShape, read_images

        return read_images(str(folder / name), ImageShape(8, 16))

    return read


def _read_text(folder: Path) -> object:
    from manyhands.data.text import encode, read_text, windows

    return windows(encode(read_text(folder / "sample", limit_bytes=1 << 26)), 8)


def _rows(**reading: Any) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        from manyhands.data.row_files import Reading, RowFile

        return list(RowFile(folder / "sample", Reading(threads=1, **reading)).blocks())

    return read


def _npy(folder: Path) -> None:
    with (folder / "sample").open("wb") as file:
        np.save(file, np.arange(60.0).reshape(12, 5))


def _parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"a": np.arange(40.0), "b": np.arange(40), "c": np.arange(40) % 3 == 0})
    parquet.write_table(table, folder / "sample", row_group_size=16)


def _matrix(folder: Path) -> object:
    from manyhands.data.matrix_files import open_matrix
    from manyhands.data.stored_matrix import MatrixStore

    with MatrixStore() as store:
        stored = store.keep(open_matrix(folder / "sample"))
        return [len(block) for block in stored.opened().blocks(0, stored.rows, 1 << 16)]


def _learn(folder: Path) -> object:
    from manyhands.regression import room
    from manyhands.regression.training import train_logreg

    room.available_bytes = lambda: (
        256 << 20
    )  # as on a machine that has no more: what is asked for must fit in it
    result = train_logreg(folder / "sample")
    result.model.save(folder / "trained.safetensors")
    return result


def _model(folder: Path) -> None:
    from manyhands.regression.labels import Labels
    from manyhands.regression.model import LogregModel

    table = np.linspace(-1, 1, 65, dtype=np.float32)
    LogregModel(table=table, labels=Labels(-1.0, 1.0), bits=6).save(folder / "model.safetensors")
    (folder / "rows").write_bytes(_LIBSVM)


def _read_model(folder: Path) -> object:
    from manyhands.regression.model import LogregModel

    model = LogregModel.load(folder / "model.safetensors")
    return model.evaluate(model.file(folder / "rows"))


def _exported(folder: Path) -> None:
    from manyhands.store.exported import write_exported
    from manyhands.tasks.vision import ImageClassifier

    about = {"task": "digits", "options": json.dumps({"width": 4}), "steps": "7"}
    weights = ImageClassifier(side=8, white=16, width=4).state_dict()
    write_exported(folder / "model.safetensors", weights, "int8", about)


def _decomposed(folder: Path) -> None:
    from manyhands.svd.model import SvdModel

    components = np.linalg.qr(np.random.default_rng(3).normal(size=(5, 2)))[0].T
    model = SvdModel(
        singular_values=np.array([3.0, 1.0]), components=components, mean=np.ones(5), rows=12, energy=11.0
    )
    model.save(folder / "model.safetensors")


def _ask_model(folder: Path) -> object:
    """Whatever the file says that it is a model of, asked for one answer."""
    from manyhands.inference.opening import open_predictor

    predictor = open_predictor(folder / "model.safetensors")
    return predictor.answers(predictor.inputs([predictor.example]))


def _boosted(folder: Path) -> None:
    from manyhands.boosting.options import GbdtOptions
    from manyhands.boosting.sources import ArraySource
    from manyhands.boosting.text_format import write_model
    from manyhands.boosting.training import TableChoice, train_gbdt

    drawn = np.random.default_rng(0)
    values = drawn.integers(0, 9, (200, 3)).astype(float)
    values[::7, 1] = np.nan
    table = TableChoice(train=ArraySource(values, values[:, 0] + values[:, 2] % 4), categorical=("2",))
    options = GbdtOptions(trees=3, num_leaves=5, min_data_per_group=5, cat_smooth=1.0)
    write_model(train_gbdt(table, options).model, folder / "model.txt")


def _read_boosted(folder: Path) -> object:
    from manyhands.boosting.sources import RowBlock
    from manyhands.boosting.text_format import read_model

    model = read_model(folder)
    return model.predict(RowBlock(labels=None, dense=np.zeros((5, model.columns))))


def _array(folder: Path) -> None:
    np.save(folder / "sample.npy", np.random.default_rng(0).integers(0, 5, (60, 4)).astype(np.float32))


def _columns(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    drawn = np.random.default_rng(0).integers(0, 5, (3, 60))
    table = pyarrow.table({"a": drawn[0].astype(float), "b": drawn[1], "label": drawn[2]})
    parquet.write_table(table, folder / "sample.parquet", row_group_size=16)


def _boost(name: str) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        from manyhands.boosting import table as tables
        from manyhands.boosting.options import GbdtOptions
        from manyhands.boosting.sources import open_source
        from manyhands.boosting.training import TableChoice, train_gbdt

        tables.available_bytes = lambda: 256 << 20  # as on a machine that has no more
        table = TableChoice(train=open_source(folder / name))
        options = GbdtOptions(trees=2, num_leaves=3, min_data_in_leaf=2, objective="regression")
        return train_gbdt(table, options)

    return read


# ── words ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _vectors(kind: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        from manyhands.words.vectors import Vectors

        words = ["the", "cat", "sat", "mat", "éß", "猫"]
        vectors = Vectors(words, np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32))
        if kind == "text":
            vectors.save_text(folder / "sample")
        else:
            vectors.save_word2vec(folder / "sample", binary=kind == "binary")

    return make


def _read_vectors(folder: Path) -> object:
    from manyhands.words.vectors import Vectors

    vectors = Vectors.load(folder / "sample")
    return vectors.neighbours(vectors.words[0], 3)


def _read_vocabulary(folder: Path) -> object:
    from manyhands.words.vocabulary import Vocabulary

    return Vocabulary.load(folder / "sample").index


def _records(folder: Path) -> None:
    from manyhands.words.records import RECORD, RecordWriter

    rng = np.random.default_rng(2)
    records = np.zeros(200, RECORD)
    records["word"], records["context"] = rng.integers(1, 21, 200), rng.integers(1, 21, 200)
    records["count"] = rng.uniform(0.1, 9, 200)
    with RecordWriter(folder / "sample") as writer:
        writer.write(records)


def _train_records(folder: Path) -> object:
    from manyhands.words.glove import GloveOptions, train_glove
    from manyhands.words.shuffle import shuffle_records

    shuffle_records(folder / "sample", folder / "shuffled", seed=1)
    return train_glove(folder / "shuffled", 20, GloveOptions(dim=4, passes=1))


def _count_corpus(folder: Path) -> object:
    from manyhands.words.corpus import Corpus
    from manyhands.words.counting import count_cooccurrence
    from manyhands.words.vocabulary import count_words

    corpus = Corpus(folder / "sample")
    vocabulary = count_words(corpus, min_count=1, workers=1)
    return count_cooccurrence(
        corpus, vocabulary, folder / "counts", window=3, workers=1, memory_bytes=64 << 20
    )


def _read_questions(folder: Path) -> object:
    from manyhands.words.analogies import read_questions

    return read_questions(folder / "sample")


def _read_pairs(folder: Path) -> object:
    from manyhands.words.similarity import read_pairs

    return read_pairs(folder / "sample")


# ── runs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_NS = 1_000_000_000


def _run(folder: Path) -> None:
    """A run on two servers as its writers leave it, all but the training."""
    from manyhands.store.rundir import RunDirectory

    config = {"task": "digits", "strategy": "ps servers=2 consistency=async", "workers": 2, "steps": 40, "seed": 0,
              "batch_size": 8, "samples": 100, "parameters": {"a": [2, 3]}}  # fmt: skip
    with RunDirectory.create(folder / "run", config) as run:
        for role, name in enumerate(("worker-0", "worker-1", "server-0", "server-1")):
            _events(run.events_path, role, name)
        for step in range(1, 21):
            run.metrics.append({"step": step, "at_s": step / 10, "loss": 1 / step})
        run.metrics.append({"step": 20, "at_s": 2.1, "metrics": {"accuracy": 0.75, "loss": 0.5}})
        shards = [{"shard": 0, "primary": 2, "backup": 3}, {"shard": 1, "primary": 3, "backup": 2}]
        slots = [{"slot": 0, "member": 0}, {"slot": 1, "member": 1}]
        names = {"0": "worker 0", "1": "worker 1", "2": "server 0", "3": "server 1"}
        for row in (
            {"event": "layout", "shards": [{"shard": 0, "bytes": 100}, {"shard": 1, "bytes": 200}]},
            {"event": "started", "at_s": 0.1, "member": 0, "name": "worker 0", "pid": 7},
            {"event": "view", "at_s": 0.2, "epoch": 1, "names": names, "shards": shards, "slots": slots},
            {"event": "died", "at_s": 1.0, "member": 1, "sentence": "worker 1 died", "epoch": 2},
            {"event": "recovered", "at_s": 1.5, "member": 1, "sentence": "worker 1 is back", "epoch": 3},
        ):
            run.append_member(row)
        worker = {"steps": 10, "samples": 80, "compute_s": 1.0, "exchange_s": 0.5, "wait_s": 0.25,
                  "wait_for_s": [0.0, 0.25], "bytes_sent": 9, "messages_sent": 3}  # fmt: skip
        run.write_summary(
            {
                "steps": 20,
                "samples": 160,
                "samples_per_s": 80.0,
                "staleness": {"mean": 0.5, "max": 3},
                "per_worker": [{"worker": 0, **worker}, {"worker": 1, **worker}],
                "servers": [{"shard": 0, "sha256": "x"}],
                "notes": [],
            }
        )


def _events(folder: Path, role: int, name: str) -> None:
    from manyhands.record.events import RECORD, EventKind
    from manyhands.record.files import EventFileWriter

    is_worker = name.startswith("worker")
    of_worker = (EventKind.INPUT, EventKind.COMPUTE, EventKind.SEND, EventKind.WAIT, EventKind.STEP)
    of_server = (EventKind.RECEIVE, EventKind.APPLY, EventKind.HOLD)
    kinds = [
        EventKind.JOIN,
        *(of_worker if is_worker else of_server) * 10,
        EventKind.EVALUATE,
        EventKind.LEAVE,
    ]
    records = np.zeros(len(kinds), RECORD)
    records["kind"], records["role"] = kinds, role
    records["start_ns"] = _NS + np.arange(len(kinds)) * 10_000_000
    records["duration_ns"] = 9_000_000
    records["peer"] = [-1 if kind == EventKind.COMPUTE else (role + 1) % 4 for kind in kinds]
    records["step"] = np.maximum(-1, np.arange(len(kinds)) // 5 - 1)
    records["id"], records["count"], records["value"] = np.arange(len(kinds)), 4, 0.5
    records["num_bytes"], records["wire"], records["message"] = 100, 1, np.arange(len(kinds))
    writer = EventFileWriter.create(folder, name=name, role=role, max_bytes=1 << 20, wall_offset_ns=5)
    writer.append(records)
    writer.close(0)


def _report(folder: Path) -> object:
    from manyhands.analyse.source import existing_run
    from manyhands.draw.page import report
    from manyhands.draw.prometheus import metrics_text

    follower = existing_run(folder / "run")
    follower.poll()
    view = follower.poll()
    return report(view).encode(), metrics_text(view).encode()


def _command(name: str) -> Callable[[Path], object]:
    """What a command of the command line does, its words thrown away."""

    def read(folder: Path) -> object:
        from manyhands.cli.audit import audit_command
        from manyhands.cli.explain import explain_command
        from manyhands.cli.timeline import timeline_command

        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            try:
                match name:
                    case "explain":
                        explain_command(folder / "run", None)
                    case "audit":
                        audit_command(folder / "run")
                    case _:
                        timeline_command(folder / "run", out=folder / f"timeline.{name}")
            except typer.Exit:
                pass  # its exit status, after it has said all
        return None

    return read


def _tensorboard(folder: Path) -> object:
    from manyhands.draw import tensorboard

    tensorboard._VIEWS = 5  # a hundred are the same code again
    return tensorboard.write_run(folder / "run", folder / "tensorboard")


def _measure(folder: Path) -> object:
    from manyhands.compare.measure import measure
    from manyhands.compare.plan import Trial
    from manyhands.strategy import Strategy

    return measure(Trial(place=0, repeat=0), folder / "run", Strategy.parse("ps servers=2 consistency=async"))


def _history(folder: Path) -> object:
    from manyhands.store.rundir import RunDirectory

    return RunDirectory.open(folder / "run", lock=False).metrics.read()


# ── checkpoints ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _tensors(folder: Path) -> None:
    import torch

    from manyhands.store.tensorfile import encode_tensors

    tensors = {
        "a": torch.arange(6.0).reshape(2, 3),
        "b": torch.ones(4, dtype=torch.bfloat16),
        "c": torch.tensor(7),
    }
    (folder / "sample.safetensors").write_bytes(b"".join(encode_tensors(tensors)))


def _read_tensors(folder: Path) -> object:
    from manyhands.store.tensorfile import read_tensors

    return read_tensors(folder / "sample.safetensors")


def _manifest(folder: Path) -> None:
    from manyhands.store.atomic import FileDigest
    from manyhands.store.manifest import CONTENT_FILES, Manifest

    files = {name: FileDigest(num_bytes=9, sha256="0" * 64) for name in CONTENT_FILES}
    (folder / "manifest.json").write_bytes(Manifest(step=50, score=0.5, files=files).render())


def _read_manifest(folder: Path) -> object:
    from manyhands.store.manifest import Manifest

    return Manifest.parse((folder / "manifest.json").read_bytes())


def _checkpoint(folder: Path) -> None:
    import torch

    from manyhands.store.checkpoint import CheckpointStore, Snapshot

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    store = CheckpointStore(folder / "checkpoints", 3)
    store.save(Snapshot(step=50, model=model.state_dict(), optimizer=optimizer.state_dict()))


def _read_checkpoint(folder: Path) -> object:
    from manyhands.store.checkpoint import CheckpointStore

    return CheckpointStore(folder / "checkpoints", 3).load()


def _read_forged(folder: Path) -> object:
    """The same with a manifest that vouches for whatever the files now hold, as somebody who forges one would write."""
    import hashlib

    from manyhands.store.atomic import FileDigest
    from manyhands.store.manifest import CONTENT_FILES, Manifest

    one = folder / "checkpoints" / "step-00000050"
    contents = {name: (one / name).read_bytes() for name in CONTENT_FILES}
    files = {
        name: FileDigest(num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        for name, data in contents.items()
    }
    (one / "manifest.json").write_bytes(Manifest(step=50, score=None, files=files).render())
    return _read_checkpoint(folder)


# ── recorded runs of servers ──────────────────────────────────────────────────────────────────────────────────────────


def _server_run(folder: Path) -> None:
    import manyhands as mh
    from manyhands.tasks import TASKS

    mh.fit(
        TASKS["digits"].build(),
        "ps servers=2 consistency=async replicas=1",
        workers=2,
        steps=20,
        out=folder / "run",
    )


def _replay(folder: Path) -> object:
    from manyhands.server import replay

    replay.available_bytes = lambda: 256 << 20  # as on a small machine
    return replay.replay(folder / "run", until=2)


_RUN_FILES = (
    "run/events/*.bin",
    "run/metrics.jsonl",
    "run/members.jsonl",
    "run/summary.json",
    "run/config.json",
)
_LOG_FILES = ("run/updates/*.jsonl", "run/updates/run.json", "run/config.json", "run/summary.json")

READERS = {
    reader.name: reader
    for reader in (
        Reader(name="idx", make=_idx, read=_read_idx),
        Reader(name="idx-gzip", make=_idx_gzip, read=_read_idx),
        Reader(name="images-npy", make=_images("sample.npy"), read=_read_images("sample.npy"), files=("sample.npy",)),
        Reader(name="images-json", make=_images("sample.json"), read=_read_images("sample.json"),
               files=("sample.json",)),
        Reader(name="images-png", make=_images("sample.png"), read=_read_images("sample.png"), files=("sample.png",)),
        Reader(name="text", make=_write(_TEXT), read=_read_text),
        Reader(name="libsvm", make=_write(_LIBSVM), read=_rows(format="libsvm")),
        Reader(name="libsvm-hashed", make=_write(_LIBSVM), read=_rows(format="libsvm", bits=10, skip_bad=True)),
        Reader(name="libsvm-gzip", make=_write(gzip.compress(_LIBSVM, mtime=0)), read=_rows()),
        Reader(name="vowpal", make=_write(_VOWPAL), read=_rows(format="vw", bits=10)),
        Reader(name="vowpal-numbers", make=_write(b"1 |a 3:0.5 7 9:2\n-1 |a 1 2\n" * 5),
               read=_rows(format="vw", skip_bad=True)),
        Reader(name="vowpal-all", make=_write(_VOWPAL), read=_rows(bits=8, hash="all")),
        Reader(name="matrix-libsvm", make=_write(_LIBSVM), read=_matrix),
        Reader(name="matrix-npy", make=_npy, read=_matrix),
        Reader(name="matrix-parquet", make=_parquet, read=_matrix),
        Reader(name="logreg", make=_write(_LIBSVM), read=_learn),
        Reader(name="logreg-model", make=_model, read=_read_model, files=("model.safetensors",)),
        Reader(name="exported-model", make=_exported, read=_ask_model, files=("model.safetensors",)),
        Reader(name="svd-model", make=_decomposed, read=_ask_model, files=("model.safetensors",)),
        Reader(name="gbdt-model", make=_boosted, read=_read_boosted, files=("model.txt",)),
        Reader(name="gbdt-npy", make=_array, read=_boost("sample.npy"), files=("sample.npy",)),
        Reader(name="gbdt-parquet", make=_columns, read=_boost("sample.parquet"), files=("sample.parquet",)),
        Reader(name="gbdt-text", make=_write(_LIBSVM), read=_boost("sample")),
        Reader(name="vectors-text", make=_vectors("text"), read=_read_vectors),
        Reader(name="vectors-word2vec", make=_vectors("word2vec"), read=_read_vectors),
        Reader(name="vectors-binary", make=_vectors("binary"), read=_read_vectors),
        Reader(name="vocabulary", make=_write("the 30\ncat 12\néß 7\n猫 1\n".encode()), read=_read_vocabulary),
        Reader(name="records", make=_records, read=_train_records),
        Reader(name="corpus", make=_write(_TEXT), read=_count_corpus),
        Reader(name="questions", make=_write(b": capitals\nathens greece oslo norway\n: gram\na b c d\n"),
               read=_read_questions),
        Reader(name="pairs", make=_write(b"cat\tdog\t7.5\nmat\that\t3\n# a comment\nthe\ta\t1.0\n"), read=_read_pairs),
        Reader(name="sweep", make=_sweep, read=_sweep_rows, files=("sweep.json", "runs/0001/*.json")),
        Reader(name="report", make=_run, read=_report, files=_RUN_FILES),
        Reader(name="explain", make=_run, read=_command("explain"), files=(_RUN_FILES[0], _RUN_FILES[4])),
        Reader(name="timeline", make=_run, read=_command("json"), files=(_RUN_FILES[0], _RUN_FILES[4])),
        Reader(name="picture", make=_run, read=_command("svg"), files=(_RUN_FILES[0], _RUN_FILES[4])),
        Reader(name="tensorboard", make=_run, read=_tensorboard, files=_RUN_FILES),
        Reader(name="compare", make=_run, read=_measure, files=_RUN_FILES),
        Reader(name="history", make=_run, read=_history, files=("run/metrics.jsonl", "run/config.json")),
        Reader(name="tensors", make=_tensors, read=_read_tensors, files=("*.safetensors",), allowed=(ValueError,)),
        Reader(name="manifest", make=_manifest, read=_read_manifest, files=("manifest.json",), allowed=(ValueError,)),
        Reader(name="checkpoint", make=_checkpoint, read=_read_checkpoint,
               files=("checkpoints/*/*.safetensors", "checkpoints/*/*.json")),
        Reader(name="checkpoint-forged", make=_checkpoint, read=_read_forged,
               files=("checkpoints/*/*.safetensors", "checkpoints/*/state.json")),
        Reader(name="audit", make=_server_run, read=_command("audit"), files=_LOG_FILES, live=True),
        Reader(name="replay", make=_server_run, read=_replay, files=_LOG_FILES, live=True),
    )
}  # fmt: skip
