"""Exported weights: what is kept of them, exactly, and files that somebody else made."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import manyhands as mh
from manyhands.cli.use_commands import export_command, predict_command
from manyhands.data.store.tensorfile import PRECISIONS, narrow, read_exported, widen, write_exported
from manyhands.errors import UserError
from manyhands.workloads.exporting import export_run
from manyhands.workloads.logreg.labels import Labels
from manyhands.workloads.logreg.model import MODEL_FILE, LogregModel


@given(count=st.integers(1, 1000), seed=st.integers(0, 99), size=st.floats(1e-6, 1e6))
@settings(max_examples=60, deadline=None)
def test_int8_is_off_by_half_a_step_of_its_block_at_most(count: int, seed: int, size: float) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * size
    read = widen(narrow({"x": values}, "int8"))["x"]
    if count < 256:
        assert torch.equal(read, values)
        return
    for begin in range(0, count, 64):
        block = values[begin : begin + 64]
        step = block.abs().max() / 127
        assert (read[begin : begin + 64] - block).abs().max() <= step * (0.5 + 1e-4)


def test_bf16_and_fp32_are_torchs() -> None:
    values = {
        "a": torch.randn(40, 3),
        "count": torch.tensor([3]),
        "double": torch.randn(5, dtype=torch.float64),
    }
    assert torch.equal(widen(narrow(values, "bf16"))["a"], values["a"].to(torch.bfloat16).float())
    assert torch.equal(widen(narrow(values, "fp32"))["double"], values["double"].float())
    assert all(torch.equal(widen(narrow(values, one))["count"], values["count"]) for one in PRECISIONS)


def test_sizes_are_those_of_the_formula_and_tied_weights_are_written_once(tmp_path: Path) -> None:
    weight = torch.randn(640, 10)
    write_exported(tmp_path / "x", {"embed": weight, "head": weight}, "int8", {"task": "own"})
    written = safetensors.torch.load_file(tmp_path / "x")
    assert sum(tensor.nbytes for tensor in written.values()) == 6400 + 4 * 100
    read = read_exported(tmp_path / "x")
    assert torch.equal(read.weights["head"], read.weights["embed"])
    assert read.about["precision"] == "int8"


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_block_of_zeros_and_an_empty_tensor_come_back(precision: str) -> None:
    values = {"zeros": torch.zeros(300), "nothing": torch.zeros(0, 4)}
    read = widen(narrow(values, precision))
    assert all(torch.equal(read[name], value) for name, value in values.items())


@pytest.mark.parametrize(
    ("tensors", "header"),
    [
        ({"x": torch.zeros(4)}, {}),
        ({"x": torch.zeros(300, dtype=torch.int8), "x::scales": torch.zeros(4)}, {"manyhands": "export.1"}),
        (
            {"x": torch.zeros(300, dtype=torch.int8), "x::scales": torch.full((5,), torch.nan)},
            {"manyhands": "export.1"},
        ),
        ({"x::scales": torch.zeros(5)}, {"manyhands": "export.1"}),
        ({"x": torch.zeros(4)}, {"manyhands": "export.1", "tied": json.dumps({"y": "z"})}),
        ({"x": torch.zeros(4)}, {"manyhands": "export.1", "tied": "[1]"}),
        ({"x": torch.zeros(4)}, {"manyhands": "export.1", "tied": "{"}),
    ],
)
def test_files_that_were_not_written_so_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], header: dict[str, str]
) -> None:
    safetensors.torch.save_file(tensors, tmp_path / "x", header)
    with pytest.raises(UserError, match="was not written by `manyhands export`"):
        read_exported(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"no such file")
    with pytest.raises(UserError, match="is not a safetensors file"):
        read_exported(tmp_path / "x")


@pytest.mark.parametrize("options", ["{", "[]", "[1]", "7", "null", '"x"', ""])
def test_options_that_are_none_are_refused_by_file(tmp_path: Path, options: str) -> None:
    header = {"manyhands": "export.1", "task": "digits", "options": options}
    safetensors.torch.save_file({"x": torch.zeros(4)}, tmp_path / "x", header)
    with pytest.raises(UserError, match=r"model .*x was not written by `manyhands export`: its options "):
        mh.load(tmp_path / "x")


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 1e300])
def test_int8_of_what_is_not_finite_is_refused_and_no_file_is_left(tmp_path: Path, value: float) -> None:
    table = torch.zeros(3, 300, dtype=torch.float64)
    table[1, 7] = value
    with pytest.raises(UserError, match=r"layer\.weight is not finite; use fp32"):
        write_exported(tmp_path / "x", {"layer.weight": table}, "int8", {})
    assert not list(tmp_path.iterdir())
    write_exported(tmp_path / "x", {"layer.weight": table}, "fp32", {})
    read = read_exported(tmp_path / "x").weights["layer.weight"]
    assert torch.equal(read.nan_to_num(5.0), table.float().nan_to_num(5.0))


def test_a_run_is_exported_with_its_cost_and_loaded_again(tmp_path: Path) -> None:
    run = mh.fit(mh.tasks.build("digits"), "single", steps=60, out=tmp_path / "run")
    sizes = {}
    for precision in PRECISIONS:
        export = export_run(tmp_path / "run", precision=precision)
        sizes[precision] = export.num_bytes
        assert export.steps == 60
        assert export.before == pytest.approx(run.history.evaluations[-1]["metrics"], rel=1e-6)
        assert export.after["accuracy"] == pytest.approx(export.before["accuracy"], abs=0.02)
        model = mh.load(export.path)
        assert not model.training
    assert sizes["bf16"] < 0.6 * sizes["fp32"]
    assert sizes["int8"] < 0.6 * sizes["bf16"]
    whole = mh.load(tmp_path / "run")
    for ours, trained in zip(whole.parameters(), run.model.parameters(), strict=True):
        assert torch.equal(ours, trained)


def test_a_logistic_regression_is_exported_for_predict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = np.random.default_rng(0).normal(size=401).astype(np.float32)
    LogregModel(table=table, labels=Labels(-1.0, 1.0)).save(tmp_path / MODEL_FILE)
    examples = tmp_path / "examples"
    examples.write_text("+1 1:1 7:0.5\n-1 3:1 400:2\n")
    export_command(tmp_path, precision="int8", test=examples, json_file=tmp_path / "figures")
    said = capsys.readouterr().out
    assert "int8" in said
    figures = json.loads((tmp_path / "figures").read_text())
    assert figures["after"]["log_loss"] == pytest.approx(figures["before"]["log_loss"], rel=0.05)
    assert figures["after"]["log_loss"] != figures["before"]["log_loss"]
    read = LogregModel.load(tmp_path / "model-int8.safetensors")
    assert np.abs(read.table - table).max() <= np.abs(table).max() / 127
    assert read.bias == table[0]
    predict_command(tmp_path / "model-int8.safetensors", str(examples))
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_what_cannot_be_loaded_is_said(tmp_path: Path) -> None:
    task = mh.Task(
        model=lambda: nn.Linear(2, 1),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        data=(torch.ones(8, 2),),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    mh.fit(task, "single", steps=2, out=tmp_path / "own")
    with pytest.raises(UserError, match="not built in; give the task it was trained with"):
        mh.load(tmp_path / "own")
    assert isinstance(mh.load(tmp_path / "own", task=task), nn.Linear)
    with pytest.raises(UserError, match="is not a run directory"):
        mh.load(tmp_path)
    with pytest.raises(UserError, match="precision='int4': allowed: fp32, bf16, int8"):
        export_run(tmp_path / "own", precision="int4", task=task)
    other = mh.Task(model=lambda: nn.Linear(3, 1), loss=task.loss, data=task.data, optimizer=task.optimizer)
    with pytest.raises(UserError, match="do not fit the task's model"):
        mh.load(tmp_path / "own", task=other)


def test_a_model_is_loaded_where_the_data_is_gone(tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text("many hands make light work; " * 200)
    task = mh.tasks.build("recurrent", path=text, context=16, width=8, layers=1)
    run = mh.fit(task, "single", steps=2, out=tmp_path / "run")
    text.unlink()
    loaded = mh.load(tmp_path / "run").state_dict()
    assert loaded.keys() == run.model.state_dict().keys()
    assert all(torch.equal(value, loaded[name]) for name, value in run.model.state_dict().items())
