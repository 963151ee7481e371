"""A checkpoint laid onto shards and taken off again is the same checkpoint; what fits no other strategy is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import manyhands as mh
from equality import OPTIMIZERS, make_task, same_bits
from manyhands.data.store.checkpoint import Loaded
from manyhands.data.store.rundir import RunDirectory
from manyhands.engine.computing import TrainingPlan
from manyhands.strategies.ps.live.snapshots import ShardSnapshots
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategies.ps.training import PsTraining, onto_shards
from manyhands.strategy import Strategy


def trained(path: Path, optimizer: str) -> TrainingPlan:
    """A run of the plain loop, ended after 5 steps of 12."""
    task = make_task(OPTIMIZERS[optimizer])
    mh.fit(task, "single", steps=5, out=path)
    return TrainingPlan(task=task, steps=12, seed=0, evaluate_every=0, checkpoint_every=0)


def ps(text: str) -> Ps:
    strategy = Strategy.parse(text)
    assert isinstance(strategy, Ps)
    return strategy


def tensors(loaded: Loaded) -> dict[str, torch.Tensor]:
    """Model and optimizer state, by name."""
    state = loaded.optimizer["state"]
    found = {
        f"{number}.{key}": torch.as_tensor(value) for number in state for key, value in state[number].items()
    }
    return {**loaded.model, **found}


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_onto_shards_and_off_again(optimizer: str, servers: int, tmp_path: Path) -> None:
    plan, strategy = trained(tmp_path / "r", optimizer), ps(f"ps servers={servers}")
    with RunDirectory.open(tmp_path / "r") as directory:
        before = directory.checkpoints().load()
        onto_shards(directory, directory.checkpoints().load(), plan, strategy, 2)
        placed = ShardSnapshots(directory.path, servers).newest_whole()
        assert placed is not None
        assert [(one.version, one.state.batches) for one in placed] == [(5, 5)] * servers
        directory.checkpoints().remove_after(-1)
        PsTraining.hand_over(directory, plan, strategy)
        after = directory.checkpoints().load()
    assert after.step == before.step == 5
    assert same_bits(tensors(before), tensors(after))
    assert before.optimizer["param_groups"] == after.optimizer["param_groups"]


def test_what_other_shards_left_is_removed_and_no_checkpoint_means_from_the_beginning(tmp_path: Path) -> None:
    plan = trained(tmp_path / "r", "sgd")
    (tmp_path / "r" / "updates").mkdir()
    with RunDirectory.open(tmp_path / "r") as directory:
        onto_shards(directory, directory.checkpoints().load(), plan, ps("ps servers=3"), 2)
        onto_shards(directory, directory.checkpoints().load(), plan, ps("ps servers=2"), 2)
        snapshots = ShardSnapshots(directory.path, 3)
        assert [snapshots.versions(shard) for shard in range(3)] == [{5}, {5}, set()]
        assert not (directory.path / "updates").exists()
        onto_shards(directory, None, plan, ps("ps servers=2"), 2)
        assert ShardSnapshots(directory.path, 2).newest_whole() is None


def test_shards_in_the_middle_of_async_fit_no_other_strategy(tmp_path: Path) -> None:
    plan, strategy = trained(tmp_path / "r", "sgd"), ps("ps servers=2 consistency=async")
    with RunDirectory.open(tmp_path / "r") as directory:
        onto_shards(directory, directory.checkpoints().load(), plan, strategy, 2)
        PsTraining.hand_over(directory, plan, strategy)  # all of it is in the checkpoint
        directory.checkpoints().remove_after(-1)
        with pytest.raises(
            mh.UserError, match=r"in the middle of consistency=async.*resume it with 'ps servers=2"
        ):
            PsTraining.hand_over(directory, plan, strategy)


def test_a_checkpoint_of_another_optimizer_is_refused_and_stays(tmp_path: Path) -> None:
    trained(tmp_path / "r", "adamw")
    other = make_task(OPTIMIZERS["sgd"])
    with pytest.raises(mh.UserError, match="resume with the optimizer"):
        mh.fit(other, "ps servers=2", workers=2, steps=9, out=tmp_path / "r", resume=True)
    with pytest.raises(mh.UserError, match="is fewer"):
        mh.fit(make_task(OPTIMIZERS["adamw"]), "ps", workers=2, steps=3, out=tmp_path / "r", resume=True)
    assert json.loads((tmp_path / "r" / "config.json").read_text())["config"]["strategy"] == "single"
    assert not (tmp_path / "r" / "shards").exists()
