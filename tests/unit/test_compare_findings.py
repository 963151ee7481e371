"""What is said of a comparison: differences beyond the repeats and within them, who waited, and what was asked for."""

import dataclasses

from compared import found, measured, reported
from manyhands.engine.options import Slowdown
from manyhands.lab.compare.comparison import Target, parse_strategies


def test_a_difference_beyond_the_repeats_is_called_one() -> None:
    runs = [measured(place, n, step_s=s + 0.01 * n) for place, s in ((0, 0.4), (1, 0.1)) for n in range(2)]
    said = reported(found(*runs))
    assert "Every strategy reached accuracy ≥ 0.9 (the better half ended there or better)." in said
    assert (
        "ps consistency=async was there first, after 2.10 s: 3.9 times as fast as allreduce (8.10 s)." in said
    )
    assert "The difference exceeds the spread: each of 2 runs" in said


def test_a_difference_within_the_repeats_is_not() -> None:
    runs = [
        measured(0, 0, step_s=0.1),
        measured(0, 1, step_s=0.4),
        measured(1, 0, step_s=0.2),
        measured(1, 1, step_s=0.5),
    ]
    assert "The difference is within the spread of the repeats." in reported(found(*runs))
    assert "exceeds the spread:" not in reported(found(*runs))


def test_one_run_each_says_nothing_about_chance() -> None:
    said = reported(found(measured(0), measured(1, step_s=0.2)))
    assert "chance was not measured" in said
    assert "repeats" not in said


def test_equal_times_have_no_winner() -> None:
    said = reported(found(measured(0), measured(1)))
    assert "allreduce and ps consistency=async took equally long to it: 2.00 s." in said
    assert "first" not in said


def test_less_than_one_evaluation_apart_is_said_to_be_so() -> None:
    near = measured(1, step_s=0.12, final=1.2)  # there one evaluation earlier, at 15 steps of 0.12 s
    said = reported(found(measured(0), near, target=Target.parse("accuracy=0.9")))
    assert "less than the time between two evaluations, 0.60 s" in said
    assert "all were there at the same evaluation or the next" in said


def test_who_does_not_reach_the_target_is_named() -> None:
    said = reported(found(measured(0), measured(1, final=0.3), target=Target.parse("accuracy=0.8")))
    assert (
        "allreduce reached accuracy ≥ 0.8 in every run. ps consistency=async reached it in 0 of 1 runs."
        in said
    )
    assert "No strategy reached" in reported(found(measured(0), target=Target.parse("accuracy=2")))


def test_waiting_is_reported_with_the_one_waited_for() -> None:
    said = reported(found(measured(0, waited_s=2.0, waited_for_s={0: 0.1, 1: 1.9}), measured(1)))
    assert "Workers spent 50 % under allreduce (mostly for worker 1) of their time waiting." in said
    assert "No workers waited for more than 0 %" in reported(found(measured(0), measured(1)))


def test_a_slowed_worker_is_reported_with_what_it_did() -> None:
    one = found(measured(0, waited_s=2.0, waited_for_s={1: 1.6}), measured(1))
    said = reported(one, slow=Slowdown.parse("worker=1,factor=5"))
    assert (
        "Worker 1 was slowed down, 5 times: of all workers' time, waiting for it took 40 % under allreduce"
        in said
    )
    assert "under ps consistency=async workers waited less than 5 %" in said
    said = reported(one, slow=Slowdown.parse("worker=1,factor=2,probability=0.1,from=400"))
    assert "Worker 1 was slowed down, 2 times in 10 % of steps from step 401 on:" in said


def test_staleness_is_reported_where_there_is_some() -> None:
    said = reported(found(measured(0), measured(1, staleness_mean=0.5, staleness_max=3)))
    assert (
        "ps consistency=async 0.50 on average and 3 at most; the other strategies had no staleness." in said
    )
    assert "stale" not in reported(found(measured(0), measured(1)))


