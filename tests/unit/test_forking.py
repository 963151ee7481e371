"""What forks of the template process leave out at their end."""

import weakref

import torch

from manyhands.places.local.forking import spare_finalizers


class Thing:
    pass


def test_a_fork_does_not_take_back_torchs_operators_and_does_all_else_at_its_end() -> None:
    library = torch.library.Library("manyhands_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    thing = Thing()
    ours = weakref.finalize(thing, print)
    theirs = [one for one in weakref.finalize._registry if one.peek()[0] is library]  # type: ignore[attr-defined]
    assert [one.atexit for one in theirs] == [True]
    spare_finalizers()
    assert [one.atexit for one in theirs] == [False]
    assert ours.atexit
    ours.detach()
    del library  # which takes it back all the same
    assert not hasattr(torch.ops.manyhands_test, "twice")
