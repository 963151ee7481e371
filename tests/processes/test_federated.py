"""Federated rounds beside what they must equal: one process on the pooled data, a loop by hand, the formulas."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.errors import NonFinite, UserError
from manyhands.strategies.federated.algorithms import ALGORITHMS, algorithm_named
from manyhands.strategies.federated.algorithms.algorithm import ClientUpdate
from manyhands.strategies.federated.algorithms.averaging import FedAvg
from manyhands.strategies.federated.update_tally import PlainTally

TRUE = torch.tensor([[2.0], [-1.0], [0.5]], dtype=torch.float64)


def samples(count: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 3, dtype=torch.float64, generator=generator)
    return inputs, inputs @ TRUE + 0.1 * torch.randn(count, 1, dtype=torch.float64, generator=generator)


PARTIES = {"one": samples(5, 1), "two": samples(8, 2), "three": samples(11, 3)}


def task(data: object = None, **fields: object) -> mh.Task:
    defaults: dict[str, object] = {
        "model": lambda: nn.Linear(3, 1).double(),
        "loss": lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        "data": mh.Parties(PARTIES) if data is None else data,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "batch_size": 24,
        "evaluation": samples(40, 9),
    }
    return mh.Task(**{**defaults, **fields})  # type: ignore[arg-type]


def assert_same(one: nn.Module, other: nn.Module, within: float = 1e-9) -> None:
    for mine, theirs in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=within, atol=within)


def test_three_models_become_their_mean() -> None:
    """m = (m1 + m2 + m3) / 3."""
    weights = [torch.zeros(2, dtype=torch.float64)]
    models = [torch.tensor(values, dtype=torch.float64) for values in ([1.0, 2.0], [4.0, 2.0], [1.0, 8.0])]
    fedavg = algorithm_named("fedavg")
    updates = [
        ClientUpdate(client=k, change=[m - weights[0]], samples=7, steps=1, loss=0.0)
        for k, m in enumerate(models)
    ]
    tally = PlainTally(lambda values: values, weights)
    for update in updates:
        tally.add(update, fedavg.weight(update))
    fedavg.step(weights, fedavg.mean(tally.total()))
    assert weights[0].tolist() == [2.0, 4.0]


def test_one_step_of_every_party_on_all_it_has_is_one_process_on_the_pooled_data(tmp_path: Path) -> None:
    pooled = mh.fit(task(), "single", steps=6)
    options = mh.Options(checkpoint_every=2)
    for strategy in (
        "federated clients=3 batch=all partition=natural",
        "federated algorithm=fedsgd partition=natural",
    ):
        rounds = mh.fit(task(), strategy, rounds=6)
        assert rounds.summary["samples"] == pooled.summary["samples"] == 6 * 24
        assert_same(rounds.model, pooled.model)
        assert rounds.history.loss == pytest.approx(pooled.history.loss, rel=1e-9)
    out = tmp_path / "run"
    mh.fit(task(), strategy, rounds=3, out=out, options=options)
    again = mh.fit(task(), strategy, rounds=6, out=out, resume=True, options=options)
    assert_same(again.model, pooled.model)
    assert again.summary["steps"] == 6


def by_hand(mu: float = 0.0) -> nn.Module:
    """Two rounds of three clients, two epochs of whole batches each, in plain PyTorch."""
    torch.manual_seed(0)
    model = task().model()
    for _ in range(2):
        begun = [parameter.detach().clone() for parameter in model.parameters()]
        found = [torch.zeros_like(one) for one in begun]
        for inputs, targets in PARTIES.values():
            copy = nn.Linear(3, 1).double()
            copy.load_state_dict(dict(zip(("weight", "bias"), begun, strict=True)))
            optimizer = torch.optim.SGD(copy.parameters(), lr=0.1)
            for _ in range(2):
                optimizer.zero_grad()
                loss = (copy(inputs) - targets).square().mean()
                for parameter, start in zip(copy.parameters(), begun, strict=True):
                    loss = loss + mu / 2 * (parameter - start).square().sum()
                loss.backward()
                optimizer.step()
            for total, mine in zip(found, copy.parameters(), strict=True):
                total += len(inputs) / 24 * mine.detach()
        with torch.no_grad():
            for parameter, mean in zip(model.parameters(), found, strict=True):
                parameter.copy_(mean)
    return model


@pytest.mark.parametrize(("algorithm", "mu"), [("fedavg", 0.0), ("fedprox:0.7", 0.7)])
def test_rounds_are_those_of_a_loop_by_hand(algorithm: str, mu: float) -> None:
    run = mh.fit(task(), f"federated algorithm={algorithm} epochs=2 batch=all partition=natural", rounds=2)
    assert_same(run.model, by_hand(mu))


@pytest.mark.parametrize("algorithm", ["fedadam:0.05", "fedyogi:0.05", "fedadagrad:0.05"])
def test_an_adaptive_server_takes_the_papers_steps_and_goes_on_where_it_stopped(
    algorithm: str, tmp_path: Path
) -> None:
    words = f"federated algorithm={algorithm} epochs=1 batch=all partition=natural"
    run = mh.fit(task(), words, rounds=4, out=tmp_path / "whole")
    mh.fit(task(), words, rounds=2, out=tmp_path / "parts")
    again = mh.fit(task(), words, rounds=4, out=tmp_path / "parts", resume=True)
    assert_same(run.model, again.model, within=0)
    torch.manual_seed(0)
    model = task().model()
    weights = torch.cat([one.detach().flatten() for one in model.parameters()])
    m, v = torch.zeros_like(weights), torch.full_like(weights, 1e-6)
    inputs = torch.cat([one for one, _ in PARTIES.values()])
    targets = torch.cat([one for _, one in PARTIES.values()])
    for _ in range(4):
        w, b = weights[:3].view(3, 1), weights[3]
        error = inputs @ w + b - targets
        change = -0.1 * 2 / len(inputs) * torch.cat([(inputs.T @ error).flatten(), error.sum().view(1)])
        beta = 0.0 if "adagrad" in algorithm else 0.9
        m = beta * m + (1 - beta) * change
        if "adam" in algorithm:
            v = 0.99 * v + 0.01 * change**2
        elif "yogi" in algorithm:
            v = v - 0.01 * change**2 * torch.sign(v - change**2)
        else:
            v = v + change**2
        weights = weights + 0.05 * m / (v.sqrt() + 1e-3)
    found = torch.cat([one.detach().flatten() for one in run.model.parameters()])
    torch.testing.assert_close(found, weights, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("clip", [{"clip_norm": 0.05}, {"clip_value": 0.02}], ids=str)
def test_a_client_clips_as_one_process_does(clip: dict[str, float]) -> None:
    """One client that has everything takes the steps of one process."""
    words = "federated clients=1 algorithm=fedsgd"
    clipped = mh.fit(task(**clip), words, rounds=4)
    assert_same(clipped.model, mh.fit(task(**clip), "single", steps=4).model)
    loose = mh.fit(task(), words, rounds=4)
    assert not torch.allclose(loose.model.weight, clipped.model.weight, atol=1e-3)


def test_two_workers_play_the_clients_that_one_does() -> None:
    data = samples(300, 4)
    words = "federated clients=20 fraction=0.4 epochs=2 batch=5 partition=quantity:0.5"
    alone = mh.fit(task(data), words, rounds=3)
    both = mh.fit(task(data), words, workers=2, rounds=3)
    assert_same(alone.model, both.model)
    assert alone.summary["samples"] == both.summary["samples"]
    assert 3 * 8 * 2 < alone.summary["samples"] < 3 * 300 * 2, (
        "two epochs of eight clients of twenty, in each round"
    )
    assert both.summary["messages_sent"] == alone.summary["messages_sent"] == 3 * 8
    assert alone.summary["bytes_sent"] == 3 * 8 * 4 * 8, "eight clients a round, four numbers of eight bytes"


def test_who_drops_out_is_the_same_with_two_workers_and_in_a_run_that_is_resumed(tmp_path: Path) -> None:
    """And one party's updates are refused, of which the workers must tell each other."""
    broken = (torch.full((4, 3), float("nan"), dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64))
    data = mh.Parties({**{f"party {at}": samples(6 + at, at) for at in range(9)}, "broken": broken})
    words = "federated batch=4 partition=natural fraction=0.6 over=1.5 dropout=0.3 deadline=4 min_reports=3"
    alone = mh.fit(task(data), words, rounds=6)
    mh.fit(task(data), words, workers=2, rounds=3, out=tmp_path / "parts")
    both = mh.fit(task(data), words, workers=2, rounds=6, out=tmp_path / "parts", resume=True)
    assert_same(alone.model, both.model)
    report = alone.summary["participation"]
    assert report == pytest.approx(both.summary["participation"])
    assert report["dropped"] > 0
    rows = [json.loads(line) for line in (tmp_path / "parts" / "metrics.jsonl").read_text().splitlines()]
    attempts = [row["attempt"] for row in rows if "attempt" in row]
    assert len(attempts) == 6
    assert attempts == sorted(set(attempts))


