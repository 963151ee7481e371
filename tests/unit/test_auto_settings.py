"""`auto` as a value: what it chooses among, and what stands for it where nothing can be tried."""

from __future__ import annotations

import pytest

from manyhands.errors import UserError
from manyhands.facts import Machines
from manyhands.interop.own_loop.connect import choose, in_own_loop
from manyhands.strategies.auto.strategy import Auto
from manyhands.strategy import Strategy


def candidates(text: str, workers: int) -> list[str]:
    auto = Strategy.parse(text)
    assert isinstance(auto, Auto)
    assert str(auto) == text
    return [str(one) for one in auto.candidates(Machines(per_host=workers)) or []]


def test_settings_that_are_auto_are_chosen_and_the_others_stay() -> None:
    found = candidates("pipeline stages=auto microbatches=8 schedule=gpipe", 4)
    assert found == [
        "pipeline microbatches=8 schedule=gpipe",
        "pipeline stages=4 microbatches=8 schedule=gpipe",
    ]
    assert candidates("ps servers=auto consistency=async", 2) == [
        "ps consistency=async",
        "ps servers=2 consistency=async",
    ]
    several = candidates("allreduce algorithm=auto buckets=auto", 4)
    assert len(several) == len(set(several)) > 20


def test_any_strategy_is_no_list() -> None:
    auto = Strategy.parse("auto must=sync tries=2")
    assert isinstance(auto, Auto)
    assert auto.candidates(Machines(per_host=4)) is None
    assert str(auto) == "auto must=sync tries=2"


def test_a_loop_of_ones_own_has_mirrored() -> None:
    assert str(in_own_loop(Strategy.parse("auto"))) == "mirrored"
    assert str(in_own_loop(Strategy.parse("central"))) == "central"
    with pytest.raises(UserError, match="stages=auto does not support a loop of your own"):
        choose(in_own_loop(Strategy.parse("pipeline stages=auto")), [range(2)])


def test_a_setting_that_the_strategy_has_not_is_rejected_as_ever() -> None:
    with pytest.raises(UserError, match="mirrored has no setting 'algorithm'"):
        Strategy.parse("mirrored algorithm=auto")
