"""Runs whose codecs leave something out: equal when resumed, replayed, and as one process would compute them."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.errors import ManyhandsError, UserError
from manyhands.observe.record.events import EventKind
from manyhands.observe.record.recorded import read_run_events
from manyhands.strategies.ps.replay import replay
from manyhands.transport.link.wire import codec_of


def make_task(momentum: float = 0.0) -> mh.Task:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(90, 24, generator=generator)
    template = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 3))
    for parameter in template.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.2
    return mh.Task(
        model=lambda: copy.deepcopy(template),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(x, x[:, :3].sin()),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=momentum),
        batch_size=15,
    )


def weights(run: mh.Run) -> dict[str, torch.Tensor]:
    return dict(run.model.state_dict())


@pytest.mark.parametrize(
    ("text", "momentum"),
    [
        ("allreduce link=tcp codec=topk:0.05+int8", 0.9),
        ("allreduce link=tcp codec=dgc:0.05,warmup=6+qsgd:7", 0.0),
        ("allreduce link=tcp codec=powersgd:2", 0.9),
        ("local steps=2 link=tcp codec=topk:0.1", 0.9),
        ("ps servers=2 link=tcp codec=topk:0.05+int8", 0.9),
    ],
)
def test_a_resumed_compressed_run_equals_an_uninterrupted_one(
    text: str, momentum: float, tmp_path: Path
) -> None:
    """What is owed, momentum and factors go on from the checkpoint, to the bit; events tell the chain."""
    task = make_task(momentum)
    whole = mh.fit(task, text, workers=2, steps=10, out=tmp_path / "whole")
    mh.fit(task, text, workers=2, steps=6, out=tmp_path / "parts")
    resumed = mh.fit(task, text, workers=2, steps=10, out=tmp_path / "parts", resume=True)
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(resumed)[name]), name
    words = {
        codec_of(number)
        for role in read_run_events(tmp_path / "whole" / "events").roles
        for number in role.records["codec"][role.records["kind"] == EventKind.SEND].tolist()
    }
    chain = text.partition("codec=")[2].split("+")
    assert words == {"+".join(stage.partition(":")[0] for stage in chain)}


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_a_server_takes_what_is_sparse_and_owed_and_is_replayed(consistency: str, tmp_path: Path) -> None:
    text = f"ps servers=2 consistency={consistency} link=tcp codec=topk:0.05+int8"
    task = make_task()
    run = mh.fit(task, text, workers=2, steps=8, out=tmp_path / "run")
    plain = mh.fit(task, text[: text.index(" codec")], workers=2, steps=8)
    assert run.summary["bytes_sent"] < 0.6 * plain.summary["bytes_sent"]  # parameters come back as they are
    assert replay(tmp_path / "run", task).same_bytes


def test_a_server_goes_by_the_majority() -> None:
    """The whole step, of one process: signs of the sum of signs; a vote has no size."""
    task, steps = make_task(), 3
    run = mh.fit(task, "ps link=tcp codec=sign:vote", workers=3, steps=steps)
    first = [parameter.detach().clone() for parameter in task.model().parameters()]
    for before, after in zip(first, run.model.parameters(), strict=True):
        moved = (after.detach() - before) / 0.1
        assert bool(((moved - moved.round()).abs() < 1e-3).all())
        assert 0 < float(moved.abs().max()) <= steps + 1e-3


def test_momentum_is_not_counted_twice() -> None:
    with pytest.raises(UserError, match=r"keeps the momentum of 0.9 itself, but SGD has 0.9 as well"):
        mh.fit(make_task(0.9), "allreduce link=tcp codec=dgc:0.01", workers=2, steps=2)


class Bag(nn.Module):
    """Words and a line on top; the second table is never reached."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(60, 4, sparse=sparse, dtype=torch.float64)
        self.never = nn.Embedding(9, 4, sparse=sparse, dtype=torch.float64)
        self.line = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.line(self.words(words).mean(1))


def bag_task(sparse: bool, clip_norm: float | None = None) -> mh.Task:
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(0, 60, (40, 3), generator=generator)
    torch.manual_seed(2)
    template = Bag(sparse)
    return mh.Task(
        model=lambda: copy.deepcopy(template),
        loss=lambda model, batch: (model(batch[0])[:, 0] - batch[1]).square().mean(),
        data=(words, torch.randn(40, generator=generator, dtype=torch.float64)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3),
        batch_size=10,
        clip_norm=clip_norm,
    )


@pytest.mark.parametrize(
    ("text", "clip_norm", "off"),
    [
        ("allreduce link=tcp", None, 1e-12),
        ("allreduce algorithm=ring", 0.1, 1e-12),
        ("allreduce link=tcp codec=int8", None, 1e-3),
    ],
)
def test_rows_of_an_embedding_are_summed_as_such(text: str, clip_norm: float | None, off: float) -> None:
    run = mh.fit(bag_task(sparse=True, clip_norm=clip_norm), text, workers=3, steps=6)
    expected = mh.fit(bag_task(sparse=False, clip_norm=clip_norm), "single", steps=6)
    begun = dict(bag_task(sparse=False).model().state_dict())
    for name, value in weights(run).items():
        assert torch.allclose(value, weights(expected)[name], atol=off, rtol=0), name
        assert name == "never.weight" or not torch.allclose(value, begun[name], atol=20 * off, rtol=0), name
    assert torch.equal(weights(run)["never.weight"], bag_task(sparse=True).model().never.weight)


def test_memory_that_is_shared_sums_dense_gradients() -> None:
    with pytest.raises(ManyhandsError, match="add link=tcp, or build"):
        mh.fit(bag_task(sparse=True), "mirrored", workers=2, steps=1)
