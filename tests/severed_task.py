"""A task one of whose workers is killed between two of its messages to two shards.

Every process of a run imports this module, since the task's functions travel by name. SEVERED names a folder and a
number: the worker of slot 1 dies by SIGKILL, once, when so many messages of its update 3 (pushes, and the reads behind
them) have left.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import equality
import manyhands as mh
from manyhands.strategies.ps.ps_messages import Push, Read
from manyhands.transport.hub.hub import Hub

_UPDATE = 3


def task() -> mh.Task:
    """The awkward model, with this module in every process."""
    return replace(equality.make_task(equality.OPTIMIZERS["sgd"]), loss=_loss)


def _loss(model: Any, batch: Any) -> torch.Tensor:
    return equality.loss(model, batch)


def acted(task: mh.Task) -> mh.Task:
    """Any task, with this module in every process."""
    return replace(task, loss=partial(_passed, task.loss))


def _passed(loss: Any, model: Any, batch: Any) -> Any:
    return loss(model, batch)


def _is_of_update(message: Any) -> bool:
    if not isinstance(message, Push | Read) or message.slot != 1:
        return False
    return message.clock == (_UPDATE if isinstance(message, Push) else _UPDATE + 1)


def _left(folder: str) -> int:
    """How many messages of the update have left, with this one; each leaves a file, so that nobody dies twice."""
    number = len(os.listdir(folder)) + 1
    with open(os.path.join(folder, str(number)), "x"):
        return number


_send = Hub.send


def _send_and_die(hub: Hub, member: int, message: Any, payload: Sequence[Any] = ()) -> bool:
    taken = _send(hub, member, message, payload)
    if "SEVERED" in os.environ and _is_of_update(message):
        hub.send_off()  # death may come before the next message: nothing waits for it
        folder, _, after = os.environ["SEVERED"].rpartition(":")
        if _left(folder) == int(after):
            os.kill(os.getpid(), signal.SIGKILL)
    return taken


Hub.send = _send_and_die  # type: ignore[method-assign]
