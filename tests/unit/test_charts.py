"""Charts: well-formed, escaped, deterministic, and every value lies where the axis says it does."""

import math
import re
import xml.etree.ElementTree as ET

import pytest

from manyhands.observe.draw.axes import linear, logarithmic, short_number, spans_powers
from manyhands.observe.draw.charts import (
    Series,
    bar_chart,
    histogram,
    line_chart,
    loss_chart,
    overlapping,
    share_bars,
)
from manyhands.observe.draw.paper import data_table, document, matrix, section

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "<script>alert('1')</script>\"&x"


def one_curve(xs, ys, **more) -> str:
    return line_chart(
        [Series(name="loss", xs=xs, ys=ys)], title="Loss", x_label="step", y_label="loss", **more
    )


def parsed(text: str) -> ET.Element:
    return ET.fromstring(text)


def path_points(chart: str, index: int = 0) -> list[tuple[float, float]]:
    path = [one for one in parsed(chart).iter(f"{SVG}path") if "curve" in one.get("class", "")][index]
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", path.get("d", ""))]


def ticks(chart: str, which: str) -> list[tuple[float, float]]:
    """Each tick of an axis as (place in the picture, the number beside it)."""
    found = [one for one in parsed(chart).iter(f"{SVG}text") if one.get("class") == f"tick {which}"]
    along = "x" if which == "x" else "y"
    shift = 0.0 if which == "x" else -3.5
    numbers = [(one.text or "").replace(",", "").replace("k", "e3") for one in found]
    return [
        (float(one.get(along, "")) + shift, float(number)) for one, number in zip(found, numbers, strict=True)
    ]


def read_off(place: float, axis: list[tuple[float, float]], log: bool = False) -> float:
    """The number that a reader sees at a place, from the first and last tick."""
    (p0, v0), (p1, v1) = axis[0], axis[-1]
    if log:
        v0, v1 = math.log10(v0), math.log10(v1)
    value = v0 + (place - p0) * (v1 - v0) / (p1 - p0)
    return 10**value if log else value


CHARTS = [
    one_curve([0, 10, 20], [3.0, 2.0, 1.5]),
    one_curve([0, 1, 2], [1e-3, 1.0, 100.0], log_y=True),
    one_curve([], []),
    one_curve([5], [0.25]),
    one_curve([5], [0.0]),
    one_curve([0, 1], [7.0, 7.0]),
    one_curve([0, 1, 2, 3], [1.0, math.nan, math.inf, 2.0]),
    one_curve([0, 1], [-1.0, 0.0], log_y=True),
    one_curve([0, 1], [-4.0, 9e12]),
    bar_chart([("server 0", 12.0), ("server 1", math.nan)], title="Updates"),
    bar_chart([], title="Updates"),
    share_bars([("worker 0", (0.4, 0.1, 0.5)), ("worker 1", (0.0, 0.0, 0.0))], ("a", "b", "c"), title="Time"),
    histogram({0: 4, 1: 2, 7: 1}, title="Staleness", x_label="steps", y_label="updates"),
    histogram({}, title="Staleness", x_label="steps", y_label="updates"),
    histogram({3: 1, 5_000: 2}, title="Staleness", x_label="steps", y_label="updates"),
    matrix([[0.0, 1.5], [math.nan, 0.0]], ["a", "b"], ["a", "b"], title="Waits"),
    data_table(["worker", "steps"], [("worker 0", "12")], title="Workers"),
]


@pytest.mark.parametrize("chart", CHARTS)
def test_every_chart_is_well_formed_and_has_no_style_of_its_own(chart: str) -> None:
    root = parsed(chart)
    assert not any(element.get("style") for element in root.iter())
    for svg in root.iter(f"{SVG}svg"):
        assert svg.get("role") == "img"
        assert svg.get("aria-label")
        assert svg.get("viewBox", "").split()[2] == "360"
    assert "nan" not in "".join(
        element.get(name, "") for element in root.iter() for name in ("d", "x", "y", "width", "height")
    )


def test_points_lie_where_the_axes_say() -> None:
    xs, ys = [0.0, 137.0, 400.0, 999.0], [2.3, 0.71, 1.9, 0.05]
    chart = one_curve(xs, ys)
    for (x, y), true_x, true_y in zip(path_points(chart), xs, ys, strict=True):
        assert read_off(x, ticks(chart, "x")) == pytest.approx(true_x, abs=3)
        assert read_off(y, ticks(chart, "y")) == pytest.approx(true_y, abs=0.02)


def test_points_lie_where_a_logarithmic_axis_says() -> None:
    ys = [1e-4, 3e-2, 1.0, 40.0]
    chart = one_curve([0, 1, 2, 3], ys, log_y=True)
    for (_, y), true_y in zip(path_points(chart), ys, strict=True):
        assert read_off(y, ticks(chart, "y"), log=True) == pytest.approx(true_y, rel=0.02)


def test_ticks_are_round_and_few() -> None:
    for low, high in ((0, 1), (0.013, 0.0172), (-3, 977), (1e-9, 4e-9)):
        chart = one_curve([0, 1], [low, high])
        numbers = [number for _, number in ticks(chart, "y")] if high < 1e4 else []
        assert 2 <= len(numbers) <= 8
        assert numbers == sorted(numbers)


