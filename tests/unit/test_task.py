"""A Task and the options of built-in tasks are checked when made: every mistake is one sentence."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn

from manyhands.errors import UserError
from manyhands.task import Task
from manyhands.workloads.builtin_task import BuiltinTask
from manyhands.workloads.task_options import Option, check_options, option
from manyhands.workloads.tasks import TASKS, build
from manyhands.workloads.tasks.digits import accuracy


def good(**changes: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "model": lambda: nn.Linear(2, 1),
        "loss": lambda model, batch: model(batch).mean(),
        "data": torch.zeros(4, 2),
        "optimizer": torch.optim.SGD,
    }
    return fields | changes


def test_the_five_fields_suffice() -> None:
    task = Task(**good(batch_size=2))
    assert (task.batch_size, task.evaluation, dict(task.metrics), task.name) == (2, None, {}, "task")
    assert Task(**good()).batch_size == 64
    assert Task(**good()).sparse == {}
    assert list(Task(**good(sparse={"weight": lambda batch: batch})).sparse) == ["weight"]


@pytest.mark.parametrize("missing", ["model", "loss", "data", "optimizer"])
def test_a_task_needs_its_main_fields(missing: str) -> None:
    fields = good()
    del fields[missing]
    with pytest.raises(TypeError, match=missing):
        Task(**fields)


def test_fields_are_given_by_name_and_stay() -> None:
    with pytest.raises(TypeError):
        Task(*good().values())  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        Task(**good()).batch_size = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": nn.Linear(2, 1)},
            "model is an instance of Linear; it must be a function without arguments",
        ),
        ({"model": None}, "model is None; it must be a function"),
        ({"loss": nn.MSELoss()}, r"loss is an instance of MSELoss; it must be a function \(model, batch\)"),
        ({"loss": 3}, "loss is 3; it must be"),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)])},
            "optimizer is an instance of SGD; it must be a function",
        ),
        ({"optimizer": "adam"}, "optimizer is 'adam'; it must be"),
        ({"scheduler": 0.9}, "scheduler is 0.9; it must be a function"),
        ({"collate": "stack"}, "collate is 'stack'; it must be a function"),
        ({"batch_size": 0}, "batch_size=0 must be an integer of at least 1"),
        ({"batch_size": 2.5}, "batch_size=2.5"),
        ({"batch_size": True}, "batch_size=True"),
        ({"name": ""}, "name is ''"),
        ({"data": []}, "data is empty"),
        ({"data": (torch.zeros(3), torch.zeros(2))}, r"data\[0\] has 3, data\[1\] has 2"),
        ({"evaluation": []}, "evaluation is empty"),
        ({"metrics": [accuracy]}, "metrics is .* it must be a dict"),
        ({"metrics": {"m": 1}, "evaluation": torch.zeros(1, 2)}, r"metrics\['m'\] is 1; it must be"),
        ({"metrics": {1: accuracy}, "evaluation": torch.zeros(1, 2)}, r"metrics\[1\] is"),
        (
            {"metrics": {"loss": accuracy}, "evaluation": torch.zeros(1, 2)},
            "'loss', which is reserved",
        ),
        ({"metrics": {"m": accuracy}}, "metrics are m, but evaluation is None"),
        ({"sparse": ["weight"]}, r"sparse is \['weight'\]; it must be a dict of parameter name"),
        ({"sparse": {"weight": 3}}, r"sparse\['weight'\] is 3; it must be .*rows that the batch reads"),
        ({"sparse": {1: len}}, r"sparse\[1\] is"),
    ],
)
def test_a_mistake_is_named_with_its_value_and_what_is_allowed(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Task(**good(**changes))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        *((name, "it must be that of one file, without a directory")
          for name in ("", ".", "..", "a/b", "/a", "a\0", 3)),
        *((name, "which a run uses itself; choose another")
          for name in ("config.json", "summary.json", "metrics.jsonl", "run.lock", "checkpoints", "events")),
    ],
)  # fmt: skip
def test_files_have_names_of_their_own(name: Any, said: str) -> None:
    assert Task(**good(files={"tokenizer.json": "{}"})).files == {"tokenizer.json": "{}"}
    with pytest.raises(UserError, match=re.escape(f"files has the name {name!r}") + f"[;,] {said}"):
        Task(**good(files={name: "text"}))


def test_a_task_of_closures_travels_by_cloudpickle() -> None:
    scale = 3.0
    task = Task(**good(loss=lambda model, batch: scale * model(batch).sum(), data={"x": torch.ones(4, 2)}))
    copy: Task = cloudpickle.loads(cloudpickle.dumps(task))
    model = copy.model()
    assert torch.equal(copy.loss(model, torch.ones(1, 2)), 3.0 * model(torch.ones(1, 2)).sum())
    assert torch.equal(copy.data["x"], task.data["x"])


def test_the_registry_names_every_task_and_its_length() -> None:
    assert list(TASKS) == ["digits", "mnist", "gpt", "bert", "recurrent", "rl", "line"]
    for name, entry in TASKS.items():
        assert entry.name == name
        assert (entry.epochs is None) != (entry.steps is None)
        assert all(option.help for option in entry.options)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"no built-in task 'digit'; allowed: digits, .*; did you mean 'digits'"
    ):
        build("digit")
    with pytest.raises(UserError, match=r"task 'gpt' has no option 'contxt'; .* did you mean 'context'\?"):
        build("gpt", contxt=3)
    with pytest.raises(UserError, match="task 'mnist' needs path: directory of the four idx files"):
        build("mnist")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digits", {"batch_size": 0}, "batch_size is 0; it must be an integer of at least 1"),
        ("digits", {"batch_size": "64"}, "batch_size is '64'; it must be an integer"),
        ("digits", {"batch_size": True}, "batch_size is True"),
        ("digits", {"learning_rate": 0}, "learning_rate is 0.0; it must be a number above 0"),
        ("digits", {"learning_rate": math.nan}, "learning_rate is nan"),
        ("digits", {"width": 6}, "width is 6; it must be a multiple of 4"),
        ("digits", {"split_seed": -1}, "split_seed is -1"),
        ("mnist", {"path": 3}, "path is 3; it must be a path"),
        ("mnist", {"path": "/nowhere"}, "path is '/nowhere'; it must be a directory"),
        ("gpt", {"width": 30, "heads": 4}, "heads is 4; it must divide width, which is 30"),
        ("gpt", {"tied": 1}, "tied is 1; it must be true or false"),
        ("gpt", {"path": "/nowhere/text"}, "/nowhere/text cannot be read: No such file"),
    ],
)
def test_options_are_checked(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(name, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    where: Path = option(..., "a required path")
    count: int = option(3, "a count", at_least=1)
    rate: float = option(0.5, "a rate", above=0)
    on: bool = option(False, "a switch")
    word: str | None = option(None, "may be absent")

    def __post_init__(self) -> None:
        check_options(self)


CHOICES = BuiltinTask(
    name="choices", help="for this test", options_type=Choices, make=lambda _: Task(**good()), steps=1
)


def test_options_describe_themselves() -> None:
    shown = [
        (option.name, option.kind, option.default, option.required, option.help) for option in CHOICES.options
    ]
    assert shown == [
        ("where", Path, None, True, "a required path"),
        ("count", int, 3, False, "a count"),
        ("rate", float, 0.5, False, "a rate"),
        ("on", bool, False, False, "a switch"),
        ("word", str, None, False, "may be absent"),
    ]
    assert Choices(where="here", rate=2) == Choices(where=Path("here"), rate=2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("where", "a/b", Path("a/b")),
        ("count", "7", 7),
        ("rate", "1e-3", 1e-3),
        ("on", "yes", True),
        ("on", "False", False),
        ("word", "hello", "hello"),
    ],
)
def test_options_are_read_from_text(name: str, text: str, value: object) -> None:
    assert _option(name).parse(text) == value


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("count", "seven", "count is 'seven'; it must be an integer of at least 1"),
        ("count", "0", "count is 0; it must be an integer of at least 1"),
        ("rate", "inf", "rate is inf; it must be a number above 0"),
        ("on", "maybe", "on is 'maybe'; it must be true or false"),
    ],
)
def test_text_that_is_no_value_is_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _option(name).parse(text)


def _option(name: str) -> Option:
    return next(option for option in CHOICES.options if option.name == name)


def test_a_builtin_task_has_one_length() -> None:
    with pytest.raises(ValueError, match="exactly one must be given"):
        dataclasses.replace(CHOICES, epochs=2)
