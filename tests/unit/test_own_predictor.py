"""A Task of one's own is asked: by its two functions or as nested arrays; and each wrong input gets one sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

import manyhands as mh
import own_models
from manyhands.errors import ManyhandsError, UserError
from manyhands.serving.model_replica import answer_batch, answers_frame
from manyhands.serving.opening import open_predictor
from manyhands.serving.own_predictor import OwnPredictor
from manyhands.serving.torch_predictors import export_program
from manyhands.task import Task
from manyhands.workloads.exporting import ExportAsked, export_run
from manyhands.workloads.own_task import own_task
from manyhands.workloads.predictor import ReadAs


def asking(task: Task) -> OwnPredictor:
    torch.manual_seed(0)
    return OwnPredictor(task.model(), task)


def of_linear(model: nn.Module | None = None, data: Any = None, **about: Any) -> Task:
    """A task whose loss gives the model the batch as it is."""
    made = model or nn.Linear(3, 2)
    return Task(
        model=lambda: made,
        loss=lambda model, batch: model(batch).sum(),
        data=torch.arange(12.0).reshape(4, 3) if data is None else data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        **about,
    )


def test_an_array_is_what_the_loss_gives_the_model_and_the_answer_is_its_output() -> None:
    predictor = asking(own_models.cnn())
    pixels = own_models.images(5)[0].float() / 16
    with torch.inference_mode():
        expected = predictor.model(pixels)
    np.testing.assert_allclose(predictor.answers(predictor.inputs(pixels.tolist())), expected, rtol=1e-6)
    assert predictor.takes == "an array of shape 1×8×8 (float32)"
    assert predictor.example == torch.zeros(1, 8, 8).tolist()


def test_texts_of_several_lengths_are_computed_apart_and_answered_in_order() -> None:
    predictor = asking(own_models.transformer())
    texts = ["ABC", "XY", "DEF", "Q", "YZ"]
    together = predictor.answers(predictor.inputs(texts))
    assert together == [one for text in texts for one in predictor.answers(predictor.inputs([text]))]
    assert {tuple(answer) for answer in together} == {("next", "probability")}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1, 2], "input 1 has shape 2 (int64); it must be an array of shape 3 (float32)"),
        ([[1, 2, 3]], "input 1 has shape 1×3 (int64); it must be"),
        ([], "input 1 has shape 0 (float64); it must be"),
        (7, "input 1 has shape () (int64); it must be"),
        ([1, [2], 3], "input 1 has rows of different lengths; it must be"),
        ([1, "2", 3], "input 1 has a value that does not fit at [1]; it must be"),
        ([[1, 2, 3], [4, [5], 6]], "input 1 has rows of different lengths; it must be"),
        ([[1, 2, 3], [4, 5, False]], "input 1 has shape 2×3 (int64); it must be"),
        ([[1.5, 2, 3], [4, 5, "6"]], "input 1 has a value that does not fit at [1][2]; it must be"),
        ([True, False, True], "input 1 has a value that does not fit at [0]; it must be"),
        ([1, None, 3], "input 1 has a value that does not fit at [1]; it must be"),
        ({"x": 1}, "input 1 has a value that does not fit; it must be"),
        ("abc", "input 1 has a value that does not fit; it must be"),
        ([1, 2, float("nan")], "input 1 has a number that is not finite or too large at [2]; it must be"),
        ([1, 1e300, 2], "input 1 has a number that is not finite or too large at [1]; it must be"),
        ([1, 2, 10**400], "input 1 has a value that does not fit; it must be"),
    ],
)
def test_an_input_of_another_shape_gets_what_was_expected(value: Any, said: str) -> None:
    predictor = asking(of_linear())
    with pytest.raises(UserError) as caught:
        predictor.inputs([[1, 2, 3], value])
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [[1.5], [2**40], [-1], [True]])
def test_integers_are_neither_cut_off_nor_overflow(value: Any) -> None:
    predictor = asking(of_linear(nn.Embedding(4, 2), torch.zeros(4, 1, dtype=torch.uint8)))
    with pytest.raises(UserError, match=r"input 0 .*an array of shape 1 \(uint8\)"):
        predictor.inputs([value])


def test_wrong_inputs_beside_good_ones_are_refused_alone() -> None:
    predictor = asking(own_models.transformer())
    bodies = [{"inputs": ["ABC"]}, {"inputs": [5]}, {"inputs": ["A" * 13]}, {"inputs": ["AB", "XYZ"]}]
    results = answer_batch(predictor, bodies)
    assert [one["status"] for one in results] == [200, 400, 400, 200]
    assert results[1]["error"] == (
        "input 0 cannot be read (ValueError: it is not text); it must be what its task reads (a text of "
        "capital letters)"
    )
    assert results[2]["error"] == (
        "input 0 has shape 13 (int64), which the model cannot take (IndexError: index out of range in self); "
        "a shape that it takes is 5 (int64)"
    )
    assert results[0]["answers"] + results[3]["answers"] == predictor.answers(
        predictor.inputs(["ABC", "AB", "XYZ"])
    )


def test_of_inputs_of_one_shape_the_one_that_the_model_fails_on_is_named() -> None:
    predictor = asking(own_models.transformer())
    with pytest.raises(ManyhandsError, match=r"the model failed on input 2 \(IndexError: index out of range"):
        predictor.answers(predictor.inputs(["HELLO", "WORLD", "HÉLLO", "THERE", "ÀÉÎÕÜ"]))
    bodies = [{"inputs": ["HELLO"]}, {"inputs": ["WORLD", "HÉLLO"]}, {"inputs": ["THERE"]}]
    results = answer_batch(predictor, bodies)
    assert [one["status"] for one in results] == [200, 500, 200]
    assert results[1]["error"].startswith("the model failed on input 1 (IndexError")


def test_a_row_far_down_a_file_is_named_by_its_number_and_left_out_on_request(tmp_path: Path) -> None:
    texts: list[Any] = [chr(65 + number % 26) * (1 + number % 3) for number in range(1600)]
    expected = asking(own_models.transformer())
    good = expected.answers(expected.inputs(texts))
    file, predictor = tmp_path / "texts.json", asking(own_models.transformer())

    def lines(skip_bad: bool) -> list[Any]:
        file.write_text(json.dumps(texts))
        blocks = predictor.blocks(str(file), ReadAs(skip_bad=skip_bad))
        return [json.loads(line) for block in blocks for line in predictor.lines(block)]

    assert lines(skip_bad=False) == good
    texts[1500] = "A" * 13
    with pytest.raises(UserError, match=r"^input 1500 has shape 13 \(int64\), which the model cannot take"):
        lines(skip_bad=False)
    texts[7] = 7
    with pytest.raises(UserError, match=r"texts.json: input 7 cannot be read \(ValueError: it is not text\)"):
        lines(skip_bad=False)
    assert lines(skip_bad=True) == [one for number, one in enumerate(good) if number not in (7, 1500)]
    assert predictor.left_out == 2
    texts[1501] = "É"
    with pytest.raises(ManyhandsError, match="input 1501"):
        predictor.answers(predictor.inputs(texts[:7] + texts[8:1500] + ["A"] * 2 + texts[1501:]))


class Two(nn.Module):
    """Takes two tensors, one by name, and gives a dict."""

    def forward(self, x: Tensor, *, y: Tensor) -> dict[str, Tensor]:
        return {"sum": x + y, "both": torch.stack([x, y], dim=1)}


def test_several_tensors_need_read_input_and_may_be_named() -> None:
    data = (torch.ones(4), torch.zeros(4))
    usual = replace(
        of_linear(Two(), data), loss=lambda model, batch: model(batch[0], y=batch[1])["sum"].sum()
    )
    with pytest.raises(UserError, match="its model takes 2 tensors; give the task read_input"):
        asking(usual)
    read = lambda value: {0: torch.tensor(value["x"]), "y": torch.tensor(value["y"])}  # noqa: E731
    predictor = asking(replace(usual, read_input=read))
    values = [{"x": 1.0, "y": 2.0}, {"x": 3.0, "y": 4.0}]
    assert predictor.answers(predictor.inputs(values)) == [
        {"sum": 3, "both": [1, 2]},
        {"sum": 7, "both": [3, 4]},
    ]
    assert predictor.example is None
    predictor.warm()
    with pytest.raises(UserError, match=r"input 0 cannot be read \(KeyError: 'y'\)"):
        predictor.inputs([{"x": 1.0}])


class Stream(IterableDataset[Any]):
    """Never iterated."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError


