"""What trained models answer: as the module itself does, whatever the file, alone or beside others."""

from __future__ import annotations

import gzip
import json
import struct
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.cli.use_commands import predict_command
from manyhands.data.file_reader import ImageShape, read_images
from manyhands.data.store.tensorfile import write_exported
from manyhands.errors import DataError, UserError
from manyhands.serving.opening import open_predictor
from manyhands.serving.torch_predictors import ImagePredictor, MaskFiller, NumberPredictor
from manyhands.workloads.exporting import export_run
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.row_sources import ArraySource
from manyhands.workloads.gbdt.text_format import MODEL_TEXT, write_model
from manyhands.workloads.gbdt.training import TableChoice, train_gbdt
from manyhands.workloads.glove.vector_files import Vectors, VectorsPredictor
from manyhands.workloads.language.bert import BERT
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.recurrent import RecurrentNetwork
from manyhands.workloads.logreg.labels import Labels
from manyhands.workloads.logreg.model import MODEL_FILE, LogregModel
from manyhands.workloads.predictor import Predictor, ReadAs
from manyhands.workloads.registry import WORKLOADS, load
from manyhands.workloads.svd.model import SvdModel, SvdPredictor
from manyhands.workloads.tasks import TASKS
from manyhands.workloads.tasks.digits import ImageClassifier, read_digits

SHAPE = ImageShape(8, 16)


@pytest.fixture(scope="module")
def digits_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "digits"
    mh.fit(mh.tasks.build("digits"), "single", steps=60, out=out)
    return out


@pytest.fixture(scope="module")
def pixels() -> np.ndarray[Any, Any]:
    return read_digits()[0][:50].reshape(-1, 8, 8)


def write_idx(path: Path, images: np.ndarray[Any, Any], compressed: bool = False) -> None:
    content = struct.pack(">2xBB3I", 8, 3, *images.shape) + images.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(content) if compressed else content)


def test_every_task_that_can_be_trained_can_be_asked() -> None:
    assert set(TASKS) <= set(WORKLOADS)
    for use in WORKLOADS.values():
        assert callable(load(use.predictor))
        assert callable(load(use.exporter))


def test_images_are_the_same_from_every_kind_of_file(tmp_path: Path, pixels: np.ndarray[Any, Any]) -> None:
    np.save(tmp_path / "a", pixels)
    np.save(tmp_path / "columns", np.asfortranarray(pixels[:, None].astype(np.float64)))
    np.save(tmp_path / "flat", pixels.reshape(-1, 64))
    write_idx(tmp_path / "idx", pixels)
    write_idx(tmp_path / "packed", pixels, compressed=True)
    (tmp_path / "array").write_text(json.dumps(pixels.tolist()))
    (tmp_path / "request").write_text(json.dumps({"inputs": pixels.tolist()}))
    for name in ("a.npy", "columns.npy", "flat.npy", "idx", "packed", "array", "request"):
        np.testing.assert_array_equal(read_images(str(tmp_path / name), SHAPE), pixels, name)


def test_a_picture_is_scaled_to_what_the_model_knows(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
    image.fromarray(grey).save(tmp_path / "one.png")
    (read,) = read_images(str(tmp_path / "one.png"), SHAPE)
    np.testing.assert_allclose(read, grey * (16 / 255), rtol=1e-6)
    image.fromarray(np.zeros((28, 28), np.uint8)).save(tmp_path / "large.png")
    with pytest.raises(DataError, match=r"28×28 pixels; the model was trained on 8×8"):
        read_images(str(tmp_path / "large.png"), SHAPE)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "P", "1"])
def test_pictures_of_every_mode_are_grey_and_what_is_seen_through_is_black(tmp_path: Path, mode: str) -> None:
    image = pytest.importorskip("PIL.Image")
    grey = np.where(np.eye(8), 255, 0).astype(np.uint8)
    picture = image.fromarray(grey).convert(mode)
    if mode in ("RGBA", "LA"):  # the corner below the middle cannot be seen
        seen = np.full((8, 8), 255, np.uint8)
        seen[7, 7] = grey[7, 7] = 0
        picture.putalpha(image.fromarray(seen))
    picture.save(tmp_path / "one.png")
    (read,) = read_images(str(tmp_path / "one.png"), SHAPE)
    np.testing.assert_allclose(read, grey * (16 / 255), rtol=1e-6)


