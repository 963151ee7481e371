"""A run on a remote Ray cluster, through Ray's client: a task on one of its nodes leads it.

The output of that process is shown here, as Ray does with all its tasks; the result is brought back once.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhands.data.store.portable import pack_tree, unpack_tree
from manyhands.engine.request import Request
from manyhands.engine.run import History, Run
from manyhands.errors import ManyhandsError, UserError
from manyhands.places.ray.cluster import RayCluster
from manyhands.places.ray.lead import fit_on_ray
from manyhands.places.ray.ray_connection import connected

__all__ = ["fit_on"]


def fit_on(cluster: RayCluster, request: Request, out: str | Path | None, resume: bool) -> Run:
    """Train what is asked for on a Ray cluster, led from here if that is one of its nodes; see `fit`."""
    if not cluster.is_remote:
        return fit_on_ray(request, cluster, out, resume)
    options = request.options
    if options.callbacks or options.on_rows or options.view or options.commands:
        raise UserError(
            f"cluster={cluster.address}: the run is led on the cluster, where callbacks of this process cannot be "
            "called; leave them out, or submit the script as a Ray job with cluster=auto"
        )
    with connected(cluster, cpus=1) as ray:
        leading = ray.remote(_lead_there).options(num_cpus=cluster.cpus, max_retries=0)
        there = replace(cluster, address="auto")
        wrong, came = ray.get(leading.remote(request, there, str(out) if out is not None else None, resume))
    if wrong:
        raise (UserError if wrong[0] == UserError.__name__ else ManyhandsError)(wrong[1])
    return _run_of(request, bytearray(came), out)


def _lead_there(request: Request, cluster: RayCluster, out: str | None, resume: bool) -> tuple[Any, bytes]:
    """On a node of the cluster: lead the run; what went wrong (an error's name and sentence), and what came out."""
    try:
        run = fit_on_ray(request, cluster, out, resume)
    except ManyhandsError as error:
        return (type(error).__name__, str(error)), b""
    tree = {"model": run.model.state_dict(), "summary": run.summary, "rows": list(run.history)}
    return None, b"".join(bytes(chunk) for chunk in pack_tree(tree))


def _run_of(request: Request, came: bytearray, out: str | Path | None) -> Run:
    tree = unpack_tree(came)
    model = request.plan.task.model()
    model.load_state_dict(tree["model"])
    kept = [f"the run is kept in {out} on the node of the cluster that led it"] if out is not None else []
    summary = {**tree["summary"], "notes": [*tree["summary"]["notes"], *kept]}
    return Run(model=model, history=History(tree["rows"]), summary=summary)
