"""Models served in stages and slices: the answers of the whole model, whatever process of a worker is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import manyhands as mh
import own_models
from kills import await_that
from manyhands.serving.batching import BatchLimits
from manyhands.serving.model_parts import cut_predictor
from manyhands.serving.model_server import ModelServer, ServeOptions
from manyhands.serving.opening import open_predictor
from manyhands.serving.own_predictor import OwnPredictor
from manyhands.strategy import Strategy
from manyhands.workloads.predictor import Predictor
from served_load import asked, connected, ready, under_load


def of_rows(model: Callable[[], nn.Module]) -> mh.Task:
    """A task whose model takes four numbers."""
    return mh.Task(
        name="rows",
        model=model,
        loss=lambda model, batch: model(batch).square().mean(),
        data=torch.arange(32.0).reshape(8, 4) / 32,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )


FLAT = of_rows(lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)))
TEXTS = ["ABC", "XYZA", "QRS", "LM", "GHIJK"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    mh.fit(own_models.cnn(), "single", steps=20, out=folder / "cnn")
    mh.fit(own_models.transformer(), "single", steps=60, out=folder / "transformer")
    mh.fit(FLAT, "single", steps=1, out=folder / "flat")
    mh.fit(mh.tasks.build("gpt", layers=2, context=16), "single", steps=2, out=folder / "gpt")
    return folder


def opened(runs: Path, name: str) -> Predictor[Any]:
    makes = {"cnn": own_models.cnn, "transformer": own_models.transformer, "flat": lambda: FLAT}
    return open_predictor(runs / name, makes[name]() if name in makes else None)


def values_for(name: str) -> list[Any]:
    if name == "flat":
        return [[0.5, 0.25, -1, 1], [1, 2, 3, 4]]
    if name == "cnn":
        return list((own_models.images(6, seed=3)[0].float() / 16).tolist())
    return (
        TEXTS
        if name == "transformer"
        else [{"prompt": text, "tokens": 8, "temperature": 0} for text in TEXTS]
    )


@pytest.mark.parametrize(
    ("name", "strategy", "precision"),
    [
        ("cnn", "pipeline stages=2", "fp32"),
        ("transformer", "pipeline stages=3", "fp32"),
        ("transformer", "pipeline stages=2", "bf16"),
        ("transformer", "pipeline stages=2", "int8"),
        ("flat", "pipeline stages=2 cuts=1", "bf16"),
        ("gpt", "pipeline stages=2 cuts=2", "fp32"),
        ("cnn", "tensor slices=2", "fp32"),
        ("transformer", "tensor slices=2", "fp32"),
        ("gpt", "tensor slices=2", "fp32"),
        ("cnn", "pipeline stages=1", "fp32"),
        ("cnn", "tensor slices=1", "fp32"),
    ],
)
def test_parts_answer_what_the_whole_model_does(runs: Path, name: str, strategy: str, precision: str) -> None:
    values = values_for(name)
    whole, predictor = opened(runs, name), opened(runs, name)
    whole.precision = predictor.precision = precision
    whole.prepare()
    expected = whole.answers(whole.inputs(values))
    cut_predictor(predictor, Strategy.parse(strategy))
    assert not list(predictor.model.parameters()), "this process keeps no weights"
    with ModelServer(predictor, name, ServeOptions(workers=1)) as server:
        connection = connected(server)
        status, said = asked(server, values, connection)
        assert status == 200, said
        if name in ("cnn", "flat"):
            np.testing.assert_allclose(said["answers"], expected, rtol=1e-5)
        else:
            assert [one.get("next", one.get("text")) for one in said["answers"]] == [
                one.get("next", one.get("text")) for one in expected
            ]
        if name == "transformer":
            status, said = asked(server, ["A" * (own_models.CONTEXT + 1)], connection)
            assert (status, "a shape that it takes is 5" in said["error"]) == (400, True), said
            assert asked(server, values, connection)[0] == 200, "the next request is answered"
        connection.close()
        assert server.view().deaths == 0


def test_an_input_that_no_slice_can_take_ends_no_worker(runs: Path) -> None:
    task = replace(own_models.cnn(), read_input=torch.tensor, example_input=torch.zeros(1, 8, 8).tolist())
    predictor = open_predictor(runs / "cnn", task)
    cut_predictor(predictor, Strategy.parse("tensor slices=2"))
    with ModelServer(predictor, "sides", ServeOptions(workers=1)) as server:
        connection = connected(server)
        for channels, expected in ((2, 400), (1, 200), (3, 400), (1, 200)):
            status, said = asked(server, [torch.zeros(channels, 8, 8).tolist()], connection)
            assert status == expected, said
            if status == 400:
                assert f"input 0 has shape {channels}×8×8 (float32), which the model cannot" in said["error"]
        connection.close()
        assert server.view().deaths == 0, server.view().notes


def later_parts() -> list[int]:
    """Children of this process that hold a part other than the first; the kernel shows 15 letters of a name."""
    found = []
    for child in {
        pid for file in Path("/proc/self/task").glob("*/children") for pid in file.read_text().split()
    }:
        try:
            if Path(f"/proc/{child}/comm").read_text().strip().endswith((", stage", ", slice")):
                found.append(int(child))
        except OSError:  # it has ended since
            continue
    return found


@pytest.mark.parametrize("strategy", ["pipeline stages=2", "tensor slices=2"])
def test_a_request_in_a_part_that_dies_or_stops_is_computed_by_the_next(runs: Path, strategy: str) -> None:
    """One worker, whose second process is stopped, so that it has the request when it is killed, or silent."""
    predictor = opened(runs, "transformer")
    cut_predictor(predictor, Strategy.parse(strategy))
    options = ServeOptions(workers=1, batches=BatchLimits(wait_s=0.0, deadline_s=45.0))
    with ModelServer(predictor, "letters", options) as server, ThreadPoolExecutor() as clients:
        for silent in (False, True):
            await_that(lambda: len(ready(server)) == 1, "the worker is ready")
            (part,) = later_parts()
            os.kill(part, signal.SIGSTOP)
            connection = connected(server)
            asking = clients.submit(asked, server, ["XY", "ABC"], connection)
            await_that(lambda: server.view().workers[0].state == "computing", "it has the request")
            if not silent:
                os.kill(part, signal.SIGKILL)
            status, said = asking.result(timeout=240)
            connection.close()
            assert status == 200, said
            assert [one["next"] for one in said["answers"]] == ["Z", "D"]
            assert part not in later_parts()
        notes = server.view().notes
        assert any("does not respond" in note for note in notes), notes
        assert server.view().deaths == 2


def test_a_stage_that_is_too_slow_is_replaced_and_its_request_reported(runs: Path) -> None:
    predictor = opened(runs, "transformer")
    cut_predictor(predictor, Strategy.parse("pipeline stages=2"))
    options = ServeOptions(workers=1, batches=BatchLimits(wait_s=0.0, deadline_s=1.0))
    with ModelServer(predictor, "letters", options) as server:
        (part,) = later_parts()
        os.kill(part, signal.SIGSTOP)
        connection = connected(server)
        status, said = asked(server, ["XY"], connection)
        assert (status, "was not computed within 1 s" in said["error"]) == (503, True), said
        await_that(lambda: part not in later_parts() and len(ready(server)) == 1, "another worker")
        connection.close()
        status, said = asked(server, ["XY"], connection)
        assert (status, said["answers"][0]["next"]) == (200, "Z")
        connection.close()


@pytest.mark.parametrize("strategy", ["pipeline stages=2", "tensor slices=2"])
def test_a_part_that_is_killed_takes_its_worker_with_it_and_nothing_is_lost_or_mixed(
    runs: Path, strategy: str
) -> None:
    predictor = opened(runs, "transformer")
    cut_predictor(predictor, Strategy.parse(strategy))
    texts = [chr(65 + number % 26) + chr(65 + (number + 1) % 26) for number in range(240)]
    expected = [chr(65 + (number + 2) % 26) for number in range(240)]
    options = ServeOptions(workers=2, batches=BatchLimits(wait_s=0.001, deadline_s=30.0))
    with ModelServer(predictor, "letters", options) as server:
        for number, (answer,) in under_load(
            server, [[text] for text in texts], kills=1, victim=lambda: min(later_parts())
        ):
            assert answer["next"] == expected[number]
        await_that(lambda: len(ready(server)) == 2, "both workers are ready")
        os.kill(ready(server)[0], signal.SIGKILL)  # the first process of a worker
        connection = connected(server)
        for text, letter in zip(texts[:20], expected, strict=False):
            status, said = asked(server, [text], connection)
            assert (status, said["answers"][0]["next"]) == (200, letter)
        connection.close()
        assert any("stage 1" in note or "slice 1" in note for note in server.view().notes), (
            server.view().notes
        )
    assert not later_parts()


@pytest.mark.parametrize(
    ("name", "strategy", "said"),
    [
        ("cnn", "mirrored", "served in parts by pipeline or tensor; leave it out"),
        ("cnn", "pipeline stages=9", "is a chain of 7 layers; use fewer stages"),
        ("cnn", "pipeline stages=2 cuts=1,2", "2 parts need 1 cuts"),
        ("cnn", "pipeline stages=2 tensor=2", "a served model has stages only; leave tensor out"),
        ("cnn", "pipeline stages=2 memory=1MiB", "a served model has stages only; leave memory out"),
        ("cnn", "pipeline stages=2 microbatches=8", "a served model has stages only; leave microbatches out"),
        ("cnn", "tensor slices=2 link=tcp", "a served model has slices only; leave link out"),
        ("cnn", "tensor slices=2 data=2", "a served model has slices only; leave data out"),
        ("cnn", "tensor", "say how many slices"),
    ],
)
def test_what_cannot_be_cut_gets_a_sentence(runs: Path, name: str, strategy: str, said: str) -> None:
    with pytest.raises(mh.errors.UserError, match=said):
        cut_predictor(opened(runs, name), Strategy.parse(strategy))


class Reversed(nn.Module):
    """One whose chain is not what it computes."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, last)

    def chain(self) -> list[nn.Module]:
        return [self.two, self.one]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.two(self.one(x))
        return found


@pytest.mark.parametrize(("last", "why"), [(4, "not close"), (3, "after 1 of 2 layers: RuntimeError")])
def test_a_chain_that_is_not_the_model_is_not_served(last: int, why: str) -> None:
    predictor = OwnPredictor(Reversed(last), of_rows(lambda: Reversed(last)))
    with pytest.raises(
        mh.errors.UserError, match=f"Reversed: its chain does not compute what it does.*{why}"
    ):
        cut_predictor(predictor, Strategy.parse("pipeline stages=2"))