def test_pictures_that_pillow_would_cut_off_or_have_a_program_read_are_refused(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    image.fromarray(np.full((8, 8), 40000, np.uint16)).save(tmp_path / "deep.png")
    with pytest.raises(DataError, match="mode I;16; save it with 8 bits a pixel"):
        read_images(str(tmp_path / "deep.png"), SHAPE)
    image.fromarray(np.zeros((8, 8), np.uint8)).save(tmp_path / "script.eps")
    with pytest.raises(DataError, match="is not an image that Pillow can read"):
        read_images(str(tmp_path / "script.eps"), SHAPE)


def test_without_pillow_pictures_are_refused_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    (tmp_path / "one.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(UserError, match=r"pip install .manyhands\[images\]"):
        read_images(str(tmp_path / "one.png"), SHAPE)


def npy(**header: Any) -> bytes:
    text = repr({"descr": "<f4", "fortran_order": False, "shape": (1, 8, 8), **header}).encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (npy() + bytes(10), "its header announces 256 B of float32, but 10 B follow"),
        (npy(shape=(1 << 40, 8, 8)) + bytes(256), "its header announces"),
        (npy(descr="|O") + bytes(64 * 8), "its header announces"),
        (b"\x93NUMPY\x07\x00", "npy|version"),
        (b"[[1, 2], [3]]", "different lengths"),
        (b'[["a"]]', "values that are not numbers"),
        (b"[[[1, 2], [3, 4]]]", "its shape is 1×2×2; an image is 8×8 numbers from 0 to 16"),
        (json.dumps([[[17] * 8] * 8]).encode(), "its values range from 17 to 17"),
        (b"[[NaN]]", "its shape"),
        (b'{"input": []}', "it must be an array of inputs"),
        (b"[" * 100_000, "JSON|recursion"),
        (b"[]", "its shape is 0|no image"),
        (b"\0\0\x08\x02" + struct.pack(">2I", 2, 3) + bytes(6), "its shape is 2×3"),
    ],
)
def test_files_that_hold_no_images_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(DataError, match=f"bad.*({said})"):
        read_images(str(tmp_path / "bad"), SHAPE)


def test_the_classes_are_those_of_the_module(digits_run: Path, pixels: np.ndarray[Any, Any]) -> None:
    predictor = open_predictor(digits_run)
    model = mh.load(digits_run)
    with torch.inference_mode():
        expected = model(torch.from_numpy(pixels).unsqueeze(1)).softmax(1).max(1)
    answers = predictor.answers(predictor.inputs(pixels.tolist()))
    assert [one["label"] for one in answers] == expected.indices.tolist()
    assert [one["probability"] for one in answers] == pytest.approx(expected.values.tolist(), abs=2e-6)
    halves = [predictor.inputs(part.tolist()) for part in (pixels[:20], pixels[20:])]
    together = predictor.answers(predictor.together(halves))
    assert [one["label"] for one in together] == [one["label"] for one in answers]
    assert predictor.answers(predictor.inputs([predictor.example]))[0]["label"] in range(10)


def test_predict_prints_a_line_for_each_input(
    digits_run: Path, tmp_path: Path, pixels: np.ndarray[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    write_idx(tmp_path / "some", pixels)
    predict_command(digits_run, str(tmp_path / "some"))
    lines = capsys.readouterr().out.splitlines()
    labels = [int(line.split()[0]) for line in lines]
    right = read_digits()[1][:50].tolist()
    assert len(labels) == 50
    assert sum(ours == theirs for ours, theirs in zip(labels, right, strict=True)) >= 40
    exported = export_run(digits_run, precision="int8").path
    capsys.readouterr()
    predict_command(exported, str(tmp_path / "some"), out=tmp_path / "lines")
    assert len((tmp_path / "lines").read_text().splitlines()) == 50
    assert f"manyhands: wrote 50 lines to {tmp_path / 'lines'}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([[[0] * 8] * 7], "input 0: its shape is 7×8"),
        ([[[0] * 8] * 8, "a cat"], "input 1: it holds"),
        ([[[[0] * 8] * 8] * 2], "input 0 holds 2 images"),
        ([[0] * 8] * 8, "input 0: its shape is 8"),
        ([None], "input 0"),
        ([{"a": 1}], "input 0"),
        ([[[-1] * 8] * 8], "input 0: its values range from -1"),
        ([[[float("nan")] * 8] * 8], "input 0: its values"),
        ([[[10**400] * 8] * 8], "input 0"),
        (
            [["a" * 1000, 1], [2, 3]],
            "input 0: it holds rows of different lengths or values that are not numbers",
        ),
    ],
)
def test_json_that_is_no_image_is_refused(values: list[Any], said: str) -> None:
    predictor = ImagePredictor(ImageClassifier(side=8, white=16, width=4))
    with pytest.raises(UserError, match=said):
        predictor.inputs(values)


