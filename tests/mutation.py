"""One seeded mutator for files of any kind: bytes, text, numbers in them, and JSON wherever a file has it."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any

_NUMBERS = (0, 1, 2, 255, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
_WORDS = (
    b"1000000000", b"99999999999999999999", b"9" * 5000, b"-1", b"0", b"1e999", b"-1e-999", b"nan", b"NaN", b"inf",
    b"-Infinity", b"1e308", b"0x10", b"1_000", b"+", b":", b"|", b"#", b"'", b"\xff", b"\x00", b"\xe2\x80\xa8",
    b"\n", b"\r\n", b" ", b"\t", b"null", b"\xd9\xa1", b"A" * 3000,
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, 10**30, -(10**400), 1e308, -1e308, 1e-320, float("nan"),
    float("inf"), float("-inf"), "", "x", "\ud800", "\x1b[31m", "<script>", "A" * 3000, [], {}, [[]], [None], ["x"],
    {"": None}, {"shard": 0}, [1e9, "x"],
)  # fmt: skip
_DEEP = 5000


def mutated(data: bytes, name: str, rng: random.Random) -> bytes:
    """`data`, the content of a file of this name, changed in one to four places."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        kinds: list[Callable[[bytes, random.Random], bytes]] = [_bytes, _bytes, _tokens]
        if name.endswith((".json", ".jsonl")):
            kinds = [_json_lines if name.endswith("l") else _json] * 4 + kinds
        elif name.endswith(".safetensors"):
            kinds += [_header] * 3
        data = rng.choice(kinds)(data, rng)
    return data


def _bytes(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 64, 1024)))
    match rng.randrange(9):
        case 0:
            return data[:at]
        case 1:
            return data[:at] + data[end:]
        case 2:
            return data[:at] + data[at:end] * rng.choice((2, 3, 50)) + data[end:]
        case 3:
            return data[:at] + rng.randbytes(end - at) + data[end:]
        case 4:
            return data[:at] + bytes(end - at) + data[end:]
        case 5:
            form = rng.choice(("<I", ">I", "<Q", ">Q", "<H", ">H", "<B"))
            size = struct.calcsize(form)
            number = struct.pack(form, rng.choice(_NUMBERS) % (1 << 8 * size))
            return data[:at] + number + data[at + size :]
        case 6:
            other = rng.randrange(len(data) + 1)
            return data[:at] + data[other : other + 200] + data[at:]
        case 7:
            return (
                data[:at]
                + struct.pack("<d", rng.choice((float("nan"), float("inf"), 1e300, -1.0)))
                + data[at + 8 :]
            )
        case _:
            if not data:
                return rng.randbytes(8)
            at = min(at, len(data) - 1)
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def _tokens(data: bytes, rng: random.Random) -> bytes:
    """One word among those between blanks, or a part of it, in the place of another."""
    at = rng.randrange(len(data) + 1)
    begin = max(data.rfind(mark, 0, at) for mark in (b" ", b"\n", b":", b",")) + 1
    ends = [place for mark in (b" ", b"\n", b":", b",") if (place := data.find(mark, at)) >= 0]
    return data[:begin] + rng.choice(_WORDS) + data[min(ends, default=len(data)) :]


def _json_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    match rng.randrange(6):
        case 0:
            lines[at] = rng.choice(
                (b"[]", b"7", b'"x"', b"null", b"{}", b"[" * _DEEP, b'{"a":' * _DEEP, b"1" * 5000)
            )
        case 1:
            lines.insert(at, lines[rng.randrange(len(lines))])
        case _:
            lines[at] = _json(lines[at], rng)
    return b"\n".join(lines)


def _json(data: bytes, rng: random.Random) -> bytes:
    """Some value of the document, or a key of it, replaced."""
    try:
        whole = json.loads(data)
    except (ValueError, RecursionError):
        return _tokens(data, rng)
    if rng.random() < 0.03:
        return rng.choice((b"[" * _DEEP, b'{"a":' * _DEEP, b"1" * 5000, b'"\\ud800"', b"NaN"))
    places = list(_places(whole))
    if not places:
        return json.dumps(rng.choice(_VALUES)).encode()
    box, key = rng.choice(places)
    match rng.randrange(8):
        case 0:
            del box[key]
        case 1 if isinstance(box, dict):
            box[rng.choice(("", "x", "-1", "99999999999", "\ud800"))] = box.pop(key)
        case 2 if isinstance(box, list):
            box.extend([box[key]] * rng.choice((1, 5, 100)))
        case _:
            box[key] = rng.choice(_VALUES)
    return json.dumps(whole).encode()


def _places(value: Any) -> Any:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in list(keys):
        yield value, key
        yield from _places(value[key])


def _header(data: bytes, rng: random.Random) -> bytes:
    """The JSON header of a safetensors file, its length told as it then is."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        return _bytes(data, rng)
    header = _json(data[8 : 8 + length], rng)
    return struct.pack("<Q", len(header)) + header + data[8 + length :]
