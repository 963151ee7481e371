"""`central` with real worker processes: the weights of the plain loop, resumed under other strategies, refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import manyhands as mh
from equality import OPTIMIZERS, distance, make_task, train_plainly
from manyhands.errors import UserError


@pytest.mark.parametrize(
    ("strategy", "workers", "optimizer"),
    [("central", 2, "adamw"), ("central buckets=512", 3, "momentum")],
)
def test_real_processes_end_with_the_weights_of_the_plain_loop(
    strategy: str, workers: int, optimizer: str
) -> None:
    task = make_task(OPTIMIZERS[optimizer])
    run = mh.fit(task, strategy, workers=workers, steps=50, seed=0)
    assert distance(run.model.state_dict(), train_plainly(task)) < 1e-9
    assert run.summary["strategy"] == strategy
    assert run.summary["bytes_sent"] > 0


@pytest.mark.soak
def test_a_run_goes_on_under_any_strategy(tmp_path: Path) -> None:
    task = make_task(OPTIMIZERS["adamw"])
    for number, strategy in enumerate(["central buckets=512", "single", "central"]):
        run = mh.fit(
            task,
            strategy,
            workers=[3, 1, 2][number],
            steps=7 * (number + 1),
            out=tmp_path / "run",
            resume=number > 0,
            options=mh.Options(checkpoint_every=4),
        )
        assert run.summary["resumed_from_step"] == (7 * number or None)
    assert distance(run.model.state_dict(), train_plainly(task, 21)) < 1e-9


def test_an_optimizer_that_can_not_be_shared_out_is_the_users_mistake() -> None:
    task = make_task(lambda p: torch.optim.LBFGS(p))
    with pytest.raises(UserError, match=r"optimizer LBFGS .* use another optimizer, such as AdamW"):
        mh.fit(task, "central", workers=2, steps=3)
