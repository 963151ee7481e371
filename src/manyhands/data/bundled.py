"""Tables that come inside scikit-learn, read from its files: importing it takes a second, and is not needed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from manyhands.errors import UserError

__all__ = ["bundled_file"]


def bundled_file(name: str, what: str) -> Path | None:
    """The file of a table inside scikit-learn; None where the version that is installed keeps it elsewhere.

    UserError if it is not installed, which says that `what` comes with it.
    """
    found = importlib.util.find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise UserError(f"{what} come with scikit-learn, which is not installed: pip install scikit-learn")
    file = Path(found.submodule_search_locations[0], "datasets", "data", name)
    return file if file.exists() else None
