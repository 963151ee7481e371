"""What the live-fault soak trains, and the deliberately broken builds that prove its oracle.

Every process of a run imports this module, since the task's functions travel by name: so a run whose environment
names a breakage gets it in its servers and workers, while the product knows nothing of it.

    LIVEFAULTS_FOLDER    where the harness leaves `go` (nothing more will be struck: hurry), `raise` (whichever server
                         takes the next step fails, once), `stop` (whichever worker computes next stops itself) and
                         `die-leaving` (the first server that is asked for its shards at the end is killed)
    LIVEFAULTS_BREAKAGE  one of `BREAKAGES`
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import equality
import manyhands as mh
from manyhands.strategies.ps.live.payloads import Gradients
from manyhands.strategies.ps.live.server_process import _Server
from manyhands.strategies.ps.shard_replica import ServerCore, ShardReplica
from manyhands.strategies.ps.shard_store import ShardStore

_QUICK_STEPS, _QUICK_S, _SLOW_S = 25, 0.01, 0.6
_calls = 0


def task(consistency: str) -> mh.Task:
    """The awkward model, slowed down so that there is time to strike; its scheduler is where a server may fail."""
    optimizer = "momentum" if consistency == "sync" else "sgd"
    made = equality.make_task(equality.OPTIMIZERS[optimizer])
    return replace(made, loss=_loss, scheduler=_scheduler)


def _folder() -> Path:
    return Path(os.environ["LIVEFAULTS_FOLDER"])


def _loss(model: Any, batch: Any) -> torch.Tensor:
    """A process begins quickly, so that strikes meet messages on their way, and then waits for the last of them."""
    global _calls
    _calls += 1
    if _is_ordered("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    quick = _calls <= _QUICK_STEPS or (_folder() / "go").exists()
    time.sleep(_QUICK_S if quick else _SLOW_S)
    return equality.loss(model, batch)


def _scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)


def _rate(step: int) -> float:
    if step and _is_ordered("raise"):
        raise RuntimeError("this server was told to fail")
    return 1.0


def _is_ordered(what: str) -> bool:
    """Whether the harness wants something of somebody, which nobody else has taken upon itself yet."""
    try:
        (_folder() / what).rename(_folder() / f"{what}-{os.getpid()}")
    except FileNotFoundError:
        return False
    return True


def _may_die_leaving(self: _Server, wanted: Any) -> None:
    if _is_ordered("die-leaving"):
        os.kill(os.getpid(), signal.SIGKILL)
    _leave(self, wanted)


_leave = _Server._leave
_Server._leave = _may_die_leaving  # type: ignore[method-assign]


# ── broken builds ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _acknowledge_early() -> None:
    """A backup that says that it has what it has not: a failover loses what was acknowledged."""
    real = ShardReplica._take_forward

    def lie(self: ShardReplica, message: Any, sender: int) -> Any:
        if message.sequence % 3:
            return real(self, message, sender)
        self.core.sequence += 1
        return [self._forwarded_to(sender)]

    ShardReplica._take_forward = lie  # type: ignore[method-assign]


def _do_not_apply() -> None:
    """A server that says that it has taken a step which it has not."""
    real = ShardStore.apply

    def lazy(self: ShardStore, contributions: Any, rate: float = 1.0, batches: int = 1) -> None:
        real(self, () if self._batches == 20 else contributions, rate, batches)

    ShardStore.apply = lazy  # type: ignore[method-assign]


def _look_before_fencing() -> None:
    """A server that wants every gradient, also of those whose slot is another's by now."""

    def greedy(self: ServerCore, message: Any) -> bool:
        return True

    def of(self: Gradients, *arguments: Any, **options: Any) -> Any:
        found = real(self, *arguments, **options)
        if found is None:
            raise RuntimeError("the gradient did not come")
        return found

    real = Gradients.of
    Gradients.of = of  # type: ignore[method-assign]
    ServerCore.keeps = greedy  # type: ignore[method-assign]


def _leave_a_process() -> None:
    """A process of the run that leaves the session of its role, and so outlives it."""
    subprocess.Popen(["sleep", "120"], start_new_session=True)


BREAKAGES: dict[str, Callable[[], None]] = {
    "acknowledge early": _acknowledge_early,
    "do not apply": _do_not_apply,
    "look before fencing": _look_before_fencing,
    "leave a process": _leave_a_process,
}

_breakage = os.environ.get("LIVEFAULTS_BREAKAGE")
if _breakage:
    BREAKAGES[_breakage]()
