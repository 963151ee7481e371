"""The page of a plan: what its pictures say, and which plans are on the frontier."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from manyhands.facts import ComputeTime, LayerTimes, LinkRate, Machines, ModelFootprint, TaskProfile
from manyhands.foresight.plan.described_cluster import DescribedCluster
from manyhands.foresight.plan.plan_page import frontier, over_workers, plan_page
from manyhands.foresight.plan.plan_search import PlanRow, Question, make_plan
from manyhands.foresight.plan.planning import TaskPlan
from manyhands.strategies.registry import entry_of
from manyhands.strategy import Strategy

BATCH, SAMPLE_S = 64, 3e-4


def profile(_per_host: int, _processes: int) -> TaskProfile:
    layer = LayerTimes(
        name="layer",
        forward=ComputeTime(per_sample_s=SAMPLE_S / 12),
        backward=ComputeTime(per_sample_s=SAMPLE_S / 6),
        gradient_bytes=1 << 20,
        output_bytes=4000.0,
    )
    model = ModelFootprint(parameters=4 << 20, gradients=4 << 20, per_sample=1000.0, batch_size=BATCH)
    return TaskProfile(layers=(layer,) * 4, model=model)


def planned(**more: Any) -> TaskPlan:
    near, far = LinkRate(latency_s=1e-6, bytes_per_s=2e10), LinkRate(latency_s=2e-5, bytes_per_s=1e9)
    machines = Machines(hosts=4, per_host=2, memory=near, inside=near, between=far)
    cluster = DescribedCluster(machines=machines, **more)
    question = Question(profile_of=profile, cluster=cluster, workers=(8,))
    found = make_plan(question)
    return TaskPlan(
        task=None,  # type: ignore[arg-type]
        cluster=cluster,
        steps=100,
        ranked=found,
        chosen=found.best,
        question=question,
    )


def test_the_page_is_one_document_with_every_plan_and_reason() -> None:
    plan = planned(price=2.0)
    page = plan_page("digits", plan, "manyhands plan digits", {"cores": "2"})
    assert "http" not in re.sub(r'xmlns="[^"]+"|http-equiv', "", page)
    assert "<script" not in page
    for row in plan.ranked.rows:
        assert f">{row.strategy}<" in page
        assert row.reason in page
    for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL):
        ElementTree.fromstring(svg)
    best = plan.ranked.best
    assert f"{best.strategy} · 8: " in page
    assert "± 28 %" in page


def test_parts_of_a_bar_are_as_long_as_they_take() -> None:
    """On one axis: the widths of a bar's parts are to each other as their seconds."""
    page = plan_page("digits", planned(), "c", {})
    bars = page.partition('id="steps"')[2].partition("</section>")[0]
    best = planned().ranked.best
    assert best.predicted is not None
    name = f"{best.strategy} · 8: "
    found = re.findall(rf'width="([\d.]+)" height="12"><title>{re.escape(name)}[^<]*</title>', bars)
    parts = [seconds for seconds in best.predicted.parts.values() if seconds > 0]
    assert [float(one) / float(found[0]) for one in found] == pytest.approx(
        [one / parts[0] for one in parts], abs=0.02
    )


def test_time_over_workers_is_that_of_the_batch_shared_out() -> None:
    plan = planned()
    assert plan.question is not None
    rows = over_workers(plan.question, plan.ranked.finalists)
    by_count = {row.workers: row for row in rows if str(row.strategy) == "mirrored"}
    assert sorted(by_count) == [1, 2, 4, 8]
    for workers, row in by_count.items():
        assert row.predicted is not None
        assert row.predicted.compute_s == pytest.approx(BATCH / workers * SAMPLE_S)
    assert (by_count[8].seconds or 0) == pytest.approx(plan.ranked.of("mirrored", 8).seconds)


def test_nobody_on_the_frontier_is_beaten_and_everybody_else_is() -> None:
    plan = planned(price=2.0)
    assert plan.question is not None
    rows = over_workers(plan.question, plan.ranked.finalists)
    best = frontier(rows)

    def beats(one: PlanRow, other: PlanRow) -> bool:
        assert one.price is not None
        assert other.price is not None
        at_most = one.price <= other.price and (one.seconds or 0) <= (other.seconds or 0)
        return at_most and (one.price, one.seconds) != (other.price, other.seconds)

    assert len(best) > 1
    assert not any(beats(one, other) for one in rows for other in best)
    assert all(any(beats(one, other) for one in best) for other in rows if other not in best)


def test_a_schedule_is_drawn_where_a_plan_has_one() -> None:
    draw = entry_of("pipeline").load_drawing()
    root = ElementTree.fromstring(draw(Strategy.parse("pipeline stages=4")))
    assert "4 stages" in root.attrib["aria-label"]
    plan = planned()
    plan = replace(plan, ranked=replace(plan.ranked, rows=(plan.ranked.of("pipeline stages=4", 8),)))
    assert 'alt="The schedule of pipeline stages=4" src="data:image/svg+xml' in plan_page(
        "digits", plan, "c", {}
    )
