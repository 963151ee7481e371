"""Readers of data files, and of models: with samples made by the project's own writers."""

from __future__ import annotations

import gzip
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from file_reader import TEXT, Reader, written

_LIBSVM = b"+1 3:1 11:0.5 14:1   # a comment\n-1 1:2.5e-3 7:-4\n\n1 2:1 5:0.125 9:1e2\n-1 4:1\n" * 4
_VOWPAL = (
    b"1 2.0 'tag |user age:0.3 city_paris |words the cat the mat\n-1 |words no:0.5 yes\n1 |user:2 a b:3\n" * 4
)


def _idx(folder: Path) -> None:
    (folder / "sample").write_bytes(struct.pack(">2xBB3I", 8, 3, 4, 5, 6) + bytes(range(120)))


def _idx_gzip(folder: Path) -> None:
    (folder / "sample").write_bytes(gzip.compress(struct.pack(">2xBB2I", 13, 2, 4, 5) + bytes(80), mtime=0))


def _read_idx(folder: Path) -> object:
    from manyhands.data.file_reader import read_idx

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
        from manyhands.data.file_reader import ImageShape, read_images

        return read_images(str(folder / name), ImageShape(8, 16))

    return read


def _read_text(folder: Path) -> object:
    from manyhands.data.file_reader import encode, read_text, windows

    return windows(encode(read_text(folder / "sample", limit_bytes=1 << 26)), 8)


def _rows(**reading: Any) -> Callable[[Path], object]:
    def read(folder: Path) -> object:
        from manyhands.data.row_files import Reading, RowFile

        return list(RowFile(folder / "sample", Reading(threads=1, **reading)).blocks())

    return read


def _npy(folder: Path) -> None:
    with (folder / "sample").open("wb") as file:
        np.save(file, np.arange(60.0).reshape(12, 5))


def _read_values(folder: Path) -> object:
    from manyhands.data.file_reader import read_values

    return list(read_values(str(folder / "sample")))


