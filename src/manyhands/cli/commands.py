"""What several commands need: a command made from an options dataclass, where files go, and an orderly end."""

from __future__ import annotations

import inspect
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, get_type_hints

import typer

__all__ = ["add_command", "check_writable", "fresh_directory", "orderly_end", "write_json"]

Asked = TypeVar("Asked")


def add_command(app: typer.Typer, name: str, options: type[Asked], run: Callable[[Asked], None]) -> None:
    """Offer `name`, with one option for each field of the dataclass `options`; the help text is that of `run`."""
    kinds = get_type_hints(options, include_extras=True)

    def command(**values: Any) -> None:
        run(options(**values))

    parameters = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=kinds[one.name],
            default=inspect.Parameter.empty if one.default is MISSING else one.default,
        )
        for one in fields(options)  # type: ignore[arg-type]
    ]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = kinds
    command.__doc__ = run.__doc__
    app.command(name)(command)


def check_writable(path: Path | None, option: str = "--json") -> None:
    """Refuse a file that could not be written now rather than after the work."""
    from manyhands.errors import UserError

    if path is not None and not path.absolute().parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}; make it first")


def write_json(json_file: Path | None, value: Mapping[str, Any]) -> None:
    """Write a summary where one was asked for."""
    from manyhands.store.atomic import render_json

    if json_file is not None:
        json_file.write_bytes(render_json(value, json_file.name, indent=2))


def fresh_directory(name: str) -> Path:
    """runs/NAME-TIME, with a number behind it where that is taken."""
    base = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


@contextmanager
def orderly_end() -> Iterator[None]:
    """While this lasts SIGTERM is raised as SystemExit, so that temporary files are removed on the way out."""
    from manyhands.cluster.signals import as_exception

    def end(number: int, _: FrameType | None) -> None:
        raise as_exception(number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