def test_a_client_whose_update_is_not_finite_is_left_out() -> None:
    broken = (torch.full((4, 3), float("nan"), dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64))
    words = "federated batch=all partition=natural"
    run = mh.fit(task(mh.Parties({**PARTIES, "broken": broken})), words, rounds=2)
    assert_same(run.model, mh.fit(task(), words, rounds=2).model)
    assert run.summary["updates_refused"] == 2
    assert any("2 updates had a number that is not finite" in note for note in run.summary["notes"])


def test_a_client_whose_update_is_too_large_is_left_out_on_every_worker(tmp_path: Path) -> None:
    """By the norms of the clients that the other worker played."""
    inputs, targets = samples(4, 7)
    data = mh.Parties({**PARTIES, "hostile": (inputs, 1e15 * targets)})
    words = "federated batch=all partition=natural"
    run = mh.fit(task(data), words, rounds=2, workers=2, out=tmp_path)
    assert_same(run.model, mh.fit(task(), words, rounds=2).model)
    assert run.summary["updates_rejected"] == 2
    assert any("2 updates did not count: larger than norm_ratio=100" in note for note in run.summary["notes"])
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [list(row["rejected"]) for row in rows if "rejected" in row] == [["3"], ["3"]]


def test_a_run_of_two_workers_whose_evaluation_breaks_names_the_round_and_what_came() -> None:
    """Two clients, of whom nobody can say which one is wrong: the evaluation is what shows it."""
    one, two = PARTIES["one"], PARTIES["two"]
    wild = task(
        mh.Parties({"one": one, "two": (two[0], 1e30 * two[1])}),
        evaluation=(1e150 * two[0], two[1]),
    )
    with pytest.raises(NonFinite, match=r"round 1 broke the model: its evaluation_loss is inf") as ended:
        mh.fit(wild, "federated batch=all partition=natural", rounds=3, workers=2)
    assert "client 1 (norm" in str(ended.value)


