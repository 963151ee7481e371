"""Valid values of the progress option; a light import, because options are checked against it."""

from __future__ import annotations

from typing import Final

__all__ = ["PROGRESS"]

PROGRESS: Final = ("auto", "bar", "lines", "none")
