"""The one table of types: the number that stands for one in messages and records, and what can be done with it.

Numbers are part of protocols and files: never renumber one, never reuse one.
"""

from __future__ import annotations

from typing import Final

import torch

TYPES: Final[dict[str, tuple[int, str | None]]] = {
    "float32": (1, "F32"),
    "float64": (2, "F64"),
    "float16": (3, "F16"),
    "bfloat16": (4, "BF16"),
    "int8": (5, "I8"),
    "int16": (6, "I16"),
    "int32": (7, "I32"),
    "int64": (8, "I64"),
    "uint8": (9, "U8"),
    "bool": (10, "BOOL"),
    "complex64": (11, None),
    "complex128": (12, None),
    "complex32": (13, None),
    "uint16": (14, None),
    "uint32": (15, None),
    "uint64": (16, None),
    "float8_e4m3fn": (17, "F8_E4M3"),
    "float8_e5m2": (18, "F8_E5M2"),
    "float8_e4m3fnuz": (19, None),
    "float8_e5m2fnuz": (20, None),
    "float8_e8m0fnu": (21, None),
}
"""By the name in torch: the number, and the name in a safetensors file where that has one."""
_LAST_LINKED: Final = 10  # of the types whose bytes a link carries

NAMED: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in TYPES if hasattr(torch, name)}
"""By name, those that this torch has."""
CODES: Final[dict[torch.dtype, int]] = {dtype: TYPES[name][0] for name, dtype in NAMED.items()}
BY_CODE: Final[dict[int, torch.dtype]] = {code: dtype for dtype, code in CODES.items()}
LINKED: Final = tuple(dtype for dtype, code in CODES.items() if code <= _LAST_LINKED)  # what a link carries
STORED: Final[dict[torch.dtype, str]] = {
    dtype: stored for name, dtype in NAMED.items() if (stored := TYPES[name][1]) is not None
}
"""What a safetensors file holds, and how it calls that."""
SUMMED: Final = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""What is summed over workers, and the number of the compiled code that does it."""
HALVES: Final = (torch.bfloat16, torch.float16)  # those of them that are widened to float32 to be summed

_codes = {code for code, _ in TYPES.values()}
if len(_codes) != len(TYPES) or min(_codes) < 1:
    raise ImportError("native/dtypes.py: every type needs a unique code other than 0")