def test_secure_rounds_are_plain_ones_to_half_a_step_of_their_fixed_point() -> None:
    """One round from the same weights, and a client that leaves because its update is not finite."""
    data = samples(120, 5)
    words = "federated clients=8 fraction=0.5 epochs=2 batch=5 partition=quantity:2"
    plain = mh.fit(task(data), words, rounds=1)
    half_a_step = 2.0 / (2**15 - 1) / 2
    secure = mh.fit(task(data), f"{words} secure=yes range=2 bits=16", rounds=1)
    for mine, theirs in zip(secure.model.parameters(), plain.model.parameters(), strict=True):
        off = (mine - theirs).abs().max()
        assert 0 < off <= half_a_step * (1 + 1e-9)
    assert secure.history.loss == pytest.approx(plain.history.loss, abs=half_a_step)
    assert secure.summary["messages_sent"] == 4 * 5, "four clients, five messages each"
    nan = (torch.full((4, 3), float("nan"), dtype=torch.float64), torch.zeros(4, 1, dtype=torch.float64))
    four = {**PARTIES, "four": samples(6, 7)}
    words = "federated batch=all partition=natural secure=yes"
    run = mh.fit(task(mh.Parties({**four, "broken": nan})), words, rounds=2)
    assert_same(run.model, mh.fit(task(mh.Parties(four)), words, rounds=2).model, within=0)
    abandoned = r"round 1 was abandoned, .*: 2 of 3 clients were left at MASK, but 3 are needed"
    with pytest.raises(NonFinite, match=abandoned):
        mh.fit(
            task(mh.Parties({"one": PARTIES["one"], "two": PARTIES["two"], "broken": nan})), words, rounds=1
        )


