import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.errors import UserError
from manyhands.observe.remarks import Manner, manner_of
from manyhands.strategy import (
    STRATEGIES,
    AllReduce,
    Central,
    Hogwild,
    Mirrored,
    Single,
    Strategy,
    Tensor,
    parse_size,
    show_size,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("single", Single()),
        ("mirrored", Mirrored()),
        ("mirrored buckets=4MiB", Mirrored(buckets=4 << 20)),
        ("allreduce", AllReduce()),
        ("central", Central()),
        ("central buckets=4MiB", Central(buckets=4 << 20)),
        ("allreduce algorithm=ring", AllReduce(algorithm="ring")),
        ("hogwild", Hogwild()),
        ("hogwild order=locked", Hogwild(order="locked")),
        ("hogwild order=turns hands=threads", Hogwild(order="turns", hands="threads")),
        ("tensor", Tensor()),
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
    assert str(Strategy.parse("  allreduce   buckets=25MiB  algorithm=direct ")) == "allreduce"


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
        ("hogwild order=lock", ["unknown order 'lock'", "free, locked, turns", "did you mean 'locked'?"]),
        ("hogwild hands=fibers", ["unknown hands 'fibers'", "auto, threads, processes"]),
        ("hogwild lock=1", ["no setting 'lock'", "order, hands"]),
        ("tensor dims=2", ["no setting 'dims'", "it takes none"]),
        ("single workers=2", ["no setting 'workers'", "it takes none"]),
        ("allreduce algorithm=ring group=2", ["hierarchical"]),
        ("allreduce algorithm=hierarchical group=x", ["'x' is not a whole number"]),
    ],
)
def test_errors_name_the_word_and_the_mend(text: str, parts: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        Strategy.parse(text)
    for part in parts:
        assert part in str(caught.value)


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


def test_every_strategy_says_what_it_is() -> None:
    for word, kind in STRATEGIES.items():
        assert kind.word == word
        assert kind.about


@pytest.mark.parametrize(
    "text",
    [
        *(word for word in STRATEGIES if word != "single"),  # nobody waits there
        "allreduce algorithm=ring",
        *(
            f"ps consistency={policy}"
            for policy in ("sync", "bounded:2", "async", "softsync:2", "aware:async")
        ),
    ],
)
def test_whoever_gives_advice_knows_from_the_text_whether_all_wait_for_all(text: str) -> None:
    if text != "tensor":  # whose workers record nothing
        assert (manner_of(text) is Manner.SYNC) == Strategy.parse(text).stepwise