def test_without_data_an_example_says_what_the_model_takes() -> None:
    streamed = replace(own_models.transformer(), data=Stream())
    predictor = asking(streamed)
    assert len(predictor.answers(predictor.inputs(["A", "BC"]))) == 2
    with pytest.raises(UserError, match=r"can only be iterated.*give the task read_input and example_input"):
        asking(replace(streamed, example_input=None))
    with pytest.raises(
        UserError, match=r"its example_input: input 0 has shape 1 \(int64\); it must be an array of shape 3"
    ):
        asking(of_linear(example_input=[1]))
    for example in (np.zeros(3), torch.zeros(3), [0, 0, float("nan")]):
        with pytest.raises(UserError, match=r"its example_input is not JSON \(.*\); give numbers"):
            asking(of_linear(example_input=example))


def test_a_model_whose_output_has_no_row_for_each_input_never_mixes_answers() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mean(dim=0, keepdim=True)

    predictor = asking(of_linear(Mean()))
    results = answer_batch(predictor, [{"inputs": [[1, 2, 3], [4, 5, 6]]}])
    assert results[0]["status"] == 500
    assert (
        "gave a tensor of shape 1×3 (float32) for 2 inputs; its first dimension must be the batch"
        in results[0]["error"]
    )


def test_an_answer_that_is_no_json_is_an_error_of_its_request_alone() -> None:
    predictor = asking(of_linear(write_answer=lambda row: row if row[0] > 0 else 1))
    bad = [{"status": 200, "answers": [torch.ones(1)]}, {"status": 200, "answers": [1]}]
    sent = json.loads(answers_frame(bad)[4:])
    assert sent[0] == {
        "status": 500,
        "error": "the model's answer is not JSON: Object of type Tensor is not JSON serializable",
    }
    assert sent[1] == bad[1]
    assert predictor.takes
    around: list[Any] = []
    around.append(around)
    (sent,) = json.loads(answers_frame([{"status": 200, "answers": around}])[4:])
    assert sent["status"] == 500


