"""Bits that compiled code and its callers agree on."""

from __future__ import annotations

from typing import Final

__all__ = ["NOT_FINITE"]

NOT_FINITE: Final = 0x7FC00000
"""The bits of a scale that say: something in this block is not finite."""
