"""Requests for actions: which are open, which answers nobody waits for any more."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch

from manyhands.workloads.rl.inference_requests import ActionRequests, groups_of, request_tensors
from manyhands.workloads.rl.rollouts import RolloutSpec

SPEC = RolloutSpec(length=4, observation_shape=(2,), observation_dtype=torch.float32)
SPINS = 1


def made(rows: int = 3, actors: int = 2) -> ActionRequests:
    groups = groups_of(rows, 2)
    given = request_tensors(SPEC, groups, actors)
    room = [torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize + 8, np.uint8)) for shape, dtype in given]
    tensors = (
        one[: prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for one, (shape, dtype) in zip(room, given, strict=True)
    )
    return ActionRequests(groups, actors, tensors)


@pytest.mark.parametrize(
    ("rows", "groups"), [(1, [range(1)]), (2, [range(1), range(1, 2)]), (5, [range(3), range(3, 5)])]
)
def test_an_actor_has_two_groups_where_it_has_two_environments(rows: int, groups: list[range]) -> None:
    assert groups_of(rows, 2) == groups


def test_open_requests_are_found_in_one_order_until_they_are_closed() -> None:
    requests = made()
    (_, second), (third, _) = requests.of_actors
    assert requests.wait(0.0) == []
    third.ask(9, 2, {})
    second.ask(8, 4, {0: np.array([5.0, 6.0])})
    assert requests.wait(1.0) == [1, 2]
    found = second.read()
    assert (found.ticket, found.row, found.places.tolist(), found.finals.tolist()) == (8, 4, [0], [[5, 6]])
    assert third.read()[1:3] == (9, 2)
    second.close()
    assert second.wait(SPINS, lambda: False)
    assert requests.wait(1.0) == [2]


def test_what_a_lost_actor_had_asked_is_not_what_its_successor_asks() -> None:
    (request, _), _ = made().of_actors
    request.ask(3, 1, {})
    lost = request.read()
    assert request.is_still(lost)
    request.close()  # as the actor is lost
    assert not request.is_still(lost)
    request.ask(3, 0, {})
    assert not request.is_still(lost)
    assert request.is_still(request.read())


def test_who_waits_stops_when_nobody_answers_any_more() -> None:
    requests = made()
    request = requests.of_actors[0][0]
    request.ask(0, 0, {})
    assert not request.wait(SPINS, lambda: False)  # the learner is gone
    requests.end()
    assert not request.wait(SPINS, lambda: True)