def _parquet(folder: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.table({"a": np.arange(40.0), "b": np.arange(40), "c": np.arange(40) % 3 == 0})
    parquet.write_table(table, folder / "sample", row_group_size=16)


def _matrix(folder: Path) -> object:
    from manyhands.data.stored_matrix import MatrixStore
    from manyhands.data.table_files import open_matrix

    with MatrixStore() as store:
        stored = store.keep(open_matrix(folder / "sample"))
        return [len(block) for block in stored.opened().blocks(0, stored.rows, 1 << 16)]


def _learn(folder: Path) -> object:
    from manyhands.workloads.logreg import training
    from manyhands.workloads.logreg.training import train_logreg

    training.available_bytes = lambda: (
        256 << 20
    )  # as on a machine that has no more: what is asked for must fit in it
    result = train_logreg(folder / "sample")
    result.model.save(folder / "trained.safetensors")
    return result


def _model(folder: Path, *more: float) -> None:
    from manyhands.workloads.logreg.labels import Labels
    from manyhands.workloads.logreg.model import LogregModel

    labels = Labels(-1.0, 1.0, *more)
    table = np.linspace(-1, 1, labels.outputs * 65, dtype=np.float32)
    table = table.reshape(labels.outputs, 65) if more else table
    LogregModel(table=table, labels=labels, bits=6).save(folder / "model.safetensors")
    (folder / "rows").write_bytes(_LIBSVM)


def _read_model(folder: Path) -> object:
    from manyhands.workloads.logreg.model import LogregModel

    model = LogregModel.load(folder / "model.safetensors")
    return model.evaluate(model.file(folder / "rows"))


def _exported(folder: Path) -> None:
    from manyhands.data.store.tensorfile import write_exported
    from manyhands.workloads.tasks.digits import ImageClassifier

    about = {"task": "digits", "options": json.dumps({"width": 4}), "steps": "7"}
    weights = ImageClassifier(side=8, white=16, width=4).state_dict()
    write_exported(folder / "model.safetensors", weights, "int8", about)


def _decomposed(folder: Path) -> None:
    from manyhands.workloads.svd.model import SvdModel

    components = np.linalg.qr(np.random.default_rng(3).normal(size=(5, 2)))[0].T
    model = SvdModel(
        singular_values=np.array([3.0, 1.0]), components=components, mean=np.ones(5), rows=12, energy=11.0
    )
    model.save(folder / "model.safetensors")


def _ask_model(folder: Path) -> object:
    """Whatever the file says that it is a model of, asked for one answer."""
    from manyhands.serving.opening import open_predictor

    predictor = open_predictor(folder / "model.safetensors")
    return predictor.answers(predictor.inputs([predictor.example]))


def _boosted(folder: Path, objective: str = "regression") -> None:
    from manyhands.workloads.gbdt.options import GbdtOptions
    from manyhands.workloads.gbdt.row_sources import ArraySource
    from manyhands.workloads.gbdt.text_format import write_model
    from manyhands.workloads.gbdt.training import TableChoice, train_gbdt

    drawn = np.random.default_rng(0)
    values = drawn.integers(0, 9, (200, 3)).astype(float)
    values[::7, 1] = np.nan
    table = TableChoice(train=ArraySource(values, values[:, 0] + values[:, 2] % 4), categorical=("2",))
    options = GbdtOptions(objective=objective, trees=3, num_leaves=5, min_data_per_group=5, cat_smooth=1.0)
    write_model(train_gbdt(table, options).model, folder / "model.txt")


def _read_boosted(folder: Path) -> object:
    from manyhands.workloads.gbdt.row_sources import RowBlock
    from manyhands.workloads.gbdt.text_format import read_model

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
        from manyhands.workloads.gbdt import bin_table as tables
        from manyhands.workloads.gbdt.options import GbdtOptions
        from manyhands.workloads.gbdt.row_sources import open_source
        from manyhands.workloads.gbdt.training import TableChoice, train_gbdt

        tables.available_bytes = lambda: 256 << 20  # as on a machine that has no more
        table = TableChoice(train=open_source(folder / name))
        options = GbdtOptions(trees=2, num_leaves=3, min_data_in_leaf=2)
        return train_gbdt(table, options)

    return read


_CSV = b'age,city,label\n31,Oslo,yes\n,"Rome, Italy",no\n4.5,,yes\n7,"Os""lo",no\n' * 3


def _boosted_texts(folder: Path) -> None:
    from manyhands.workloads.gbdt.options import GbdtOptions
    from manyhands.workloads.gbdt.row_sources import open_source
    from manyhands.workloads.gbdt.text_format import write_model
    from manyhands.workloads.gbdt.training import TableChoice, train_gbdt

    (folder / "rows.csv").write_bytes(_CSV)
    options = GbdtOptions(trees=2, min_data_in_leaf=2, min_data_per_group=1, cat_smooth=1.0)
    table = TableChoice(train=open_source(folder / "rows.csv"))
    write_model(train_gbdt(table, options).model, folder / "model.txt")


def _read_texts(folder: Path) -> object:
    from manyhands.workloads.gbdt.text_format import open_gbdt
    from manyhands.workloads.predictor import ReadAs

    return [len(block) for block in open_gbdt(folder).blocks(folder / "rows.csv", ReadAs())]


def _table(folder: Path) -> object:
    from manyhands.data.table_files import SparseTable, open_table

    return [len(block) for block in SparseTable(open_table(folder / "sample.csv")).blocks()]


ROWS = (
    Reader(name="idx", make=_idx, read=_read_idx),
    Reader(name="idx-gzip", make=_idx_gzip, read=_read_idx),
    Reader(name="images-npy", make=_images("sample.npy"), read=_read_images("sample.npy"), files=("sample.npy",)),
    Reader(name="images-json", make=_images("sample.json"), read=_read_images("sample.json"),
           files=("sample.json",)),
    Reader(name="images-png", make=_images("sample.png"), read=_read_images("sample.png"), files=("sample.png",)),
    Reader(name="values-npy", make=_npy, read=_read_values),
    Reader(name="values-json", make=written(b'{"inputs": [[1, 2.5], "a text", {"x": null}]}'), read=_read_values),
    Reader(name="text", make=written(TEXT), read=_read_text),
    Reader(name="libsvm", make=written(_LIBSVM), read=_rows(format="libsvm")),
    Reader(name="libsvm-hashed", make=written(_LIBSVM), read=_rows(format="libsvm", bits=10, skip_bad=True)),
    Reader(name="libsvm-gzip", make=written(gzip.compress(_LIBSVM, mtime=0)), read=_rows()),
    Reader(name="vowpal", make=written(_VOWPAL), read=_rows(format="vw", bits=10)),
    Reader(name="vowpal-numbers", make=written(b"1 |a 3:0.5 7 9:2\n-1 |a 1 2\n" * 5),
           read=_rows(format="vw", skip_bad=True)),
    Reader(name="vowpal-all", make=written(_VOWPAL), read=_rows(bits=8, hash="all")),
    Reader(name="matrix-libsvm", make=written(_LIBSVM), read=_matrix),
    Reader(name="matrix-npy", make=_npy, read=_matrix),
    Reader(name="matrix-parquet", make=_parquet, read=_matrix),
    Reader(name="table-csv", make=written(_CSV, "sample.csv"), read=_table, files=("sample.csv",)),
    Reader(name="table-gzip", make=written(gzip.compress(_CSV, mtime=0), "sample.csv"), read=_table,
           files=("sample.csv",)),
    Reader(name="logreg", make=written(_LIBSVM), read=_learn),
    Reader(name="logreg-model", make=_model, read=_read_model, files=("model.safetensors",)),
    Reader(name="logreg-classes", make=lambda folder: _model(folder, 7.0), read=_read_model,
           files=("model.safetensors",)),
    Reader(name="exported-model", make=_exported, read=_ask_model, files=("model.safetensors",)),
    Reader(name="svd-model", make=_decomposed, read=_ask_model, files=("model.safetensors",)),
    Reader(name="gbdt-model", make=_boosted, read=_read_boosted, files=("model.txt",)),
    Reader(name="gbdt-classes", make=lambda folder: _boosted(folder, "multiclass"), read=_read_boosted,
           files=("model.txt",)),
    Reader(name="gbdt-texts", make=_boosted_texts, read=_read_texts, files=("model.txt",)),
    Reader(name="gbdt-npy", make=_array, read=_boost("sample.npy"), files=("sample.npy",)),
    Reader(name="gbdt-parquet", make=_columns, read=_boost("sample.parquet"), files=("sample.parquet",)),
    Reader(name="gbdt-text", make=written(_LIBSVM), read=_boost("sample")),
)  # fmt: skip
