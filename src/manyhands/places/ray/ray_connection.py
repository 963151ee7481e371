"""This process's connection to a Ray cluster: the one it has, one that runs somewhere, or one of its own."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from manyhands.errors import UserError, first_line

__all__ = ["connected", "ray_module"]


def ray_module() -> Any:
    """Ray, imported when it is first needed; UserError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise UserError(
            f"cluster: Ray is not installed here ({error}); pip install 'manyhands[ray]'"
        ) from error
    return ray


@contextmanager
def connected(cluster: str, cpus: int) -> Iterator[Any]:
    """Ray's module, connected to the cluster; one of this process's own has `cpus` CPUs, and ends with this.

    A connection that is there already, as inside a Ray job's task or after the user's own `ray.init`, is used and left
    as it is.
    """
    ray = ray_module()
    if ray.is_initialized():
        yield ray
        return
    arguments: dict[str, Any] = {"logging_level": logging.WARNING}
    if cluster == "ray" and "RAY_ADDRESS" not in os.environ:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        arguments |= {"address": "local", "num_cpus": cpus, "include_dashboard": False}
    else:
        arguments |= {"address": "auto" if cluster == "ray" else cluster}
    try:
        with _same_imports() if arguments["address"] == "local" else nullcontext():
            ray.init(**arguments)
    except Exception as error:  # where its processes do not come up, Ray raises just that
        with suppress(Exception):
            ray.shutdown()  # those that did
        raise UserError(_why_not(cluster, error, arguments["address"])) from error
    try:
        yield ray
    finally:
        ray.shutdown()


def _why_not(cluster: str, error: Exception, address: str) -> str:
    """A sentence for whatever Ray raised."""
    if address == "local":
        return (
            f"cluster={cluster}: Ray could not start on this host ({first_line(error)}); its logs in "
            "/tmp/ray/session_latest/logs say why; leave cluster out to run without Ray"
        )
    return (
        f"cluster={cluster}: no Ray cluster can be reached there ({first_line(error)}); start one with "
        "`ray start --head`, or give cluster=ray for one of this run's own"
    )


@contextmanager
def _same_imports() -> Iterator[None]:
    """While this is open, processes that are started here find the modules that this one finds."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
