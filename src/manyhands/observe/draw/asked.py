"""What may be asked of a run about showing itself; light to import, as options are checked against it."""

from __future__ import annotations

from typing import Final

__all__ = ["PROGRESS"]

PROGRESS: Final = ("auto", "bar", "lines", "none")
