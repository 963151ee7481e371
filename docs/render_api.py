"""The API reference of the site, from the docstrings of what `import manyhands` offers: `make docs`."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

import manyhands
from manyhands.strategies.registry import STRATEGIES

_HEAD = """# API reference

Everything that `import manyhands as mh` offers, from the docstrings of the sources, rendered by
`make docs`.

[Functions](#functions) · [Options](#options) · [Values](#values) · [Strategies](#strategies) · [Errors](#errors)
"""


_CALLED = {"Callback", "ClusterSpec", "History", "Parties", "Running", "WorkerGroup"}
"""Values whose methods a user calls or overrides; those of the others are for who extends the library."""


def render() -> str:
    """The page."""
    offered = {name: getattr(manyhands, name) for name in manyhands.__all__ if not name.startswith("__")}
    strategies = {home.value.partition(":")[2] for home in STRATEGIES.values()}
    functions = {name: one for name, one in offered.items() if not inspect.isclass(one)}
    errors = {
        name: one for name, one in offered.items() if inspect.isclass(one) and issubclass(one, Exception)
    }
    values = {
        name: one
        for name, one in offered.items()
        if name not in {*functions, *errors, *strategies, "Options"}
    }
    parts = [_HEAD, "## Functions", *(_function(name, one) for name, one in functions.items())]
    parts += ["## Options", *_options(manyhands.Options)]
    parts += ["## Values", *(part for name, one in values.items() for part in _value(name, one))]
    parts += ["## Strategies", *_strategies()]
    parts += ["## Errors", *(f"### `mh.{name}`\n\n{_text(one)}" for name, one in errors.items())]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _function(name: str, one: Any) -> str:
    return f"### `mh.{name}`\n\n```text\nmh.{name}{_signature(one)}\n```\n\n{_text(one)}"


def _options(kind: type) -> Iterator[str]:
    yield (
        "`mh.fit(..., options=mh.Options(...))`: "
        + _sentence(_text(kind))
        + " Every field, its type and its default:"
    )
    yield _table(["option", "type", "default", ""], _fields(kind))


def _value(name: str, kind: type) -> Iterator[str]:
    yield f"### `mh.{name}`\n\n{_text(kind)}"
    if dataclasses.is_dataclass(kind):
        rows = _fields(kind)
        if rows:
            yield _table(["field", "type", "default", ""], rows)
    methods = _methods(kind) if name in _CALLED else []
    if methods:
        yield _table(["method or property", ""], methods)


def _strategies() -> Iterator[str]:
    yield (
        "A strategy is written as text, `ps servers=2 consistency=async`, or made as a value, "
        '`mh.Ps(servers=2, consistency="async")`. A default is shown as it is written in text.'
    )
    for word, home in STRATEGIES.items():
        kind = home.load_value()
        yield f"### `{word}`: `mh.{kind.__name__}`\n\n{_text(kind)}"
        rows = []
        for name, _, _, about in _fields(kind):
            field = next(one for one in dataclasses.fields(kind) if one.name == name.strip("`"))
            shown = field.metadata["setting"].show(field.default)
            rows.append([name, f"`{shown}`", about])
        yield _table(["setting", "default", ""], rows) if rows else "It has no settings."


def _fields(kind: Any) -> list[list[str]]:
    """Name, type, default and first sentence of every public field of a dataclass, those of its bases included."""
    about: dict[str, tuple[str, str]] = {}
    for base in reversed(kind.__mro__[:-1]):
        if base.__module__.startswith("manyhands"):
            about.update(_documented(base))
    rows = []
    for field in dataclasses.fields(kind):
        if field.name.startswith("_"):
            continue
        written, sentence = about.get(field.name, ("", ""))
        rows.append([f"`{field.name}`", f"`{written}`", _default(field), sentence])
    return rows


def _documented(kind: type) -> dict[str, tuple[str, str]]:
    """By field: its type as it is written, and the string after it; or, of a setting, what makes it says of itself."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    module = importlib.import_module(kind.__module__)
    found: dict[str, tuple[str, str]] = {}
    for place, node in enumerate(tree.body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        text, following = "", tree.body[place + 1 : place + 2]
        if following and isinstance(following[0], ast.Expr) and isinstance(following[0].value, ast.Constant):
            text = str(following[0].value.value)
        elif isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Name):
            made_by = getattr(module, node.value.func.id, None)
            if inspect.isfunction(made_by) and made_by.__name__.endswith("_setting"):
                text = (inspect.getdoc(made_by) or "").partition(": ")[2]
                text = text[:1].upper() + text[1:]
        found[node.target.id] = ast.unparse(node.annotation), _one_line(text)
    return found


def _default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`" if not callable(field.default) else f"`{field.default.__name__}`"
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    return "required" if field.init else "computed"


def _methods(kind: type) -> list[list[str]]:
    rows = []
    for name, one in vars(kind).items():
        called = one.__func__ if isinstance(one, classmethod | staticmethod) else one
        if name.startswith("_"):
            continue
        if isinstance(one, property):
            rows.append([f"`.{name}`", _one_line(inspect.getdoc(one) or "")])
        elif inspect.isfunction(called):
            rows.append([f"`.{name}({_names(called)})`", _sentence(inspect.getdoc(called) or "")])
    return rows


def _names(method: Any) -> str:
    """The parameters of a method by name; its types are in the source."""
    parameters = list(inspect.signature(method).parameters.values())[1:]
    return ", ".join(
        f"{one.name}={one.default!r}" if one.default is not one.empty else one.name for one in parameters
    )


def _signature(one: Any) -> str:
    signature = inspect.signature(one)
    shown, kind = [], None
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and kind not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            shown.append("*")
        kind = parameter.kind
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(kind, "")
        annotation = (
            "" if parameter.annotation is parameter.empty else f": {_annotation(parameter.annotation)}"
        )
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        shown.append(f"{stars}{parameter.name}{annotation}{default}")
    result = (
        ""
        if signature.return_annotation is signature.empty
        else f" -> {_annotation(signature.return_annotation)}"
    )
    whole = f"({', '.join(shown)}){result}"
    if len(whole) <= 100:
        return whole
    return "(\n" + "".join(f"    {one},\n" if one != "*" else "    *,\n" for one in shown) + f"){result}"


def _annotation(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))


def _text(one: Any) -> str:
    return inspect.cleandoc(one.__doc__ or "")


def _sentence(text: str) -> str:
    return _one_line(text.partition("\n\n")[0])


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _table(head: list[str], rows: list[list[str]]) -> str:
    escaped = [[cell if "\\|" in cell else cell.replace("|", "\\|") for cell in row] for row in rows]
    lines = [head, ["---"] * len(head), *escaped]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
