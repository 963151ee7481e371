"""Who the parties of a run are, how the model does for each, and how a page shows it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import manyhands as mh
from manyhands.observe.analyse.participants import PartiesHistory
from manyhands.observe.analyse.run_view import Gather
from manyhands.observe.analyse.view import PartiesView
from manyhands.observe.draw.page import sections
from manyhands.observe.draw.run_sections import skew_picture
from manyhands.strategies.federated.client_data import Samples
from manyhands.strategies.federated.client_measures import (
    measured,
    shown_clients,
    skew_of,
    spread_of,
)
from manyhands.strategies.federated.clients import held
from views import run_view

LABELS = torch.tensor([0, 0, 0, 1, 1, 2])
SPLIT = [np.array([0, 1, 2, 3]), np.array([4, 5])]


def a_task(data: object) -> mh.Task:
    return mh.Task(
        model=lambda: nn.Linear(1, 3),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        data=data,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        evaluation=(torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64)),
        metrics={"accuracy": lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float().mean()},
    )


def test_skew_counts_the_labels_of_each_party() -> None:
    inputs = torch.zeros(6, 1)
    report = skew_of(a_task((inputs, LABELS)), SPLIT)
    assert report["labels"] == [0, 1, 2]
    assert report["counts"] == [[3, 1, 0], [0, 1, 1]]
    assert report["samples"] == [4, 2]
    assert report["names"] == ["client 0", "client 1"]
    parties = mh.Parties({"b": (inputs[:4], LABELS[:4]), "a": (inputs[4:], LABELS[4:])})
    assert skew_of(a_task(parties), parties.split()) == {**report, "names": ["b", "a"]}
    unlabelled = skew_of(a_task(torch.zeros(6, 4)), SPLIT)
    assert "counts" not in unlabelled
    assert unlabelled["samples"] == [4, 2]


def test_the_spread_over_parties_is_that_of_numpy() -> None:
    values = np.random.default_rng(0).random(37)
    found = spread_of([*values.tolist(), float("nan")])
    assert found["mean"] == pytest.approx(np.mean(values))
    assert found["deviation"] == pytest.approx(np.std(values))
    assert found["lowest_tenth"] == pytest.approx(np.mean(np.sort(values)[:4]))
    assert found["highest_tenth"] == pytest.approx(np.mean(np.sort(values)[-4:]))
    assert spread_of([]) == {}
    assert len(shown_clients(10_000)) == 300
    assert shown_clients(3) == [0, 1, 2]


def test_each_party_is_measured_on_its_own_samples_with_the_model_it_uses() -> None:
    task = a_task((torch.zeros(6, 1), LABELS))
    model = task.model()
    with torch.no_grad():
        model.bias.copy_(torch.tensor([1.0, 0.0, 0.0]))  # everything is a 0
    own = [model.weight.detach().clone(), torch.tensor([0.0, 0.0, 1.0])]  # everything is a 2, to party 1
    models = [(1, own), (0, held(model))]
    found = measured(Samples(task, torch.device("cpu")), task.metrics, model, models, SPLIT)
    assert found == ({0: {"accuracy": 0.75}, 1: {"accuracy": 0.5}}, {})


def test_a_metric_that_cannot_read_samples_of_training_is_left_out_and_it_is_told_why() -> None:
    task = a_task((torch.zeros(6, 1), LABELS))
    model = task.model()

    def third(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return batch[2].mean()

    metrics = {"third": third, **task.metrics}
    models = [(client, held(model)) for client in (0, 1)]
    values, failed = measured(Samples(task, torch.device("cpu")), metrics, model, models, SPLIT)
    assert failed == {"third": "IndexError: list index out of range"}
    assert [list(one) for one in values.values()] == [["accuracy"], ["accuracy"]]

    def stopped(model: nn.Module, batch: object) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured(Samples(task, torch.device("cpu")), {"stopped": stopped}, model, [(0, held(model))], SPLIT)
    with pytest.raises(ValueError, match="zip"):  # a defect of ours is no reason to leave a measure out
        measured(Samples(task, torch.device("cpu")), metrics, model, [(0, held(model)[:1])], SPLIT)


FAIRNESS = {"accuracy": {"mean": 0.375, "lowest_tenth": 0.0, "highest_tenth": 0.75, "deviation": 0.375}}

SUMMARY = {
    "parties": {
        "clients": 2,
        "numbers": [0, 1],
        "names": ["north", "south <b>"],
        "samples": [4, 2],
        "labels": [0, 1, 2],
        "counts": [[3, 1, 0], [0, 1, 1]],
        "measures": {"accuracy": [0.75, 0.0]},
    },
    "fairness": FAIRNESS,
}


def test_a_view_counts_who_took_part_from_the_first_round_on_and_tells_the_rest_at_the_end() -> None:
    gather = Gather(task="digits", strategy="federated clients=2", steps_asked=3)
    assert gather.view(0).parties == PartiesView(count=0, rounds={})
    gather.add_rows(
        [
            {"step": 1, "loss": 1.0, "at_s": 0.1, "clients": [1]},
            {"step": 2, "loss": 1.0, "at_s": 0.2, "clients": [0, 1, "x", -1]},
            {"step": 3, "loss": 1.0, "at_s": 0.3, "clients": "all"},
        ]
    )
    live = gather.view(0).parties
    assert live is not None
    assert live.rounds == {0: 1, 1: 2}
    assert live.parties == ()
    gather.add_rows([{"step": 3, "metrics": {"accuracy": 0.4}, "at_s": 0.3, "fairness": FAIRNESS}])
    gather.add_rows(
        [{"step": 4, "metrics": {}, "at_s": 0.4, "fairness": {"accuracy": 3, "x": {"mean": "y"}}}]
    )
    report = gather.view(0).parties
    assert report is not None
    assert {curve.name: (curve.steps, curve.values) for curve in report.courses["accuracy"]} == {
        "highest_tenth": ((3.0,), (0.75,)),
        "mean": ((3.0,), (0.375,)),
        "lowest_tenth": ((3.0,), (0.0,)),
    }
    gather.summary = SUMMARY
    ended = gather.view(0).parties
    assert ended is not None
    assert [(one.name, one.samples, one.rounds, one.labels) for one in ended.parties] == [
        ("north", 4, 1, (3, 1, 0)),
        ("south <b>", 2, 2, (0, 1, 1)),
    ]
    assert ended.spread["accuracy"]["lowest_tenth"] == 0.0
    assert Gather(strategy="mirrored").view(0).parties is None


def viewed(rounds: dict[int, int], summary: dict[str, object]) -> PartiesView:
    history = PartiesHistory()
    history.rounds.update(rounds)
    return history.view(summary)


@pytest.mark.parametrize(
    "parties", [None, [], {"numbers": ["x"]}, {"numbers": [0], "counts": [3], "measures": 1}]
)
def test_a_damaged_summary_gives_a_view_all_the_same(parties: object) -> None:
    found = viewed({0: 1}, {"parties": parties, "fairness": [1]})
    assert found.rounds == {0: 1}
    assert found.spread == {}


def test_the_page_shows_the_skew_the_fairness_and_who_took_part() -> None:
    view = viewed({0: 1, 1: 2}, SUMMARY)
    drawn = sections(run_view(strategy="federated clients=2", parties=view))["parties"]
    assert "2 of 2 parties have taken part" in drawn
    assert "lowest tenth" in drawn
    assert "south &lt;b&gt;" in drawn
    assert "<b>" not in drawn
    assert skew_picture(view).count("<td") == 6, "three labels of two parties"
    assert "parties" not in sections(run_view())
    quiet = sections(run_view(strategy="federated", parties=PartiesView(count=0, rounds={})))["parties"]
    assert "No round has ended yet" in quiet


def test_the_page_shows_models_of_parties_own_beside_the_common_one_and_the_spread_over_the_run() -> None:
    parties = {**SUMMARY["parties"], "measures_common": {"accuracy": [0.5, None]}, "held_out": 0.2}
    history = PartiesHistory()
    for step, lowest in ((1, 0.1), (2, 0.3)):
        spread = {"mean": 0.5, "lowest_tenth": lowest, "highest_tenth": 0.9}
        history.add({"step": step, "at_s": float(step), "fairness": {"accuracy": spread}})
    summary = {**SUMMARY, "parties": parties, "fairness_common": {"accuracy": {"mean": 0.5}}}
    view = history.view(summary)
    assert [one.common for one in view.parties] == [{"accuracy": 0.5}, {}]
    drawn = sections(run_view(strategy="federated clients=2", parties=view))["parties"]
    assert drawn.count(">accuracy of the common model<") == 2, (
        "in the table of parties, and in that of the spread"
    )
    assert "On the parties' own samples, held out, over the parties" in drawn.replace("&#x27;", "'")
    assert "accuracy over the parties, at each evaluation" in drawn
    assert "lowest tenth" in drawn
