"""Sliced convolutions and pools, by channels and by rows, against torch's whole ones in float64; and what they send."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from manyhands.errors import UserError
from sliced import SLICES, hold_against_the_whole, numbers, reduced, words

CONVOLUTIONS = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 3, "stride": 2},
    {"kernel_size": (3, 5), "padding": (2, 1), "dilation": 2},
    {"kernel_size": 1, "stride": 3, "bias": False},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
]


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("settings", CONVOLUTIONS, ids=str)
def test_convolutions_by_channels(slices: int, settings: dict[str, Any]) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 7, **settings), nn.ReLU(), nn.MaxPool2d(2, 1), nn.Conv2d(7, 5, **settings)
    )
    assert words(model) == {"0": "channels_out units=7", "3": "channels_in units=7"}
    hold_against_the_whole(model, numbers(2, 3, 17, 19), slices)
    hold_against_the_whole(
        nn.Conv2d(3, 7, **settings), numbers(2, 3, 9, 11), slices, {"": "channels_out gather"}
    )


@pytest.mark.parametrize("slices", SLICES)
def test_convolutions_of_other_dimensions(slices: int) -> None:
    hold_against_the_whole(
        nn.Sequential(nn.Conv1d(2, 5, 3), nn.Tanh(), nn.Conv1d(5, 3, 2)), numbers(2, 2, 9), slices
    )
    hold_against_the_whole(nn.Conv3d(2, 5, 2), numbers(2, 2, 4, 3, 5), slices)


@pytest.mark.parametrize("slices", SLICES)
def test_convolution_with_group_normalisation_then_a_flat_head(slices: int) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3),
        nn.GroupNorm(4, 12),
        nn.ReLU(),
        nn.Conv2d(12, 8, 3),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3),
        nn.MaxPool2d(2),
        nn.Sequential(nn.Flatten(), nn.Dropout(0.0)),
        nn.Linear(6 * 4, 5),
    )
    assert words(model) == {
        "0": "channels_out units=4",
        "1": "inside units=4 channels",
        "3": "channels_in units=4",
        "6": "channels_out units=6",
        "8.1": "inside units=6 channels",
        "9": "row units=6",
    }
    hold_against_the_whole(model, numbers(2, 3, 11, 11), slices)


def test_groups_too_few_for_the_slices_are_normalised_whole() -> None:
    model = nn.Sequential(nn.Conv2d(3, 12, 3), nn.GroupNorm(2, 12), nn.ReLU(), nn.Conv2d(12, 8, 3))
    assert words(model, 3) == {"0": "channels_out gather", "3": "channels_out gather"}
    hold_against_the_whole(model, numbers(2, 3, 7, 7), 3)


ROWS: dict[str, nn.Module] = {
    "halo of one": nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1)),
    "strides": nn.Sequential(
        nn.Conv2d(2, 3, 3, stride=2, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 3, stride=3)
    ),
    "wide": nn.Sequential(nn.Conv2d(2, 3, (7, 3), padding="same", dilation=(2, 1)), nn.Conv2d(3, 2, (8, 2))),
    "groups": nn.Sequential(nn.Conv2d(2, 4, 3, groups=2, bias=False), nn.Conv2d(4, 4, 1, stride=2, groups=4)),
    "pools": nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.MaxPool2d(3, 2, padding=1, dilation=2),
        nn.Sequential(nn.Dropout(0.0), nn.AvgPool2d(2, 1, padding=1), nn.GroupNorm(2, 4, affine=False)),
    ),
}


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("name", ROWS)
def test_layers_by_rows_fetch_their_halo(slices: int, name: str) -> None:
    model = ROWS[name]
    model.tensor_plan = {"*": "spatial"}
    plan = words(model)
    assert plan["0"] == "spatial scatter"
    assert list(plan.values())[-1] == "spatial gather"
    model.tensor_plan = None
    hold_against_the_whole(model, numbers(2, 2, 23, 9), slices, plan)


def test_halo_of_a_row_is_all_that_travels_forward() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1))
    (first, second, third) = hold_against_the_whole(
        model, numbers(1, 2, 17, 9), 3, {"0": "spatial scatter", "2": "spatial gather"}
    )
    row = 9 * 8
    gathered = [2 * 2 * rows * row for rows in (6, 6, 5)]
    assert [one.traffic["0"].forward.bytes_sent for one in (first, second, third)] == [
        2 * row,
        4 * row,
        2 * row,
    ]
    assert [
        one.traffic["2"].forward.bytes_sent - all_of_it
        for one, all_of_it in zip((first, second, third), gathered, strict=True)
    ] == [3 * row, 6 * row, 3 * row]


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (
            nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
            "padding_mode=circular needs rows from the opposite",
        ),
        (nn.AvgPool2d(3, padding=1, count_include_pad=False), "count_include_pad=False needs the position"),
        (nn.MaxPool2d(2, ceil_mode=True), "ceil_mode=True reaches beyond"),
        (nn.Conv2d(2, 2, 3), "module '0' has an image of 1 rows, too few for 2 slices"),
    ],
)
def test_what_cannot_be_sliced_by_rows_is_refused(module: nn.Module, sentence: str) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        hold_against_the_whole(nn.Sequential(module), numbers(2, 2, 3, 5), 2, {"0": "spatial scatter gather"})


@pytest.mark.parametrize("slices", [2, 4])
def test_traffic_of_convolutions_is_that_of_the_formulas(slices: int) -> None:
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 3, padding=1))
    image = 3 * 2 * 8 * 8 * 8
    for one in hold_against_the_whole(model, numbers(3, 2, 8, 8), slices):
        assert (one.traffic["0"].forward.bytes_sent, one.traffic["0"].backward.bytes_sent) == (
            0,
            reduced(image, slices),
        )
        assert (one.traffic["2"].forward.bytes_sent, one.traffic["2"].backward.bytes_sent) == (
            reduced(image, slices),
            0,
        )
    plan = {"0": "spatial scatter", "2": "spatial gather"}
    for index, one in enumerate(hold_against_the_whole(model, numbers(3, 2, 8, 8), slices, plan)):
        edges = 1 if index in (0, slices - 1) else 2
        row = 3 * 8 * 8
        rows, weights = 8 // slices, [reduced(count * 8, slices) for count in (144, 8, 144, 2)]
        first, second = one.traffic["0"], one.traffic["2"]
        assert first.forward.bytes_sent == edges * 2 * row
        assert first.backward.bytes_sent == edges * 2 * row + sum(weights[:2]) + (slices - 1) * rows * 2 * row
        assert second.forward.bytes_sent == edges * 8 * row + (slices - 1) * rows * 2 * row
        assert second.backward.bytes_sent == edges * 8 * row + sum(weights[2:])
