"""GloVe on parameter servers whose roles are threads: equal to one process with the same batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from manyhands.workloads.glove.cooccurrence_files import RECORD
from manyhands.workloads.glove.glove_server import GloveTables, glove_tables
from manyhands.workloads.glove.glove_task import GloveTask
from manyhands.workloads.glove.learning import GloveOptions, train_glove
from threaded_ps import ThreadedRun, job_for

SIZE, COUNT = 120, 2_047
OPTIONS = GloveOptions(dim=10, passes=2, x_max=10.0, batch=512, dtype="float64")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The last batch of a pass is short."""
    drawn = np.random.default_rng(2)
    records = np.empty(COUNT, RECORD)
    for name in ("word", "context"):
        records[name] = (SIZE ** drawn.random(COUNT)).astype(np.int32)
    records["count"] = np.exp(drawn.normal(0.0, 2.0, COUNT))
    records.tofile(tmp_path / "records.bin")
    return tmp_path / "records.bin"


@pytest.mark.parametrize(("strategy", "servers"), [("ps", (1,)), ("ps servers=2", (1, 2))])
def test_two_workers_in_step_equal_one_process(path: Path, strategy: str, servers: tuple[int, ...]) -> None:
    task = glove_tables(GloveTask.of(path, SIZE, OPTIONS), workers=2)
    with ThreadedRun(job_for(task, strategy, steps=8, workers=2)) as run:
        run.start_workers()
        run.await_joined(2 + len(servers))
        run.publish(1, servers)
        found = run.finish()
    assert isinstance(found, GloveTables)
    tables, expected = found.snapshot(), train_glove(path, SIZE, OPTIONS)
    for name in ("word", "context", "word_bias", "context_bias"):
        np.testing.assert_allclose(
            getattr(tables, name), getattr(expected.model, name), rtol=0, atol=1e-9, err_msg=name
        )
