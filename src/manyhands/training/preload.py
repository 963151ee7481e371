"""Imported by the process that workers are forked from: everything that a worker of any strategy imports.

Nothing here may compute; see `cluster.forking`.
"""

from __future__ import annotations

from manyhands.registry import STRATEGIES
from manyhands.training.dynamo import defer

defer()
for _home in STRATEGIES.values():
    _home.load_value()
    _home.load_training()
    _home.load_training(compiled=True)
