"""What a worker of `sharded` holds, measured in its process by walking all live tensors, against the formula."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
import warm

LAYERS, WIDTH = 16, 96
UNIT = (2 * WIDTH * WIDTH + 2 * WIDTH) * 4
"""Bytes of one layer's parameters."""


def live_bytes() -> int:
    """Of all tensors that this process holds, a storage that several share once."""
    storages = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided:
            storage = one.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class Probe(torch.autograd.Function):
    """Looks at memory in the middle of a layer, forward and backward."""

    peak = 0

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        Probe.peak = max(Probe.peak, live_bytes())
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        Probe.peak = max(Probe.peak, live_bytes())
        return gradients[0]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        return x + self.second(Probe.apply(hidden))


def task(folder: Path) -> mh.Task:
    calls = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls.append(None)
        if len(calls) == 2:  # in the first step the optimizer has no state
            Probe.peak = 0
        (folder / str(os.getpid())).write_text(str(Probe.peak))
        return model(batch[0]).square().mean()

    return mh.Task(
        model=lambda: nn.Sequential(*(Block() for _ in range(LAYERS))),
        loss=loss,
        data=(torch.randn(16, WIDTH),),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=4,
    )


@pytest.mark.parametrize("workers", [2, 4])
def test_a_worker_holds_its_share_of_everything_and_two_layers(workers: int, tmp_path: Path) -> None:
    mh.fit(task(tmp_path), "sharded", workers=workers, steps=4)
    peaks = [int(file.read_text()) for file in tmp_path.iterdir()]
    assert len(peaks) == workers
    everything = LAYERS * UNIT * 4  # parameters, gradients and AdamW's two numbers for each
    share = everything / workers
    least = share + 2 * UNIT + UNIT  # this layer and the next one, and this one's gradient
    most = share + 2 * UNIT + 2 * UNIT + UNIT  # the gradient that is on its way, and what others sent of it
    for peak in peaks:
        print(peak / UNIT, least / UNIT, most / UNIT, everything / UNIT)
        assert 0.98 * least < peak < 1.02 * most, (peak, least, most)


LOOP = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import manyhands as mh
from test_sharded_memory import LAYERS, WIDTH, Block, Probe

model = torch.nn.Sequential(*(Block() for _ in range(LAYERS)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with mh.join() as group:
    model, optimizer = group.prepare(model, optimizer)
    for step in range(4):
        if step == 1:  # in the first step the optimizer has no state
            Probe.peak = 0
        model(torch.randn(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    group.print(Probe.peak)
"""


def test_a_worker_of_an_own_loop_holds_its_share_of_everything_and_two_layers(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LOOP)
    command = [sys.executable, "-m", "manyhands", "launch", script, "--workers", "2", "--strategy", "sharded"]
    done = warm.run(
        [*command, str(Path(__file__).parent)],
        trains=True,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    share, words = (
        LAYERS * UNIT * 4 / 2,
        2 * (512 + 32 * 1024) * 8,
    )  # what workers say to each other goes through these
    assert share < int(done.stdout) - words < 1.02 * (share + 5 * UNIT)
