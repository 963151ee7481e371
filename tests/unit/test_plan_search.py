"""Plans of described machines: the order, the reasons, what would change the choice, and mistakes in the file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import UserError
from manyhands.facts import (
    ComputeTime,
    LayerTimes,
    LinkRate,
    Machines,
    ModelFootprint,
    StepCosts,
    TaskProfile,
)
from manyhands.foresight.plan.described_cluster import (
    DescribedCluster,
    parse_budget,
    parse_duration,
    parse_rate,
)
from manyhands.foresight.plan.plan_file import plan_record, planned
from manyhands.foresight.plan.plan_search import (
    PlanLimits,
    Question,
    RankedPlans,
    make_plan,
    worth_trying,
)
from manyhands.foresight.plan.planning import TaskPlan
from manyhands.foresight.plan.track_record import SeenStep, TrackRecord
from manyhands.strategies.auto.promised import Must
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy

GOOD = """
hosts = 4
workers_per_host = 2
speed = 3
memory = "2GiB"
price = 1.5

[links]
inside = { latency = "5us", bandwidth = "10GB/s" }
between = { latency = "50us", bandwidth = "8Gbit/s" }

[devices.h100]
peak = "989TFLOPS"
bandwidth = "3TB/s"
efficiency = 0.5
"""


def profile(
    _per_host: int = 1, _processes: int = 1, *, num_bytes: int = 4 << 20, layers: int = 6
) -> TaskProfile:
    each = LayerTimes(
        name="layer",
        forward=ComputeTime(per_sample_s=1e-4),
        backward=ComputeTime(per_sample_s=2e-4),
        gradient_bytes=num_bytes,
        output_bytes=4000.0,
    )
    size = layers * num_bytes
    model = ModelFootprint(parameters=size, gradients=size, state=2 * size, per_sample=1000.0, batch_size=64)
    return TaskProfile(layers=(each,) * layers, model=model, optimizer_s=1e-3)


def cluster(hosts: int = 2, per_host: int = 2, rate: float = 1e9, **more: Any) -> DescribedCluster:
    link = LinkRate(latency_s=2e-5, bytes_per_s=rate)
    near = LinkRate(latency_s=1e-6, bytes_per_s=2e10)
    machines = Machines(hosts=hosts, per_host=per_host, memory=near, inside=near, between=link)
    return DescribedCluster(machines=machines, **more)


def plan(of: DescribedCluster, **more: Any) -> RankedPlans:
    workers = more.pop("workers", of.machines.workers)
    counts = (workers,) if isinstance(workers, int) else workers
    must = tuple(one for text in more.pop("must", ("equal",)) for one in Must.parse(text))
    asked: dict[str, Any] = {"profile_of": profile, "cluster": of, "workers": counts, "must": must, **more}
    return make_plan(Question(**asked))


def test_a_file_is_read_in_the_units_that_people_write(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD)
    found = DescribedCluster.from_file(path)
    assert found.machines.workers == 8
    assert found.machines.between.seconds(1e9) == pytest.approx(1 + 5e-5)
    assert found.machines.inside.seconds(1e10) == pytest.approx(1 + 5e-6)
    assert found.machines.memory == found.machines.inside
    assert (found.speed, found.memory, found.price) == (3.0, 2 << 30, 1.5)
    assert parse_duration("1.5ms") == pytest.approx(1500 * parse_duration("1us"))
    assert parse_rate("8Gbit/s") == parse_rate("1GB/s") == pytest.approx(1e3 * parse_rate("1MB"))
    assert parse_rate("1MiB/s") == 2**20


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ('"8Gbit/s"', '"8"', 10, "'8' is not a rate above 0 with a unit"),
        ('"8Gbit/s"', '"-8Gbit/s"', 10, "is not a rate above 0"),
        ('"8Gbit/s"', '"8parsec/s"', 10, "is not a rate above 0 with a unit"),
        ('"50us"', "50", 10, "latency=50 has no unit; write it in quotes"),
        (
            "between =",
            "betwen =",
            10,
            "there is no links.betwen; allowed: memory, inside, between; did you mean",
        ),
        ("speed = 3", "speed = -3", 4, "speed=-3 must be a number above 0"),
        ("hosts = 4", "hosts = 0", 2, "hosts=0 must be an integer of at least 1"),
        ("hosts = 4", "hosts = true", 2, "hosts=True must be an integer"),
        ('"2GiB"', "2", 5, "memory=2 has no unit"),
        ('"2GiB"', '"2"', 5, "memory='2' has no unit; write it as 80GiB"),
        ("price = 1.5", 'adds = "8"', 6, "adds='8' is not a rate above 0 with a unit"),
        ("price = 1.5", 'adds = "-1GB/s"', 6, "adds='-1GB/s' is not a rate above 0"),
        (
            "speed = 3",
            'device = "h10"',
            4,
            "device='h10' is not described; allowed: h100; did you mean 'h100'?",
        ),
        ("price = 1.5", 'device = "h100"', 4, "leave speed or device out"),
        ('bandwidth = "3TB/s"', 'bandwidth = "3"', 14, "bandwidth='3' is not a rate above 0"),
        ('"989TFLOPS"', '"989"', 13, "peak='989' is not a rate above 0 with a unit; write it as 989TFLOPS"),
        ("efficiency = 0.5", "efficiency = 1.5", 15, "efficiency=1.5 must be at most 1"),
        ("efficiency = 0.5", "", 12, "has no efficiency"),
        ("efficiency = 0.5", "efficient = 0.5", 15, "there is no devices.h100.efficient; allowed: peak"),
        ("price = 1.5", "price = inf", 6, "price=inf must be a number of at least 0"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence_with_its_line(
    old: str, new: str, line: int, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UserError) as caught:
        DescribedCluster.from_file(path)
    assert str(caught.value).startswith(f"cluster file {path}, line {line}: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_device_is_found_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(GOOD.replace("speed = 3", 'device = "h100"'))
    found = DescribedCluster.from_file(path).device
    assert found is not None
    assert (found.flops_per_s, found.bytes_per_s, found.efficiency) == (989e12, 3e12, 0.5)
    path.write_text(path.read_text().replace('memory = "2GiB"', "") + 'memory = "80GiB"\nlaunch = "7us"\n')
    cluster = DescribedCluster.from_file(path)
    assert cluster.memory == 80 << 30
    assert cluster.device is not None
    assert cluster.device.launch_s == pytest.approx(7e-6)


def test_a_link_that_is_needed_and_a_file_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text("hosts = 2")
    with pytest.raises(UserError, match=r"\[links\] has no between; add between = "):
        DescribedCluster.from_file(path)
    path.write_text("hosts = ")
    with pytest.raises(UserError, match="is not TOML"):
        DescribedCluster.from_file(path)
    with pytest.raises(UserError, match="cannot be read"):
        DescribedCluster.from_file(tmp_path / "none.toml")


def test_the_fastest_that_fits_comes_first_and_every_other_plan_has_a_reason() -> None:
    found = plan(cluster(), must=())
    seconds = [row.seconds for row in found.rows if row.seconds is not None and "ruled" not in row.reason]
    assert seconds == sorted(seconds)
    assert all(row.reason for row in found.rows[1:])
    assert {row.strategy.word for row in found.rows} == STRATEGIES.keys()
    reasons = {row.strategy.word: row.reason for row in found.rows}
    assert reasons["federated"].startswith("one host only")
    assert reasons["hogwild"].startswith("one host only: its workers write to one memory without locks")
    assert reasons["federated"].startswith("one host only: ")


def test_what_must_be_promised_rules_out_what_does_not() -> None:
    for must, out in (("equal", "local"), ("sync", "hogwild"), ("survives", "mirrored")):
        found = plan(cluster(), must=(must,))
        assert next(row.reason for row in found.rows if row.strategy.word == out).startswith("ruled out: ")
    with pytest.raises(UserError, match="must='fast' is not a promise; allowed: equal, sync, survives"):
        plan(cluster(), must=("fast",))


def test_a_plan_that_does_not_fit_is_not_chosen() -> None:
    """A worker of `mirrored` holds 24 MiB four times; under `sharded`, a quarter of that and some layers."""
    texts = ("mirrored", "sharded")
    whole = plan(cluster(rate=1e8), strategies=texts)
    little = plan(cluster(rate=1e8, memory=80 << 20), strategies=texts)
    assert whole.best.strategy.word == "mirrored"
    assert whole.best.memory > 80 << 20
    assert little.best.strategy.word == "sharded"
    assert little.best.memory <= 80 << 20
    assert little.rows[1].reason == "does not fit: 96.0 MiB of 80.0 MiB for each worker"


def test_where_nothing_is_left_the_nearest_plan_is_named_with_what_it_lacks() -> None:
    with pytest.raises(UserError) as caught:
        plan(cluster(memory=1 << 20))
    assert "the nearest is " in str(caught.value)
    assert "does not fit: " in str(caught.value)
    assert "of 1.0 MiB for each worker" in str(caught.value)
    with pytest.raises(
        UserError, match="the nearest is federated: ruled out: its weights are not those of one"
    ):
        plan(cluster(), strategies=("federated",))
    with pytest.raises(UserError, match="no strategy can train this task so; the reasons: mirrored: no"):
        plan(cluster(), refuses=lambda _strategy, _workers: "no", strategies=("mirrored",))


def test_at_a_flip_both_plans_take_the_same_time() -> None:
    """The factor that is said is where the choice changes: a little less and the old plan wins."""
    at = cluster(rate=1e8)
    found = plan(at)
    faster = next(one for one in found.sensitivities if one.startswith("From ") and "Gbit/s between" in one)
    rate, other = float(faster.split()[1]), faster.split(", ")[1].removesuffix(" wins.")
    factor = rate * 1e9 / 8 / at.machines.between.bytes_per_s
    links = at.machines

    def best_with(scale: float) -> str:
        def scaled(link: LinkRate) -> LinkRate:
            return LinkRate(latency_s=link.latency_s / scale, bytes_per_s=link.bytes_per_s * scale)

        machines = replace(
            links, memory=scaled(links.memory), inside=scaled(links.inside), between=scaled(links.between)
        )
        return str(plan(replace(at, machines=machines)).best.strategy)

    assert best_with(factor * 1.05) == other
    assert best_with(factor / 1.05) == str(found.best.strategy)


@pytest.mark.parametrize("hosts", [2, 8])
def test_what_wins_on_other_hosts_is_what_a_plan_for_them_says(hosts: int) -> None:
    here, there = plan(cluster(hosts=4)), plan(cluster(hosts=hosts))
    said = next(one for one in here.sensitivities if one.startswith(f"On {hosts} hosts, "))
    times = (there.best.seconds or 0) / (here.best.seconds or 1)
    assert said.endswith(f"{there.best.strategy} is the fastest: {times:.2f} times the time of a step.")


def test_with_the_memory_that_is_said_the_other_plan_wins() -> None:
    asked: Any = {"strategies": ("mirrored", "sharded")}
    little = plan(cluster(rate=1e8, memory=80 << 20), **asked)
    assert "With 97MiB for each worker, mirrored wins." in little.sensitivities
    enough = plan(cluster(rate=1e8, memory=97 << 20), **asked)
    assert enough.best.strategy.word == "mirrored"
    assert "With less than 96.0 MiB for each worker, sharded wins." in enough.sensitivities
    unknown = plan(cluster(rate=1e8), **asked)
    assert not any("for each worker" in one for one in unknown.sensitivities)


def test_workers_that_a_strategy_cannot_have_are_a_reason_and_no_error() -> None:
    found = plan(cluster(), workers=(2, 4), strategies=("mirrored", "pipeline stages=4"))
    assert found.of("pipeline stages=4", 2).reason.startswith("workers=2: must be a multiple of 4")
    assert found.of("pipeline stages=4", 4).seconds is not None


def test_profiles_of_other_machines_keep_the_sizes_that_were_measured() -> None:
    """A share between two sizes that were measured takes what lies between their times, on slower machines too."""
    time = ComputeTime.through({4.0: 1.0, 8.0: 1.5, 16.0: 4.0})
    layer = LayerTimes(name="layer", forward=time, backward=time)
    model = ModelFootprint(parameters=4, gradients=4, batch_size=16)
    found = cluster(speed=0.5).scaled(TaskProfile(layers=(layer,), model=model, rest=time))
    for scaled in (found.layers[0].forward, found.layers[0].backward, found.rest):
        assert [scaled.seconds(samples) for samples in (4, 6, 12, 16)] == pytest.approx([2.0, 2.5, 5.5, 8.0])


def test_a_slow_link_between_hosts_and_many_workers_change_the_choice() -> None:
    """On one host all-reduce wins over servers; over a link of 1 Mbit/s one process wins over everything."""
    fast, slow = plan(cluster(rate=1e10)), plan(cluster(rate=1e5))
    assert fast.best.strategy.word != "single"
    assert slow.best.strategy.word == "single"


def test_more_candidates_never_make_the_choice_worse_and_a_plan_is_the_same_twice() -> None:
    few = plan(cluster(), strategies=("mirrored", "central"))
    many = plan(cluster())
    assert (many.best.seconds or 0) <= (few.best.seconds or 0)
    assert plan(cluster()) == plan(cluster())


def test_prices_and_times_are_of_the_steps_that_are_wanted() -> None:
    found = plan(cluster(price=3.6), strategies=("mirrored", "single"), must=(), steps=1000)
    for row in found.rows:
        hosts = 2 if row.strategy.word == "mirrored" else 1
        assert row.total_s == pytest.approx(1000 * (row.seconds or 0))
        assert row.price == pytest.approx(hosts * 1000 * (row.seconds or 0) * 3.6 / 3600)


def test_what_costs_or_takes_too_much_is_left_out() -> None:
    free = plan(cluster(price=1.0), steps=1000, must=())
    dearest = max(row.price or 0 for row in free.rows if row.is_open)
    cheap = plan(cluster(price=1.0), steps=1000, must=(), limits=PlanLimits(price=dearest * 0.99))
    assert any(row.reason.startswith("over the budget: ") for row in cheap.rows)
    assert all((row.price or 0) < dearest for row in cheap.finalists)
    with pytest.raises(UserError, match=r"the nearest is .*: over the budget: .* of 1 ms"):
        plan(cluster(), steps=1000, limits=PlanLimits(seconds=1e-3))


@pytest.mark.parametrize(("text", "seconds"), [("2h", 7200), ("90s", 90), ("1.5 min", 90), ("20ms", 0.02)])
def test_a_budget_of_time_is_in_the_units_of_long_runs(text: str, seconds: float) -> None:
    assert parse_budget(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["2x", "-1h", "0h", "-3", "h", "nan"])
def test_a_budget_that_is_none_is_one_sentence(text: str) -> None:
    with pytest.raises(UserError, match=r"--budget .* is neither a price nor a time above 0 with a unit"):
        parse_budget(text)


def test_of_several_numbers_of_workers_the_best_is_chosen() -> None:
    """Over a link of 1 Mbit/s two workers of one host are faster than four of two."""
    found = plan(cluster(rate=1e5), workers=(1, 2, 4), strategies=("mirrored",))
    assert [row.workers for row in found.rows] == [2, 1, 4]
    assert "on 4 workers" in found.rows[-1].reason


def test_what_messages_cost_here_is_added_to_every_step() -> None:
    of = DescribedCluster(machines=Machines(per_host=4), measured=True)
    costs = {"mirrored": StepCosts(step_s=0.5)}
    here = Machines(per_host=4, costs=costs)
    row = plan(of, strategies=("mirrored", "central"), machines_of=lambda _workers: here).of("mirrored", 4)
    plain = plan(of, strategies=("mirrored", "central")).of("mirrored", 4)
    assert row.seconds == pytest.approx((plain.seconds or 0) + 0.5)
    assert row.reason.endswith("most of it on messages and bookkeeping")


def test_earlier_errors_correct_a_prediction_and_say_how_sure_it_is() -> None:
    twice = TrackRecord(pairs=[SeenStep(kind="mirrored", predicted_s=1.0, seen_s=2.0)] * 50)
    asked = {"strategies": ("mirrored", "central")}
    before, after = plan(cluster(), **asked), plan(cluster(), record=twice, **asked)
    ratio = (after.of("mirrored", 4).seconds or 0) / (before.of("mirrored", 4).seconds or 1)
    assert ratio == pytest.approx(2.0, rel=0.1)
    assert after.of("mirrored", 4).uncorrected_s == pytest.approx(before.of("mirrored", 4).seconds)
    assert after.of("central", 4).seconds == before.of("central", 4).seconds
    assert after.of("mirrored", 4).error < before.of("mirrored", 4).error


def test_the_fastest_of_each_kind_is_tried_before_the_second_fastest_of_any() -> None:
    rows = plan(
        cluster(), strategies=("ps servers=1", "ps servers=2", "ps servers=4", "central", "mirrored")
    ).finalists
    words = [row.strategy.word for row in rows]
    assert words.count("ps") == 3
    assert [row.strategy.word for row in worth_trying(rows, 3)] == list(dict.fromkeys(words))
    assert sorted(map(str, worth_trying(rows, 9))) == sorted(map(str, rows))
    assert worth_trying(rows, 1) == [rows[0]]


def test_a_thousand_workers_are_planned() -> None:
    found = plan(cluster(hosts=125, per_host=8), must=())
    assert all(row.seconds is None or row.seconds > 0 for row in found.rows)


def test_workers_that_the_hosts_do_not_have_are_rejected() -> None:
    with pytest.raises(UserError, match="workers=5: the cluster has 4"):
        plan(cluster(), workers=5)
    with pytest.raises(UserError, match="workers=3: hosts of 2 cannot share them equally"):
        plan(cluster(), workers=3)


def test_the_file_of_a_plan_is_read_back_and_others_are_rejected(tmp_path: Path) -> None:
    import json

    path = tmp_path / "plan.json"
    found = plan(cluster())
    made: Any = TaskPlan(task=None, cluster=cluster(), steps=10, ranked=found, chosen=found.best)  # type: ignore[arg-type]
    path.write_text(json.dumps(plan_record("digits", {}, made)))
    assert planned(path, "digits", {}) == (str(found.rows[0].strategy), found.rows[0].workers)
    cut = replace(found.best, settled=Strategy.parse("pipeline cuts=3"))  # as it was predicted
    path.write_text(json.dumps(plan_record("digits", {}, replace(made, chosen=cut))))
    assert planned(path, "digits", {})[0] == "pipeline cuts=3"
    with pytest.raises(UserError, match="is a plan for 'digits', not for gpt"):
        planned(path, "gpt", {})
    with pytest.raises(UserError, match="is for digits with no options; give the same ones"):
        planned(path, "digits", {"batch-size": "32"})
    for text in (
        "",
        "[]",
        "{}",
        '{"task": "digits", "strategy": 3, "workers": 2, "options": {}}',
        '{"task": "digits"}',
    ):
        path.write_text(text)
        with pytest.raises(UserError, match="is not a plan"):
            planned(path, "digits", {})
    path.write_text('{"task": "digits", "strategy": "mirrored", "workers": "2", "options": {}}')
    with pytest.raises(UserError, match="workers='2' must be an integer"):
        planned(path, "digits", {})
    path.write_text('{"task": "digits", "strategy": "mirored", "workers": 2, "options": {}}')
    with pytest.raises(UserError, match="unknown strategy 'mirored'"):
        planned(path, "digits", {})
