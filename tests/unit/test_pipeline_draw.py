"""The pictures show every turn where the table has it, and those of the documentation are what is drawn today."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from manyhands.strategies.common.collectives.collective_drawing import refresh
from manyhands.strategies.pipeline import schedule_drawing
from manyhands.strategies.pipeline.schedule_cost import cost, equal_times
from manyhands.strategies.pipeline.schedule_drawing import (
    FIGURES,
    LETTERS,
    as_svg,
    as_text,
    costs_text,
    figure,
    heading,
)
from manyhands.strategies.pipeline.schedules import SCHEDULES, Schedule, interleaved

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
REDRAW = "draw it again: python -m manyhands.strategies.pipeline.schedule_drawing docs"
EVERY = pytest.mark.parametrize("name", SCHEDULES)


def named(schedule: Schedule) -> dict[tuple[int, int], str]:
    """What stands at (stage, tick)."""
    return {
        (turn.stage, turn.tick): f"{LETTERS[turn.work]}{turn.microbatch}"
        + ("abc"[turn.chunk] if schedule.chunks > 1 else "")
        for turn in schedule.work_items
    }


def read_back(text: str) -> dict[tuple[int, int], str]:
    """The turns of a drawing, with however many blocks of ticks."""
    found: dict[tuple[int, int], str] = {}
    begin = 0
    for block in text.rstrip("\n").split("\n\n"):
        ticks, *rows = block.splitlines()
        assert ticks.startswith("tick")
        longest = 0
        for row in rows:
            stage, cells = re.fullmatch(r"stage (\d+) +(.*)", row).groups()  # type: ignore[union-attr]
            words = cells.split()
            longest = max(longest, len(words))
            found |= {(int(stage), begin + at): word for at, word in enumerate(words) if word != "·"}
        begin += longest
    return found


@EVERY
@pytest.mark.parametrize("width", [None, 80, 33, 1])
def test_the_text_has_every_turn_in_its_place(name: str, width: int | None) -> None:
    for schedule in (SCHEDULES[name](1, 1), SCHEDULES[name](3, 12)):
        text = as_text(schedule, width)
        assert read_back(text) == named(schedule)
        if width is not None and width > 20:
            assert max(map(len, text.splitlines())) <= width


def test_the_text_of_1f1b() -> None:
    assert as_text(SCHEDULES["1f1b"](2, 4)) == (
        "tick     0              5\n"
        "stage 0  F0 F1 ·  B0 F2 B1 F3 B2 ·  B3\n"
        "stage 1  ·  F0 B0 F1 B1 F2 B2 F3 B3 ·\n"
    )


def test_ticks_are_numbered_where_they_stand() -> None:
    first, *_ = as_text(SCHEDULES["naive"](2, 4)).splitlines()
    cells = {int(found[0]): found.start() for found in re.finditer(r"\d+", first)}
    assert cells == {tick: 9 + 3 * tick for tick in (0, 5, 10, 15)}


@EVERY
def test_the_drawing_has_every_turn_in_its_place(name: str) -> None:
    schedule = SCHEDULES[name](3, 6)
    root = ElementTree.fromstring(as_svg(schedule))
    boxes = [one for one in root.iter() if one.find("{*}title") is not None]
    labels = [one for one in root.iter() if one.get("class") == "on"]
    assert len(boxes) == len(labels) == len(schedule.work_items)
    assert {one.text for one in labels} == set(named(schedule).values())
    for box, label, turn in zip(boxes, labels, schedule.work_items, strict=True):
        assert label.text == named(schedule)[turn.stage, turn.tick]
        assert box.get("class") == {"F": "forward", "B": "backward", "W": "weights"}[LETTERS[turn.work]]
        inside = float(label.get("x", 0)) - float(box.get("x", 0))
        assert 0 < inside < float(box.get("width", 0))
    columns = sorted({float(box.get("x", 0)) for box in boxes})
    rows = sorted({float(box.get("y", 0)) for box in boxes})
    assert len(rows) == 3
    assert len(columns) == len({turn.tick for turn in schedule.work_items})
    assert [float(box.get("x", 0)) for box in boxes] == sorted(float(box.get("x", 0)) for box in boxes)


def test_no_two_boxes_of_a_drawing_meet() -> None:
    root = ElementTree.fromstring(as_svg(interleaved(2, 4, 3)))
    boxes = [one for one in root.iter() if one.find("{*}title") is not None]
    by_row: dict[str, list[tuple[float, float]]] = {}
    for box in boxes:
        x = float(box.get("x", 0))
        by_row.setdefault(box.get("y", ""), []).append((x, x + float(box.get("width", 0))))
    for row in by_row.values():
        assert all(left[1] <= right[0] for left, right in zip(sorted(row), sorted(row)[1:], strict=False))


def test_later_parts_of_a_stage_are_marked() -> None:
    schedule = interleaved(2, 4, 3)
    lines = as_svg(schedule).count('class="later"')
    assert lines == sum(turn.chunk for turn in schedule.work_items)


def test_a_drawing_is_light_and_dark_and_says_what_it_is() -> None:
    drawing = as_svg(SCHEDULES["zb-h1"](2, 2))
    assert "prefers-color-scheme: dark" in drawing
    assert 'aria-label="zb-h1 · 2 stages · 2 micro-batches"' in drawing
    assert "W weight gradient" in drawing
    assert "W weight gradient" not in as_svg(SCHEDULES["1f1b"](2, 2))


def test_headings() -> None:
    assert heading(SCHEDULES["gpipe"](1, 1)) == "gpipe · 1 stage · 1 micro-batch"
    assert heading(SCHEDULES["wavefront"](2, 3)) == "wavefront · 2 stages · 3 time slices"
    assert heading(interleaved(2, 2)) == "interleaved · 2 stages · 2 parts each · 2 micro-batches"


def test_what_it_costs_as_a_table() -> None:
    schedule = SCHEDULES["1f1b"](2, 4)
    assert costs_text(schedule, cost(schedule, equal_times(schedule), [1024])) == (
        "         bubble  activations  messages    bytes  to stages\n"
        "stage 0   20.0%            2         4  4.0 KiB          1\n"
        "stage 1   20.0%            1         4  4.0 KiB          0\n"
        "all       20.0%    2 at most         8  8.0 KiB\n"
    )


def test_the_page_shows_every_schedule_as_it_is() -> None:
    page = (DOCS / "pipeline.md").read_text()
    assert re.findall(r"<!-- figure: (\S+) -->", page) == list(SCHEDULES) == list(FIGURES), REDRAW
    assert refresh(page, figure) == page, REDRAW
    for name in FIGURES:
        drawn = (DOCS / "figures" / f"pipeline-{name}.svg").read_text()
        assert drawn == as_svg(SCHEDULES[name](4, FIGURES[name])), REDRAW


def test_the_command_prints_all_and_writes_the_docs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule_drawing.main([])
    printed = capsys.readouterr().out
    assert all(heading(SCHEDULES[name](4, number)) in printed for name, number in FIGURES.items())
    (tmp_path / "pipeline.md").write_text(
        "before\n<!-- figure: gpipe -->\nold\n<!-- end of figure -->\nafter\n"
    )
    schedule_drawing.main([str(tmp_path)])
    page = (tmp_path / "pipeline.md").read_text()
    assert page == f"before\n<!-- figure: gpipe -->\n{figure('gpipe')}<!-- end of figure -->\nafter\n"
    assert len(list((tmp_path / "figures").iterdir())) == len(FIGURES)
