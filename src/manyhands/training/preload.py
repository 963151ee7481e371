"""Imported by the process that workers are forked from: what workers of every strategy import.

Nothing here may compute; see `cluster.forking`.
"""

from __future__ import annotations

from importlib import import_module

from manyhands.training.dynamo import defer

defer()
for _name in ("cluster.role", "training.processes", "training.worker", "training.loaded"):
    import_module(f"manyhands.{_name}")
