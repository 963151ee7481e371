"""Typed messages in notes: what was written is read again, and anything else is refused by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import pytest

from manyhands.errors import UserError
from manyhands.places.local.control import TypedNotes
from manyhands.strategies.ps.client_core import Reason
from manyhands.strategies.ps.live import reports
from manyhands.strategies.ps.live.reports import ORDERS, REPORTS
from manyhands.strategies.ps.ps_messages import Concluded, Installed, ShardView, SlotView, Update, View
from manyhands.transport.messages import ProtocolError


class Colour(Enum):
    RED = auto()


@dataclass(frozen=True)
class Inner:
    number: int


@dataclass(frozen=True)
class Said:
    whole: int
    other: float
    text: str
    yes: bool
    colour: Colour
    pairs: tuple[tuple[int, str], ...]
    inner: tuple[Inner, ...]
    named: Mapping[int, Inner]
    perhaps: int | None = None


WORDS = TypedNotes(Said, Inner)
EXAMPLE = Said(1, 2, "three", True, Colour.RED, ((4, "five"),), (Inner(6),), {7: Inner(8)})


def through_json(words: TypedNotes, message: Any) -> Any:
    return words.read(json.loads(json.dumps(words.write(message))))


def test_what_is_written_is_read_again() -> None:
    assert through_json(WORDS, EXAMPLE) == EXAMPLE
    assert through_json(WORDS, Inner(3)) == Inner(3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kind": "Shout"}, "'Shout' must be one of Said, Inner"),
        ({"kind": "Inner"}, "Inner.*must have 8 bytes, not"),
        ({"body": "x"}, "of a Said is not hexadecimal"),
        ({"body": 3}, "of a Said is not hexadecimal"),
        ({"body": ""}, "Said.whole"),
    ],
)
def test_anything_else_is_refused_by_name(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ProtocolError, match=sentence):
        WORDS.read({**json.loads(json.dumps(WORDS.write(EXAMPLE))), **change})


def test_a_message_that_is_not_listed_is_not_written() -> None:
    with pytest.raises(UserError, match="a Colour is not a message of this protocol; use Said, Inner"):
        WORDS.write(Colour.RED)


def test_every_report_and_order_of_a_parameter_server_run_goes_through() -> None:
    view = View(
        epoch=3,
        shards=(ShardView(shard=0, epoch=3, primary=1, backup=2),),
        slots=(SlotView(slot=0, member=4),),
        retiring=(SlotView(slot=1, member=5),),
        gone=(Update(slot=2, clock=7),),
    )
    left = reports.LeftShard(shard=0, member=1, staleness=((0, 3), (1, 2)), nbytes=8, sha256="ab", version=5)
    for report in (
        reports.WorkerReady(),
        reports.WorkerReady(host="here", address="unix:z"),
        reports.ServerListens(address="unix:x"),
        reports.ShardsWelcomed(epoch=2),
        reports.StepComputed(clock=1, batch=2, part=0, parts=2, loss=0.5, share=0.5, seconds=0.1),
        reports.StepSkipped(clock=1, sentence="no number"),
        reports.Evaluated(step=3, metrics={"evaluation_loss": 0.25}),
        reports.PlaceLost(sentence="another"),
        reports.WorkerLeft(reason=Reason.FINISHED),
        reports.ShardsLeft(shards=(left,)),
        reports.Notice(sentence="so", ends_recording=True),
        Installed(shard=0, epoch=1, member=2),
        Concluded(shard=0, view=3),
    ):
        assert through_json(REPORTS, report) == report
    for order in (
        reports.ViewPublished(
            view=view,
            addresses={1: "unix:x"},
            roles={1: 4},
            workers={5: reports.WorkerReady(host="here", address="unix:z")},
        ),
        reports.PlaceGiven(slot=0, member=9),
        reports.RestoreShard(shard=1),
        reports.LeaveShards(shards=(0, 1)),
        reports.Finish(),
    ):
        assert through_json(ORDERS, order) == order
