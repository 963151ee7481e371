"""Gradient boosting in one process and by threads that meet: a tree by hand, equal trees, resume, peers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import make_hastie_10_2
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score

from boosted import choice, drawn_table, predictions, trained
from manyhands.engine.training import Keeping
from manyhands.errors import UserError
from manyhands.workloads.gbdt.growing import TreeMemory
from manyhands.workloads.gbdt.model import GbdtModel
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.gbdt.row_sources import ArraySource, RowBlock, open_source
from manyhands.workloads.gbdt.searching import SharedHistograms, area_words, gathered_words
from manyhands.workloads.gbdt.task import GbdtStep, GbdtTask
from manyhands.workloads.gbdt.text_format import parse_model, render_model
from manyhands.workloads.gbdt.training import TableChoice, gbdt_task, train_gbdt

DATA = Path(__file__).parents[2].parent / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.exists(), reason="needs the files of ../shared/data")


def test_one_split_is_the_one_found_by_hand() -> None:
    values = np.array([[1.0], [1.0], [1.0], [2.0], [2.0], [2.0], [3.0], [3.0], [3.0]])
    labels = np.array([1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 11.0, 12.0, 13.0])
    options = {"trees": 1, "num_leaves": 2, "min_data_in_leaf": 1, "rate": 0.5, "lambda_l2": 1.0}
    model = trained(choice(values, labels), objective="regression", **options).model
    (tree,) = model.trees
    mean = labels.mean()  # 16/3; gradients are mean - label
    left, right = 6 * mean - 12, 3 * mean - 36  # 20 and -20
    assert tree.threshold.tolist() == [2.5]
    assert tree.gain[0] == pytest.approx(left**2 / 7 + right**2 / 4)
    assert tree.leaf_value == pytest.approx([mean - 0.5 * left / 7, mean - 0.5 * right / 4])
    assert tree.leaf_count.tolist() == [6, 3]
    assert predictions(model, np.array([[2.5], [2.6]])) == pytest.approx(tree.leaf_value)


def by_threads(task: GbdtTask, world: int, trees: int) -> list[TreeMemory]:
    """The trees of every worker, where workers are threads."""
    areas = np.zeros((world, area_words(task.gbdt, task.bins.offsets)), np.int64)
    report, barrier = (
        np.zeros((2, world, gathered_words(task.gbdt)), np.int64),
        threading.Barrier(world, timeout=240),
    )
    memories, failed = [task.model() for _ in range(world)], []

    def work(rank: int) -> None:
        try:
            step = GbdtStep(
                task, memories[rank], SharedHistograms(rank, areas, report, lambda: barrier.wait() and None)
            )
            step.fill()
            for number in range(trees):
                step.take(task.portion(number))
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return memories


def assert_same(memories: Sequence[TreeMemory], reference: TreeMemory) -> None:
    expected = {name: one.numpy() for name, one in reference.named_buffers()}
    for memory in memories:
        for name, one in memory.named_buffers():
            assert np.array_equal(one.numpy(), expected[name]), name


@pytest.mark.parametrize("objective", ["binary", "regression", "multiclass"])
@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_any_number_of_workers_grows_the_same_trees(objective: str, world: int) -> None:
    values, labels = drawn_table()
    if objective == "regression":
        labels = labels * 1e3 + np.nan_to_num(values[:, 0])
    if objective == "multiclass":
        labels = labels + (np.nan_to_num(values[:, 1]) > 0.5)
    weights = np.random.default_rng(0).random(len(labels))
    source = ArraySource(values, labels, weights=weights)
    table = TableChoice(train=source, categorical=("4",), valid_fraction=0.2)
    options = GbdtOptions(objective=objective, trees=6, num_leaves=9, min_data_per_group=5)
    with gbdt_task(table, options, shared=False) as task:
        (alone,) = by_threads(task, 1, 6)
        assert alone.get_buffer("num_leaves").tolist() == [9] * 6 * task.classes
        assert task.classes == (3 if objective == "multiclass" else 1)
        assert np.isfinite(alone.get_buffer("valid_loss").numpy()).all()
        assert (alone.get_buffer("flags").numpy() & 1).any(), "a categorical split is among them"
        assert (alone.get_buffer("flags").numpy() & 2).any(), "and one that sends missing values to the left"
        assert_same(by_threads(task, world, 6), alone)


@pytest.mark.parametrize("parallel", ["data", "voting"])
def test_features_that_share_columns_give_any_number_of_workers_the_same_trees(parallel: str) -> None:
    drawn = np.random.default_rng(7)
    answers = [np.eye(6)[drawn.integers(0, 6, 900)] for _ in range(3)]
    values = np.column_stack([*answers, drawn.normal(size=900)])
    labels = answers[0] @ np.arange(6.0) + answers[1] @ np.arange(6.0) * values[:, -1]
    options = GbdtOptions(trees=5, num_leaves=9, parallel=parallel, top_k=20)
    with gbdt_task(choice(values, labels), options, shared=False) as task:
        assert len(task.train.layout.offsets) - 1 == 4, "three questions and a number"
        (alone,) = by_threads(task, 1, 5)
        assert (alone.get_buffer("num_leaves").numpy() == 9).all()
        for world in (2, 3):
            assert_same(by_threads(task, world, 5), alone)


def test_voting_is_the_same_where_all_features_are_elected_and_cheaper_where_not() -> None:
    values, labels = drawn_table()
    table = choice(values, labels, categorical=("4",))
    with gbdt_task(table, GbdtOptions(trees=4, num_leaves=7), shared=False) as task:
        (alone,) = by_threads(task, 1, 4)
    with gbdt_task(
        table, GbdtOptions(trees=4, num_leaves=7, parallel="voting", top_k=6), shared=False
    ) as task:
        assert_same(by_threads(task, 3, 4), alone)
    with gbdt_task(
        table, GbdtOptions(trees=4, num_leaves=7, parallel="voting", top_k=1), shared=False
    ) as task:
        first, *others = by_threads(task, 3, 4)
        assert_same(others, first)
        assert not np.array_equal(first.get_buffer("gain").numpy(), alone.get_buffer("gain").numpy())
        assert first.get_buffer("gain").numpy()[0, 0] == alone.get_buffer("gain").numpy()[0, 0]


def test_trees_predict_what_training_had_as_scores() -> None:
    values, labels = drawn_table()
    with gbdt_task(choice(values, labels, categorical=("4",)), GbdtOptions(trees=8), shared=False) as task:
        memory = task.model()
        step = task.step(memory, None)  # type: ignore[arg-type]
        step.fill()
        losses = [step.take(task.portion(number)) for number in range(8)]
        bias = float(task.train.opened()[3][0, 0])
        assert isinstance(step, GbdtStep)
        model = GbdtModel.of(dict(memory.named_buffers()), 8, task.bins, task.gbdt, [bias], None)
        scores = model.scores(RowBlock(labels=None, dense=values))
        assert np.allclose(scores, step._train.scores[0], rtol=0, atol=1e-12)
        assert [one.loss for one in losses] == sorted((one.loss for one in losses), reverse=True)
        chance = 1 / (1 + np.exp(-bias))
        assert chance == pytest.approx(labels.mean())
        entropy = -(chance * np.log(chance) + (1 - chance) * np.log(1 - chance))
        assert losses[0].loss / losses[0].weight == pytest.approx(entropy)


def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    values, labels = drawn_table()
    table = choice(values, labels, categorical=("4",), valid_fraction=0.2)
    whole = train_gbdt(table, GbdtOptions(trees=9, early_stopping=50), keep=Keeping(out=tmp_path / "whole"))
    train_gbdt(table, GbdtOptions(trees=4, early_stopping=50), keep=Keeping(out=tmp_path / "run"))
    resumed = train_gbdt(
        table, GbdtOptions(trees=9, early_stopping=50), keep=Keeping(out=tmp_path / "run", resume=True)
    )
    assert resumed.summary["resumed_from_step"] == 4
    assert render_model(resumed.model) == render_model(whole.model)
    assert resumed.valid_losses == whole.valid_losses
    with pytest.raises(UserError, match="num_leaves is 5, but the run was started with 31"):
        train_gbdt(table, GbdtOptions(num_leaves=5), keep=Keeping(out=tmp_path / "run", resume=True))


def test_training_goes_on_with_a_model_as_if_it_had_grown_it() -> None:
    values, labels = drawn_table()
    table = choice(values, labels, categorical=("4",), valid_fraction=0.2)
    whole = trained(table, trees=8)
    first = parse_model(render_model(trained(table, trees=3).model).encode(), "first")
    rest = trained(replace(table, start=first), trees=5)
    assert rest.valid_losses == whole.valid_losses[3:]
    assert rest.model.trees[:3] == first.trees
    ours, theirs = (render_model(one.model).partition("parameters:")[0] for one in (rest, whole))
    assert ours == theirs
    with pytest.raises(UserError, match="the model has 6 columns, but the table has 5"):
        trained(replace(choice(values[:, :5], labels), start=first))
    with pytest.raises(UserError, match="the model's objective is 'binary sigmoid:1', but regression"):
        trained(replace(table, start=first), objective="regression")


def test_early_stopping_keeps_the_trees_up_to_the_best() -> None:
    values, labels = drawn_table()
    labels = np.random.default_rng(1).permutation(labels)  # nothing to learn
    result = trained(choice(values, labels, valid_fraction=0.3), trees=60, early_stopping=4, rate=0.5)
    best = int(np.argmin(result.valid_losses)) + 1
    assert result.trees_grown == best + 4 < 60
    assert len(result.model.trees) == best
    assert any("valid_loss has not fallen in 4 evaluations" in note for note in result.summary["notes"])
    with pytest.raises(UserError, match="early_stopping needs held-out rows"):
        trained(choice(values, labels), early_stopping=4)


def test_training_ends_where_nothing_can_be_split() -> None:
    values, labels = np.array([[0.0], [1.0]] * 30), np.array([0.0, 1.0] * 30)
    result = trained(choice(values, labels), trees=500, objective="regression", rate=1.0)
    assert result.trees_grown < 500
    assert "no split of all rows gains anything" in str(result.summary["notes"])
    assert predictions(result.model, values) == pytest.approx(labels)


def test_importance_counts_splits_and_gains() -> None:
    values, labels = drawn_table()
    model = trained(choice(values, labels), trees=10).model
    splits, gains = model.importance("split"), model.importance("gain")
    assert splits.sum() == sum(tree.num_leaves - 1 for tree in model.trees)
    assert gains.sum() == pytest.approx(sum(tree.gain.sum() for tree in model.trees))
    assert gains.argmax() == 0
    with pytest.raises(UserError, match="split or gain"):
        model.importance("weight")


@pytest.mark.parametrize(
    ("strategy", "workers", "message"),
    [
        ("single", 2, "single is one process; use strategy=allreduce"),
        ("hogwild", 2, "strategy hogwild does not train gbdt"),
        ("ps", 2, "does not train gbdt; allowed: single, allreduce, mirrored"),
        ("tensor", 2, "does not train gbdt"),
        ("allreduce algorithm=ring", 2, "takes no algorithm"),
    ],
)
def test_strategies_that_do_not_grow_trees_are_refused(strategy: str, workers: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_gbdt(choice(*drawn_table()), strategy=strategy, workers=workers)


def test_it_predicts_as_scikit_learn_does() -> None:
    drawn = np.random.default_rng(4)
    values = drawn.integers(0, 20, (3_000, 4)).astype(float)  # few values, so that both have the same bins
    logit = values[:, 0] / 5 - (values[:, 1] - 10) ** 2 / 20 + values[:, 2] * values[:, 3] / 100
    labels = (logit + drawn.logistic(size=3_000) > 0).astype(float)
    ours = trained(choice(values, labels), trees=20).model
    peer = HistGradientBoostingClassifier(max_iter=20, early_stopping=False).fit(values, labels)
    assert np.abs(predictions(ours, values) - peer.predict_proba(values)[:, 1]).max() < 1e-4


def test_drawn_rows_are_learned_as_well_as_by_lightgbm() -> None:
    lightgbm = pytest.importorskip("lightgbm")
    values, labels = make_hastie_10_2(12_000, random_state=1)
    targets, train, test = (labels > 0).astype(float), slice(0, 6_000), slice(6_000, None)
    ours = trained(choice(values[train], targets[train]), trees=50).model
    dataset = lightgbm.Dataset(values[train], targets[train], params={"verbose": -1})
    peer = lightgbm.train({"objective": "binary", "verbose": -1, "num_threads": 1}, dataset, 50)
    found = roc_auc_score(targets[test], predictions(ours, values[test]))
    assert found > 0.95
    assert abs(found - roc_auc_score(targets[test], peer.predict(values[test]))) < 0.002


@needs_data
def test_a9a_is_learned_as_well_as_by_lightgbm() -> None:
    lightgbm = pytest.importorskip("lightgbm")
    train, test = open_source(DATA / "a9a.gz"), open_source(DATA / "a9a.t.gz")
    ours = trained(TableChoice(train=train), trees=60).model
    blocks = [block for block in test.blocks() if block.labels is not None]
    labels = np.concatenate([block.labels for block in blocks])
    found = roc_auc_score(labels, np.concatenate([ours.predict(block) for block in blocks]))

    def dense(source: Any) -> tuple[np.ndarray, np.ndarray]:
        parts = list(source.blocks())
        out = np.zeros((sum(map(len, parts)), 124), np.float32)
        at = 0
        for part in parts:
            which = np.repeat(np.arange(at, at + len(part)), np.diff(part.sparse.starts))
            out[which, part.sparse.indices] = part.sparse.values
            at += len(part)
        return out, np.concatenate([part.labels for part in parts])

    values, targets = dense(train)
    dataset = lightgbm.Dataset(values, (targets > 0).astype(float), params={"verbose": -1})
    peer = lightgbm.train({"objective": "binary", "verbose": -1, "num_threads": 1}, dataset, 60)
    reference = roc_auc_score(labels, peer.predict(dense(test)[0]))
    assert found > 0.903
    assert abs(found - reference) < 0.002
