"""View of a run that may not have begun: a page can be opened before its directory exists."""

from __future__ import annotations

from pathlib import Path

from manyhands.errors import UserError
from manyhands.observe.analyse.follow import RunFollower
from manyhands.observe.analyse.run_view import Gather
from manyhands.observe.analyse.view import RunView

__all__ = ["ComingRun", "existing_run"]


def existing_run(path: Path) -> RunFollower:
    """Return a follower of the run in `path`; UserError where there is none."""
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path} holds no run (there is no config.json); name the directory of a run, as in runs/digits"
        )
    return RunFollower(path)


class ComingRun:
    """Follows the run in `path` once it exists; until then it is shown as starting."""

    def __init__(self, path: Path, task: str, strategy: str, workers: int = 1) -> None:
        self._path = path
        self._before = Gather(task=task, strategy=strategy, workers=workers).view(0)
        self._follower: RunFollower | None = None

    def poll(self) -> RunView:
        """Return the current view; call from one thread at a time."""
        if self._follower is None:
            if not (self._path / "config.json").exists():
                return self._before
            self._follower = RunFollower(self._path)
        return self._follower.poll()
