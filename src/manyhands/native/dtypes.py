"""The one table of types: the number that stands for one in messages and records, and what can be done with it.

Numbers are part of protocols and files: never renumber one, never reuse one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

__all__ = ["BY_CODE", "CODES", "HALVES", "LINKED", "NAMED", "STORED", "SUMMED"]


@dataclass(frozen=True, slots=True)
class Kind:
    """A type: its name in torch, its number, and its name in a safetensors file where that has one."""

    name: str
    code: int
    stored: str | None = None


TYPES: Final = (
    Kind("float32", 1, "F32"),
    Kind("float64", 2, "F64"),
    Kind("float16", 3, "F16"),
    Kind("bfloat16", 4, "BF16"),
    Kind("int8", 5, "I8"),
    Kind("int16", 6, "I16"),
    Kind("int32", 7, "I32"),
    Kind("int64", 8, "I64"),
    Kind("uint8", 9, "U8"),
    Kind("bool", 10, "BOOL"),
    Kind("complex64", 11),
    Kind("complex128", 12),
    Kind("complex32", 13),
    Kind("uint16", 14),
    Kind("uint32", 15),
    Kind("uint64", 16),
    Kind("float8_e4m3fn", 17, "F8_E4M3"),
    Kind("float8_e5m2", 18, "F8_E5M2"),
    Kind("float8_e4m3fnuz", 19),
    Kind("float8_e5m2fnuz", 20),
    Kind("float8_e8m0fnu", 21),
)
_LAST_LINKED: Final = 10  # of the types whose bytes a link carries

_KNOWN: Final = [(kind, getattr(torch, kind.name)) for kind in TYPES if hasattr(torch, kind.name)]
NAMED: Final[dict[str, torch.dtype]] = {kind.name: dtype for kind, dtype in _KNOWN}
"""By name, those that this torch has."""
CODES: Final[dict[torch.dtype, int]] = {dtype: kind.code for kind, dtype in _KNOWN}
BY_CODE: Final[dict[int, torch.dtype]] = {code: dtype for dtype, code in CODES.items()}
LINKED: Final = tuple(dtype for dtype, code in CODES.items() if code <= _LAST_LINKED)
"""What a link carries."""
STORED: Final[dict[torch.dtype, str]] = {dtype: kind.stored for kind, dtype in _KNOWN if kind.stored}
"""What a safetensors file holds, and how it calls that."""
SUMMED: Final = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""What is summed over workers, and the number of the compiled code that does it."""
HALVES: Final = (torch.bfloat16, torch.float16)
"""Those of them that are widened to float32 to be summed."""

if len({kind.code for kind in TYPES}) != len(TYPES) or not all(kind.code > 0 for kind in TYPES):
    raise ImportError("native/dtypes.py: every type needs one code of its own, other than 0")
