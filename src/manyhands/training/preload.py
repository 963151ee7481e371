"""Imported by the process that workers are forked from: what workers of every strategy import.

Their kernels are loaded too, once for all, by being compiled for their types or called for no bytes; nothing here may
compute (see `cluster.forking`). Where they are not compiled yet, workers do that themselves.
"""

from __future__ import annotations

from importlib import import_module

from manyhands.compiled.place import cache_folder
from manyhands.compiled.warming import missing_jobs
from manyhands.group import kernels
from manyhands.memory import hashing
from manyhands.record import ring
from manyhands.training.dynamo import defer

defer()
for _name in ("cluster.role", "training.processes", "training.worker"):
    import_module(f"manyhands.{_name}")
if cache_folder() is not None and not missing_jobs("fit"):
    ring.warm()
    hashing.warm()
    kernels.warm()
    kernels.warm_double()
