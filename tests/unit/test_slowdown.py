import pytest

from manyhands.engine.options import Slowdown
from manyhands.errors import UserError


def test_parses_the_documented_form() -> None:
    assert Slowdown.parse("worker=1,factor=5") == Slowdown(worker=1, factor=5.0)
    assert Slowdown.parse("worker=0, factor=2.5, probability=0.1") == Slowdown(
        worker=0, factor=2.5, probability=0.1
    )
    assert Slowdown.parse("worker=0,factor=2,from=400") == Slowdown(worker=0, factor=2, from_step=400)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("worker=1", "must name worker and factor"),
        ("worker=1,facto=3", "did you mean 'factor'"),
        ("worker=1,factor=fast", "not a number"),
        ("worker=1,factor=0.5", "at least 1"),
        ("worker=-1,factor=2", "negative"),
        ("worker=1,factor=2,probability=0", "above 0"),
        ("worker=1,factor=nan", "at least 1"),
        ("worker=1,factor=2,from=-1", "from=-1 must not be negative"),
        ("worker=1,factor=2,from=soon", "not a number"),
    ],
)
def test_bad_texts_are_refused_with_a_sentence(text: str, part: str) -> None:
    with pytest.raises(UserError, match=part):
        Slowdown.parse(text)


def test_only_the_named_worker_is_slow_and_by_the_factor() -> None:
    slow = Slowdown(worker=1, factor=3)
    assert slow.extra_s(seed=0, step=5, worker_rank=1, compute_s=0.25) == pytest.approx(0.5)
    assert slow.extra_s(seed=0, step=5, worker_rank=0, compute_s=0.25) == 0


def test_slows_from_its_step_on() -> None:
    slow = Slowdown(worker=1, factor=3, from_step=400)
    assert slow.extra_s(seed=0, step=399, worker_rank=1, compute_s=0.25) == 0
    assert slow.extra_s(seed=0, step=400, worker_rank=1, compute_s=0.25) == pytest.approx(0.5)


def test_probability_is_met_and_repeatable() -> None:
    slow = Slowdown(worker=0, factor=2, probability=0.1)
    steps = [slow.extra_s(seed=7, step=k, worker_rank=0, compute_s=1.0) > 0 for k in range(20_000)]
    assert steps == [slow.extra_s(seed=7, step=k, worker_rank=0, compute_s=1.0) > 0 for k in range(20_000)]
    # 20,000 draws at 0.1: the standard deviation of the mean is 0.0021
    assert abs(sum(steps) / len(steps) - 0.1) < 0.01