def test_answers_that_are_too_large_are_an_error_of_their_requests_alone() -> None:
    results = [{"status": 200, "answers": [0] * count} for count in (100, 10_000, 500, 1)]
    small, large, crowded, last = json.loads(answers_frame(results, most_bytes=1800)[4:])
    assert (small, last) == (results[0], results[3])
    assert (large["status"], crowded["status"]) == (413, 503)
    assert "at most 1.8 KiB can be sent; send fewer inputs at a time" in large["error"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"write_answer": lambda row: row["no"]}, "write_answer failed for input 0 (IndexError: "),
        ({"read_input": lambda value: value}, "read_input gave a list; it must give a tensor"),
        ({"model": lambda: Fails(3, 2)}, "the model failed on input 0 (ArithmeticError: no luck)"),
    ],
)
def test_what_fails_in_the_task_is_one_sentence_on_the_command_line_too(changes: Any, said: str) -> None:
    predictor = asking(replace(of_linear(), **changes))
    with pytest.raises(ManyhandsError) as caught:
        predictor.answers(predictor.inputs([[1, 2, 3]]))
    assert said in str(caught.value)
    (result,) = answer_batch(predictor, [{"inputs": [[1, 2, 3]]}])
    assert (result["status"], result["error"]) == (500, str(caught.value))


