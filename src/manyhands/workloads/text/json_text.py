"""Lines of JSON objects, and text from JSON, which can spell what UTF-8 cannot hold: half of a surrogate pair."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from manyhands.errors import DataError, printable


def is_json_lines(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith((".jsonl", ".ndjson"))


def json_lines(lines: Iterable[str | bytes], path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The number and the object of each line that is not empty; DataError names the first that holds none."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}, line {number} is not JSON: {printable(str(error))}") from error
        if not isinstance(value, dict):
            raise DataError(f"{path}, line {number} is not a JSON object")
        yield number, value


def utf8(text: str, name: str) -> bytes:
    """The bytes of a text; a DataError that begins with `name` where it has half of a surrogate pair."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        half = f"half of a surrogate pair at character {error.start}"
        raise DataError(f"{name} is not text: it has {half}") from error
