"""Queues of batches against queueing theory, saturation of known curves, and the study on this machine."""

import math
from dataclasses import replace

import numpy as np
import pytest

from manyhands.errors import UserError
from manyhands.lab.studies.latency_throughput import (
    BatchRule,
    BatchTimes,
    finish_times,
    mean_in_system,
    queues_under_load,
    random_arrivals,
    saturating,
    truck_answer,
)
from manyhands.lab.studies.truck_study import TRUCK, TruckOptions

ONE = BatchRule(name="one", most=1)


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_one_at_a_time_is_the_queue_of_pollaczek_and_khinchine(load: float) -> None:
    """M/D/1 with a service of 1 s: W = 1 + load / (2 (1 - load)), and by Little L = load W."""
    arrivals = random_arrivals(load, 200_000)
    finished = finish_times(arrivals, ONE, lambda _: 1.0)
    expected = 1 + load / (2 * (1 - load))
    assert (finished - arrivals).mean() == pytest.approx(expected, rel=0.04)
    assert mean_in_system(arrivals, finished) == pytest.approx(load * expected, rel=0.04)


@pytest.mark.parametrize(
    "rule", [ONE, BatchRule(name="some", most=7), BatchRule(name="full", most=5, wait_s=math.inf)]
)
def test_littles_law_holds_whatever_the_rule(rule: BatchRule) -> None:
    arrivals = random_arrivals(0.9, 5_000, seed=1)
    finished = finish_times(arrivals, rule, lambda count: 0.5 + 0.5 * count)
    rate = len(arrivals) / finished[-1]
    assert mean_in_system(arrivals, finished) == pytest.approx(rate * (finished - arrivals).mean())


def test_full_batches_of_regular_arrivals_wait_for_half_of_the_others() -> None:
    """Every second one, in batches of 8 that take 3 s: an input waits for (8 - 1) / 2 others in the mean."""
    arrivals = np.arange(1.0, 801.0)
    rule = BatchRule(name="full", most=8, wait_s=math.inf)
    took = finish_times(arrivals, rule, lambda _: 3.0) - arrivals
    assert took.reshape(100, 8).tolist() == [[10, 9, 8, 7, 6, 5, 4, 3]] * 100
    assert took.mean() == 3 + 3.5


def test_a_batch_that_never_fills_begins_when_its_oldest_has_waited_or_nobody_comes() -> None:
    arrivals = np.array([0.0, 1.0, 10.0, 10.5])
    limited = finish_times(arrivals, BatchRule(name="", most=3, wait_s=2.0), lambda _: 1.0)
    assert limited.tolist() == [3, 3, 11.5, 11.5], "the last two wait for nobody: no input comes after them"
    endless = finish_times(arrivals, BatchRule(name="", most=3, wait_s=math.inf), lambda _: 1.0)
    assert endless.tolist() == [11, 11, 11, 12]


def test_who_waits_is_taken_together() -> None:
    finished = finish_times(np.array([0.0, 1.0, 2.0, 3.0]), BatchRule(name="", most=2), lambda _: 5.0)
    assert finished.tolist() == [5, 10, 10, 15]


def test_a_constant_and_a_part_for_each_input_saturate_where_the_constant_is_a_tenth() -> None:
    """Times of 9 + b: rates b / (9 + b) have 9 tenths of their limit, which is 1, from b = 81 on."""
    batches = list(range(1, 100_000, 10))
    assert saturating(batches, [batch / (9 + batch) for batch in batches]) == 81
    assert saturating([1, 2, 4], [10.0, 10.5, 11.0]) == 1


def test_at_little_load_the_car_wins_and_at_much_only_the_truck_keeps_up() -> None:
    found = queues_under_load(lambda count: 0.010 + 0.001 * count, 64)
    p99_s = {rule: {one.inputs_per_s: one.p99_s for one in found if one.rule == rule} for rule in
             dict.fromkeys(one.rule for one in found)}  # fmt: skip
    car, flexible, full = p99_s.values()
    calm, busy = min(flexible), max(flexible)
    assert car[calm] < full[calm]
    assert busy not in car
    assert max(car) < 1 / 0.011
    assert full[busy] < 2 * flexible[busy]
    assert full[calm] > 64 / calm / 2


def rows(*batches: int) -> list[BatchTimes]:
    """Times of 1 ms and 0.1 ms a sample; training takes three times that."""
    return [
        BatchTimes(
            batch=batch,
            step_s=3 * seconds,
            p50_s=seconds,
            p99_s=2 * seconds,
            mean_s=seconds,
            calls=100,
            clocked_per_s=batch / seconds,
        )
        for batch in batches
        if (seconds := 1e-3 + 1e-4 * batch)
    ]


def test_what_a_truck_costs_is_told() -> None:
    answer = truck_answer(rows(1, 10, 100, 1000), "digits", "cpu")
    assert answer.figures["saturates_at"] == {"training": 100, "inference": 100}
    assert answer.sentences[1].startswith(
        "Inference saturates at a batch of 100: 9,091 inputs/s, 10 times those of batch 1, for 10 times the latency"
    )
    assert any("holds for the measured batches to 0.0%" in sentence for sentence in answer.sentences)
    assert "too many" in {cell for row in answer.tables[1].rows for cell in row}
    off = [replace(row, clocked_per_s=0.8 * row.clocked_per_s) for row in rows(1, 10)]
    answer = truck_answer(off, "digits", "cpu")
    assert any("to 20.0%" in sentence for sentence in answer.sentences)
    assert "the largest batch still gained" in answer.sentences[0]


def test_one_at_a_time_may_be_the_best() -> None:
    answer = truck_answer(rows(1), "digits", "cpu")
    assert any("The car is the truck" in sentence for sentence in answer.sentences)
    assert answer.sentences[0] == "Training has nearly its best throughput at a batch of 1: 303 samples/s."


def test_the_study_measures_training_and_inference_of_a_task() -> None:
    answer = TRUCK.run(TruckOptions(task="line", batches="8", seconds=0.02), lambda _: None)
    assert [row["batch"] for row in answer.figures["rows"]] == [1, 8]
    assert all(row["calls"] >= 20 and 0 < row["p50_s"] <= row["p99_s"] for row in answer.figures["rows"])
    assert len(answer.charts) == 3


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"batches": "0"}, "--batches '0' is not an integer of at least 1"),
        ({"task": "digitz"}, "there is no built-in task 'digitz'"),
        ({"device": "gpu"}, "device='gpu'"),
    ],
)
def test_what_makes_no_sense_is_one_sentence(given: dict[str, str], part: str) -> None:
    with pytest.raises(UserError, match=part):
        TRUCK.run(TruckOptions(**given), lambda _: None)
