"""The demo corpus: the English in the user's own Python installation, several MB on every machine, nothing to download.

Docstrings and comments of the standard library, numpy and torch, in lower case, letters only; each docstring and each
block of comments is one line, so that contexts end where a text ends. Files are taken in the order of their names and
found by patterns, not by compiling them: a piece of code in between does no harm and time matters.

With a few questions for its word vectors, our own: analogies and pairs that documentation of Python programs knows.
Pairs have three degrees: 2 for words of one kind that can stand for each other in a sentence, 1 for words of one
subject, 0 for words that have little to do with each other.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from itertools import permutations
from pathlib import Path

from manyhands.errors import UserError
from manyhands.workloads.glove.analogies import Pair, Section
from manyhands.workloads.glove.corpus import Corpus

_PACKAGES = ("numpy", "torch")
_MOST_BYTES = 6 * 2**20  # of each package: enough to learn from, little enough to wait for
_SKIPPED = re.compile("site-packages|dist-packages|tests?|idle_test|__pycache__|testing|_vendor")
# Each way begins with a character of its own, so that the search skips to the next of them.
_TEXTS = re.compile(rb'"""(.*?)"""|' + rb"'''(.*?)'''|" + rb"(#[^\n]*\n(?:[ \t]*#[^\n]*\n)*)", re.DOTALL)
_LETTERS = bytes(bytes([byte]).lower()[0] if bytes([byte]).isalpha() else 32 for byte in range(256))
_LEAST_WORDS = 4


def demo_corpus(most_bytes: int = _MOST_BYTES) -> Corpus:
    """The corpus, at most `most_bytes` of each of the standard library, numpy and torch, the same every time."""
    specs = [importlib.util.find_spec(name) for name in _PACKAGES]
    folders = [one for spec in specs if spec is not None for one in spec.submodule_search_locations or ()]
    lines: list[str] = []
    for root in (sysconfig.get_path("stdlib"), *folders):
        room = most_bytes
        for path in _files(Path(root)):
            with suppress(OSError, UnicodeDecodeError):
                found = list(english(path.read_text("utf-8")))
                room -= sum(len(line) + 1 for line in found)
                lines += found
            if room <= 0:
                break
    if not lines:
        raise UserError("this Python installation has no source files; give a text with --corpus FILE")
    return Corpus.of_text("\n".join(lines))


def english(source: str) -> Iterator[str]:
    """The docstrings and blocks of comments of a Python file, each as one line of lower-case words."""
    data, at = source.encode(), 0
    while match := _TEXTS.search(data, at):
        at = match.end()
        before = data[data.rfind(b"\n", 0, match.start()) + 1 : match.start()]
        if match.lastindex == 3 and before.strip(b" \t"):
            at = match.start() + 1  # a comment behind code is not one of a block
            continue
        words = match.group(match.lastindex or 0).translate(_LETTERS).split()
        if len(words) >= _LEAST_WORDS:
            yield b" ".join(words).decode()


def _files(root: Path) -> Iterator[Path]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not _SKIPPED.fullmatch(name))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))


_PLURALS = (
    "argument arguments,file files,value values,function functions,method methods,object objects,element elements,"
    "parameter parameters,tensor tensors,array arrays,dimension dimensions,error errors,exception exceptions,"
    "module modules,string strings,type types,name names,option options,line lines,item items,class classes,key keys"
)
_VERBS = (
    "return returns,raise raises,contain contains,use uses,call calls,create creates,specify specifies,"
    "support supports,represent represents,require requires,take takes,make makes,convert converts,compute computes"
)
_OPPOSITES = (
    "minimum maximum,min max,first last,lower upper,start stop,left right,read write,row column,input output,"
    "open close,before after,true false,positive negative,encode decode,forward backward,first second"
)
_SAME_KIND = (
    "array tensor,minimum maximum,rows columns,list tuple,integer float,function method,width height,read write,"
    "true false,input output,parameter argument,string bytes,index key,module package,row column,first last"
)
_SAME_SUBJECT = (
    "file path,loop iteration,matrix vector,thread lock,error exception,class instance,byte encoding,network socket,"
    "process pipe,sort order,log message,default option,shape dimension,gradient backward,date time,test assert"
)
_APART = (
    "matrix password,socket gradient,month tensor,lock comma,email sine,thread weekday,cosine directory,quote float,"
    "hash window,http sort,dtype calendar,zip random,calendar pointer,terminal matrix,newline gradient,color loss"
)


def demo_questions() -> list[Section]:
    named = {"opposites": _OPPOSITES, "gram1-plural": _PLURALS, "gram2-third-person": _VERBS}
    pairs = {name: permutations(_pairs(text), 2) for name, text in named.items()}
    return [Section(name=name, questions=tuple((*a, *b) for a, b in both)) for name, both in pairs.items()]


def demo_pairs() -> list[Pair]:
    degrees = ((2.0, _SAME_KIND), (1.0, _SAME_SUBJECT), (0.0, _APART))
    return [Pair(one=a, other=b, score=score) for score, text in degrees for a, b in _pairs(text)]


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    for pair in text.split(","):
        one, other = pair.split()
        yield one, other
