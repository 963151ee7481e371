"""A script as a run that a place gives its processes: each of them runs it, as under torchrun, and rank 0 leads.

Light to import: it travels to every process.
"""

from __future__ import annotations

import hashlib
import queue
import runpy
import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from torch._C._distributed_c10d import PrefixStore

from manyhands.errors import Aborted, ManyhandsError, UserError, first_line
from manyhands.places.external.process_place import ExternalPlace, ProcessPlace
from manyhands.places.external.run_store import comes_true
from manyhands.places.place import Command, using_place
from manyhands.strategy import Strategy

_END_S: Final = 24 * 3600.0  # what a script does after its loop may take long
_CAUSE_S: Final = 3.0


def run_as_main(script: Path, arguments: Sequence[str]) -> None:
    """Run the script as `python script.py` would; SystemExit where it ends with an error."""
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise


def script_digest(script: Path) -> str:
    return hashlib.sha256(script.read_bytes()).hexdigest()


class ScriptPlace(ExternalPlace):
    """The place of a process that runs a launched script."""

    kind = "launch"


@dataclass(frozen=True)
class ScriptRun:
    """`manyhands launch` at a place; see `places.place.PlacedRun`."""

    script: Path
    arguments: tuple[str, ...]
    _: KW_ONLY
    workers: int
    strategy: Strategy
    requested: Strategy | None  # by the launcher, else by the script or nobody
    requested_device: str | None = None

    min_workers: ClassVar[int | None] = None
    max_workers: ClassVar[int | None] = None
    commands: ClassVar[queue.SimpleQueue[Command] | None] = None
    calls_back: ClassVar[bool] = False

    @property
    def device(self) -> str:
        return self.requested_device or "cpu"

    def take_part(self, process: ProcessPlace, name: str | None = None) -> None:
        """Run the script in this process; the leader then waits until all others have."""
        del name
        placed = replace(process, strategy=self.requested, device=self.requested_device)
        store = process.open_store(_END_S)  # kept here: torch's own reference does not keep it
        ends = PrefixStore("ends", store)
        try:
            with using_place(ScriptPlace(placed)):
                run_as_main(self.script, self.arguments)
        except (Exception, SystemExit) as error:
            if not process.leads and not isinstance(error, Aborted):
                ends.set("failed", f"{process.name}: {type(error).__name__}: {first_line(error)}")
            elif process.leads and comes_true(lambda: ends.check(["failed"]), _CAUSE_S):
                raise ManyhandsError(ends.get("failed").decode()) from error
            if isinstance(error, SystemExit):
                raise ManyhandsError(f"the script ended with {error.code!r} in {process.name}") from error
            raise
        ends.set(str(process.rank), "1")
        if process.leads:
            ends.wait([str(rank) for rank in range(process.world)], timedelta(seconds=_END_S))

    def here(self) -> None:
        raise UserError("a script is started here without a cluster; leave it out")

    def for_others(self) -> Self:
        return self

    def following(self, commands: queue.SimpleQueue[Command]) -> Self:
        del commands
        return self

    def pack(self, result: Any) -> bytes:
        """Nothing: what a script has to say, it writes itself."""
        del result
        return b""

    def unpack(self, data: bytes) -> None:
        del data
