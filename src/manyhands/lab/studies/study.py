"""What a study is: a question, its options, and an experiment that answers it with a table, charts and sentences.

A study measures what this machine can show, and extrapolates the rest; its sentences say which is which. To add one: a
module with a `Study`, and a line in `registry.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

O = TypeVar("O")  # noqa: E741 - options


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyTable:
    """One table of an answer, in words that are ready to print."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyChart:
    """One picture of an answer."""

    title: str
    picture: str  # SVG, as the functions of `observe.draw.charts` make it
    explained: str = ""  # a sentence below it


@dataclass(frozen=True, kw_only=True)
class StudyAnswer:
    """What a study found."""

    sentences: tuple[str, ...]  # the answer first; what was measured and what is extrapolated, with its error
    tables: tuple[StudyTable, ...]
    charts: tuple[StudyChart, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)  # all numbers, for `--json`


@dataclass(frozen=True, kw_only=True)
class Study(Generic[O]):
    """A question that `manyhands study NAME` answers."""

    name: str
    question: str  # one sentence, which ends with a question mark
    options_type: type[O]  # a frozen dataclass whose fields are made by `workloads.task_options.option`
    run: Callable[
        [O, Callable[[str], None]], StudyAnswer
    ]  # the second argument reports each stage of the work
    processes: Sequence[str] = ()  # what it starts, for its help text
