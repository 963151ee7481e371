"""What processes of a run import: nothing that the launcher alone needs, for which its first step would wait."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

import manyhands
from manyhands.engine import preload
from manyhands.places.local.template import PRELOADED
from manyhands.strategies.registry import STRATEGIES

SOURCES = Path(manyhands.__file__).parent.parent
LAUNCHERS = (
    "manyhands.observe.analyse",
    "manyhands.places.local.children",
    "manyhands.places.local.watchdog",
    "manyhands.observe.draw",
    "manyhands.places.external.process_group",
    "manyhands.places.external.control_server",
)
"""Packages and modules that start processes, hear them, and show what they do."""


def file_of(module: str) -> Path | None:
    place = SOURCES.joinpath(*module.split("."))
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()), None)


@cache
def imported(module: str) -> frozenset[str]:
    """The modules of ours that importing this one imports, packages included, but for itself."""
    file = file_of(module)
    assert file is not None, module
    found: set[str] = set()
    for node in _at_once(ast.parse(file.read_text()).body):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found.add(node.module)
            found |= {f"{node.module}.{name.name}" for name in node.names}
        elif isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
    ours = {name for name in found if name.startswith("manyhands.") and file_of(name) is not None}
    return frozenset(ours | {name.rpartition(".")[0] for name in ours if name.count(".") > 1})


def _at_once(body: list[ast.stmt]) -> list[ast.stmt]:
    """What runs while a module is imported; not what a type checker alone reads."""
    found = []
    for node in body:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            found += _at_once(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(node)
            for inner in ("body", "orelse", "handlers", "finalbody"):
                found += _at_once(getattr(node, inner, []))
    return found


def ways_to(modules: tuple[str, ...]) -> dict[str, str]:
    """Every module that these import, and by whom it is first."""
    ways = dict.fromkeys(modules, "")
    waiting = list(modules)
    while waiting:
        module = waiting.pop(0)
        for name in sorted(imported(module) - ways.keys()):
            ways[name] = module
            waiting.append(name)
    return ways


def of_launchers(modules: tuple[str, ...]) -> dict[str, str]:
    return {
        name: by
        for name, by in ways_to(modules).items()
        if any(name == one or name.startswith(f"{one}.") for one in LAUNCHERS)
    }


@pytest.mark.parametrize("word", STRATEGIES)
def test_processes_import_nothing_of_launchers(word: str) -> None:
    preloaded = (*PRELOADED[1:], *preload.MODULES)
    assert of_launchers((*preloaded, *STRATEGIES[word].modules)) == {}


def test_what_a_launcher_imports_would_be_found() -> None:
    found = of_launchers(("manyhands.strategies.ps.training", "manyhands.observe.draw.showing"))
    assert {next(one for one in LAUNCHERS if name.startswith(one)) for name in found} == set(LAUNCHERS)
