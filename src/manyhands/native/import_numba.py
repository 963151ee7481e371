"""numba without scipy: it imports scipy's linear algebra only to know that it is there, which takes 0.3 s.

Compiled code that multiplies matrices still can: numba imports scipy itself where such code is compiled or run.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final

__all__ = ["import_numba"]

_LOOKED_FOR: Final = "scipy.linalg.cython_blas"
_WHO_LOOKS: Final = "numba.np.arraymath"


def import_numba() -> None:
    """Import what numba would when it compiles for the first time; scipy only if that is imported already."""
    if _WHO_LOOKS in sys.modules or _LOOKED_FOR in sys.modules or not _is_there():
        return
    sys.modules[_LOOKED_FOR] = ModuleType(_LOOKED_FOR)
    try:
        import_module(_WHO_LOOKS)
    finally:
        del sys.modules[_LOOKED_FOR]  # or numba would take it for the real one when it needs that


def _is_there() -> bool:
    scipy = find_spec("scipy")
    folders = (scipy.submodule_search_locations if scipy is not None else None) or ()
    return any(Path(folder, "linalg").glob("cython_blas.*") for folder in folders)
