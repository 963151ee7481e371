"""What pairs of predicted and seen say of the next prediction, what a plan must promise, and what steps cost."""

from __future__ import annotations

import json
import math
import random
import statistics
from pathlib import Path

import pytest

from manyhands.errors import UserError, format_seconds
from manyhands.facts import ComputeTime, LinkRate, Machines, StepCosts
from manyhands.foresight.plan.described_cluster import DescribedCluster
from manyhands.foresight.plan.host_list import with_hosts
from manyhands.foresight.plan.machine_record import MachineRecord
from manyhands.foresight.plan.seen_steps import seen_step_s
from manyhands.foresight.plan.step_costs import CostSample, fitted_costs
from manyhands.foresight.plan.task_profile import expected_slowest
from manyhands.foresight.plan.track_record import SeenStep, TrackRecord
from manyhands.strategies.auto.promised import Must
from manyhands.strategy import Strategy


def pairs(ratios: list[float]) -> list[SeenStep]:
    return [SeenStep(kind="ps", predicted_s=2.0, seen_s=2.0 * ratio) for ratio in ratios]


def test_nine_of_ten_are_within_the_error_that_is_said() -> None:
    """Of errors that are normal in the logarithm, as drawn here, whose middle and spread are learnt."""
    draw = random.Random(1)
    ratios = [math.exp(draw.gauss(0.3, 0.08)) for _ in range(20)]
    learnt = TrackRecord(pairs(ratios)).of("ps")
    new = [math.exp(draw.gauss(0.3, 0.08)) for _ in range(4000)]
    within = statistics.mean(abs(one / learnt.factor - 1) <= learnt.error for one in new)
    assert 0.85 < within < 0.98


def test_few_pairs_say_little_and_those_of_other_kinds_nothing() -> None:
    nothing = TrackRecord().of("ps")
    assert nothing.factor == 1.0
    assert TrackRecord(pairs([4.0])).of("mirrored") == nothing
    one, many = TrackRecord(pairs([4.0])).of("ps"), TrackRecord(pairs([4.0] * 20)).of("ps")
    assert 1.0 < one.factor < many.factor < 4.0
    assert many.error < nothing.error < one.error


def test_a_noisy_profile_widens_the_error() -> None:
    assert TrackRecord(noise=1.0).of("ps").error > TrackRecord(noise=0.1).of("ps").error > 0


def test_costs_of_steps_messages_and_bytes_are_told_apart() -> None:
    true = StepCosts(step_s=2e-4, message_s=5e-5, byte_s=3e-10)
    sizes = [(4.0, 1e4), (120.0, 3e5), (6.0, 9e6), (30.0, 1e6)]
    samples = [
        CostSample(
            kind="ps", modelled_s=1e-3, seen_s=1e-3 + true.seconds(*one), messages=one[0], num_bytes=one[1]
        )
        for one in sizes
    ]
    found = fitted_costs(samples)["ps"]
    assert found.step_s == pytest.approx(true.step_s, rel=1e-6)
    assert found.message_s == pytest.approx(true.message_s, rel=1e-6)
    assert found.byte_s == pytest.approx(true.byte_s, rel=1e-6)


def test_costs_are_never_negative_where_a_step_was_faster_than_modelled() -> None:
    sample = CostSample(kind="ps", modelled_s=2e-3, seen_s=1e-3, messages=3.0, num_bytes=100.0)
    assert fitted_costs([sample])["ps"].seconds(3.0, 100.0) == pytest.approx(0.0, abs=1e-9)


def test_noise_makes_no_cost_of_bytes_many_times_the_usual_one() -> None:
    """One step that was late is no reason to expect seconds of a model of ten times the size."""
    samples = [
        CostSample(kind="pipeline", modelled_s=1e-3, seen_s=1e-3 + late, messages=8.0, num_bytes=size)
        for size, late in ((1e4, 0.0), (3e5, 0.0), (2e6, 0.05))
    ]
    usual = StepCosts(byte_s=5e-10)
    assert fitted_costs(samples, {"pipeline": usual})["pipeline"].byte_s <= 3 * usual.byte_s * (1 + 1e-9)


def test_times_between_measured_sizes_are_on_the_line_through_both() -> None:
    time = ComputeTime.through({8: 1.0, 16: 3.0, 64: 4.0})
    assert [time.seconds(size) for size in (8, 12, 16, 40, 64)] == [1.0, 2.0, 3.0, 3.5, 4.0]
    assert time.seconds(4) == 0.0
    assert time.seconds(112) == 5.0
    assert time.times(2).seconds(12) == 4.0
    line = ComputeTime.through({8: 1.0, 16: 2.0})
    assert (line.fixed_s, line.per_sample_s) == (0.0, 0.125)
    assert ComputeTime.through({8: 1.0}).seconds(16) == 2.0


def test_the_slowest_of_many_takes_longer_than_each() -> None:
    """The median of the larger of two draws from 0 to 1 is the square root of a half."""
    draw = random.Random(2)
    uniform = [[draw.random() for _ in range(2000)] for _ in range(2)]
    assert expected_slowest(uniform) == pytest.approx(math.sqrt(0.5), abs=0.05)
    assert expected_slowest([[1.0] * 5, [2.0] * 5]) == 2.0


