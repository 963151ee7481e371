"""README and docs are run: every ```python block, top to bottom, one namespace a file, in an empty folder."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "internals").glob("*.md")),
]
LESSONS = sorted((ROOT / "docs" / "tour").glob("*.md"))
"""`processes/test_tour.py` runs them."""
SCRIPTS = ("accelerate.md", "hugging-face.md", "lightning.md")
"""Scripts of two workers: `processes/test_integrations.py` runs them."""

BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "page", [one for one in PAGES if one.name not in SCRIPTS], ids=lambda page: page.name
)
def test_snippets_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for match in BLOCK.finditer(text):
        line = text[: match.start()].count("\n") + 1
        code = compile("\n" * line + match.group(1), str(page), "exec")
        exec(code, namespace)
    assert text.startswith("# "), f"{page.name} needs a title"


@pytest.mark.parametrize("page", PAGES + LESSONS, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} points to {target}, which is not there"


@pytest.mark.parametrize("page", PAGES + LESSONS, ids=lambda page: page.name)
def test_figures_are_those_of_the_committed_results(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # where a script finds what lies beside it
    render = runpy.run_path(str(ROOT / "benchmarks" / "render.py"))["render"]
    text = page.read_text()
    assert render(text) == text, "run `python benchmarks/render.py`"
