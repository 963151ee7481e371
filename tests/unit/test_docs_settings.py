"""What README and docs say of settings, held against the code: each name, each value, each default.

A strategy's text in the docs is parsed. A setting that stands alone, as in `algorithm=ring`, must be one of some
strategy, with a value that it takes; any other `name=value` must name a parameter that exists.
"""

from __future__ import annotations

import inspect
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import manyhands as mh
from manyhands.cli.train_command import train_app
from manyhands.errors import UserError
from manyhands.foresight.simulate.simulated_spec import SimulationSpec
from manyhands.interop.own_loop import connect
from manyhands.strategies.common.consistency import SoftSync
from manyhands.strategies.registry import STRATEGIES
from manyhands.strategy import Strategy, settings_of
from manyhands.workloads.gbdt.options import GbdtOptions
from manyhands.workloads.logreg.options import LogregOptions

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "tour").glob("*.md")),
    *sorted((ROOT / "docs" / "internals").glob("*.md")),
]

_WORD = "|".join(STRATEGIES)
_CODE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_QUOTED = re.compile(rf"(?<![\w=])([\"'])((?:{_WORD})(?:[ ;][^\"'\n]*)?)\1")
_SETTING = re.compile(r"([a-z_]+)=(\S+)")
_PLACEHOLDER = re.compile(r"…|[A-Z]+|\{.*\}")
_DEFAULT = re.compile(
    r"`(?P<before>[^`\n]+)`(?: \((?:the )?default\)|, the default\b)|default (?:is )?`(?P<after>[^`\n]+)`"
)

REFUSED = {("architecture.md", "allreduce algorithm=rign")}
"""Examples of errors."""

BESIDE = {
    "group": "algorithm=hierarchical",
    "order": "link=tcp",
    "feedback": "codec=topk:0.01",
    "noise": "clip=1.0 delta=1e-5",
    "delta": "clip=1.0 noise=1.0",
    "epsilon": "clip=1.0 noise=1.0 delta=1e-5",
    "noise_by": "clip=1.0 noise=1.0 delta=1e-5 secure=yes",
    "sampling": "clip=1.0 noise=1.0 delta=1e-5",
    "offload": "device_memory=2GiB",
    "cuts": "stages=3",
    "codec": "link=tcp",
}
"""What a setting is given together with, where it makes no sense alone."""

OF_OTHERS = {
    *(
        "async_op",
        "broadcast_buffers",
        "cpu",
        "create_graph",
        "find_unused_parameters",
        "foreach",
        "fused",
        "grad",
    ),
    *("mixed_precision", "momentum", "use_cpu", "use_reentrant"),
}
"""Parameters of torch, accelerate and transformers."""


