"""`tensor` in processes: slices and replicas train a transformer as one process does; what it says, and refuses."""

from __future__ import annotations

import copy
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import manyhands as mh
from equality import OPTIMIZERS, distance, train_plainly
from manyhands.cli.main import app
from manyhands.errors import UserError
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.next_token import bits_per_byte, next_byte_loss

WINDOWS = torch.randint(0, 17, (30, 9), generator=torch.Generator().manual_seed(4))


def gpt(**plan: Any) -> mh.Task:
    torch.manual_seed(0)
    template = GPT(context=8, layers=2, width=12, heads=3, vocabulary=17).double()
    if plan:
        template.tensor_plan = plan["plan"]
    return mh.Task(
        model=lambda: copy.deepcopy(template),
        loss=next_byte_loss,
        data=WINDOWS,
        optimizer=OPTIMIZERS["adamw"],
        batch_size=7,
        evaluation=WINDOWS[:11],
        metrics={"bits_per_byte": bits_per_byte},
    )


def test_slices_and_replicas_train_a_transformer_and_single_goes_on(tmp_path: Path) -> None:
    task, out = gpt(), tmp_path / "run"
    run = mh.fit(task, "tensor slices=2 data=2", workers=4, steps=8, out=out)
    assert distance(run.model.state_dict(), train_plainly(task, 8)) < 1e-9
    sent = {row["layer"]: row for row in run.summary["layers"]}
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert list(sent) == [
        "transformer.wte",
        *(f"transformer.h.{number}.{name}" for number in (0, 1) for name in layers),
        "lm_head",
    ]
    assert sent["transformer.h.0.attn.c_proj"]["forward_bytes"] > 0
    assert sent["transformer.h.0.attn.c_proj"]["backward_bytes"] == 0
    assert sum(row["messages"] for row in sent.values()) * 8 < run.summary["messages_sent"]
    shown = CliRunner().invoke(app, ["explain", str(out)], env={"COLUMNS": "100"})
    assert shown.exit_code == 0, shown.output
    assert re.search(r"transformer.h.0.attn.c_attn +heads=3 fused=3 +0 B +[\d.]+ KiB +\d", shown.output), (
        shown.output
    )
    gone_on = mh.fit(task, "single", steps=12, out=out, resume=True)
    assert gone_on.summary["resumed_from_step"] == 8
    assert distance(gone_on.model.state_dict(), train_plainly(task, 12)) < 1e-9


def chance(model: nn.Module, folder: Path | None = None) -> mh.Task:
    """A model with dropout; each worker leaves its parameters in `folder`, as they are before each step."""
    x = torch.randn(30, 5, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if folder is not None and model.training:
            torch.save(dict(model.named_parameters()), folder / f"{os.getpid()}.pt")
        return model(batch).square().mean()

    template = model.double()
    return mh.Task(
        model=lambda: copy.deepcopy(template),
        loss=loss,
        data=x,
        optimizer=OPTIMIZERS["adamw"],
        batch_size=7,
    )


def test_dropout_in_a_chain_is_that_of_one_process_and_elsewhere_that_of_all_slices(tmp_path: Path) -> None:
    torch.manual_seed(0)
    chain = [nn.Linear(6, 13), nn.Dropout(0.3), nn.GELU(), nn.Linear(13, 6), nn.Dropout(0.2), nn.LayerNorm(6)]
    task = chance(nn.Sequential(*chain))
    run = mh.fit(task, "tensor", workers=2, steps=8)
    assert distance(run.model.state_dict(), train_plainly(task, 8)) < 1e-9
    layer = nn.TransformerEncoderLayer(6, 3, 9, dropout=0.3, batch_first=True)
    mh.fit(chance(layer, tmp_path), "tensor", workers=2, steps=8)
    first, second = (torch.load(file) for file in sorted(tmp_path.iterdir()))
    assert first["self_attn.out_proj.weight"].shape != second["self_attn.out_proj.weight"].shape
    for name in ("norm1.weight", "norm2.bias", "linear2.bias", "self_attn.out_proj.bias"):
        assert torch.equal(first[name], second[name]), (
            "slices of different sizes draw alike where it is whole"
        )
        assert not torch.equal(first[name], layer.get_parameter(name)), "it has moved"


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (
            {"transformer.j.*.c_fc": "column"},
            "tensor_plan: GPT has no module 'transformer.j.*.c_fc'; the nearest is 'transformer",
        ),
        (
            {"lm_head": "colum"},
            "tensor_plan: 'colum' is not a way to slice; allowed: column, row, heads, vocabulary",
        ),
        ({"lm_head": "heads"}, "tensor_plan: 'heads' has no number of heads; write heads=4"),
        ({"lm_head": "column of=2"}, "tensor_plan: 'of=2' in 'column of=2' is invalid; allowed: heads=4"),
        (
            {"transformer.ln_f": "row"},
            "tensor_plan: module 'transformer.ln_f' is a LayerNorm, which cannot be row; leave it whole",
        ),
        (["lm_head"], "GPT.tensor_plan is a list; it must be a dict of module names and slicings"),
    ],
)
def test_plans_that_cannot_be_are_refused_before_anything_starts(plan: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        mh.fit(gpt(plan=plan), "tensor", workers=2, steps=2)


def test_a_layer_that_gets_what_it_does_not_take_is_named() -> None:
    """Only the run shows in which order a model applies its modules."""
    task = gpt(plan={"transformer.h.*.c_fc": "row"})
    with pytest.raises(
        Exception,
        match=r"module 'transformer.h.0.mlp.c_fc' is row, so it needs 6 features on slice \d, but got",
    ):
        mh.fit(task, "tensor", workers=2, steps=2)


def test_more_slices_than_heads_are_refused() -> None:
    with pytest.raises(
        UserError,
        match=r"'transformer\.h\.0\.attn\.c_attn' is heads=3 fused=3, which is too small for 4 slices",
    ):
        mh.fit(gpt(), "tensor slices=4", workers=4, steps=2)


def test_a_loss_that_is_not_finite_names_its_worker() -> None:
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * float("nan")

    task = replace(
        gpt(),
        model=Broken,
        loss=lambda model, batch: model(batch[:, :4].float()).mean(),
        evaluation=None,
        metrics={},
    )
    with pytest.raises(Exception, match="worker 0, step 1: the loss is not finite"):
        mh.fit(task, "tensor", workers=2, steps=2)


def test_compiling_a_slice_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"compile: torch\.compile needs a complete model, and under `tensor`"
    ):
        mh.fit(gpt(), "tensor", workers=2, steps=2, options=mh.Options(compile=True))
