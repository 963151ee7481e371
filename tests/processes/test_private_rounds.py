"""Runs with noise: they end where the accountant says, a resumed one has spent what was spent, and they say so."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import UserError
from manyhands.observe.analyse.remarks import privacy_words
from manyhands.observe.draw.page import write_report
from manyhands.strategies.federated.private_rounds import RoundKind, epsilon_of, most_rounds

TRUE = torch.tensor([[2.0], [-1.0], [0.5]], dtype=torch.float64)
PRIVATE = "federated clients=20 fraction=0.25 sampling=poisson batch=all clip=0.5 noise=0.8 delta=1e-3"
KIND = RoundKind(noise=0.8, probability=0.25)


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, dtype=torch.float64, generator=generator)
    return inputs, inputs @ TRUE


def task(**fields: object) -> mh.Task:
    defaults: dict[str, object] = {
        "model": lambda: nn.Linear(3, 1).double(),
        "loss": lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        "data": samples(200, 1),
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "evaluation": samples(40, 9),
    }
    return mh.Task(**{**defaults, **fields})  # type: ignore[arg-type]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_a_run_with_a_budget_ends_at_the_round_that_the_accountant_says(tmp_path: Path) -> None:
    allowed = most_rounds(KIND, 8.0, 1e-3)
    assert 2 < allowed < 30
    out = tmp_path / "run"
    run = mh.fit(task(), f"{PRIVATE} epsilon=8", rounds=40, out=out)
    assert run.summary["steps"] == allowed
    assert run.summary["stopped_early"]
    assert run.summary["privacy"]["epsilon"] == epsilon_of({KIND: allowed}, 1e-3) <= 8
    assert run.summary["privacy"]["rounds"] == allowed
    assert "loss" not in run.summary["final"], "what clients lose is not told"
    assert run.summary["final"]["evaluation_loss"] >= 0
    [why] = [note for note in run.summary["notes"] if note.startswith("stopped")]
    assert f"stopped after round {allowed}: the privacy budget of epsilon=8 at delta=0.001 is spent" in why
    assert any(
        note.startswith("privacy of each client, against everybody but") for note in run.summary["notes"]
    )
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows if "loss" in row] == [None] * allowed
    promised, ended = privacy_words(json.loads((out / "summary.json").read_text()))
    assert promised.endswith("of a budget of 8.")
    assert ended == f"S{why[1:]}."
    page = write_report(out).read_text()
    assert f"stopped after round {allowed}: the privacy budget of epsilon=8" in page.lower()

    again = mh.fit(task(), f"{PRIVATE} epsilon=8", rounds=40, out=out, resume=True)
    assert again.summary["steps"] == allowed, "nothing is left"
    assert again.summary["privacy"]["epsilon"] == run.summary["privacy"]["epsilon"]
    assert_same(again.model, run.model)


def test_a_resumed_run_goes_on_with_what_was_spent(tmp_path: Path) -> None:
    """From the seed, so that the whole can be compared; the bound of an adaptive clip goes on as well."""
    strategy = PRIVATE.replace("clip=0.5", "clip=adaptive:0.5") + " randomness=seed epsilon=8"
    whole = mh.fit(task(), strategy, rounds=40)
    out = tmp_path / "run"
    mh.fit(task(), strategy, rounds=3, out=out)
    resumed = mh.fit(task(), strategy, rounds=40, out=out, resume=True)
    assert resumed.summary["steps"] == whole.summary["steps"] > 3
    assert resumed.summary["privacy"] == whole.summary["privacy"]
    assert_same(resumed.model, whole.model)
    assert any("none against anyone who knows the seed" in note for note in resumed.summary["notes"])

    quieter = mh.fit(task(), strategy.replace("noise=0.8", "noise=0.7"), rounds=40, out=out, resume=True)
    assert quieter.summary["steps"] == whole.summary["steps"], "rounds with other noise have spent it"
    assert quieter.summary["privacy"]["epsilon"] == whole.summary["privacy"]["epsilon"]
    plain = tmp_path / "plain"
    mh.fit(task(), "federated clients=20", rounds=2, out=plain)
    with pytest.raises(UserError, match="without noise, so no epsilon would hold"):
        mh.fit(task(), strategy, rounds=40, out=plain, resume=True)


def test_rounds_before_a_failure_are_counted(tmp_path: Path) -> None:
    """Every round is saved, whatever checkpoint_every says."""
    calls = []

    def breaks(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(1)
        if len(calls) > 25:
            raise RuntimeError("no more")
        return (model(batch[0]) - batch[1]).square().mean()

    out, options = tmp_path / "run", mh.Options(checkpoint_every=100)
    with pytest.raises(Exception, match="no more"):
        mh.fit(task(loss=breaks), PRIVATE, rounds=50, out=out, options=options)
    resumed = mh.fit(task(), PRIVATE, rounds=50, out=out, resume=True, options=options)
    assert resumed.summary["resumed_from_step"] >= 2
    assert resumed.summary["privacy"]["rounds"] == resumed.summary["steps"] == 50


def test_two_workers_draw_and_noise_as_one() -> None:
    strategy = f"{PRIVATE} randomness=seed"
    alone = mh.fit(task(), strategy, rounds=4)
    together = mh.fit(task(), strategy, rounds=4, workers=2)
    assert_same(together.model, alone.model)
    assert together.summary["privacy"] == alone.summary["privacy"]
    secret = mh.fit(task(), PRIVATE, rounds=4, workers=2)
    assert not torch.equal(next(secret.model.parameters()), next(alone.model.parameters()))


def test_a_round_may_have_no_clients() -> None:
    strategy = PRIVATE.replace("fraction=0.25", "fraction=0.01")
    run = mh.fit(task(), strategy, rounds=5)
    assert run.summary["steps"] == 5
    assert run.summary["privacy"]["rounds"] == 5


def test_with_secure_sums_every_client_is_counted_by_its_rounds() -> None:
    strategy = (
        "federated clients=9 fraction=0.4 batch=all clip=0.5 noise=2 noise_by=clients secure=yes delta=1e-3"
    )
    kind = RoundKind(noise=2.0, probability=1.0)
    allowed = most_rounds(kind, 5.0, 1e-3)
    run = mh.fit(task(), f"{strategy} epsilon=5", rounds=60)
    privacy = run.summary["privacy"]
    assert privacy["rounds"] == allowed, "of the client with the most rounds"
    assert privacy["epsilon"] == epsilon_of({kind: allowed}, 1e-3)
    assert allowed <= run.summary["steps"] < 60
    assert any("against the server and everybody else" in note for note in run.summary["notes"])


@pytest.mark.parametrize(
    ("text", "rounds", "asked", "delta"),
    [
        ("clients=20", 8, 8.0, 1e-5),
        ("clients=20 fraction=0.25 clip=0.5 delta=1e-3", 30, 2.0, 1e-3),
        ("clients=9 fraction=0.4 clip=0.5 noise_by=clients secure=yes delta=1e-4", 12, 20.0, 1e-4),
    ],
)
def test_epsilon_alone_computes_the_noise_and_all_rounds_stay_within_it(
    text: str, rounds: int, asked: float, delta: float
) -> None:
    """Asked and spent by dp-accounting's own count of the rounds that the client with most of them was in."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    run = mh.fit(task(), f"federated {text} batch=all epsilon={asked:g}", rounds=rounds)
    privacy = run.summary["privacy"]
    assert (run.summary["steps"], run.summary["stopped_early"]) == (rounds, False)
    assert (privacy["budget"], privacy["delta"]) == (asked, delta)
    event = GaussianDpEvent(privacy["noise"])
    if "secure" not in text and "fraction" in text:
        event = PoissonSampledDpEvent(0.25, event)
    accountant = RdpAccountant()
    accountant.compose(event, privacy["rounds"])
    assert privacy["epsilon"] == pytest.approx(accountant.get_epsilon(delta), rel=1e-9)
    assert 0.99 * asked < privacy["epsilon"] <= asked
    [said] = [note for note in run.summary["notes"] if note.startswith(f"epsilon={asked:g} with noise=")]
    assert f"with noise={privacy['noise']:g} will be {privacy['epsilon']:.4g} after" in said
    [spent] = [note for note in run.summary["notes"] if note.startswith("privacy of each client")]
    assert f"with noise={privacy['noise']:g}" in spent
    assert spent.endswith(f"of a budget of {asked:g}")
    again = mh.Strategy.parse(run.summary["strategy"])
    assert str(again) == run.summary["strategy"], "what was computed can be asked for"
    assert f"noise={privacy['noise']:g}" in str(again)


