"""Algorithms that keep something, over two workers and in two parts: one worker's run in one piece; and refusals."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import UserError
from manyhands.observe.draw.page import write_report

RATE = 0.05
TRUE = torch.tensor([[2.0], [-1.0], [0.5]], dtype=torch.float64)


def samples(count: int, seed: int, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, dtype=torch.float64, generator=generator)
    noise = 0.1 * torch.randn(count, 1, dtype=torch.float64, generator=generator)
    return inputs, inputs @ (TRUE + shift) + noise


PARTIES = {f"party {at}": samples(3 + 2 * at, at, 0.5 * at) for at in range(5)}


def regression(data: object = None) -> mh.Task:
    return mh.Task(
        model=lambda: nn.Linear(3, 1, bias=False).double(),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=mh.Parties(PARTIES) if data is None else data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        batch_size=24,
    )


def weight_of(run: mh.Run) -> NDArray[np.float64]:
    return next(iter(run.model.parameters())).detach().numpy().flatten()


STATEFUL = ["scaffold", "median", "ditto codec=topk:0.4 max_samples=9", "fedbuff:3"]


@pytest.mark.parametrize("algorithm", STATEFUL)
def test_two_workers_and_a_run_in_two_parts_are_one(algorithm: str, tmp_path: Path) -> None:
    """The second part is by one worker, the first by two: clients' states are dealt anew."""
    words = f"federated clients=12 fraction=0.5 epochs=2 batch=4 partition=quantity:0.7 algorithm={algorithm}"
    task = regression(samples(200, 4))
    alone = mh.fit(task, words, rounds=6)
    out = tmp_path / "parts"
    both = mh.fit(task, words, workers=2, rounds=3, out=out)
    if algorithm == "scaffold":  # for all of them the second part shows the same
        early = mh.fit(task, words, rounds=3)
        np.testing.assert_allclose(weight_of(both), weight_of(early), rtol=0, atol=1e-12)
    again = mh.fit(task, words, rounds=6, out=out, resume=True)
    np.testing.assert_allclose(weight_of(again), weight_of(alone), rtol=0, atol=1e-12)
    assert again.summary["bytes_sent"] == alone.summary["bytes_sent"] - both.summary["bytes_sent"]


def test_a_state_that_no_round_has_touched_is_in_the_next_checkpoint(tmp_path: Path) -> None:
    words = "federated partition=natural batch=all algorithm=scaffold"
    mh.fit(regression(), words, rounds=3, out=tmp_path)
    mh.fit(regression(), words, rounds=3, out=tmp_path, resume=True)
    again = mh.fit(regression(), words, rounds=5, out=tmp_path, resume=True)
    np.testing.assert_array_equal(weight_of(again), weight_of(mh.fit(regression(), words, rounds=5)))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("federated algorithm=scaffold:1", "scaffold takes no number"),
        ("federated algorithm=trimmed:0.5", "trimmed:0.5: .* below 0.5"),
        ("federated clients=5 algorithm=trimmed:0.45", "leaves none of a round's 5 clients"),
        ("federated clients=6 algorithm=krum:2", "krum:2: needs 7 clients a round .* there are 6"),
        ("federated clients=20 fraction=0.3 algorithm=multikrum:2", "multikrum:2: needs 7"),
        ("federated partition=natural algorithm=krum:2", "krum:2: needs 7 clients a round .* there are 5"),
        ("federated algorithm=krum:1.5", "krum:1.5: .* an integer"),
        *(
            (f"federated secure=yes algorithm={one}", "needs each client's update")
            for one in ("median", "trimmed", "krum", "multikrum")
        ),
    ],
)
def test_what_an_algorithm_cannot_do_is_refused(words: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        mh.fit(regression(), words, rounds=1)


def measured_task() -> mh.Task:
    return replace(
        regression(samples(200, 4)),
        evaluation=samples(40, 5),
        metrics={"near": lambda model, batch: ((model(batch[0]) - batch[1]).abs() < 0.3).double().mean()},
    )


def test_fine_tuned_models_are_measured_alike_by_two_workers_and_after_a_resume(tmp_path: Path) -> None:
    words = (
        "federated clients=12 fraction=0.5 batch=4 partition=quantity:0.7 personal=finetune:2 held_out=0.25"
    )
    whole = mh.fit(measured_task(), words, rounds=6)
    out = tmp_path / "parts"
    mh.fit(measured_task(), words, workers=2, rounds=3, out=out)
    again = mh.fit(measured_task(), words, workers=2, rounds=6, out=out, resume=True)
    over = mh.fit(measured_task(), words, rounds=6, out=out, resume=True)
    assert over.summary["steps"] == 6
    for run in (again, over):
        for kind in ("measures", "measures_common"):
            mine, theirs = run.summary["parties"][kind], whole.summary["parties"][kind]
            assert list(mine) == ["evaluation_loss", "near"]
            for name in mine:
                assert None in mine[name], "of a single sample nothing is held out"
                values = (
                    [math.nan if one is None else one for one in report[name]] for report in (mine, theirs)
                )
                np.testing.assert_allclose(*values, rtol=1e-9)
    tuned, common = (
        whole.summary[name]["evaluation_loss"]["mean"] for name in ("fairness", "fairness_common")
    )
    assert tuned != pytest.approx(common, rel=1e-3)
    final, own = whole.summary["final"], whole.summary["parties"]["measures"]
    for name in ("evaluation_loss", "near"):
        mean = np.mean([value for value in own[name] if value is not None])
        assert final[f"personal_{name}"] == pytest.approx(mean, rel=1e-12)
        assert name in final, "the common model's, on the evaluation data"
    plain = mh.fit(measured_task(), words.replace("personal=finetune:2 ", ""), rounds=6)
    np.testing.assert_array_equal(weight_of(plain), weight_of(whole))
    assert plain.summary["parties"]["measures"] == whole.summary["parties"]["measures_common"]
    assert "measures_common" not in plain.summary["parties"]
    assert not any(name.startswith("personal") for name in plain.summary["final"])


def test_every_evaluation_tells_how_the_parties_fare(tmp_path: Path) -> None:
    words = "federated clients=12 fraction=0.5 batch=4 partition=quantity:0.7 algorithm=ditto"
    alone = mh.fit(measured_task(), words, rounds=3)
    both = mh.fit(measured_task(), words, rounds=3, workers=2, out=tmp_path)
    assert [row["step"] for row in alone.history.evaluations] == [1, 2, 3]
    for mine, theirs in zip(alone.history.evaluations, both.history.evaluations, strict=True):
        assert list(mine["fairness"]) == ["evaluation_loss", "near"]
        for name, spread in mine["fairness"].items():
            assert spread == pytest.approx(theirs["fairness"][name], rel=1e-9)
    last = alone.history.evaluations[-1]["fairness"]
    assert last["near"] == pytest.approx(alone.summary["fairness"]["near"])
    assert "over the parties, at each evaluation" in write_report(tmp_path).read_text()
    noisy = f"{words.replace(' algorithm=ditto', '')} sampling=poisson clip=1 noise=1 delta=1e-3"
    assert all("fairness" not in row for row in mh.fit(measured_task(), noisy, rounds=2).history.evaluations)
