"""`fit`: one task, one strategy, some workers, one run.

Light to import: what a run needs besides, be it to look at its options, is imported when there is one, while the
process that workers come from imports the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.errors import UserError, limits_named, named_arguments
from manyhands.places.local.template import expect, warm
from manyhands.places.place import Place, find_place
from manyhands.strategies.registry import entry_of
from manyhands.strategy import Strategy

if TYPE_CHECKING:
    from manyhands.engine.kernel_task import AnyTask
    from manyhands.engine.options import Options
    from manyhands.engine.run import Run
    from manyhands.engine.training import Keeping, Kept


@named_arguments
@limits_named()
def fit(
    task: AnyTask,
    strategy: str | Strategy = "allreduce",
    *,
    workers: int | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    rounds: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    out: str | Path | None = None,
    resume: bool = False,
    options: Options | None = None,
    cluster: str | Place | None = None,
) -> Run:
    """Train `task` with `strategy` on `workers` processes of this host (default: one), and return what came out.

    Under torchrun every process that calls `fit` is one worker, and all return the same weights, history and summary;
    rank 0 keeps the run, the others print nothing but errors. So it is with TF_CONFIG set, or under `manyhands role`,
    where a process is the role that the cluster specification gives it.

    `steps` counts global batches; `epochs` says the same in passes over the data (default: one); `federated` is counted
    in `rounds`. `device` is `cpu`, or `cuda` for one GPU per worker in turn. With `out`, the run is kept in that
    directory, and `resume=True` continues from its newest good checkpoint to the weights that an uninterrupted run
    would have. With `cluster`, Ray starts the processes: `ray` for one of this run's own, `auto` for the one that runs
    here, or its address; or the place of that name in `manyhands.places.registry` does.

    Raises UserError for what makes no sense, NonFinite when the loss breaks, and WorkerFailed naming the first worker
    that failed; when it returns or raises, no worker is left; the template process stays for the next call.
    """
    chosen = Strategy.parse(strategy)
    if resume and out is None:
        raise UserError("resume=True needs out=, the directory of the run to continue")
    if chosen.facts.kernels:
        import_module("manyhands.native.warming").prepare(*chosen.facts.kernels)
    place = find_place(cluster)
    if place.forks:
        # before all that is imported here: the workers wait for it
        await_workers(chosen, compiled=getattr(task, "compiled", False))
    from manyhands.engine.device import check_device
    from manyhands.engine.options import Options

    options = options or Options()
    options.security()  # a bad certificate is reported before anything is trained
    if not place.changes_size:
        fixed = options.min_workers is None or chosen.facts.continues_with_fewer
        if options.max_workers is not None or (chosen.facts.can_change_workers and not fixed):
            raise UserError("min_workers and max_workers are for a cluster; give cluster= as well")
    from manyhands.engine.placed_run import RequestedRun, spoken_by
    from manyhands.engine.request import Length, Request

    length, device = Length(steps=steps, epochs=epochs, rounds=rounds), check_device(device)
    with spoken_by(place.leads):
        chosen, count = place.resolve(chosen, workers)
        request = Request.make(task, chosen, count, length, seed, options, device)
    run: Run = place.run(RequestedRun(request=request, out=out, resume=resume))
    return run


def fit_or_kept(
    task: AnyTask,
    strategy: Strategy,
    *,
    workers: int,
    epochs: int,
    seed: int,
    options: Options,
    keep: Keeping | None,
    is_result: Callable[[Kept], bool] = lambda _: True,
) -> Run | Kept:
    """`fit`, or after a signal the last checkpoint of a kept run, if it `is_result`; else the signal's exception."""
    from manyhands.engine.training import last_kept
    from manyhands.places.local.signals import signal_of

    out = keep.out if keep is not None else None
    resume = keep is not None and keep.resume
    try:
        return fit(
            task, strategy, workers=workers, epochs=epochs, seed=seed, out=out, resume=resume, options=options
        )
    except (KeyboardInterrupt, SystemExit) as stop:
        kept = last_kept(out, task, strategy) if out is not None and signal_of(stop) is not None else None
        if kept is None or not is_result(kept):
            raise
        return kept


def await_workers(strategy: Strategy, modules: Sequence[str] = (), *, compiled: bool = False) -> None:
    """Import what workers need, and `modules`, in the template process that they will be forked from; returns at once.

    `fit` calls it first; a caller that reads data before `fit` calls it before reading.
    """
    if strategy.forks_workers(compiled=compiled) and find_place().forks:
        expect((*entry_of(strategy.word).modules, *modules))
        warm()
