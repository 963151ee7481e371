"""A run directory and a model file of version 0.1, from before the package was reorganised: both still open."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest

import manyhands as mh
from manyhands.observe.analyse.follow import existing_run
from manyhands.observe.draw.page import report
from manyhands.strategies.ps.audit import audit_run
from manyhands.workloads.svd.model import open_svd

PACKED = Path(__file__).parents[1] / "run_of_0_1.tar.gz"
STRATEGY = "ps servers=2 consistency=bounded:1"


@pytest.fixture
def unpacked(tmp_path: Path) -> Path:
    with tarfile.open(PACKED) as packed:
        packed.extractall(tmp_path, filter="data")
    return tmp_path


def test_a_run_of_before_is_audited_shown_and_loaded(unpacked: Path) -> None:
    assert audit_run(unpacked / "ps").found.clean
    page = report(existing_run(unpacked / "ps").poll())
    assert STRATEGY in page
    assert re.search(r"absolute.error", page)
    model = mh.load(unpacked / "ps")
    assert [tuple(value.shape) for value in model.state_dict().values()] == [(1, 1), (1,)]


def test_a_run_of_before_is_continued(unpacked: Path) -> None:
    run = mh.fit(
        mh.tasks.build("line"),
        STRATEGY,
        workers=2,
        steps=20,
        out=unpacked / "ps",
        resume=True,
        options=mh.Options(checkpoint_every=2, evaluate_every=16),
    )
    assert run.summary["resumed_from_step"] == 12
    assert run.summary["steps"] == 20
    assert audit_run(unpacked / "ps").found.clean


def test_a_model_file_of_before_is_opened(unpacked: Path) -> None:
    predictor = open_svd(unpacked / "svd.safetensors")
    (answer,) = predictor.answers(predictor.inputs([predictor.example]))
    assert len(answer) == 2, "two components"