def test_an_axis_from_zero_begins_there() -> None:
    chart = one_curve([0, 1], [900.0, 1000.0], from_zero=True)
    assert ticks(chart, "y")[0][1] == 0


@pytest.mark.parametrize(
    ("value", "first", "last"),
    [(0.98, 0.75, 1.0), (1.0, 0.8, 1.0), (0.25, 0.2, 0.3), (7.381, 5, 9), (0.0, 0, 1), (-3.0, -4, -2),
     (1e6, 8e5, 1.2e6)],
)  # fmt: skip
def test_the_axis_of_one_number_stays_near_it_and_no_share_passes_one(
    value: float, first: float, last: float
) -> None:
    axis, _ = linear([value], 0, 100, 5)
    assert (axis.low, axis.high) == pytest.approx((first, last))


def test_steps_have_whole_ticks_even_if_there_is_but_one() -> None:
    assert [said for _, said in linear([1.0], 0, 100, 5, tight=True)[1]] == ["0", "1"]
    assert [said for _, said in linear([1.0, 2.0, 3.0], 0, 100, 5, tight=True)[1]] == ["1", "2", "3"]
    assert linear([0.8], 0, 100, 5, tight=True)[0].high == 0.8, "seconds end where they end"


def test_a_logarithmic_axis_ends_near_its_numbers_and_names_powers() -> None:
    axis, ticks_ = logarithmic([0.008, 2.5], 0, 100)
    assert (10**axis.low, 10**axis.high) == pytest.approx((0.005, 5))
    assert [said for _, said in ticks_] == ["0.01", "0.1", "1"]


@pytest.mark.parametrize(
    ("values", "is_log"),
    [([2.3, 0.2], True), ([2.3, 0.3], False), ([2.3, 0.0], False), ([2.3, -1.0], False), ([math.nan, 1.0, 20.0], True),
     ([], False), ([math.nan], False)],
)  # fmt: skip
def test_one_rule_says_which_losses_are_logarithmic(values: list[float], is_log: bool) -> None:
    assert spans_powers(values) is is_log
    series = [Series(name="loss", xs=range(len(values)), ys=values)]
    assert ("log scale" in loss_chart(series, title="Loss", x_label="step")) is is_log


def test_curves_that_lie_on_one_another_are_striped_and_named() -> None:
    xs = [float(n) for n in range(50)]
    first, other = [2.0 / (1 + n) for n in xs], [2.0 / (1 + n / 4) for n in xs]
    chart = line_chart(
        [
            Series(name=name, xs=xs, ys=ys)
            for name, ys in (("a", first), ("b", other), ("c", first), ("d", first))
        ],
        title="Loss",
        x_label="steps",
        y_label="loss",
    )
    paths = list(parsed(chart).iter(f"{SVG}path"))
    stripes = [(one.get("stroke-dasharray"), one.get("stroke-dashoffset")) for one in paths]
    assert stripes == [("7 14", "0"), (None, None), ("7 14", "-7"), ("7 14", "-14")], (
        "each shows a third of itself"
    )
    assert "a, c and d overlap." in "".join(parsed(chart).itertext())
    assert "overlap" in next(parsed(chart).iter(f"{SVG}svg")).get("aria-label", "")


def test_curves_overlap_where_they_are_near_nearly_everywhere() -> None:
    line = [(float(n), 100.0 - n) for n in range(100)]
    sparse = [line[0], line[50], line[99]]
    shifted = [(x, y + 4) for x, y in line]
    half, late = line[:50], [(x, y + (30 if x > 80 else 0)) for x, y in line]
    assert overlapping([line, sparse, shifted, half, late, []]) == [(0, 1)]
    assert overlapping([[(5.0, 5.0)], [(5.0, 5.4)], [(9.0, 5.0)]]) == [(0, 1)]
    assert overlapping([]) == []


def test_nothing_to_draw_has_the_size_of_a_chart_and_says_why() -> None:
    empty = line_chart([], title="Loss", x_label="step", y_label="loss", empty="No step has ended yet.")
    whole = one_curve([0, 1], [1.0, 2.0])
    for chart in (empty, histogram({}, title="Loss", x_label="", y_label="", empty="No step has ended yet.")):
        assert "No step has ended yet." in "".join(parsed(chart).itertext())
        assert next(parsed(chart).iter(f"{SVG}svg")).get("viewBox") == next(
            parsed(whole).iter(f"{SVG}svg")
        ).get("viewBox")
        assert parsed(chart)[0].tag == "figcaption"
        assert ["legend" in one.get("class", "") for one in parsed(chart)] == [False, True, False]
        assert not ticks(chart, "y"), "no numbers that nobody measured"


