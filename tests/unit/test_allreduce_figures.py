"""The figures of the documentation are what the schedules do today, for every algorithm."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from manyhands.errors import UserError
from manyhands.strategies.common.collectives import collective_drawing
from manyhands.strategies.common.collectives.algorithms import ALGORITHMS
from manyhands.strategies.common.collectives.collective_drawing import (
    EXAMPLE,
    as_svg,
    as_text,
    example,
    figure,
    refresh,
    watch,
)
from manyhands.strategies.common.collectives.schedule import Algorithm

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
REDRAW = "draw it again: python -m manyhands.strategies.common.collectives.collective_drawing docs"
EVERY = pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=lambda algorithm: algorithm.name)


def test_the_page_shows_every_algorithm_as_it_is() -> None:
    page = (DOCS / "allreduce.md").read_text()
    assert re.findall(r"<!-- figure: (\S+) -->", page) == list(ALGORITHMS), REDRAW
    assert refresh(page, figure) == page, REDRAW


@EVERY
def test_the_drawings_are_as_they_are_today(algorithm: Algorithm) -> None:
    drawn = (DOCS / "figures" / f"allreduce-{algorithm.name}.svg").read_text()
    assert drawn == as_svg(watch(algorithm, EXAMPLE)), REDRAW


@EVERY
def test_a_drawing_has_every_number_and_every_message(algorithm: Algorithm) -> None:
    picture = watch(algorithm, EXAMPLE)
    root = ElementTree.fromstring(as_svg(picture))
    names = [element.tag.rpartition("}")[2] for element in root.iter()]
    assert names.count("line") == sum(len(step.sends) for table in algorithm.tables(4) for step in table)
    assert names.count("text") == 4 + len(picture.rows) * (
        1 + 4 * 4
    )  # heads, and per row its label and 16 numbers


def test_the_text_of_two_workers_that_swap() -> None:
    assert as_text(watch(ALGORITHMS["doubling"], [(1, 20), (3, 4)])) == (
        "         worker 0   |  worker 1\n"
        "           a    b   |    a    b\n"
        "start      1   20   |    3    4\n"
        "\n"
        "         0→1:ab  1→0:ab\n"
        "round 1  [ 4] [24]  |  [ 4] [24]\n"
    )


@EVERY
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8, 16])
def test_other_numbers_of_workers_end_with_the_sums(algorithm: Algorithm, world: int) -> None:
    vectors = example(world)
    sums = [sum(column) for column in zip(*vectors, strict=True)]
    last = watch(algorithm, vectors).rows[-1]
    assert [[item.number for item in rank] for rank in last] == [sums] * world


def test_one_worker_and_no_numbers_can_be_drawn() -> None:
    assert as_text(watch(ALGORITHMS["ring"], [(5,)])).splitlines()[-1] == "start     5"
    assert watch(ALGORITHMS["ring"], [(), ()]).rows[-1] == ((), ())
    with pytest.raises(UserError, match=r"vectors of lengths \[1, 2\]"):
        watch(ALGORITHMS["ring"], [(1,), (1, 2)])


def test_the_command_prints_all_and_writes_the_docs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    collective_drawing.main([])
    printed = capsys.readouterr().out
    assert all(f"{algorithm.name}: {algorithm.description}" in printed for algorithm in ALGORITHMS.values())
    (tmp_path / "allreduce.md").write_text(
        "before\n<!-- figure: tree -->\nold\n<!-- end of figure -->\nafter\n"
    )
    collective_drawing.main([str(tmp_path)])
    page = (tmp_path / "allreduce.md").read_text()
    assert "old" not in page
    assert figure("tree") in page
    assert (page.startswith("before\n"), page.endswith("after\n")) == (True, True)
    assert len(list((tmp_path / "figures").iterdir())) == len(ALGORITHMS)
