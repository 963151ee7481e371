"""Comparisons without running any: what is run, what the numbers are, and how they are shown."""

import dataclasses
import re
from xml.etree import ElementTree

import pytest
from rich.console import Console

from compared import TWO, found, measured, reported
from manyhands.errors import UserError
from manyhands.facts import Answer, Promises
from manyhands.lab.compare.bandwidth import Rate, shaped_command, why_not
from manyhands.lab.compare.compare_report import (
    cells,
    columns,
    measures_table,
    promises_table,
    report,
    scores_table,
    smooth,
)
from manyhands.lab.compare.comparison import (
    Target,
    Trial,
    default_target,
    parse_strategies,
    trials,
    workers_of,
)
from manyhands.lab.compare.figures import FailedTrial, Figures, Point, Prices, Spread, figures
from manyhands.lab.compare.findings import paragraph
from manyhands.lab.compare.run_comparison import time_stopped
from manyhands.observe.draw.paper import PART_COLOURS
from manyhands.strategies.allreduce.strategy import AllReduce
from manyhands.strategies.hogwild.strategy import Hogwild
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategies.single.strategy import Single
from manyhands.strategy import Strategy

# ── the plan ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_strategies_are_separated_by_semicolons() -> None:
    assert [str(one) for one in parse_strategies(" allreduce ; ps consistency=bounded:4;")] == [
        "allreduce",
        "ps consistency=bounded:4",
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("allreduce; sp", ["'sp'", "did you mean 'ps'"]),
        (" ; ", ["is empty", "semicolons"]),
        ("ps; allreduce; ps consistency=sync", ["'ps' twice", "--repeats"]),
    ],
)
def test_one_bad_strategy_is_one_sentence(text: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        parse_strategies(text)
    assert all(part in str(caught.value) for part in parts)


def test_repeats_are_interleaved() -> None:
    assert [(trial.repeat, trial.place) for trial in trials(3, 2)] == [
        (0, 0), (0, 1), (0, 2),
        (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert Trial(place=4, repeat=1).folder(Ps()) == "05-ps-2"
    with pytest.raises(UserError, match="--repeats 0"):
        trials(3, 0)


def test_single_is_one_worker_whatever_the_others_are() -> None:
    assert (workers_of(Single(), 4), workers_of(AllReduce(), 4)) == (1, 4)


@pytest.mark.parametrize(
    ("text", "shown", "good", "bad"),
    [
        ("accuracy=0.95", "accuracy ≥ 0.95", 0.95, 0.94),
        ("evaluation_loss=0.2", "evaluation_loss ≤ 0.2", 0.2, 0.21),
        ("reward<=3", "reward ≤ 3", 2, 4),
        ("perplexity >= 5", "perplexity ≥ 5", 6, 4),
    ],
)
def test_a_target_knows_its_direction(text: str, shown: str, good: float, bad: float) -> None:
    target = Target.parse(text)
    assert str(target) == shown
    assert target.reached_by(good)
    assert not target.reached_by(bad)


@pytest.mark.parametrize("text", ["accuracy", "=0.9", "accuracy=high", "accuracy=nan", ""])
def test_a_target_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"accuracy=0\.95"):
        Target.parse(text)


def test_a_target_must_be_measured_by_the_task() -> None:
    with pytest.raises(UserError, match="did you mean 'accuracy'"):
        Target.parse("acuracy=0.9").require_known(["evaluation_loss", "accuracy"])
    with pytest.raises(UserError, match="no evaluation data"):
        Target.parse("accuracy=0.9").require_known([])


def test_the_target_nobody_asked_for_is_what_the_better_half_reaches_in_every_run() -> None:
    ends = {"async": (0.847, 0.85), "sync": (0.964, 0.96), "ring": (0.964, 0.95), "failed": ()}
    finals = [
        [{"loss": 9.0, "evaluation_loss": round(1 - value, 6), "accuracy": value} for value in values]
        for values in ends.values()
    ]
    assert default_target(finals) == Target(metric="accuracy", value=0.95, lower=False, chosen=True)
    losses = [
        [{"loss": one["loss"], "evaluation_loss": one["evaluation_loss"]} for one in runs] for runs in finals
    ]
    assert default_target(losses) == Target(metric="evaluation_loss", value=0.05, lower=True, chosen=True)
    assert default_target([[{"loss": 1.0}], []]) is None
    assert default_target([]) is None


@pytest.mark.parametrize("value", [0.123449999, 0.12345, 0.9, 0.99999, 123.456, 1e-7 / 3, -0.123456, 0.0])
@pytest.mark.parametrize("metric", ["accuracy", "evaluation_loss"])
def test_a_chosen_target_has_four_digits_and_is_reached_by_who_set_it(metric: str, value: float) -> None:
    target = default_target([[{metric: value}]])
    assert target is not None
    assert target.reached_by(value)
    assert target.value == float(f"{target.value:.4g}") == pytest.approx(value, rel=1.1e-3)


# ── prices ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_prices_are_of_processes_for_an_hour() -> None:
    prices = Prices.parse("worker=10, helper=1,server=2.5")
    assert str(prices) == "10 for a worker, 1 for a helper, 2.5 for a server"
    assert prices.of(Strategy.parse("allreduce helpers=3"), 4) == 43
    assert prices.of(Strategy.parse("ps servers=2"), 4) == 45
    assert prices.of(Single(), 1) == 10


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("worker", "'' is not a price of a worker"),
        ("worker=-1", "'-1' is not a price"),
        ("worker=nan", "'nan' is not a price"),
        ("worker=1,worker=2", "two prices"),
        ("wroker=1", "did you mean 'worker'"),
        ("", "write it as worker=10,helper=1"),
    ],
)
def test_prices_that_make_no_sense_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Prices.parse(text)