class Fails(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError("no luck")


def test_fewer_bits_answer_nearly_the_same() -> None:
    usual, other = asking(own_models.cnn()), asking(own_models.cnn())
    other.precision = "bf16"
    other.prepare()
    values = (own_models.images(3)[0].float() / 16).tolist()
    for one, near in zip(
        usual.answers(usual.inputs(values)), other.answers(other.inputs(values)), strict=True
    ):
        assert near == pytest.approx(one, abs=0.05)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "run"
    mh.fit(own_models.cnn(), "single", steps=3, out=folder)
    return folder


def test_a_run_and_its_export_answer_files_alike(run: Path, tmp_path: Path) -> None:
    pixels = own_models.images(6, seed=2)[0].float() / 16
    with torch.inference_mode():
        expected = mh.load(run, own_models.cnn())(pixels).tolist()
    np.save(tmp_path / "six.npy", pixels.numpy())
    (tmp_path / "six.json").write_text(json.dumps({"inputs": [*pixels.tolist(), [0]]}))
    exported = export_run(run, tmp_path / "model.safetensors", task=own_models.cnn())
    for place in (run, exported.path):
        predictor = open_predictor(place, own_models.cnn())
        [block] = predictor.blocks(str(tmp_path / "six.npy"), ReadAs())
        np.testing.assert_allclose([json.loads(line) for line in predictor.lines(block)], expected, rtol=1e-6)
        with pytest.raises(UserError, match=r"six.json: input 6 has shape 1 \(int64\); it must be"):
            list(predictor.blocks(str(tmp_path / "six.json"), ReadAs()))
        [block] = predictor.blocks(str(tmp_path / "six.json"), ReadAs(skip_bad=True))
        assert (len(block), predictor.left_out) == (6, 1)
    with pytest.raises(UserError, match="say where its Task is: --task my_module:task"):
        open_predictor(run)
    with pytest.raises(UserError, match="do not fit the task's model"):
        open_predictor(run, own_models.transformer())


@pytest.mark.parametrize("make", [own_models.cnn, own_models.transformer])
def test_a_program_computes_what_the_module_does(make: Any, tmp_path: Path) -> None:
    task, run = make(), tmp_path / "run"
    mh.fit(task, "single", steps=3, out=run)
    made = export_program(ExportAsked(run=run, out=tmp_path / "model.pt2", task=task))
    assert made.largest_difference is not None
    assert (made.steps, made.largest_difference <= 1e-5) == (3, True)
    program = torch.export.load(made.path).module()
    inputs = torch.rand(4, 1, 8, 8) if make is own_models.cnn else torch.randint(0, 64, (4, 5))
    with torch.inference_mode():
        assert torch.allclose(program(inputs), mh.load(run, task)(inputs), atol=1e-5)


def test_a_module_that_cannot_be_traced_gets_a_sentence(tmp_path: Path) -> None:
    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.sum() > 0 else x[:, :2]

    task = of_linear(Branches(3, 2))
    mh.fit(task, "single", steps=1, out=tmp_path / "run")
    with pytest.raises(
        UserError, match=r"torch.export cannot trace Branches for batches of any size"
    ) as caught:
        export_program(ExportAsked(run=tmp_path / "run", task=task))
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "model.pt2").exists()


MODULE = """
import manyhands as mh, own_models
made = own_models.cnn()
number = 3
def broken(argument): ...
def without_data(): open("nowhere.csv")
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("made", "it must be MODULE:NAME, such as my_module:task"),
        ("named_here:", "it must be MODULE:NAME"),
        ("named_here:mde", "no 'mde'; allowed: made, without_data; did you mean 'made'?"),
        ("names_none:task", "no 'task'; nor any other Task, or function that makes one"),
        ("leaves_here:task", "module leaves_here cannot be imported (SystemExit: 2)"),
        ("named_here:number", "number gives a int; it must be a Task"),
        ("named_here:broken", "broken cannot be called without arguments"),
        ("named_here:without_data", "without_data failed (FileNotFoundError: [Errno 2] No such file"),
        ("json.py:task", "another module is called json ("),
        ("nowhere_at_all:task", "cannot be imported (ModuleNotFoundError: No module named 'nowhere_at_all')"),
        ("absent.py:task", "there is no file absent.py"),
        ("raises_here:task", "module raises_here cannot be imported (ZeroDivisionError: division by zero)"),
    ],
)
def test_a_task_that_is_not_there_gets_a_sentence(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "named_here.py").write_text(MODULE)
    (tmp_path / "raises_here.py").write_text("1 / 0")
    (tmp_path / "leaves_here.py").write_text("import sys; sys.exit(2)")
    (tmp_path / "names_none.py").write_text("def loss(model, batch): ...")
    (tmp_path / "json.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(UserError) as caught:
        own_task(name)
    assert said in str(caught.value)
    sys.modules.pop("named_here", None)


def test_a_task_is_found_by_module_file_and_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "found_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for text in ("found_here:made", f"{tmp_path}/found_here.py:made", "own_models:cnn"):
        assert own_task(text).name == "sides"
    sys.modules.pop("found_here", None)


@pytest.mark.parametrize("field", ["read_input", "write_answer"])
def test_what_is_no_function_is_refused(field: str) -> None:
    with pytest.raises(UserError, match=f"{field} is 3; it must be a function"):
        of_linear(**{field: 3})
