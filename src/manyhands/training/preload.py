"""Imported by the process that workers are forked from: what workers of every strategy import.

What those of one strategy need besides, the registry says.

Nothing here may compute; see `cluster.forking`.
"""

from __future__ import annotations

from importlib import import_module

from manyhands.training.dynamo import defer

defer()
import_module("numpy.ma")  # numba asks of the first array that a kernel gets whether it is one of these
for _name in ("cluster.role", "training.loaded"):
    import_module(f"manyhands.{_name}")
