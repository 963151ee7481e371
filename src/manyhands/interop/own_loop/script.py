"""A launched worker: the user's script, run as `python script.py` would run it, in a process of the local cluster."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhands.places.external import process_place
from manyhands.places.local.context import RoleContext
from manyhands.strategy import Strategy

__all__ = ["Script", "run_script"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What every worker of a launch runs."""

    path: Path
    arguments: tuple[str, ...]
    strategy: Strategy | None
    device: str | None


def run_script(context: RoleContext, script: Script) -> Mapping[str, Any]:
    """The whole life of a worker; says how many groups it joined."""
    path = str(script.path)
    sys.argv = [path, *script.arguments]
    sys.path.insert(0, str(script.path.resolve().parent))
    process_place.launched = launched = process_place.Launched(
        context=context, strategy=script.strategy, device=script.device
    )
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            raise
    finally:
        process_place.launched = None
    return {"joins": launched.joins}
