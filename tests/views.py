"""Views of runs that were never run, for tests of whatever draws them."""

import math
from dataclasses import replace
from typing import Any

from manyhands.observe.analyse.run_view import Gather
from manyhands.observe.analyse.view import (
    Curve,
    Happening,
    Phase,
    Presence,
    RunView,
    ServerView,
    Shares,
    Staleness,
    TrafficView,
    WorkerView,
)


def empty_view(**changes: Any) -> RunView:
    """A run that has only just been asked for."""
    view = RunView(
        task="digits", strategy="ps servers=2", phase=Phase.STARTING, step=0, steps_asked=400, seconds=0.0, loss=None,
        samples_per_s=0.0, steps_per_s=0.0, seconds_left=None, final={}, curves=(), workers=(), servers=(), waits=(),
        staleness=Staleness(), traffic=(), epoch=0, happenings=(), warnings=(), notes=(),
    )  # fmt: skip
    return replace(view, **changes)


def starting_view(workers: int = 3, **changes: Any) -> RunView:
    """A run whose members were asked for, as it is shown from the first moment on; nobody has come yet."""
    view = Gather(task="digits", strategy="ps servers=2", steps_asked=400, workers=workers).view(0)
    return replace(view, **changes)


def run_view(step: int = 120, workers: int = 3, **changes: Any) -> RunView:
    """A run with a straggler under way, with everything that a view can hold."""
    steps = tuple(float(n) for n in range(0, step + 1, 4))
    seconds = tuple(n / 20 for n in steps)
    losses = tuple(2.3 * math.exp(-n / 60) + 0.1 for n in steps)
    evaluated = tuple(float(n) for n in range(40, step + 1, 40))
    slow = workers - 1
    view = empty_view(
        phase=Phase.RUNNING,
        step=step,
        seconds=step / 20,
        loss=losses[-1],
        samples_per_s=2560.0 + step,
        steps_per_s=20.0,
        seconds_left=(400 - step) / 20,
        final={"accuracy": 0.91, "evaluation_loss": 0.4},
        curves=(
            Curve(name="loss", steps=steps, seconds=seconds, values=losses),
            Curve(
                name="samples_per_s",
                steps=steps,
                seconds=seconds,
                values=tuple(2500 + 90 * math.sin(n) for n in steps),
            ),
            Curve(
                name="evaluation_loss",
                steps=evaluated,
                seconds=evaluated,
                values=tuple(1 / n for n in evaluated),
            ),
            Curve(
                name="accuracy",
                steps=evaluated,
                seconds=evaluated,
                values=tuple(1 - 9 / n for n in evaluated),
            ),
        ),
        workers=tuple(
            WorkerView(
                role=n,
                name=f"worker {n}",
                presence=Presence.PRESENT,
                steps=step,
                samples=step * 64,
                steps_per_s=20.0,
                compute_ms=30.0 if n == slow else 10.0,
                shares=Shares(compute=0.6, input=0.02, exchange=0.1, wait=0.28),
                recent=Shares(compute=0.9, exchange=0.1)
                if n == slow
                else Shares(compute=0.31, input=0.03, exchange=0.06, wait=0.6),
                waits_for="" if n == slow else f"worker {slow}",
                bytes_sent=1_000_000 * step,
                messages_sent=4 * step,
            )
            for n in range(workers)
        ),
        servers=(
            ServerView(
                role=32,
                name="server 0",
                presence=Presence.PRESENT,
                primary_of=(0, 1, 2),
                backup_of=(3,),
                num_bytes=140_000,
                updates=360,
                updates_per_s=60.0,
                apply_ms=0.12,
                share=0.7,
            ),
            ServerView(
                role=33,
                name="server 1",
                presence=Presence.GONE,
                primary_of=(3,),
                backup_of=(0, 1, 2),
                num_bytes=60_000,
                updates=360,
                updates_per_s=60.0,
                apply_ms=0.05,
                share=0.3,
            ),
        ),
        waits=tuple(tuple(4.2 if j == slow != i else 0.0 for j in range(workers)) for i in range(workers)),
        staleness=Staleness(histogram={0: 200, 1: 90, 2: 40, 5: 3}, mean=0.56, max=5),
        traffic=(TrafficView(wire="tcp", codec="raw", num_bytes=90_000_000, messages=1440),),
        epoch=2,
        happenings=(
            Happening(at_s=0.0, what="started", who="server 0", sentence="", epoch=1),
            Happening(
                at_s=3.25,
                what="died",
                who="server 1",
                sentence="server 1 died; server 0 took shard 3 over",
                epoch=2,
            ),
        ),
        warnings=(
            f"worker {slow} is 2.9× slower than the median since step 40: the others wait 60 % of their time",
        ),
        notes=("worker-0.bin stops at its bound",),
        best=("accuracy", 1 - 9 / max(40, step), max(40, step)),
        about=(
            ("command", "manyhands train digits --strategy 'ps servers=2' --workers 3 --steps 400"),
            ("host", "lab-7"),
            ("begun", "2026-11-17 21:52:13 UTC"),
            ("task options", "batch_size=64, learning_rate=0.004, width=16"),
            ("seed", "0"),
        ),
    )
    return replace(view, **changes)
