"""The files of the package that one step passes, as a profiler of the worker's thread sees it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import manyhands

SOURCE = Path(manyhands.__file__).parent


class Tracer:
    """Lists the files with a call, in order of their first one, between one `mark` and the next."""

    def __init__(self, to: Path, first: int, last: int) -> None:
        self._to, self._first, self._last = to, first, last
        self._marks = 0
        self._steps: list[dict[str, None]] = []

    def mark(self) -> None:
        """A step begins: the one before it is complete."""
        self._marks += 1
        if self._marks > self._last:
            sys.setprofile(None)
            if self._marks == self._last + 1:
                self._to.write_text(json.dumps([list(files) for files in self._steps]))
        elif self._marks >= self._first:
            self._steps.append({})
            sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            name = frame.f_code.co_filename
            if name.startswith(str(SOURCE)):
                self._steps[-1].setdefault(str(Path(name).relative_to(SOURCE)))


def passed(steps: list[list[str]]) -> list[str]:
    """The files that every traced step passes, in the order of the first one."""
    always = set.intersection(*map(set, steps))
    return [name for name in steps[0] if name in always]
