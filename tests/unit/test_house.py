"""Nobody outside a strategy's own folder names its class; a file name means one thing; the tree stays small."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import manyhands
from manyhands.strategies.registry import STRATEGIES

SOURCE = Path(manyhands.__file__).parent
CLASSES = {home.value.partition(":")[2]: home.value.split(".")[1] for home in STRATEGIES.values()}
"""The package of each strategy's class."""

WORKLOADS = {
    "lab/bench/server_ours.py": "Ps",
    "lab/bench/bench_server.py": "Ps",
}
"""What drives the parameter server's own parts, and takes its settings from the value."""


@cache
def source(module: str) -> str:
    return (SOURCE / module).read_text()


@cache
def named(module: str) -> set[str]:
    """The strategy classes that a module imports from their homes."""
    if ".strategy" not in source(module):  # parsing 500 modules takes seconds
        return set()
    found = set()
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith(".strategy"):
            found |= {alias.name for alias in node.names} & CLASSES.keys()
    return found


def modules() -> list[str]:
    return sorted(str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py"))


def test_modules_name_no_strategy_of_another_room() -> None:
    foreign = {}
    for module in modules():
        room = module.removeprefix("strategies/").partition("/")[0]
        others = {name for name in named(module) if CLASSES[name] != room} - {WORKLOADS.get(module)}
        if others and module != "__init__.py":  # which has what a user imports
            foreign[module] = others
    assert not foreign, "ask the value for a fact instead, or make one"


def test_a_module_that_names_one_would_be_found() -> None:
    assert {name for module in modules() for name in named(module)} == CLASSES.keys()


def test_modules_that_are_excused_still_need_it() -> None:
    assert {module: name for module, name in WORKLOADS.items() if name in named(module)} == WORKLOADS


CONTENDERS = {"lab/bench/step.py"}
"""What is measured there is chosen by name."""


def listed(module: str) -> list[list[str]]:
    """The tuples, lists, sets and keys of a module in which two strategies or more are named."""
    found = []
    for node in ast.walk(ast.parse(source(module))):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            items = node.elts
        elif isinstance(node, ast.Dict):
            items = [key for key in node.keys if key is not None]
        else:
            continue
        texts = [one.value for one in items if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        words = [text for text in texts if text.partition(" ")[0] in STRATEGIES]
        if len(words) > 1:
            found.append(words)
    return found


def test_only_the_rooms_of_strategies_list_their_words() -> None:
    quoted = [f'"{word}' for word in STRATEGIES]
    others = [one for one in modules() if not one.startswith("strategies/") and one not in CONTENDERS]
    suspects = [one for one in others if sum(word in source(one) for word in quoted) > 1]
    found = {module: listed(module) for module in suspects}
    assert {module: words for module, words in found.items() if words} == {}, "make it a fact of the strategy"
    assert all(map(listed, CONTENDERS)), "it would be found, and still needs the excuse"


SAME_ON_PURPOSE = {"Options": {"engine/options.py", "interop/c10d/torch_group.py"}}
"""`mh.Options` is of `fit`; `manyhands.c10d.Options` is what torch calls the options of a process group."""


def test_no_two_public_classes_have_one_name() -> None:
    homes: dict[str, set[str]] = defaultdict(set)
    for module in modules():
        for name in re.findall(r"^class ([^\W_]\w*)", source(module), re.MULTILINE):
            homes[name].add(module)
    assert len(homes) > 400
    assert {name: found for name, found in homes.items() if len(found) > 1} == SAME_ON_PURPOSE


def test_times_of_a_step_are_booked_in_one_place() -> None:
    parts = {"INPUT", "COMPUTE", "EXCHANGE", "WAIT", "STEP"}
    found = set()
    for module in modules():
        if "EventKind" not in source(module):
            continue
        for node in ast.walk(ast.parse(source(module))):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Attribute):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
                first = node.args[0]
                is_kind = isinstance(first.value, ast.Name) and first.value.id == "EventKind"
                if called in {"record", "_record"} and is_kind and first.attr in parts:
                    found.add(module)
    assert found == {"engine/reporting.py"}


ROLES = {
    "__init__.py", "command.py", "exchange.py", "kernel.py", "model.py", "options.py", "predicted.py",
    "registry.py", "strategy.py", "task.py", "training.py",
}  # fmt: skip
"""File names that mean the same in every folder that has one."""


def test_a_file_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = defaultdict(list)
    for module in modules():
        homes[Path(module).name].append(module)
    assert {name: found for name, found in homes.items() if len(found) > 1 and name not in ROLES} == {}


PRIVATE = """
afar asking away beats bell board company courier crew crowd elsewhere front hearing heart home knock lighter
mailbag meeting movers owed owes passage players playing pulse recall remarked riding shelf standing strangers
surroundings telling ties told underneath vigil whereabouts wish
"""
"""Words of our own that names once had; the field has words for all of them (docs/concepts.md has the few we keep)."""


def test_no_name_has_a_word_that_only_we_understand() -> None:
    found = defaultdict(set)
    for module in modules():
        for node in ast.walk(ast.parse(source(module))):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                    pass
                case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                    pass
                case _:
                    continue
            words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name)}
            for word in words.intersection(PRIVATE.split()):
                found[word].add(module)
    assert dict(found) == {}


def test_the_top_of_the_package_is_a_list_that_one_can_remember() -> None:
    entries = {path.name for path in SOURCE.iterdir()} - {"__pycache__", "py.typed"}
    assert len(entries) <= 22
    assert len([name for name in entries if "." not in name]) <= 14


def test_a_function_fits_on_a_screen_and_few_classes_are_large() -> None:
    long, large = [], []
    for module in modules():
        for node in ast.walk(ast.parse(source(module))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or 0) - node.lineno + 1
                long += [f"{module}: {node.name} has {lines} lines"] * (lines > 60)
            elif isinstance(node, ast.ClassDef):
                methods = sum(isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) for part in node.body)
                large += [node.name] * (methods > 20)
    assert long == []
    assert len(large) <= 10, large


def test_every_where_of_contributing_is_there() -> None:
    text = (SOURCE.parents[1] / "CONTRIBUTING.md").read_text()
    table = text.partition("| where is …")[2].partition("\n\n")[0]
    named = re.findall(r"`([a-z_/0-9]+\.py)` \|$", table, re.MULTILINE)
    assert len(named) >= 20
    assert [name for name in named if not (SOURCE / name).is_file()] == []