def test_a_process_without_a_price_is_named() -> None:
    with pytest.raises(UserError, match="ps starts a server, which has no price; add server=1"):
        Prices.parse("worker=10").of(Ps(), 2)


def test_a_priced_row_has_its_cost_in_table_json_report_and_words() -> None:
    prices = Prices.parse("worker=36,server=18")
    runs = [measured(0, 0), measured(0, 1), measured(1, 0)]
    one = figures([(strategy, 2) for strategy in TWO], runs, None, 5, prices)
    row, ps = one.rows
    assert (row.price_per_hour, ps.price_per_hour) == (72, 90)
    seconds = [run.seconds / run.steps for run in runs[:2]]
    assert row.price_per_1000_steps == Spread.of([20 * took for took in seconds])
    assert row.target_s is not None
    assert row.price_to_target is not None
    assert row.price_to_target.median == pytest.approx(row.target_s.median * 72 / 3600)
    heads, values = columns(one), cells(one, row)
    assert len(heads) == len(values)
    assert values[heads.index("price,\n1k st.")] == f"{row.price_per_1000_steps.median:,.3g}"
    assert one.to_dict()["prices_per_hour"] == {"worker": 36, "server": 18}
    assert one.to_dict()["strategies"][0]["price_per_hour"] == 72
    assert "at 36 for a worker, 18 for a server an hour" in report(one, [], "t", "c", {})
    assert "At 36 for a worker, 18 for a server an hour, 1,000 steps cost" in reported(one)
    plain = found(*runs)
    assert "price" not in " ".join(columns(plain))
    assert "cost" not in reported(plain)


# ── the figures ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_row_is_medians_over_repeats_with_their_spread() -> None:
    runs = [
        measured(repeat=n, step_s=s, waited_s=w)
        for n, (s, w) in enumerate([(0.1, 1.0), (0.4, 2.0), (0.2, 0.0)])
    ]
    row = found(*runs, target=Target.parse("accuracy=0.5")).rows[0]
    assert row.target_s == Spread(median=15 * 0.2, low=15 * 0.1, high=15 * 0.4)
    assert row.target_steps == Spread(median=15, low=15, high=15)
    assert row.samples_per_s is not None
    assert row.samples_per_s.median == pytest.approx(200 / 4)
    assert row.waiting == Spread(median=0.25, low=0.0, high=0.5)
    assert row.messages_per_step is not None
    assert row.bytes_per_step is not None
    assert (row.messages_per_step.median, row.bytes_per_step.median) == (2, 200)
    assert row.busiest_bytes_per_step == Spread(median=150, low=150, high=150)
    assert row.final["loss"].median == 1 / 20, "that of the last step"
    assert row.always_reached


def test_a_target_that_only_some_runs_reach_is_counted() -> None:
    row = found(measured(), measured(repeat=1, final=0.4), target=Target.parse("accuracy=0.5")).rows[0]
    assert (row.reached, row.always_reached) == (1, False)
    assert row.target_s is not None
    assert row.target_s.median == pytest.approx(1.5)


def test_the_better_half_reaches_the_target_that_is_chosen() -> None:
    one = found(measured(0, final=0.9), measured(1, final=0.7))
    assert one.target == Target(metric="accuracy", value=0.9, lower=False, chosen=True)
    assert [row.always_reached for row in one.rows] == [True, False]


