"""The energy of a run: counters in a written folder, which begin at 0 again, and what a comparison shows of them."""

import os
import re
import threading
from pathlib import Path

import pytest
import torch

from compared import found, measured, reported
from manyhands.lab.compare.compare_report import cells, columns, report
from manyhands.lab.compare.energy import (
    EnergyCounter,
    EnergyMeter,
    counted,
    energy_counters,
    processor_counters,
)

RANGE = 262_143_328_850  # of a package, as Linux shows it: 2^32 - 1 units of 61 µJ


def zone(root: Path, place: str, name: str, energy_uj: int, at_most: int = RANGE) -> Path:
    folder = root / f"intel-rapl:{place}"
    folder.mkdir(parents=True)
    for file, value in (("name", name), ("energy_uj", energy_uj), ("max_energy_range_uj", at_most)):
        (folder / file).write_text(f"{value}\n")
    return folder / "energy_uj"


def test_packages_and_memory_beside_them_count_and_their_parts_do_not(tmp_path: Path) -> None:
    zone(tmp_path, "0", "package-0", 10)
    zone(tmp_path, "0:0", "core", 20)
    zone(tmp_path, "0:1", "dram", 30)
    zone(tmp_path, "1", "package-1", 40)
    zone(tmp_path, "2", "psys", 50)
    counters, reason = processor_counters(tmp_path)
    assert [(one.name, one.read(), one.wraps_at) for one in counters] == [
        ("package-0", 10, RANGE),
        ("dram", 30, RANGE),
        ("package-1", 40, RANGE),
    ]
    assert reason == ""


@pytest.mark.parametrize(
    ("before", "after", "wraps_at", "difference"),
    [(5, 9, 0, 4), (5, 5, 10, 0), (8, 3, 10, 5), (RANGE - 7, 5, RANGE, 12), (8, 3, 0, 3)],
)
def test_a_counter_that_begins_at_0_again(before: int, after: int, wraps_at: int, difference: int) -> None:
    assert counted(before, after, wraps_at) == difference


def test_joules_are_of_all_counters_over_the_wrap(tmp_path: Path) -> None:
    package, dram = (
        zone(tmp_path, "0", "package-0", RANGE - 1_000_000),
        zone(tmp_path, "0:1", "dram", 5_000_000),
    )
    counters, _ = energy_counters("cpu", tmp_path)
    meter = EnergyMeter(counters)
    with meter:
        package.write_text("2000000\n")
        dram.write_text("5500000\n")
    assert meter.joules == 3.5


def test_no_wrap_is_missed_between_the_beginning_and_the_end() -> None:
    """Every reading is 0.7 of the range after the one before: two wraps or more, of which the ends show none."""
    reads, enough = [0], threading.Event()

    def read() -> int:
        reads[0] += 1
        if reads[0] > 12:
            enough.set()
        return 700 * reads[0] % 1000

    meter = EnergyMeter([EnergyCounter("package-0", read, 1000)], every_s=1e-4)
    with meter:
        assert enough.wait(30)
    assert meter.joules == pytest.approx(700e-6 * (reads[0] - 1))
    assert "energy" not in {thread.name for thread in threading.enumerate()}


def test_a_counter_that_goes_away_gives_no_figure(tmp_path: Path) -> None:
    package = zone(tmp_path, "0", "package-0", 1)
    counters, _ = processor_counters(tmp_path)
    meter = EnergyMeter(counters)
    with meter:
        package.unlink()
    assert meter.joules is None


def test_why_nothing_is_measured_is_said(tmp_path: Path) -> None:
    assert "no energy counter" in processor_counters(tmp_path)[1]
    assert EnergyMeter(energy_counters("cuda", tmp_path)[0]).joules is None
    zone(tmp_path, "0", "package-0", 1).write_text("much")
    assert "cannot be read" in processor_counters(tmp_path)[1]
    assert energy_counters("cpu", tmp_path)[1].startswith("Energy is not measurable here: ")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_counts_what_it_takes_to_multiply(tmp_path: Path) -> None:
    counters, sentence = energy_counters("cuda", tmp_path)
    assert "GPUs alone" in sentence
    x = torch.randn(4096, 4096, device="cuda")
    with EnergyMeter(counters) as meter:
        for _ in range(200):
            x = (x @ x).clamp(-1, 1)
        torch.cuda.synchronize()
    assert meter.joules is not None
    assert meter.joules > 0


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_counter_that_only_root_may_read_says_how_to_allow_it(tmp_path: Path) -> None:
    path = zone(tmp_path, "0", "package-0", 1)
    path.chmod(0)
    assert processor_counters(tmp_path) == (
        [],
        f"{path} may not be read; run as root, or: sudo chmod a+r {path}",
    )


def test_joules_are_a_column_where_they_were_measured() -> None:
    one = found(measured(0, 0, joules=40.0), measured(0, 1, joules=44.0), measured(1, 0))
    place = columns(one).index("joules\n/run")
    assert [cells(one, row)[place] for row in one.rows] == ["42", "–"]
    assert one.to_dict()["strategies"][0]["joules"] == {"median": 42.0, "low": 40.0, "high": 44.0}
    assert re.search("joules of the whole machine", report(one, [], "title", "command", {}))
    plain = found(measured(), measured(1))
    assert not any("joules" in head for head in columns(plain))
    assert "nergy" not in reported(plain)