def test_without_its_package_a_secure_run_is_refused_and_a_plain_one_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UserError, match=r"pip install 'manyhands\[tls\]', or leave out secure=yes"):
        mh.fit(task(), "federated partition=natural secure=yes", rounds=1)
    mh.fit(task(), "federated partition=natural", rounds=1)


def test_an_algorithm_that_must_see_each_update_is_refused_with_a_secure_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Nosy(FedAvg):
        word = "nosy"
        single_updates = True

    monkeypatch.setitem(ALGORITHMS, "nosy", Nosy)
    mh.Federated(algorithm="nosy")
    with pytest.raises(UserError, match="algorithm=nosy needs each client's update"):
        mh.Federated(algorithm="nosy", secure=True)


@pytest.mark.parametrize(
    ("words", "length", "sentence"),
    [
        ("federated secure=maybe", {"rounds": 1}, "maybe"),
        ("federated secure=yes range=0", {"rounds": 1}, "range=0: must be a number above 0"),
        ("federated secure=yes range=wide", {"rounds": 1}, "not a number above 0"),
        ("federated secure=yes bits=40", {"rounds": 1}, "bits=40: must be an integer from 2 to 32"),
        ("federated bits=16", {"rounds": 1}, "bits=16: needs secure=yes"),
        ("federated secure=yes clients=20 fraction=0.1", {"rounds": 1}, "2 of 20 clients, .* protects none"),
        ("federated secure=yes partition=natural fraction=0.5", {"rounds": 1}, "2 of 3 clients"),
        ("federated secure=yes clients=5000 bits=32", {"rounds": 1}, "5000 clients .* room for 4096"),
        ("federated secure=yes", {"rounds": 1, "workers": 2}, "workers=2: with secure=yes one worker"),
        ("federated clients=0", {"rounds": 1}, "clients=0"),
        ("federated fraction=0", {"rounds": 1}, "fraction=0"),
        (
            "federated clients=4 partition=natural",
            {"rounds": 1},
            "each of the data's 3 parties is a client",
        ),
        (
            "federated algorithm=fedsgd epochs=2",
            {"rounds": 1},
            "epochs=2: a client of algorithm=fedsgd takes one",
        ),
        (
            "federated algorithm=fedsgd batch=5",
            {"rounds": 1},
            "batch=5: a client of algorithm=fedsgd takes one",
        ),
        (
            "federated algorithm=fedyogi:0",
            {"rounds": 1},
            "fedyogi:0: a server rate of 0 never changes the model",
        ),
        ("federated fraction=many", {"rounds": 1}, "not a number"),
        ("federated algorithm=fedavgg", {"rounds": 1}, "fedavg"),
        ("federated algorithm=fedavg:2", {"rounds": 1}, "takes no number"),
        ("federated algorithm=fedprox:-1", {"rounds": 1}, "at least 0"),
        ("federated partition=dirichlet", {"rounds": 1}, "no labels"),
        ("federated clients=25", {"rounds": 1}, "at most that many clients"),
        ("federated", {"steps": 3}, "counted in rounds"),
        ("federated", {"steps": 3, "rounds": 2}, "twice"),
        ("single", {"rounds": 3}, "counted in global batches"),
    ],
)
def test_what_makes_no_sense_is_refused(words: str, length: dict[str, int], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        mh.fit(task(), words, **length)  # type: ignore[arg-type]
