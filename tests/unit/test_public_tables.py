"""Tables of others: read whole, scored as committed; predictors beside closed forms and the papers' formulas."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from manyhands.errors import UserError
from manyhands.facts import LinkRate
from manyhands.foresight.plan.described_model import DescribedTransformer, DescribedWorker

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT.parent / "shared" / "reference" / "planner.md"
SLOW = {"mpt-a100", "megatron-2021", "megatron-2022", "megatron-2024", "nanotron-stalls"}
"""These take longer than all others together; `benchmarks/public_tables.py` runs them."""

needs_tables = pytest.mark.skipif(
    not REFERENCE.exists(), reason="the tables of others are not beside this checkout"
)


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What `benchmarks/public_tables.py` consists of."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import public_tables

    return {name: sys.modules[name] for name in ("public_rows", "public_models", "public_scores")} | {
        "public_tables": public_tables
    }


def committed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / "public-tables.json").read_text())[
        "tables"
    ]
    return found


@needs_tables
def test_all_rows_are_read(modules: Any) -> None:
    rows = modules["public_rows"]
    assert list(rows.bert_nodes()) == [1, 4, 16, 64]
    assert rows.told_minutes() == 47
    assert {name: len(found) for name, found in rows.megatron_2020().items()} == {
        "V100": 4, "A100": 4, "A100, 128 replicas": 4,
    }  # fmt: skip
    counts = [
        len(found())
        for found in (rows.megatron_sc21, rows.megatron_h100, rows.korthikanti, rows.gpipe, rows.bloom)
    ]
    assert counts == [10, 9, 8, 9, 4]
    assert {name: len(found) for name, found in rows.fsdp().items()} == {
        "MPT, H100": 6, "MPT, A100": 5, "torchtitan 8B, H100": 3,
    }  # fmt: skip
    runs = rows.nanotron()
    assert [sum(one.gpus == gpus for one in runs) for gpus in (8, 16, 64)] == [10, 14, 6]
    assert sum(one.starred for one in runs) == 3
    assert [one.name for one in runs if one.seconds is None] == ["1-8-2-64"]
    assert {name: len(found) for name, found in rows.servers().items()} == {
        "EC2, 8 K80 a host": 4,
        "DGX-1": 4,
    }
    assert all(
        one.replicas * one.slices * one.stages == one.gpus
        for one in rows.megatron_sc21() + rows.megatron_h100()
    )


@needs_tables
def test_described_models_have_the_rates_that_their_authors_count(modules: Any) -> None:
    """Megatron's tables state both the time of a step and TFLOP/s."""
    rows, transformer_of = modules["public_rows"], modules["public_models"].transformer_of
    stated = re.findall(
        r"^\| [\d.]+ B \| .*? · ([\d.]+) \| .*? · ([\d.]+) \| .*? · ([\d.]+) \|$", rows.section("4.2"), re.M
    )
    found = [
        [transformer_of(row).step_flops / row.gpus / row.seen / 1e12 for row in column]
        for column in rows.megatron_2020().values()
    ]
    assert len(stated) == 4
    for index, texts in enumerate(stated):
        assert [column[index] for column in found] == pytest.approx(
            [float(text) for text in texts], rel=0.005
        )
    for row in rows.megatron_sc21():
        assert transformer_of(row).parameters / 1e9 == pytest.approx(
            float(row.name[:-2].replace(",", "")), rel=0.04
        )


@needs_tables
def test_the_committed_scores_are_those_of_a_run(modules: Any) -> None:
    tables = modules["public_tables"]
    assert committed().keys() == tables.TABLES.keys()
    found = tables.scores([name for name in tables.TABLES if name not in SLOW])
    for name, score in found.items():
        _compare(score, committed()[name], name)


def _compare(found: Any, said: Any, where: str) -> None:
    if isinstance(found, dict):
        assert found.keys() == said.keys(), where
        for key, value in found.items():
            _compare(value, said[key], f"{where}, {key}")
    elif isinstance(found, list):
        assert len(found) == len(said), where
        for number, pair in enumerate(zip(found, said, strict=True)):
            _compare(*pair, f"{where}, {number}")
    elif isinstance(found, float):
        assert found == pytest.approx(said, rel=1e-3, abs=2e-4), where
    else:
        assert found == said, f"{where}: run `python benchmarks/public_tables.py`"


