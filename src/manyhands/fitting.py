"""`fit`: one task, one strategy, some workers, one run.

Light to import: what a run needs besides is imported when there is one, while the process that workers come from
imports the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.cluster.template import expect, warm
from manyhands.device import check_device
from manyhands.errors import UserError
from manyhands.onray.cluster import RayCluster
from manyhands.registry import STRATEGIES
from manyhands.strategy import Strategy
from manyhands.training.options import Options

if TYPE_CHECKING:
    from manyhands.kernel import AnyTask
    from manyhands.run import Run

__all__ = ["fit"]


def fit(
    task: AnyTask,
    strategy: str | Strategy = "allreduce",
    *,
    workers: int = 1,
    steps: int | None = None,
    epochs: int | None = None,
    seed: int = 0,
    device: str = "cpu",
    out: str | Path | None = None,
    resume: bool = False,
    options: Options | None = None,
    cluster: str | RayCluster | None = None,
) -> Run:
    """Train `task` with `strategy` on `workers` processes of this host, or of a cluster, and return what came out.

    `steps` counts global batches; `epochs` says the same in passes over the data (default: one). `device` is `cpu`, or
    `cuda` for one GPU per worker in turn. With `out`, the run is kept in that directory, and `resume=True` goes on
    from its newest good checkpoint to the weights that an uninterrupted run would have. With `cluster`, Ray starts the
    processes: `ray` for one of this run's own, `auto` for the one that runs here, or its address.

    Raises UserError for what makes no sense, NonFinite when the loss breaks, and WorkerFailed naming the first worker
    that failed; when it returns or raises, no worker is left; the template process stays for the next call.
    """
    chosen = Strategy.parse(strategy)
    if resume and out is None:
        raise UserError("resume=True needs out=, the directory of the run to go on with")
    options = options or Options()
    options.security()  # a bad certificate is told before anything starts
    ray_cluster = RayCluster.parse(cluster) if cluster is not None else None
    if ray_cluster is None and chosen.forks_workers(compiled=getattr(task, "compiled", False)):
        expect(STRATEGIES[chosen.word].modules)
        warm()  # before all that is imported here: the workers wait for it
    from manyhands.session import run_session
    from manyhands.training.request import Request

    length = (steps, epochs)
    request = Request.make(task, chosen, workers, length, seed, options, check_device(device))
    if ray_cluster is not None:
        from manyhands.onray.lead import fit_on_ray

        return fit_on_ray(request, ray_cluster, out, resume)
    return run_session(request, out, resume)