def test_a_failed_run_is_a_row_of_its_own_kind() -> None:
    one = found(measured(), FailedTrial(place=1, repeat=0, sentence="the disk is full"))
    assert (one.rows[1].runs, one.rows[1].failures) == ((), ("the disk is full",))
    assert cells(one, one.rows[1])[0] == "failed"
    assert one.to_dict()["strategies"][1]["failures"] == ["the disk is full"]
    nothing = found(
        FailedTrial(place=0, repeat=0, sentence="no"), FailedTrial(place=1, repeat=0, sentence="no")
    )
    assert nothing.target is None
    assert "No run finished." in reported(nothing)


def test_the_clock_stands_still_for_evaluations() -> None:
    stopped_s = time_stopped({5: {0: 0.5, 1: 0.4}, 10: {0: 0.25}}, 2, together=True)
    assert [stopped_s(step) for step in (1, 5, 6, 10, 11)] == [0, 0, 0.5, 0.5, 0.75]
    assert [stopped_s(step + 1) for step in (4, 5, 10)] == [0, 0.5, 0.75]
    assert time_stopped({}, 2, together=True)(8) == 0


def test_one_who_evaluates_while_others_go_on_stops_its_share_of_the_clock() -> None:
    stopped_s = time_stopped({5: {1: 0.5}, 10: {0: 0.25}}, 2, together=False)
    assert [stopped_s(step + 1) for step in (4, 5, 10)] == [0, 0.25, 0.375]
    rendezvous = ("allreduce", "ps", "hogwild")
    assert all(Strategy.parse(text).facts.meets_to_evaluate for text in rendezvous)
    assert not Strategy.parse("ps consistency=async").facts.meets_to_evaluate


# ── what is shown ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_table_is_readable_at_a_hundred_columns() -> None:
    strategies = parse_strategies(
        "allreduce algorithm=hierarchical; ps servers=2 consistency=bounded:4 replicas=1"
    )
    one = found(*(measured(p, n, step_s=0.5 + n) for p in range(2) for n in range(2)), strategies=strategies)
    console = Console(width=100, color_system=None)
    for table in (measures_table(one), promises_table(one)):
        with console.capture() as captured:
            console.print(table)
        text = captured.get()
        assert max(map(len, text.splitlines())) <= 100
        assert "…" not in text
    assert len(cells(one, one.rows[0])) == len(columns(one))
    shown = dict(zip(columns(one), cells(one, one.rows[0]), strict=True))
    assert (shown["bytes\n/step"], shown["busiest\nsends"]) == ("200 B", "150 B")


def test_the_report_is_well_formed_and_has_every_strategy() -> None:
    strategies = parse_strategies("allreduce; ps consistency=async; hogwild")
    one = found(
        measured(0),
        measured(1),
        FailedTrial(place=2, repeat=0, sentence="<no> & never"),
        strategies=strategies,
    )
    made = ("a < b", "manyhands compare 'a' & b", {"cores": "2"}, ("a note",))
    page = report(one, paragraph(one), *made)
    root = ElementTree.fromstring(page.split("\n", 1)[1])
    text = "".join(root.itertext())
    for expected in (*map(str, strategies), "<no> & never", "manyhands compare 'a' & b", "cores 2", "a note"):
        assert expected in text, expected
    assert "allreduce and ps consistency=async overlap." in text, "no curve hides another"
    assert len(root.findall(".//figure")) == 5, (
        "loss and metric against steps and seconds, and the shares of time"
    )
    drawn = re.findall(r'class="f(\d)"[^>]*/></svg>waiting</li>', page)
    assert drawn == [str(PART_COLOURS["waiting"])], "as on the page of a run"
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", ""), (
        "nothing from elsewhere"
    )
    assert "<script" not in page


def test_smoothing_keeps_the_number_of_points_and_the_mean_of_a_constant() -> None:
    points = [Point(step=n, at_s=n, values={"loss": 2.0 if n < 50 else 4.0}) for n in range(100)]
    smoothed = smooth(points, "loss")
    assert [point.step for point in smoothed] == list(range(100))
    assert [smoothed[n].values["loss"] for n in (0, 49, 50, 51, 99)] == [2, 2, 2.4, 2.8, 4]


# ── promises ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("word", STRATEGIES)
def test_every_strategy_states_what_it_promises(word: str) -> None:
    promises = Strategy.parse(word).facts.promises
    for one in dataclasses.fields(Promises):
        promise = getattr(promises, one.name)
        assert isinstance(promise.answer, Answer)
        assert promise.words


