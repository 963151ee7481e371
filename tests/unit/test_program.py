"""A program of torch.export computes what the module does, for batches of any size, or is not written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.cli.use_commands import export_command
from manyhands.errors import ManyhandsError, UserError
from manyhands.serving import torch_predictors as exported_program
from manyhands.serving.torch_predictors import export_program
from manyhands.workloads.exporting import ExportAsked
from manyhands.workloads.logreg.labels import Labels
from manyhands.workloads.logreg.model import MODEL_FILE, LogregModel, export_logreg

SMALL = {
    "digits": {"width": 4},
    "gpt": {"context": 8, "width": 8, "heads": 1, "layers": 1},
    "recurrent": {"context": 8, "width": 8, "layers": 2},
}


@pytest.mark.parametrize("name", SMALL)
def test_the_program_is_the_module(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "book.txt"
    text.write_text("many hands make light work; " * 200)
    own = {} if name == "digits" else {"path": text}
    mh.fit(mh.tasks.build(name, **SMALL[name], **own), "single", steps=2, out=tmp_path / "run")
    export_command(tmp_path / "run", file_format="torch-export")
    assert "largest difference" in capsys.readouterr().out
    read = torch.export.load(tmp_path / "run" / "model.pt2").module()
    model = mh.load(tmp_path / "run")
    asked = torch.rand(11, 1, 8, 8) * 16 if name == "digits" else torch.randint(0, 256, (11, 8))
    with torch.inference_mode():
        torch.testing.assert_close(read(asked), model(asked))


def test_a_program_that_answers_otherwise_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mh.fit(mh.tasks.build("digits", width=4), "single", steps=1, out=tmp_path / "run")
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    exported = torch.export.export

    def export_another(_model: nn.Module, args: tuple[Tensor], **options: object) -> object:
        return exported(other, args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(exported_program.torch.export, "export", export_another)
    with pytest.raises(ManyhandsError, match="differs from the module by"):
        export_program(ExportAsked(run=tmp_path / "run"))
    assert not (tmp_path / "run" / "model.pt2").exists()


def test_what_cannot_be_a_program_is_said(tmp_path: Path) -> None:
    table = np.zeros(4, np.float32)
    LogregModel(table=table, labels=Labels(-1.0, 1.0)).save(tmp_path / MODEL_FILE)
    with pytest.raises(UserError, match="whose model is not a PyTorch module"):
        export_command(tmp_path, file_format="torch-export")
    with pytest.raises(UserError, match="leave --precision and --test out"):
        export_command(tmp_path, file_format="torch-export", precision="int8")
    with pytest.raises(UserError, match="did you mean 'torch-export'"):
        export_command(tmp_path, file_format="torch-exprt")


def test_the_file_of_a_model_is_exported_beside_itself(tmp_path: Path) -> None:
    table = np.linspace(-1, 1, 400, dtype=np.float32)
    LogregModel(table=table, labels=Labels(-1.0, 1.0)).save(tmp_path / MODEL_FILE)
    for run in (tmp_path, tmp_path / MODEL_FILE):
        export = export_logreg(ExportAsked(run=run, precision="int8"))
        assert export.path == tmp_path / "model-int8.safetensors"
        export.path.unlink()
    elsewhere = ExportAsked(run=tmp_path / MODEL_FILE, out=tmp_path / "other")
    assert export_logreg(elsewhere).path.is_file()