def test_one_long_text_among_many_does_not_take_its_length_for_each_of_them() -> None:
    predictor = ImagePredictor(ImageClassifier(side=8, white=16, width=4))
    for values in (["a" * 100_000, *["b"] * 1000], [["a" * 100_000, *["b"] * 1000]]):
        tracemalloc.start()
        try:
            with pytest.raises(UserError, match="input 0: it holds"):
                predictor.inputs(values)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert most < 10e6, "1000 times 100,000 letters would be 400 MB"


def test_masked_text_is_text_with_a_mask() -> None:
    filler = MaskFiller(BERT(context=12, layers=1, width=4, heads=1, vocabulary=260))
    for value, said in (
        (3, "is 3"),
        ("a" * 99, "is 'a{59}…"),
        ("[MASK]\ud800", "is not text: it has half of a"),
    ):
        with pytest.raises(UserError, match=f"input 0 {said}"):
            filler.inputs([value])


def test_sparse_lines_are_asked_one_by_one(tmp_path: Path) -> None:
    table = np.random.default_rng(0).normal(size=401).astype(np.float32)
    LogregModel(table=table, labels=Labels(-1.0, 1.0)).save(tmp_path / MODEL_FILE)
    predictor = open_predictor(tmp_path)
    lines = ["+1 1:1 7:0.5", "-1 3:1 400:2"]
    (tmp_path / "examples").write_text("".join(f"{line}\n" for line in lines))
    (block,) = predictor.blocks(str(tmp_path / "examples"), ReadAs())
    answers = predictor.answers(predictor.inputs(lines))
    assert answers == predictor.answers(block)
    margin = float(table[0]) + float(table[2]) + 0.5 * float(table[8])  # the bias lies before feature 0
    assert answers[0]["probability"] == pytest.approx(1 / (1 + np.exp(-margin)), rel=1e-6)
    both = predictor.together([predictor.inputs(lines[:1]), predictor.inputs(lines[1:])])
    assert predictor.answers(both) == answers
    for bad in (["+1 1:1\n+1 2:1"], [3], ["# only a comment"], ["+1 one:1"]):
        with pytest.raises(UserError, match="input"):
            predictor.inputs(bad)


def test_words_are_asked(tmp_path: Path) -> None:
    directions = np.array([[1, 0], [0.9, 0.1], [0, 1]], np.float32)
    Vectors(["king", "queen", "cat"], directions).save_text(tmp_path / "vectors.txt")
    predictor = load(WORKLOADS["glove"].predictor)(tmp_path)
    (inputs,) = predictor.blocks("king", ReadAs())
    assert [line.split()[0] for line in predictor.lines(inputs)] == ["queen", "cat"]
    with pytest.raises(UserError, match="'dog' is not among the 3 words"):
        predictor.inputs(["dog"])
    with pytest.raises(UserError, match="input 0 has 1,000,000 letters"):
        predictor.inputs(["x" * 10**6])


@pytest.mark.parametrize("first", ["+", "-", "−", "x" * 2000, "a\u00a0b"])
def test_the_example_is_a_word_that_can_be_asked(first: str) -> None:
    predictor = VectorsPredictor(Vectors([first, "king", "cat"], np.eye(3, dtype=np.float32)))
    assert predictor.example == "king"
    assert predictor.answers(predictor.inputs([predictor.example]))


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("digits", {"width": 1 << 24}, "has shape .*, but its options give"),
        ("digits", {"width": 8, "side": 3}, "no option 'side'"),
        ("gpt", {"width": 8, "heads": 1, "layers": 20, "context": 128}, "it has no "),
        ("gpt", {"layers": 10**9}, "at most 1000"),
        ("recurrent", {"width": 1 << 24, "layers": 1}, "has shape .*, but its options give"),
        ("recurrent", {"width": 8, "layers": 1, "context": "a"}, "context is 'a'"),
        ("recurrent", {"width": 8, "layers": 1}, "does not name its context length"),
        ("cats", {}, "not built in"),
    ],
)
def test_a_header_that_promises_another_model_takes_no_memory(
    tmp_path: Path, name: str, options: dict[str, Any], said: str
) -> None:
    models = {
        "digits": ImageClassifier(side=8, white=16, width=8),
        "gpt": GPT(context=128, layers=1, width=8, heads=1),
    }
    weights = models.get(name, RecurrentNetwork(layers=1, width=8)).state_dict()
    about = {"task": name, "options": json.dumps(options), "steps": "1"}
    write_exported(tmp_path / "model", weights, "fp32", about)
    with pytest.raises(UserError, match=said):
        open_predictor(tmp_path / "model")


