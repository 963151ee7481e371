"""`codec=auto` in real runs: what is chosen is told at the end, by `explain`, and goes on when the run does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import manyhands as mh
from commands import run_command
from manyhands.data.store.rundir import RunDirectory


def make_task(dtype: torch.dtype = torch.float32) -> mh.Task:
    x = torch.randn(64, 32, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return mh.Task(
        model=lambda: torch.nn.Linear(32, 8).to(dtype),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(x, x[:, :8].sin()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
    )


def test_memory_is_shared_and_nothing_is_chosen() -> None:
    run = mh.fit(make_task(), "allreduce codec=auto:1", workers=2, steps=6)
    assert run.summary["codec_choices"] is None
    [note] = [note for note in run.summary["notes"] if "codec=auto" in note]
    assert note.startswith("codec=auto chose raw: workers share memory")


@pytest.mark.parametrize(
    "text", ["allreduce link=tcp codec=auto:0.05", "local steps=2 link=tcp codec=auto:0.05"]
)
def test_what_was_chosen_over_tcp_is_told_and_goes_on_when_the_run_does(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What is chosen depends on this machine; that it is measured once, told everywhere and kept does not."""
    task = make_task()
    run = mh.fit(task, text, workers=2, steps=6, out=tmp_path / "run")
    [choice] = run.summary["codec_choices"]
    assert choice["step"] == 3
    assert choice["why"].startswith(f"{choice['codec']}: an exchange of 0.00109 MB takes ")
    assert f"codec=auto chose {choice['why']} (at step 4)" in run.summary["notes"]
    kept = RunDirectory.open(tmp_path / "run", lock=False).checkpoints().load().extra
    assert f"in use:{choice['codec']}" in str(_names(kept))
    assert run_command(monkeypatch, "explain", str(tmp_path / "run")) == 0
    assert f"codec=auto chose {choice['why']}" in " ".join(capfd.readouterr().out.split())
    resumed = mh.fit(task, text, workers=2, steps=9, out=tmp_path / "run", resume=True)
    [same] = resumed.summary["codec_choices"]  # the next look is at step 200
    assert same == {**choice, "why": f"{choice['codec']}: used before the run was resumed"}


def _names(tree: object) -> list[str]:
    """What workers' memories in a checkpoint are called, wherever they lie in it."""
    if isinstance(tree, torch.Tensor):
        return [tree.contiguous().view(torch.uint8).numpy().tobytes().decode("latin-1")]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [name for part in parts for name in _names(part)]
