"""Charts: well-formed, escaped, deterministic, and every value lies where the axis says it does."""

import math
import re
import xml.etree.ElementTree as ET

import pytest

from manyhands.draw.charts import (
    Series,
    bar_chart,
    data_table,
    document,
    histogram,
    line_chart,
    matrix,
    section,
    share_bars,
    short_number,
)

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
