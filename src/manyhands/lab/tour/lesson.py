"""A lesson, read from its page: what to type, what to see, and an exercise that changes one file.

    # 3. The parameter server            its number and title
    prose, ```console blocks             text to read, and commands to type: lines that begin with `$ manyhands`
    ## Exercise                          prose, and one ```python block: the file as it is, which fails
    ## Solution                          one ```diff block: the lines that leave it and those that come

A page is part of the package (`lessons/` is `docs/tour/`). Pure, but for `lessons`, which reads the pages.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Final

from manyhands.errors import UserError

_PROMPT: Final = "$ manyhands "
_FENCE: Final = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_TITLE: Final = re.compile(r"# (\d+)\. (.+)\n")
_MARK: Final = re.compile(r"^<!-- .*? -->\n?", re.MULTILINE)
_PICTURE: Final = re.compile(r"!\[([^\]]*)\]\((?:\.\./)?([^)]+)\)")
_LINK: Final = re.compile(r"\[([^\]]*)\]\([^)]+\)")
_EXERCISE, _SOLUTION = "\n## Exercise\n", "\n## Solution\n"


@dataclass(frozen=True, slots=True)
class LessonCommand:
    """Something to type."""

    arguments: tuple[str, ...]  # what follows `manyhands`

    def __str__(self) -> str:
        return _PROMPT + shlex.join(self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One page of the tour."""

    number: int
    title: str
    steps: tuple[str | LessonCommand, ...]  # what comes before the exercise: paragraphs, and what to type
    question: str  # what the exercise asks for
    exercise: str  # the file that it begins with: a script that fails until it is changed
    answer: str  # why the solution is one
    changes: tuple[tuple[str, str], ...]
    """The solution: lines of the exercise, and what stands in the place of each."""

    @property
    def solution(self) -> str:
        text = self.exercise
        for old, new in self.changes:
            if text.count(old) != 1:
                raise ValueError(
                    f"lesson {self.number}: {old!r} is {text.count(old)} times in its exercise, not once"
                )
            text = text.replace(old, new)
        return text


def read_lesson(page: str) -> Lesson:
    """A lesson from its page; ValueError says what a page lacks."""
    title = _TITLE.match(page)
    if title is None:
        raise ValueError("a lesson begins with its number and title: `# 3. The parameter server`")
    number = int(title[1])
    body, exercise, rest = page[title.end() :].partition(_EXERCISE)
    asked, solution, answered = rest.partition(_SOLUTION)
    if not exercise or not solution:
        raise ValueError(f"lesson {number} needs the parts `## Exercise` and `## Solution`")
    question, start = _one_block(asked, "python", number)
    answer, diff = _one_block(answered, "diff", number)
    lines = diff.splitlines()
    changes = list(zip(lines[::2], lines[1::2], strict=True))
    if any(old[:1] != "-" or new[:1] != "+" for old, new in changes):
        raise ValueError("a solution must be pairs of lines: one with -, then one with +")
    return Lesson(
        number=number,
        title=title[2],
        steps=tuple(_steps(body)),
        question=question,
        exercise=start,
        answer=answer,
        changes=tuple((old[1:].strip(), new[1:].strip()) for old, new in changes),
    )


def lessons() -> list[Lesson]:
    pages = (one for one in (files("manyhands.lab.tour") / "lessons").iterdir() if one.name[0].isdigit())
    return sorted((read_lesson(page.read_text("utf-8")) for page in pages), key=lambda one: one.number)


def lesson_numbered(number: int) -> Lesson:
    found = {one.number: one for one in lessons()}
    if number not in found:
        raise UserError(f"lesson {number}: there are lessons 1 to {max(found)}; `manyhands tour` lists them")
    return found[number]


def shown_in_terminal(text: str) -> str:
    """Paragraphs of a page as a terminal shows them: without marks and links, and a picture by its file's name."""
    named = _PICTURE.sub(r"Picture: \1, in docs/\2", _MARK.sub("", text))
    return _LINK.sub(r"\1", named)


def _steps(body: str) -> Iterator[str | LessonCommand]:
    end = 0
    for block in _FENCE.finditer(body):
        if block[1] != "console":
            continue
        if text := body[end : block.start()].strip():
            yield text
        end = block.end()
        for line in block[2].splitlines():
            if line.startswith(_PROMPT):
                yield LessonCommand(tuple(shlex.split(line.removeprefix(_PROMPT))))
    if text := body[end:].strip():
        yield text


def _one_block(text: str, kind: str, number: int) -> tuple[str, str]:
    blocks = [block for block in _FENCE.finditer(text) if block[1] == kind]
    if len(blocks) != 1:
        raise ValueError(f"lesson {number}: one block of {kind} is needed, but there are {len(blocks)}")
    [block] = blocks
    return (text[: block.start()] + text[block.end() :]).strip(), block[2]
