"""Traces that workers took with `torch.profiler`, as `TorchProfiler` and `--profile` leave them in a folder."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from manyhands.errors import UserError, format_bytes

INPUT: Final = "manyhands: input"
EXCHANGE: Final = "manyhands: exchange"
"""What a worker calls these spans of its host in a trace."""

_NAME = re.compile(r"worker-([0-9]{1,6})\.json")
_MOST_BYTES: Final = 1 << 30  # of one file; three steps of a large model are tens of megabytes


def read_traces(folder: Path) -> dict[int, Sequence[Mapping[str, Any]]]:
    """The events of each worker that has a trace; UserError names a folder without one, or a file that is none."""
    files = sorted(folder.glob("worker-*.json")) if folder.is_dir() else []
    found = {int(match[1]): file for file in files if (match := _NAME.fullmatch(file.name))}
    if not found:
        raise UserError(
            f"{folder} has no trace worker-0.json; give the folder of `manyhands train --profile`"
        )
    return {worker: _events(file) for worker, file in sorted(found.items())}


def _events(file: Path) -> list[Mapping[str, Any]]:
    if file.stat().st_size > _MOST_BYTES:
        raise UserError(f"{file} has more than {format_bytes(_MOST_BYTES)}; trace fewer steps")
    try:
        trace = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{file} is not a trace of torch.profiler: it is no JSON; trace the run again"
        ) from error
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    if not isinstance(events, list):
        raise UserError(
            f"{file} is not a trace of torch.profiler: it has no traceEvents; trace the run again"
        )
    return [event for event in events if isinstance(event, dict)]
