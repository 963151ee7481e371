"""Imported by the process that workers are forked from: everything that a worker of any strategy imports.

`torch._dynamo` is what torch itself imports when the first optimizer is made, half as long as torch again.

Nothing here may compute; see `cluster.forking`.
"""

from __future__ import annotations

import torch._dynamo  # noqa: F401

from manyhands.registry import STRATEGIES

for _home in STRATEGIES.values():
    _home.load_value()
    _home.load_training()
    _home.load_training(compiled=True)
