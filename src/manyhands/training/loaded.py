"""Imported by a process that others are forked from: kernels that workers of every strategy run, loaded once for all.

They are loaded by being compiled for their types or called for no bytes; nothing here computes. Where they are not
compiled yet, workers do that themselves.
"""

from __future__ import annotations

from manyhands.compiled.place import cache_folder
from manyhands.compiled.warming import missing_jobs
from manyhands.group import kernels
from manyhands.memory import hashing
from manyhands.record import ring

if cache_folder() is not None and not missing_jobs("fit"):
    ring.warm()
    hashing.warm()
    kernels.warm()
    kernels.warm_double()
