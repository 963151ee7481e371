"""Imported by the template process that workers are forked from: loads the kernels that all strategies use.

They are loaded by being compiled for their types or called for no bytes; nothing here computes. Where they are not
compiled yet, workers do that themselves.
"""

from __future__ import annotations

from manyhands.native import hashing
from manyhands.native.cache_folder import cache_folder
from manyhands.native.group import reduction_kernels
from manyhands.native.warming import missing_jobs
from manyhands.observe.record import event_ring

if cache_folder() is not None and not missing_jobs("fit"):
    event_ring.warm()
    hashing.warm()
    reduction_kernels.warm()
    reduction_kernels.warm_double()
