import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import manyhands
from manyhands.cli.main import app
from manyhands.engine.training import training_class
from manyhands.errors import UserError
from manyhands.facts import Answer, Split, Truth, Waits
from manyhands.strategies.allreduce.strategy import AllReduce, Mirrored
from manyhands.strategies.central.strategy import Central
from manyhands.strategies.common.grid.grid_layout import Grid
from manyhands.strategies.hogwild.strategy import Hogwild
from manyhands.strategies.registry import ALIASES, STRATEGIES
from manyhands.strategies.sharded.strategy import Sharded
from manyhands.strategies.single.strategy import Single
from manyhands.strategies.tensor.strategy import Tensor
from manyhands.strategy import Strategy, parse_size, show_size


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("single", Single()),
        ("mirrored", Mirrored()),
        ("mirrored buckets=8MiB", Mirrored(buckets=8 << 20)),
        ("allreduce", AllReduce()),
        ("central", Central()),
        ("central buckets=8MiB", Central(buckets=8 << 20)),
        ("sharded", Sharded()),
        ("sharded link=tcp", Sharded(link="tcp")),
        ("allreduce algorithm=ring", AllReduce(algorithm="ring")),
        ("hogwild", Hogwild()),
        ("hogwild order=locked", Hogwild(order="locked")),
        ("hogwild order=turns hands=threads", Hogwild(order="turns", hands="threads")),
        ("tensor", Tensor()),
        ("tensor slices=2 data=3", Tensor(slices=2, data=3)),
        (
            "allreduce algorithm=hierarchical buckets=1GiB group=4",
            AllReduce(algorithm="hierarchical", buckets=1 << 30, group=4),
        ),
    ],
)
def test_text_form_parses_and_prints_back(text: str, value: Strategy) -> None:
    assert Strategy.parse(text) == value
    assert str(value) == text
    assert Strategy.parse(value) is value


def test_defaults_are_not_printed_and_spacing_does_not_matter() -> None:
    assert str(Strategy.parse("  allreduce   buckets=4MiB  algorithm=direct ")) == "allreduce"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "alreduce",
            [
                "unknown strategy 'alreduce'",
                "allowed: single, mirrored, allreduce",
                "did you mean 'allreduce'?",
            ],
        ),
        ("", ["empty"]),
        ("allreduce algorithm=rign", ["'rign'", "did you mean 'ring'?", "butterfly"]),
        ("allreduce bucket=1MiB", ["no setting 'bucket'", "did you mean 'buckets'?"]),
        ("allreduce algorithm", ["'algorithm' needs a value", "algorithm=direct"]),
        ("allreduce algorithm=ring algorithm=tree", ["given twice"]),
        ("mirrored buckets=25Mib5", ["'25Mib5'", "25MiB"]),
        ("mirrored buckets=0", ["buckets=0"]),
        ("central buckets=0", ["buckets=0"]),
        ("sharded link=pigeon", ["unknown link 'pigeon'", "shared, tcp"]),
        ("sharded codec=bf16", ["codec=bf16", "gathered uncompressed"]),
        ("hogwild order=lock", ["unknown order 'lock'", "free, locked, turns", "did you mean 'locked'?"]),
        ("hogwild hands=fibers", ["unknown hands 'fibers'", "auto, threads, processes"]),
        ("hogwild lock=1", ["no setting 'lock'", "order, hands"]),
        ("tensor dims=2", ["no setting 'dims'", "slices, data, link"]),
        ("single workers=2", ["no setting 'workers'", "device_memory, offload"]),
        ("allreduce algorithm=ring group=2", ["hierarchical"]),
        ("allreduce algorithm=hierarchical group=x", ["group=x: 'x' is not an integer"]),
        ("ps servers=-1", ["servers=-1 must be an integer of at least 1"]),
        ("pipeline stages=-2", ["stages=-2 must be an integer of at least 1"]),
        ("pipeline data=-1", ["data=-1: must be at least 1, or 0"]),
        ("tensor slices=-1", ["slices=-1: must be at least 1, or 0"]),
    ],
)
def test_errors_name_the_word_and_the_fix(text: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        Strategy.parse(text)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(("word", "ours"), ALIASES.items())
def test_words_of_other_frameworks_lead_to_ours(word: str, ours: str) -> None:
    assert word not in STRATEGIES
    assert str(Strategy.parse(ours)) == ours
    with pytest.raises(
        UserError, match=re.escape(f"unknown strategy {word!r}; the nearest strategy is {ours!r}")
    ):
        Strategy.parse(word)


@given(st.integers(min_value=1, max_value=1 << 50))
def test_sizes_round_trip(num_bytes: int) -> None:
    assert parse_size(show_size(num_bytes)) == num_bytes


def test_sizes_in_decimal_and_binary_units() -> None:
    assert [parse_size(t) for t in ("1kB", "1KiB", "2.5MiB", "3gb", "17")] == [
        1000,
        1024,
        2621440,
        3 * 10**9,
        17,
    ]


@pytest.mark.parametrize("word", STRATEGIES)
def test_every_strategy_says_what_it_is_and_has_a_training(word: str) -> None:
    kind = STRATEGIES[word].load_value()
    assert kind.word == word
    assert getattr(manyhands, kind.__name__) is kind
    assert kind.__name__ in dir(manyhands)
    assert kind.about
    assert isinstance(kind.truth, Truth)
    assert training_class(Strategy.parse(word)) is STRATEGIES[word].load_training()


def test_tensor_splits_dimensions_of_word_vectors_and_layers_of_networks() -> None:
    tensor = Strategy.parse("tensor")
    assert tensor.split is Split.DIMENSIONS
    assert not tensor.facts.splits_batches, "every worker sees all samples"
    assert tensor.facts.waits_for is Waits.ALL
    assert tensor.facts.promises.worker_dies.answer is Answer.NO
    for workers in (1, 2, 5):
        tensor.check(workers, device="cpu")
        tensor.check(workers, device="cpu", compiled=True)
        assert Tensor().grid(workers) == Grid(slices=workers)
    assert Tensor(slices=2).grid(6) == Grid(slices=2, data=3)
    assert Tensor(data=2).grid(6) == Grid(slices=3, data=2)


@pytest.mark.parametrize(
    ("text", "workers", "compiled", "sentence"),
    [
        (
            "tensor slices=2",
            3,
            False,
            "workers=3: must be a multiple of 2 (2 slices); use workers=2 or workers=4",
        ),
        ("tensor slices=2 data=2", 2, False, "workers=2: 2 slices × 2 replicas would use 4; use workers=4"),
        ("tensor data=2", 5, False, "workers=5: must be a multiple of data=2; use workers=4 or workers=6"),
        ("tensor data=2", 1, False, "workers=1: must be a multiple of data=2; use workers=2"),
        ("tensor data=2", 4, True, "strategy tensor data=2: word vectors are split over all workers"),
        ("tensor link=tcp", 4, True, "strategy tensor link=tcp: word vectors are split over all workers"),
    ],
)
def test_workers_that_do_not_fill_the_slices_are_refused(
    text: str, workers: int, compiled: bool, sentence: str
) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}"):
        Strategy.parse(text).check(workers, device="cpu", compiled=compiled)


