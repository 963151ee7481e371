"""Tokens as the data of a run: the same weights for any workers, and after a resume in the middle of an epoch."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands.data.batches import BatchedDataset
from manyhands.workloads.text.masking import IGNORED, Masking
from manyhands.workloads.text.token_files import ShardWriter, TokenFiles, shard_name

SHA = "ef" * 32
VOCABULARY, LENGTH = 40, 10


class MaskedRows(BatchedDataset):
    """Rows of a file of tokens without special ones, masked anew in each epoch."""

    def __init__(self, files: TokenFiles) -> None:
        self._files = files
        self._masking = Masking(mask_id=0, vocabulary=VOCABULARY, special_ids=(0,), rate=0.3, seed=3)

    def __len__(self) -> int:
        return self._files.num_tokens // LENGTH

    def batch(self, indices: np.ndarray, epoch: int) -> dict[str, Tensor]:
        rows = self._files.shard(0).tokens.reshape(-1, LENGTH)[indices]
        masked = self._masking.mask(rows, indices, epoch)
        return {name: torch.from_numpy(one) for name, one in masked._asdict().items()}


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Tanh(), nn.Linear(6, VOCABULARY)).double()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    scores = torch.take_along_dim(model(batch["tokens"]), batch["places"][..., None], 1)
    return F.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def task(folder: Path) -> mh.Task:
    tokens = np.random.default_rng(0).integers(1, VOCABULARY, 50 * LENGTH)
    with ShardWriter(folder / shard_name(0), np.dtype("<u2"), SHA) as writer:
        writer.add(tokens, [0])
        header = writer.finish()
    listed = {"tokens": header.tokens, "documents": 1, "sha256": header.body}
    (folder / "tokens.json").write_text(json.dumps({"tokenizer": SHA, "shards": [listed]}))
    optimizer = partial(torch.optim.Adam, lr=0.01)
    return mh.Task(
        model=model, loss=loss, data=MaskedRows(TokenFiles(folder)), optimizer=optimizer, batch_size=12
    )


@pytest.mark.parametrize("strategy", ["mirrored", "allreduce", "central", "sharded", "ps"])
def test_the_same_weights_for_any_workers_and_after_a_resume(strategy: str, tmp_path: Path) -> None:
    problem = task(tmp_path)
    alone = mh.fit(
        problem, "single", steps=13
    ).model.state_dict()  # epochs have five batches, the last of two rows
    out = tmp_path / "run"
    mh.fit(problem, strategy, workers=2, steps=8, out=out)
    resumed = mh.fit(problem, strategy, workers=3, steps=13, out=out, resume=True)
    assert resumed.summary["resumed_from_step"] == 8
    for name, value in resumed.model.state_dict().items():
        torch.testing.assert_close(value, alone[name], rtol=0, atol=1e-9)
