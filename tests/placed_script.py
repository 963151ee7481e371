"""What every process of a run does that somebody else started: several calls of `fit`, one after the other.

placed_script.py equal DIRECTORY            runs that must come out alike; prints `<name> <digest> <rows> <path>`;
                                            and one of `central` whose last worker is killed
placed_script.py trouble DIRECTORY          runs that must fail; prints `<name>: <error>`, and `<name> took: <seconds>`
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhands as mh
from manyhands.engine.dynamo import defer

defer()  # every process would import torch's compiler, which takes as long as all its runs, and nothing is compiled
STEPS = 6
EQUAL = ("allreduce", "local steps=2", "sharded", "pipeline stages=2")
RANK = int(os.environ.get("RANK", "0"))
CALLS = [0]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def loss(of: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    samples, wanted = batch
    return nn.functional.mse_loss(of(samples), wanted)


def task(measure: Callable[[nn.Module, tuple[Tensor, Tensor]], Tensor] = loss) -> mh.Task:
    chance = torch.Generator().manual_seed(3)
    data = TensorDataset(*(torch.randn(64, wide, generator=chance).double() for wide in (8, 2)))
    return mh.Task(
        name="toy",
        model=model,
        loss=measure,
        data=data,
        evaluation=data,
        batch_size=8,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    )


def options(timeout_s: float = 60.0) -> mh.Options:
    return mh.Options(
        timeout_s=timeout_s, insecure=True, progress="none", checkpoint_every=2, resume_command=""
    )


def digest(run: mh.Run) -> str:
    values = [value.double().flatten() for value in run.model.state_dict().values()]
    return hashlib.sha256(torch.cat(values).numpy().tobytes()).hexdigest()[:16]


def say(*words: object) -> None:
    os.write(1, f"{' '.join(map(str, words))}\n".encode())  # in one piece, whoever else writes


def equal(directory: Path) -> None:
    for strategy in EQUAL:
        run = mh.fit(task(), strategy, steps=STEPS, options=options())
        say("equal", strategy.replace(" ", "-"), digest(run), len(run.history), run.path)
        if strategy.startswith("local"):
            torch.save(run.model.state_dict(), directory / f"local-{RANK}.pt")
    out = directory / f"rank-{RANK}"  # no file system in common
    mh.fit(task(), "allreduce", steps=STEPS // 2, out=out, options=options())
    run = mh.fit(task(), "allreduce", steps=STEPS, out=out, resume=True, options=options())
    say("equal", "resumed", digest(run), len(run.history), run.path)
    out = directory / f"central-{RANK}"
    mh.fit(task(), "central", steps=STEPS // 2, out=out, options=options())
    run = mh.fit(task(), "central", steps=STEPS, out=out, resume=True, options=options())
    say("equal", "central", digest(run), len(run.history), run.path)
    torch.save(run.model.state_dict(), directory / f"central-{RANK}.pt")
    expect("hogwild", lambda: mh.fit(task(), "hogwild", steps=STEPS, options=options()))
    kill = at_third(lambda: os.kill(os.getpid(), signal.SIGKILL), 3)
    expect("killed", lambda: mh.fit(task(kill), "central", steps=100, options=options()))


def expect(name: str, call: Callable[[], object]) -> None:
    began = time.monotonic()
    try:
        call()
    except Exception as error:
        say(f"{name}:", str(error).replace("\n", "¶"))
    else:
        say(f"{name}: came to its end")
    say(f"{name} took:", f"{time.monotonic() - began:.1f}")


def at_third(deed: Callable[[], object], rank: int) -> Callable[..., Tensor]:
    CALLS[0] = 0

    def measure(of: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        CALLS[0] += torch.is_grad_enabled()  # in a step, and not in the trial of the loss
        if CALLS[0] == 3 and rank == RANK:
            deed()
        return loss(of, batch)

    return measure


def trouble(directory: Path) -> None:
    def kept(name: str, **arguments: object) -> Callable[[], mh.Run]:
        return lambda: mh.fit(**{"task": task(), "out": directory / name, "options": options()} | arguments)

    def fail() -> None:
        raise ZeroDivisionError("a defect of the task")

    elastic = kept("b", strategy="allreduce elastic=yes", steps=STEPS)
    expect("workers", kept("a", strategy="allreduce", workers=7, steps=STEPS))
    expect("elastic", lambda: say("elastic digest:", digest(elastic())))
    expect("steps", kept("c", strategy="allreduce", steps=STEPS + RANK))
    expect("raises", kept("d", strategy="allreduce", steps=100, task=task(at_third(fail, 1))))
    kill = at_third(lambda: os.kill(os.getpid(), signal.SIGKILL), 2)
    expect("killed", kept("e", strategy="allreduce", steps=100, task=task(kill)))
    expect("missing", kept("f", strategy="allreduce", steps=STEPS, options=options(timeout_s=1.0)))


if __name__ == "__main__":
    {"equal": equal, "trouble": trouble}[sys.argv[1]](Path(sys.argv[2]))
