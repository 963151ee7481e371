"""Imported by the template process that workers are forked from: what workers of every strategy import.

The registry names what one strategy needs besides.

Nothing here may compute; see `places.local.forking`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final

from manyhands.engine.dynamo import defer

MODULES: Final = ("manyhands.places.local.role_process", "manyhands.engine.loaded")

defer()
import_module("numpy.ma")  # numba asks of the first array that a kernel gets whether it is one of these
for _module in MODULES:  # after the compiler's import was deferred
    import_module(_module)