def test_bandwidth_names_those_it_did_not_touch() -> None:
    strategies = parse_strategies("allreduce; ps link=tcp; hogwild")
    one = found(measured(0), measured(1), measured(2), strategies=strategies)
    said = reported(one, bandwidth="1 Gbit/s")
    assert "TCP was limited to 1 Gbit/s" in said
    assert (
        "allreduce and hogwild do not use the network on one host, so --bandwidth did not affect them."
        in said
    )
    assert [strategy.uses_network for strategy in strategies] == [False, True, False]
    assert "bandwidth" not in reported(one)


def test_codecs_are_reported_beside_the_one_that_hardly_compresses() -> None:
    strategies = parse_strategies(
        "allreduce link=tcp; allreduce link=tcp codec=fp16; allreduce link=tcp codec=int8; ps link=tcp;"
        "allreduce link=tcp codec=topk:0.01; allreduce link=tcp codec=sign feedback=no; ps link=tcp codec=int8"
    )
    runs = [
        measured(place, step_s=step_s, final=final)
        for place, (step_s, final) in enumerate(
            [(0.4, 0.9), (0.2, 0.9), (0.1, 0.9), (0.3, 0.9), (0.2, 0.9), (0.1, 0.4), (0.3, 0.9)]
        )
    ]
    said = reported(found(*runs, target=Target.parse("accuracy=0.8"), strategies=strategies))
    assert (
        "Under allreduce link=tcp, beside fp16 and by the time to the target: int8 (2.0 times as fast) paid; "
        "topk:0.01 made no difference; no codec (2.0 times as long), sign feedback=no (not there in every run) lost."
    ) in said
    assert (
        "Under ps link=tcp, beside no codec and by the time to the target: int8 made no difference." in said
    )
    assert "beside" not in reported(found(measured(0), measured(1))), "no two differ by their codec alone"


def test_what_was_measured_at_the_end_alone_is_an_upper_bound() -> None:
    late = measured(1)
    said = reported(found(measured(0), dataclasses.replace(late, evaluations=late.evaluations[-1:])))
    assert (
        "ps consistency=async could be measured at the end alone, so its time to it is an upper bound" in said
    )


def test_all_who_end_alike_are_named() -> None:
    strategies = parse_strategies("allreduce; central; hogwild")
    said = reported(found(measured(0), measured(1), measured(2, final=0.8), strategies=strategies))
    assert said.startswith(
        "allreduce and central ended best, at accuracy 0.9 after 2.00 s, and no other was faster."
    )
    assert "hogwild ended worst, at accuracy 0.8." in said
    assert reported(found(measured(0), measured(1))).startswith("All ended at accuracy 0.9 after 2.00 s.")
    rounded = reported(found(measured(0), measured(1, final=0.9 + 1e-7)))
    assert "All ended at accuracy 0.9 after 2.00 s." in rounded, (
        "best and worst at one number would be nonsense"
    )
    assert "worst" not in rounded


def test_the_first_sentence_has_quality_and_time_and_does_not_crown_who_ended_worst() -> None:
    strategies = parse_strategies("allreduce; ps; ps consistency=async; hogwild")
    ends = [(0.12, 0.964), (0.2, 0.964), (0.1, 0.847), (0.15, 0.9)]
    runs = [measured(place, step_s=step_s, final=final) for place, (step_s, final) in enumerate(ends)]
    said = reported(found(*runs, strategies=strategies))
    assert said.startswith(
        "allreduce and ps ended best, at accuracy 0.964, allreduce after 2.40 s and the others later; faster, and "
        "worse: ps consistency=async (0.847 after 2.00 s). allreduce and ps reached accuracy ≥ 0.964 (the better "
        "half ended there or better) in every run."
    )
    assert "ps consistency=async was there first" not in said
    assert "ps consistency=async reached it in 0 of 1 runs." in said
    equal = reported(found(measured(0), measured(1, step_s=0.3)))
    assert equal.startswith("All ended at accuracy 0.9; allreduce took the least time, 2.00 s.")