class Found(NamedTuple):
    """A piece of code in a page."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {self.text}"


def _found() -> Iterator[Found]:
    for page in PAGES:
        text = page.read_text()
        for pattern, group in ((_CODE, 1), (_QUOTED, 2)):
            for match in pattern.finditer(text):
                yield Found(page.name, text[: match.start()].count("\n") + 1, match[group])


def _of_strategies() -> Iterator[Found]:
    for found in _found():
        for part in found.text.split(";"):
            words = part.strip("\"'").split()
            if words and words[0] in STRATEGIES and all(map(_SETTING.fullmatch, words[1:])):
                yield found._replace(text=" ".join(words))


def _alone() -> Iterator[Found]:
    for found in _found():
        words = found.text.split()
        if all(map(_SETTING.fullmatch, words)):
            yield from (found._replace(text=word) for word in words)


def _has(word: str, name: str) -> bool:
    return name in settings_of(STRATEGIES[word].load_value())


def _without_placeholders(text: str) -> str:
    """`ps servers=S link=tcp` as `ps link=tcp`; that the strategy has the others is checked here."""
    word, *settings = text.split()
    kept = [word]
    for one in settings:
        name, _, value = one.partition("=")
        if not _PLACEHOLDER.fullmatch(value):
            kept.append(one)
        elif not _has(word, name) and name not in STRATEGIES[word].load_value().refuses:
            raise UserError(f"{word} has no setting {name}")
    return " ".join(kept)


def test_every_strategy_in_the_docs_is_one() -> None:
    texts = list(_of_strategies())
    assert sum("=" in found.text for found in texts) > 100, "the docs are read"
    wrong, refused = [], set()
    for found in texts:
        try:
            Strategy.parse(_without_placeholders(found.text))
        except UserError as error:
            if (found.page, found.text) in REFUSED:
                refused.add((found.page, found.text))
            else:
                wrong.append(f"{found}: {error}")
    assert not wrong, "\n".join(wrong)
    assert refused == REFUSED


def test_a_strategy_is_text_or_value_as_the_api_says() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "render_api.py"))["render"]()
    text, value = re.findall(r"`(ps [^`]+)`, or made as a value, `(mh\.[^`]+)`", page)[0]
    assert eval(value, {"mh": mh}) == Strategy.parse(text)


def _takes(name: str, value: str) -> bool:
    """Whether a strategy takes this setting with this value, alone or beside what it needs."""
    for word in (word for word in STRATEGIES if _has(word, name)):
        for beside in ("", BESIDE.get(name, ""), f"{BESIDE.get(name, '')} link=tcp"):
            try:
                Strategy.parse(f"{word} {beside} {name}={value}")
            except UserError:
                continue
            return True
    return False


def test_every_setting_that_stands_alone_is_one_with_a_value_that_it_takes() -> None:
    settings = {name for word in STRATEGIES for name in settings_of(STRATEGIES[word].load_value())}
    checked, wrong = 0, []
    for found in _alone():
        name, _, value = found.text.partition("=")
        if name in settings and not _PLACEHOLDER.fullmatch(value):
            checked += 1
            if not _takes(name, value.strip('"')):
                wrong.append(f"{found}: no strategy takes it")
    assert checked > 50, "the docs are read"
    assert not wrong, "\n".join(wrong)
    assert not _takes("algorithm", "fastest")


def test_every_other_parameter_in_the_docs_is_one_of_a_function_or_a_record() -> None:
    source = "\n".join(path.read_text() for path in sorted((ROOT / "src").rglob("*.py")))
    ours = set(re.findall(r"\b([a-z_]+)\b *[:=]", source))
    wrong = [found for found in _alone() if found.text.partition("=")[0] not in ours | OF_OTHERS]
    assert not wrong, "\n".join(map(str, wrong))


def _parameter(function: Callable[..., Any], name: str) -> str:
    return str(inspect.signature(function).parameters[name].default)


def _train_default(name: str) -> str:
    (command,) = (one for one in train_app.registered_commands if one.name == "digits")
    assert command.callback is not None
    return _parameter(command.callback, name)


DEFAULTS = {
    ("choosing.md", "mirrored"): lambda: _train_default("strategy"),
    ("codecs.md", "raw"): lambda: mh.AllReduce().codec,
    ("gbdt.md", "data"): lambda: GbdtOptions().parallel,
    ("own-loop.md", 'mh.join(buffers="broadcast")'): lambda: _parameter(mh.join, "buffers"),
    ("own-loop.md", "broadcast"): lambda: _parameter(mh.join, "buffers"),
    ("tasks.md", "broadcast"): lambda: mh.Options().buffers,
    ("own-loop.md", "mirrored"): lambda: connect._BY_DEFAULT,
    ("regression.md", "adagrad"): lambda: LogregOptions().learner,
    ("simulator.md", "Ledger"): lambda: type(SimulationSpec(workers=1, steps=1).model).__name__,
}
"""What pages call a default that is not a setting of a strategy, and what it is."""


def _default_texts(name: str) -> set[str]:
    """The defaults of a setting, as they are written, of all strategies that have it."""
    kinds = [STRATEGIES[word].load_value() for word in STRATEGIES if _has(word, name)]
    return {settings_of(kind)[name].show(settings_of(kind)[name].default) for kind in kinds}


def test_what_the_docs_call_a_default_is_one() -> None:
    checked, wrong = set(), []
    for page in PAGES:
        for match in _DEFAULT.finditer(page.read_text()):
            text = match["before"] or match["after"]
            name, equals, value = text.partition("=")
            if (page.name, text) in DEFAULTS:
                checked.add((page.name, text))
                fits = DEFAULTS[page.name, text]() in re.findall(r"[\w.]+", text)
            else:
                fits = bool(equals) and value in _default_texts(name)
            if not fits:
                wrong.append(f"{page.name}: {match[0]}")
    assert not wrong, "\n".join(wrong)
    assert checked == DEFAULTS.keys()


def test_what_fit_takes_where_nothing_is_said() -> None:
    (said,) = re.findall(r"`mh\.fit` takes `(\w+)`", (ROOT / "docs" / "choosing.md").read_text())
    assert said == _parameter(mh.fit, "strategy")


_PAGE_OF = {
    "allreduce.md": "allreduce",
    "central.md": "central",
    "hogwild.md": "hogwild",
    "local.md": "local",
    "memory.md": "sharded",
    "parameter-server.md": "ps",
    "pipeline.md": "pipeline",
    "tensor.md": "tensor",
}


def test_pages_say_one_host_where_a_strategy_cannot_cross_hosts_and_nowhere_else() -> None:
    confined = {page for page, word in _PAGE_OF.items() if Strategy.parse(word).facts.cannot_cross_hosts}
    says = re.compile(r"^- (?:One host\b|It is for the workers of one host\b)", re.MULTILINE)
    assert {page for page in _PAGE_OF if says.search((ROOT / "docs" / page).read_text())} == confined


def test_softsync_is_reported_as_it_is() -> None:
    """Of λ workers ⌊λ/n⌋ updates make a step, which the glossary and the page of `ps` say in these words."""
    for splits, workers in ((1, 6), (2, 6), (4, 6), (6, 6)):
        assert SoftSync(splits).group_size(workers) == workers // splits
    (row,) = re.findall(r"^\| softsync \|.*$", (ROOT / "docs" / "concepts.md").read_text(), re.MULTILINE)
    assert "⌊λ/n⌋" in row
    assert "every ⌊λ/n⌋ pushes, λ workers" in (ROOT / "docs" / "parameter-server.md").read_text()