def test_promises_depend_on_the_settings() -> None:
    def answers(text: str) -> str:
        promises = Strategy.parse(text).facts.promises
        return " ".join(getattr(promises, one.name).answer.value for one in dataclasses.fields(promises))

    expected = {
        "allreduce": "no – no yes",
        "ps": "yes partly yes yes",
        "ps replicas=1": "yes yes yes yes",
        "ps consistency=async": "yes partly yes no",
        "ps consistency=sync:1": "yes partly yes no",
        "hogwild": "no – no no",
        "hogwild order=turns": "no – no yes",
    }
    assert {text: answers(text) for text in expected} == expected
    assert Hogwild(order="locked").facts.promises.same_numbers.answer is Answer.NO


# ── a slower network ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "bits", "shown"),
    [
        ("1Gbit", 10**9, "1 Gbit/s"),
        ("2.5 Mbit/s", 2_500_000, "2.5 Mbit/s"),
        ("256kbit", 256_000, "256 kbit/s"),
    ],
)
def test_a_rate_is_read_and_shown(text: str, bits: int, shown: str) -> None:
    rate = Rate.parse(text)
    assert (rate.bits_per_s, str(rate)) == (bits, shown)


@pytest.mark.parametrize("text", ["", "fast", "1", "1GB", "0Gbit", "-1Mbit", "1Gbit; rm"])
def test_a_rate_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="1Gbit, 100Mbit"):
        Rate.parse(text)


@pytest.mark.parametrize("text", ["8kbit", "100Mbit", "1Gbit", "10Gbit", "100Gbit"])
def test_a_burst_holds_a_packet_and_is_short_on_the_wire(text: str) -> None:
    rate = Rate.parse(text)
    assert rate.burst_bytes >= 2 * rate.packet_bytes, "what is larger than a burst is never sent"
    # A gradient of 100 KB must be felt on every network that it takes longer than a timer's tick to cross.
    assert rate.burst_bytes <= max(32 * 1024, 0.0003 * rate.bits_per_s / 8)
    assert f"mtu {rate.packet_bytes} up" in shaped_command(rate, ["true"], as_root=True)[-3]


def test_the_command_is_passed_on_as_it_is() -> None:
    command = ["python", "-m", "manyhands", "a b", "$HOME"]
    line = shaped_command(Rate.parse("1Gbit"), command, as_root=True)
    assert line[:2] == ["unshare", "--net"]
    assert line[-5:] == command
    assert "rate 1000000000bit burst 32768b" in line[4]
    assert "--map-root-user" in shaped_command(Rate.parse("1Gbit"), command, as_root=False)


def test_a_machine_that_can_not_shape_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("manyhands.lab.compare.bandwidth._ADMIN_PATHS", ())
    assert why_not(Rate.parse("1Gbit")) == "the program 'unshare' is missing; install util-linux"


# ── scores of the trained models ──────────────────────────────────────────────────────────────────────────────────────


def scored(*values: float) -> Figures:
    runs = [measured(place).scored({"analogies": value}) for place, value in enumerate(values)]
    return figures([(strategy, 2) for strategy in TWO], runs, None, 5, scores=("analogies",))


def test_scores_stand_beside_the_last_evaluation() -> None:
    run = measured().scored({"analogies": 0.25})
    assert run.evaluations[-1].values == {"evaluation_loss": 0.1, "accuracy": 0.9, "analogies": 0.25}
    assert len(run.evaluations) == 4
    early = measured(evaluations=measured().evaluations[:2]).scored({"analogies": 0.5})
    assert (early.evaluations[-1].step, early.evaluations[-1].at_s) == (20, 2.0)
    assert "analogies" not in early.evaluations[-2].values
    assert measured(evaluations=()).scored({"analogies": 0.5}).final["analogies"] == 0.5


def test_scores_are_told_and_are_no_target_unless_asked_for() -> None:
    one = scored(0.25, 0.5)
    assert one.target is not None
    assert one.target.metric == "accuracy"
    assert "ps consistency=async ended best, at analogies 0.5, and allreduce worst, at 0.25" in reported(one)
    console = Console(width=100, record=True, file=None)
    with console.capture() as captured:
        console.print(scores_table(one))
    assert "0.2500 (0.2500 to 0.2500)" in captured.get()
    assert "Quality of the models" in report(one, ["s"], "t", "c", {})
    asked = figures(
        [(strategy, 2) for strategy in TWO],
        [measured(place).scored({"analogies": value}) for place, value in enumerate((0.25, 0.5))],
        Target.parse("analogies=0.4"),
        5,
        scores=("analogies",),
    )
    assert [row.reached for row in asked.rows] == [0, 1]