def decomposition() -> Predictor[Any]:
    components = np.array([[0.6, 0.8, 0.0], [0.0, 0.0, 1.0]])
    return SvdPredictor(
        SvdModel(
            singular_values=np.array([2.0, 1.0]), components=components, mean=np.ones(3), rows=9, energy=5.0
        )
    )


def trees(tmp_path: Path) -> Predictor[Any]:
    values = np.random.default_rng(0).integers(0, 9, (100, 3)).astype(float)
    table = TableChoice(train=ArraySource(values, values[:, 0]))
    write_model(train_gbdt(table, GbdtOptions(trees=2, num_leaves=3)).model, tmp_path / MODEL_TEXT)
    return open_predictor(tmp_path / MODEL_TEXT)


def test_rows_are_projected_and_predicted(tmp_path: Path) -> None:
    found = decomposition().answers(decomposition().inputs([[2, 1, 1], [1.0, 1.0, 4.5]]))
    np.testing.assert_allclose(found, [[0.6, 0.0], [0.0, 3.5]])
    boosted = trees(tmp_path)
    rows = boosted.inputs([[1, 2, 3], [None, 8, 0.5]])
    assert np.isnan(rows.values[1, 0])
    both = boosted.together([boosted.inputs([[1, 2, 3]]), boosted.inputs([[None, 8, 0.5]])])
    assert boosted.answers(both) == boosted.answers(rows)


def test_lines_that_are_wrong_are_left_out_and_counted_where_asked(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("1 1:1\n1 1:x\n")
    for predictor in (trees(tmp_path), decomposition()):
        (block,) = predictor.blocks(str(tmp_path / "rows"), ReadAs(skip_bad=True))
        assert len(block) == 1
        assert predictor.left_out == 1
    with pytest.raises(DataError, match=r"rows.*line 2"):
        list(trees(tmp_path).blocks(str(tmp_path / "rows"), ReadAs()))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (["abc"], "input 0 is not an array"),
        ([{}], "input 0 is not an array"),
        ([[1, 2, 3], [1, 2]], "input 1 has 2 numbers; .*3 in all"),
        ([[1, 2, 3], [1, "2", 3]], "input 1 has '2' at position 1"),
        ([[1, True, 3]], "input 0 has 'True' at position 1"),
        ([[[1], [2], [3]]], r"input 0 has '\[1\]' at position 0"),
        ([[1, 2, 10**400]], "input 0 has a number beyond double precision"),
    ],
)
def test_json_that_is_no_row_is_refused(values: list[Any], said: str, tmp_path: Path) -> None:
    for predictor in (decomposition(), trees(tmp_path)):
        with pytest.raises(UserError, match=said):
            predictor.inputs(values)


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_what_is_missing_cannot_be_projected(value: Any) -> None:
    with pytest.raises(UserError, match="input 0 has"):
        decomposition().inputs([[1, 2, value]])


@pytest.mark.parametrize("value", [10**400, True, "1", None, float("nan"), [1]])
def test_what_is_no_number_has_no_place_on_a_line(value: Any) -> None:
    predictor = NumberPredictor(nn.Linear(1, 1, dtype=torch.float64))
    with pytest.raises(UserError, match=r"input 1 is .*; it must be a finite number"):
        predictor.inputs([1, value])
    with pytest.raises(UserError, match="fp32 only"):
        predictor.check_precision("bf16")


def test_what_is_no_model_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run directory"):
        open_predictor(tmp_path)
    with pytest.raises(UserError, match="cannot be read: No such file"):
        open_predictor(tmp_path / "nothing")
    task = mh.Task(
        model=lambda: nn.Linear(2, 1),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        data=(torch.ones(8, 2),),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    mh.fit(task, "single", steps=1, out=tmp_path / "own")
    with pytest.raises(UserError, match=r"--task my_module:task, or open_predictor\(path, task\)"):
        open_predictor(tmp_path / "own")