def test_epsilon_alone_goes_on_with_the_same_noise(tmp_path: Path) -> None:
    strategy, out = "federated clients=20 fraction=0.25 batch=all randomness=seed epsilon=3", tmp_path / "run"
    whole = mh.fit(task(), strategy, rounds=6)

    class Stop(mh.Callback):
        def on_step(self, row: object) -> bool:
            return True

    first = mh.fit(task(), strategy, rounds=6, out=out, options=mh.Options(callbacks=[Stop()]))
    assert first.summary["steps"] < 6
    resumed = mh.fit(task(), strategy, rounds=6, out=out, resume=True)
    assert resumed.summary["privacy"] == whole.summary["privacy"]
    assert_same(resumed.model, whole.model)


def test_epsilon_without_its_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r"epsilon needs the dp-accounting package.*manyhands\[privacy\]"):
        mh.fit(task(), "federated clients=20 epsilon=8", rounds=2)


def test_what_cannot_be_promised_is_refused() -> None:
    with pytest.raises(UserError, match=r"federated epsilon=1e-06: no noise up to 1e\+06 keeps 2 rounds"):
        mh.fit(task(), "federated clients=20 epsilon=1e-6 delta=1e-30", rounds=2)
    with pytest.raises(UserError, match=r"algorithm=scaffold uses more of a client"):
        mh.fit(task(), "federated clients=20 algorithm=scaffold epsilon=8", rounds=2)
    with pytest.raises(UserError, match=r"epsilon=0\.01: one round with noise=0\.8 costs"):
        mh.fit(task(), f"{PRIVATE} epsilon=0.01", rounds=2)
    normed = task(model=lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1)).double())
    with pytest.raises(UserError, match=r"buffer '0\.running_mean' is averaged over clients"):
        mh.fit(normed, PRIVATE, rounds=2)
    parties = mh.Parties({str(name): samples(10, name) for name in range(4)})
    with pytest.raises(UserError, match=r"delta=0\.3: must be below 1/"):
        mh.fit(task(data=parties), "federated partition=natural clip=1 noise=1 delta=0.3", rounds=2)