def test_a_table_of_many_columns_can_be_stacked_and_stays_a_table() -> None:
    table = data_table(
        ["worker", "steps", "seconds to target", "b", "c"],
        [("worker 0", "12", "1.10 ±0.08", "1", "2")],
        title="Workers",
    )
    root = parsed(table)
    assert next(root.iter("table")).get("class") == "stack"
    assert [one.get("data-name") for one in root.iter("td")] == ["steps", "seconds to target", "b", "c"]
    assert ["long" in one.get("class", "") for one in root.iter("td")] == [False, True, False, False]
    roles = [one.get("role") for one in root.iter() if one.tag in ("table", "tr", "th", "td")]
    assert roles == ["table", "row", *["columnheader"] * 5, "row", "rowheader", *["cell"] * 4]
    assert "stack" not in data_table(["a", "b"], [("1", "2")], title="small")


def test_what_is_not_finite_leaves_a_gap() -> None:
    chart = one_curve([0, 1, 2, 3], [1.0, math.nan, 3.0, 2.0])
    path = next(one for one in parsed(chart).iter(f"{SVG}path"))
    assert path.get("d", "").count("M") == 2
    assert len(path_points(chart)) == 3


def test_a_long_curve_is_thinned_and_keeps_its_peak_and_its_ends() -> None:
    ys = [1.0] * 20_000
    ys[7_777] = 9.0
    chart = one_curve(list(range(20_000)), ys)
    points = path_points(chart)
    assert len(points) <= 400
    assert min(y for _, y in points) == pytest.approx(ticks(chart, "y")[-1][0], abs=25)
    assert read_off(points[-1][0], ticks(chart, "x")) == pytest.approx(19_999, rel=0.01)
    assert len(chart) < 30_000


def test_many_series_differ_in_colour_or_dash() -> None:
    chart = line_chart(
        [Series(name=str(n), xs=[0, 1], ys=[n, n + 1]) for n in range(40)], title="", x_label="", y_label=""
    )
    paths = [one.get("class") for one in parsed(chart).iter(f"{SVG}path")]
    assert len(set(paths)) == 40


def test_share_bars_are_as_long_as_their_shares() -> None:
    chart = share_bars([("worker 0", (0.25, 0.75))], ("compute", "wait"), title="Time")
    widths = [
        float(one.get("width", ""))
        for one in parsed(chart).iter(f"{SVG}rect")
        if one.get("class") in ("f0", "f1")
    ]
    mine = [width for width in widths if width != 12]  # those of the legend
    assert mine[1] == pytest.approx(3 * mine[0], rel=1e-3)
    assert "worker 0 compute 25 %, wait 75 %" in chart


def test_histogram_bars_count() -> None:
    chart = histogram({0: 10, 2: 5}, title="Staleness", x_label="steps", y_label="updates")
    heights = [float(one.get("height", "")) for one in parsed(chart).iter(f"{SVG}rect")]
    assert heights[0] == pytest.approx(2 * heights[1])
    assert "15 in all, from 0 to 2, mean 0.67" in chart


def test_numbers_near_the_end_of_what_a_float_holds_have_a_colour() -> None:
    assert "1e+308" in matrix([[0, 1e308], [1e-308, 2]], ["a", "b"], ["a", "b"], title="Waits", show=str)


def test_the_greatest_number_of_a_matrix_is_the_hottest() -> None:
    table = matrix([[0, 1], [4, 2]], ["a", "b"], ["a", "b"], title="Waits")
    assert [cell.get("class") for cell in parsed(table).iter("td")] == ["quiet", "h2", "h9", "h4"]


def test_hostile_names_stay_text() -> None:
    bits = [
        line_chart(
            [Series(name=HOSTILE, xs=[0], ys=[1]), Series(name="b", xs=[0], ys=[1])],
            title=HOSTILE,
            x_label=HOSTILE,
            y_label=HOSTILE,
        ),
        bar_chart([(HOSTILE, 1.0)], title=HOSTILE),
        share_bars([(HOSTILE, (1.0,))], (HOSTILE,), title=HOSTILE),
        histogram({1: 1}, title=HOSTILE, x_label=HOSTILE, y_label=HOSTILE),
        matrix([[1.0]], [HOSTILE], [HOSTILE], title=HOSTILE, corner=HOSTILE),
        data_table([HOSTILE, HOSTILE], [(HOSTILE, HOSTILE)], title=HOSTILE),
    ]
    page = document(HOSTILE, [section("x", HOSTILE, bit) for bit in bits])
    assert "<script" not in page
    assert parsed(page).findtext(".//h1") == HOSTILE


def test_equal_numbers_give_equal_bytes() -> None:
    assert one_curve([0, 1], [1, 2]) == one_curve([0, 1], [1, 2])


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (0.01234, "0.0123"), (4.567, "4.57"), (123.4, "123"), (1234, "1,234"), (12345, "12.3k"), (4.5e6, "4.5M"),
     (math.nan, "nan"), (-3.0, "-3")],
)  # fmt: skip
def test_numbers_are_short(value: float, said: str) -> None:
    assert short_number(value) == said


def test_a_page_of_what_is_no_text_can_be_written() -> None:
    page = document("half a character: \ud800", [section("x", "\udfff", "\ud800")])
    assert page.encode().count(b"ud800") == 3  # in title, heading and body
