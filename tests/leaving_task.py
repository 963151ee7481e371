"""A task whose servers die while they leave their shards at the end, one after the other.

Every process of a run imports this module, since the task's functions travel by name. LEAVING_FOLDER names the run's
directory's parent: `first` there lets the first server that has left its shards be killed then, and `second` lets the
next one be killed as soon as the launcher has noted a death, before it has left anything. Each happens once.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import equality
import manyhands as mh
from assassin import events
from manyhands.strategies.ps.live.server_process import _Server

_NOTED_S = 30.0


def task() -> mh.Task:
    """The awkward model, with this module in every process."""
    return replace(equality.make_task(equality.OPTIMIZERS["sgd"]), loss=_loss)


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return equality.loss(model, batch)


def _is_ordered(what: str) -> bool:
    folder = Path(os.environ["LEAVING_FOLDER"])
    try:
        (folder / what).rename(folder / f"{what}-{os.getpid()}")
    except FileNotFoundError:
        return False
    return True


def _may_die(self: _Server, wanted: Any) -> None:
    if _is_ordered("first"):
        _leave(self, wanted)
        os.kill(os.getpid(), signal.SIGKILL)
    if _is_ordered("second"):
        out, until_s = Path(os.environ["LEAVING_FOLDER"]) / "run", time.monotonic() + _NOTED_S
        while not any(event["event"] == "died" for event in events(out)):
            if time.monotonic() > until_s:
                raise TimeoutError("the launcher has noted no death")
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    _leave(self, wanted)


_leave = _Server._leave
_Server._leave = _may_die  # type: ignore[method-assign]
