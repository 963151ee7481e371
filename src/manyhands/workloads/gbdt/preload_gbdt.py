"""Imported by the process that workers are forked from: what grows trees, and its kernels, loaded once for all.

They are loaded by being called for no rows, in this thread; nothing computes. Where they are not compiled yet, workers
do that themselves.
"""

from __future__ import annotations

from importlib import import_module

from manyhands.native.cache_folder import cache_folder
from manyhands.native.warming import missing_jobs
from manyhands.workloads.gbdt import histogram_kernels, split_kernels

import_module("manyhands.workloads.gbdt.task")
if cache_folder() is not None and not missing_jobs("gbdt"):
    histogram_kernels.warm()
    split_kernels.warm()
