"""What workers of `ps` owe, on the disk: found again by the same run, and by no other."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from manyhands.errors import CorruptCheckpoint
from manyhands.strategies.ps.live.worker_state import ResidualMemory
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategy import Strategy

MEMORY = {"left/0.0.32": torch.arange(8.0), "left/1.0.16": torch.full((4,), -0.5)}


def residual(residuals: ResidualMemory, step: int, part: int) -> Mapping[str, torch.Tensor]:
    found = residuals.load(step, part)
    return found.model if found is not None else {}


def ps(text: str = "ps servers=2 link=tcp codec=topk:0.1") -> Ps:
    strategy = Strategy.parse(text)
    assert isinstance(strategy, Ps)
    return strategy


def test_the_same_run_finds_what_each_part_owed_at_its_step(tmp_path: Path) -> None:
    residuals = ResidualMemory(tmp_path, ps(), workers=2, keep=2)
    for step in (2, 4, 6, 8):
        residuals.save(step, 0, {name: step * kept for name, kept in MEMORY.items()})
    again = ResidualMemory(tmp_path, ps(), workers=2)
    for step in (4, 6, 8):
        found = residual(again, step, 0)
        assert found.keys() == MEMORY.keys()
        assert all(torch.equal(found[name], step * kept) for name, kept in MEMORY.items())
    assert residual(again, 2, 0) == {}, "as many are kept as there are snapshots, and one"
    assert residual(again, 5, 0) == {}
    assert residual(again, 8, 1) == {}, "another worker's"


@pytest.mark.parametrize(
    ("text", "workers"),
    [("ps servers=2 link=tcp codec=sign", 2), ("ps link=tcp codec=topk:0.1", 2), (str(ps()), 3)],
)
def test_another_codec_layout_or_number_of_workers_owes_nothing(
    text: str, workers: int, tmp_path: Path
) -> None:
    ResidualMemory(tmp_path, ps(), workers=2).save(4, 0, MEMORY)
    assert residual(ResidualMemory(tmp_path, ps(text), workers=workers), 4, 0) == {}


def test_nothing_is_kept_without_a_directory_or_order(tmp_path: Path) -> None:
    asynchronous = replace(ps(), consistency=ps("ps consistency=async").consistency)
    for residuals in (
        ResidualMemory(None, ps(), workers=2),
        ResidualMemory(tmp_path, asynchronous, workers=2),
    ):
        residuals.save(4, 0, MEMORY)
        assert residual(residuals, 4, 0) == {}
    ResidualMemory(tmp_path, ps(), workers=2).save(4, 0, {})  # a codec that owes nothing
    assert list(tmp_path.iterdir()) == []


def test_a_life_that_did_not_go_on_leaves_nothing(tmp_path: Path) -> None:
    residuals = ResidualMemory(tmp_path, ps(), workers=2, keep=3)
    for step in (2, 4, 6):
        residuals.save(step, 1, MEMORY)
    ResidualMemory.remove_after(tmp_path, 4)
    assert [bool(residual(residuals, step, 1)) for step in (2, 4, 6)] == [True, True, False]
    ResidualMemory.remove_after(tmp_path, -1)
    assert not residual(residuals, 2, 1)
    ResidualMemory.remove_after(tmp_path / "none", -1)


def test_what_is_damaged_is_said_to_be(tmp_path: Path) -> None:
    residuals = ResidualMemory(tmp_path, ps(), workers=2)
    residuals.save(4, 0, MEMORY)
    [file] = tmp_path.glob("owed/0/step-*/model.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpoint, match="step 4"):
        residual(residuals, 4, 0)


def test_a_workers_optimizer_comes_back_as_it_was(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = torch.tensor([1.0, -2.0, 3.0])
    optimizer.step()
    strategy = ps("ps push=parameters")
    residuals = ResidualMemory(tmp_path, strategy, workers=2)
    assert residuals.load(4, 1) is None
    residuals.save(4, 1, {}, optimizer.state_dict())
    assert residuals.has(4, 1)
    assert not residuals.has(4, 0)
    assert not residuals.has(2, 1)
    found = ResidualMemory(tmp_path, strategy, workers=2).load(4, 1)
    assert found is not None
    fresh = torch.optim.AdamW([parameter], lr=0.1)
    fresh.load_state_dict(dict(found.optimizer))
    for name, value in optimizer.state[parameter].items():
        assert torch.equal(fresh.state[parameter][name], value)
    assert ResidualMemory(tmp_path, strategy, workers=3).load(4, 1) is None
    assert ResidualMemory(tmp_path, ps("ps push=parameters consistency=async"), workers=2).load(4, 1) is None
