"""Every sentence that the program can show a user, in one file to be read as a whole: `docs/sentences.txt`.

    python docs/collect_sentences.py            # writes the file anew
    python docs/collect_sentences.py --check    # exit status 1 if it is not current

Read from the sources without running them: a string of four words or more that is given to a call (an error, a help
text, a notice, a row of a page), with `{…}` where a value goes. Docstrings and assertions are not among them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "sentences.txt"
_SOURCES = ROOT / "src" / "manyhands"
_WORD = re.compile(r"[A-Za-z][a-z']*")
_NOT_SHOWN = {"njit", "compile", "AssertionError"}  # signatures, programs, and defects of this library
_LEAST_WORDS = 4


def collect() -> str:
    """The whole file: the sentences in the order of the sources, each file's under its path."""
    parts = []
    for path in sorted(_SOURCES.rglob("*.py")):
        sentences = list(dict.fromkeys(_sentences(ast.parse(path.read_text(encoding="utf-8")))))
        if sentences:
            parts.append("\n".join([f"# {path.relative_to(_SOURCES)}", *sentences]))
    return "\n\n".join(parts) + "\n"


def _sentences(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or _name(node.func) in _NOT_SHOWN:
            continue
        for value in [*node.args, *(keyword.value for keyword in node.keywords)]:
            for text in _texts(value):
                if _reads(text):
                    yield " ".join(text.split())


def _texts(value: ast.expr) -> Iterator[str]:
    """The strings that an argument is, or chooses between, or is made of."""
    match value:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "{…}" for part in parts)
        case ast.IfExp(body=first, orelse=second):
            yield from _texts(first)
            yield from _texts(second)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from _texts(left)
            yield from _texts(right)


def _reads(text: str) -> bool:
    """Whether this is a sentence for a person, not a path, a program or a table of numbers."""
    words = [word for word in text.replace("{…}", " ").split() if _WORD.match(word)]
    return len(words) >= _LEAST_WORDS and not text.lstrip().startswith("<")


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(FILE.read_text(encoding="utf-8") != collect())
    FILE.write_text(collect(), encoding="utf-8")