def test_steps_are_seen_in_windows_and_not_one_by_one() -> None:
    rows = [{"seconds": 9.0, "at_s": 0.1 * (number // 2 * 2)} for number in range(60)]  # in pairs
    assert seen_step_s(rows, 2) == pytest.approx(0.1, rel=0.2)
    assert seen_step_s(rows[:5], 2) is None
    evaluated = [*rows, {"at_s": 100.0, "metrics": {}}]
    assert seen_step_s(evaluated, 2) == seen_step_s(rows, 2)


def test_what_a_plan_must_promise() -> None:
    equal, sync, survives, twice = Must.parse("equal, sync, survives=1, survives=2")
    assert Must.parse("none") == Must.parse("") == ()
    keeps = {
        ("mirrored", equal): True, ("local", equal): False, ("ps consistency=async", equal): False,
        ("mirrored", sync): True, ("hogwild", sync): False, ("single", sync): True,
        ("mirrored", survives): False, ("allreduce elastic=yes", survives): True, ("ps", survives): False,
        ("ps replicas=1 servers=2", survives): True, ("ps replicas=1 servers=2", twice): False,
        ("allreduce elastic=yes", twice): True,
    }  # fmt: skip
    for (text, must), kept in keeps.items():
        workers = 1 if text == "single" else 4
        assert (must.lacking(Strategy.parse(text), workers) == "") == kept, (text, must)
    assert "3 workers, and 3 may be lost" in Must("survives", 3).lacking(
        Strategy.parse("allreduce elastic=yes"), 3
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fast", "must='fast' is not a promise; allowed: equal, sync, survives"),
        ("survives=0", "the number of losses must be at least 1"),
        ("survives=x", "'x' is not a number of losses; write survives=1"),
        ("sync=2", "sync takes no number"),
    ],
)
def test_a_promise_that_makes_no_sense_is_rejected(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Must.parse(text)


def test_hosts_are_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# mine\nhostA slots=4\n\nhostB slots=4 # behind the door\n")
    link = LinkRate(latency_s=1e-5, bytes_per_s=1e9)
    cluster = DescribedCluster(machines=Machines(hosts=9, per_host=1, between=link))
    found = with_hosts(cluster, path)
    assert (found.machines.hosts, found.machines.per_host, found.machines.between) == (2, 4, link)
    for text, said in {
        "hostA slots=4\nhostB slots=2\n": "hostB has 2 slots, and hostA has 4",
        "hostA slots=x\n": "line 1: 'hostA slots=x' must be NAME slots=WORKERS",
        "hostA\nhostA\n": "line 2: hostA was named before",
        "hostA slots=0\n": "line 1",
        "": "names no host",
    }.items():
        path.write_text(text)
        with pytest.raises(UserError, match=said):
            with_hosts(cluster, path)
    with pytest.raises(UserError, match="cannot be read"):
        with_hosts(cluster, tmp_path / "none")


def test_what_is_known_of_a_machine_survives_and_a_broken_file_is_none(tmp_path: Path) -> None:
    record = MachineRecord(tmp_path / "machine")
    assert record.costs(2) is None
    assert record.pairs(2) == ()
    costs = {"ps": StepCosts(step_s=1e-3), "mirrored": StepCosts(byte_s=1e-9)}
    record.keep_costs(2, costs)
    record.add_pairs(2, pairs([1.5, 2.0]))
    record.add_pairs(2, pairs([3.0]))
    again = MachineRecord(tmp_path / "machine")
    assert again.costs(2) == costs
    assert again.costs(4) is None
    assert [one.seen_s for one in again.pairs(2)] == [3.0, 4.0, 6.0]
    for broken in (
        "",
        "[]",
        "{}",
        '{"costs": {"ps": 3}}',
        '{"costs": []}',
        '{"pairs": [{"kind": 1}]}',
        '{"pairs": [{"kind": "ps", "predicted_s": 0, "seen_s": 1.0}]}',
        '{"pairs": [{"kind": "ps", "predicted_s": 1.0, "seen_s": NaN}]}',
        '{"pairs": [{"kind": "ps", "predicted_s": "1", "seen_s": 1.0}]}',
        '{"costs": {"ps": {"step_s": -1.0}}}',
        '{"costs": {"ps": {"byte_s": Infinity}}}',
        "\x00",
    ):
        for name in ("costs-2.json", "seen-2.json"):
            (tmp_path / "machine" / name).write_text(broken)
        assert again.costs(2) in (None, {})
        assert again.pairs(2) == ()
    nothing = MachineRecord(None)
    nothing.keep_costs(2, costs)
    assert nothing.costs(2) is None


def test_durations_in_words() -> None:
    cases = {
        0.0: "0 s", 3e-7: "0.3 µs", 4.712e-3: "4.71 ms", 0.9994: "999 ms", 0.9996: "1 s", 1.25: "1.2 s", 59.4: "59 s",
        60: "1 min 0 s", 3599.6: "1 h 0 min", 7800: "2 h 10 min", 48 * 3600: "2 days 0 h", math.inf: "–",
    }  # fmt: skip
    assert {seconds: format_seconds(seconds) for seconds in cases} == cases


def test_a_record_has_no_value_that_json_cannot_hold(tmp_path: Path) -> None:
    record = MachineRecord(tmp_path)
    record.keep_costs(2, {"ps": StepCosts()})
    assert json.loads((tmp_path / "costs-2.json").read_text())["costs"]["ps"]["step_s"] == 0.0