def test_errors_follow_from_the_pairs_that_are_committed() -> None:
    for name, table in committed().items():
        errors = [abs(row["predicted"] / row["seen"] - 1) for row in table["held_out"]]
        assert table["error"]["mean"] == pytest.approx(sum(errors) / len(errors), abs=1e-3), name
        assert table["error"]["worst"] == pytest.approx(max(errors), abs=1e-3), name
        ahead = min(one["mean"] for one in table["nulls"].values()) - table["error"]["mean"]
        expected = "even" if abs(ahead) < 0.005 else "better" if ahead > 0 else "worse"
        assert table["verdict"] == expected, name


def test_a_fixed_part_and_one_that_is_shared_are_recovered_exactly(modules: Any) -> None:
    """Without time for links, a step of data parallelism is A / n + c."""
    models = modules["public_models"]
    host = models.Host(1, 1e12, math.inf, math.inf, math.inf)

    def took_s(devices: int, constants: tuple[float, ...]) -> float:
        found: float = models.data_parallel_s(devices, constants, host=host, batch=4096, gradient_bytes=1e9)
        return found

    links_s = took_s(64, (0.0, 0.0))
    assert took_s(64, (3e-3, 0.25)) == pytest.approx(4096 * 3e-3 / 64 + 0.25 + links_s)
    devices = [1, 4, 16]
    seen = [took_s(many, (3e-3, 0.25)) for many in devices]
    assert models.calibrated(took_s, devices, seen, (1e-3, 1e-2)) == pytest.approx((3e-3, 0.25))


def test_what_is_left_out_does_not_calibrate(modules: Any) -> None:
    left_out = modules["public_scores"].left_out_in_turn
    rows = [1.0, 2.0, 3.0, 4.0]
    exact = left_out(
        rows, [2 * row + 5 for row in rows], lambda row: row, lambda row, now: now[0] * row + now[1], (1, 1)
    )
    assert exact == pytest.approx([7, 9, 11, 13])
    spoiled = left_out(
        rows, [700.0, 9, 11, 13], lambda row: row, lambda row, now: now[0] * row + now[1], (1, 1)
    )
    assert spoiled[0] == pytest.approx(7)


GPT = DescribedTransformer(layers=24, hidden=2304, sequence=2048, vocabulary=51200, batch_size=512)


def test_the_operations_of_a_described_model_are_those_of_the_papers() -> None:
    """Narayanan et al. 2021, equation 3, with recomputation; Korthikanti et al. 2022 without."""
    b, s, h, layers, v = 512, 2048, 2304, 24, 51200
    for recompute, factor, head in ((True, 96, 16), (False, 72, 12)):
        model = DescribedTransformer(
            layers=layers, hidden=h, sequence=s, vocabulary=v, batch_size=b, recompute=recompute
        )
        said = factor * b * s * layers * h * h * (1 + s / (6 * h) + v / (head * layers * h))
        assert model.step_flops == pytest.approx(said, rel=1e-12)
        assert model.profile(DescribedWorker(flops=1e12)).compute_s() == pytest.approx(said / 1e12)
    assert GPT.parameters == 12 * layers * h * h + v * h


def test_slices_share_the_work_and_sum_outputs_four_times_a_layer() -> None:
    free = GPT.profile(DescribedWorker(flops=1e12, slices=8))
    assert free.compute_s() == pytest.approx(GPT.step_flops / 8e12)
    linked = GPT.profile(
        DescribedWorker(flops=1e12, slices=8, link=LinkRate(latency_s=1e-5, bytes_per_s=1e9))
    )
    output = 2 * 2048 * 2304
    sums_s = 4 * 24 * (14 * 1e-5 + 512 * 2 * 7 / 8 * output / 1e9)
    assert linked.compute_s() - free.compute_s() == pytest.approx(sums_s, rel=1e-6)
    moving = GPT.profile(DescribedWorker(flops=1e12, memory=1e9, moves=2.0))
    moved_s = 3 * 24 * 512 * 2 * 34 * output / 1e9  # 34 bytes a value, written and read
    assert moving.compute_s() - 8 * free.compute_s() == pytest.approx(moved_s)
    assert moving.optimizer_s == pytest.approx(28 * GPT.parameters / 1e9)


@pytest.mark.parametrize(
    ("given", "said"), [({"hidden": 0}, "hidden=0 must be"), ({"batch_size": -1}, "batch_size=-1")]
)
def test_a_model_that_makes_no_sense_is_an_error(given: dict[str, int], said: str) -> None:
    sizes = {"layers": 2, "hidden": 8, "sequence": 4, "vocabulary": 10, "batch_size": 1}
    with pytest.raises(UserError, match=said):
        DescribedTransformer(**(sizes | given))
    with pytest.raises(UserError, match="flops=0 must be above 0"):
        DescribedWorker(flops=0)
    with pytest.raises(UserError, match="slices=0 must be at least 1"):
        DescribedWorker(flops=1e12, slices=0)