@pytest.mark.parametrize(
    ("text", "waits_for", "stepwise"),
    [
        ("single", Waits.NOBODY, True),
        ("mirrored", Waits.ALL, True),
        ("allreduce algorithm=ring", Waits.ALL, True),
        ("central", Waits.ALL, True),
        ("sharded", Waits.ALL, True),
        ("tensor", Waits.ALL, True),
        ("hogwild order=turns", Waits.NOBODY, False),
        ("ps", Waits.ALL, True),
        ("ps consistency=sync:1", Waits.ALL, True),
        ("ps consistency=bounded:0", Waits.ALL, True),
        ("ps consistency=aware:sync", Waits.ALL, True),
        ("ps consistency=bounded:2", Waits.LAGGARDS, False),
        ("ps consistency=aware:bounded:2", Waits.LAGGARDS, False),
        ("ps consistency=softsync:2", Waits.NOBODY, False),
        ("ps consistency=async", Waits.NOBODY, False),
    ],
)
def test_strategy_knows_whom_its_workers_wait_for(text: str, waits_for: Waits, stepwise: bool) -> None:
    strategy = Strategy.parse(text)
    assert strategy.facts.waits_for is waits_for
    assert strategy.facts.stepwise is stepwise
    assert bool(strategy.facts.straggler_advice) == (waits_for is not Waits.NOBODY)


@pytest.mark.parametrize(
    ("consistency", "fewest"),
    [
        ("sync", 1),
        ("sync:2", 3),
        ("aware:sync:2", 3),
        ("bounded:5", 1),
        ("async", 1),
        ("softsync:1", 1),
        ("softsync:9", 9),
        ("damped:softsync:9", 9),
    ],
)
def test_a_consistency_that_would_be_another_with_so_few_workers_is_refused(
    consistency: str, fewest: int
) -> None:
    strategy = Strategy.parse(f"ps consistency={consistency}")
    strategy.check(fewest, device="cpu")
    if fewest > 1:
        sentence = (
            f"consistency={consistency} workers={fewest - 1}: it needs at least {fewest} workers; start more, or give "
            "a smaller number in consistency="
        )
        with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
            strategy.check(fewest - 1, device="cpu")


@pytest.mark.parametrize(
    "words",
    [
        ["train", "digits", "--workers", "3", "--strategy", "ps consistency=sync:3"],
        ["simulate", "digits", "--workers", "3", "--strategy", "ps consistency=sync:3"],
        ["compare", "digits", "--workers", "3", "--strategies", "allreduce; ps consistency=sync:3"],
        ["scaling", "digits", "--workers", "1,3", "--strategy", "ps consistency=sync:3"],
    ],
    ids=lambda words: words[0],
)
def test_every_command_says_that_a_consistency_needs_more_workers(words: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert isinstance(done.exception, UserError)
    assert "it needs at least 4 workers" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_strategy_that_several_hosts_cannot_have_is_refused_with_the_reason() -> None:
    sentence = (
        "strategy=hogwild supports one host, but there are 2 (with ranks [0, 1], [2]): "
        "its workers write to one memory"
    )
    with pytest.raises(UserError, match=re.escape(sentence)):
        Strategy.parse("hogwild").across_hosts([[0, 1], [2]])


@pytest.mark.parametrize("text", ["pipeline", "tensor", "sharded", "single device_memory=1MiB"])
def test_compiling_is_refused_before_anything_starts_where_no_worker_has_a_whole_model(text: str) -> None:
    task = manyhands.Task(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)),
        loss=lambda model, batch: model(batch).sum(),
        data=torch.zeros(4, 2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    workers = 1 if text.startswith("single") else 2
    with pytest.raises(UserError, match=r"^compile: .*; leave it out$"):
        manyhands.fit(task, text, workers=workers, steps=1, options=manyhands.Options(compile=True))
    assert not Strategy.parse(text.split()[0] if workers == 1 else "mirrored").facts.cannot_compile
