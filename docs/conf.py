"""The site that `make docs` builds into build/site: Sphinx with furo, and the API reference from docstrings."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

project = "manyhands"
author = "the authors of manyhands"
extensions = ["myst_parser"]
myst_heading_anchors = 4  # a link to a heading is written as on a forge
html_theme = "furo"
html_title = "manyhands"
html_show_copyright = False

CONTENTS = {
    "Start": "tour/README concepts tasks language-models choosing plan",
    "Train": "machines callbacks run-directory memory placement own-loop drop-in lightning hugging-face accelerate",
    "Look": "seeing compare studies faults replay simulator",
    "Strategies": "allreduce central parameter-server hogwild local pipeline tensor codecs",
    "Federated learning": "federated federated-deployment",
    "Workloads and models": "text words regression svd gbdt reinforcement-learning after-training",
    "Reference": "api benchmarks never-run security dependencies",
    "Internals": (
        "architecture internals/extending internals/cluster internals/links internals/liveness internals/membership"
        " internals/events internals/public-tables"
    ),
}
"""The menu: it is here, and not in index.md, so that a forge shows that page without directives."""


_IMAGE = re.compile(r"^!\[([^\]]*)\]\(([^)]+)\.png\)$", re.MULTILINE)


def _two_colours(page: str, image: re.Match[str]) -> str:
    """A picture that exists in dark as well: the one that suits the reader's theme."""
    about, path = image.groups()
    if (
        path.endswith("-dark")
        or not (Path(__file__).parent.joinpath(page).parent / f"{path}-dark.png").is_file()
    ):
        return image[0]
    return "\n".join(
        f"```{{image}} {path}{suffix}.png\n:class: only-{theme}\n:alt: {about}\n```\n"
        for suffix, theme in (("", "light"), ("-dark", "dark"))
    )


def complete(_app: Any, page: str, source: list[str]) -> None:
    source[0] = _IMAGE.sub(lambda image: _two_colours(page, image), source[0])
    if page == "index":
        for caption, pages in CONTENTS.items():
            source[0] += (
                f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n" + "\n".join(pages.split()) + "\n```\n"
            )
    if page == "api":
        source[0] = runpy.run_path(str(Path(__file__).with_name("render_api.py")))["render"]()
    if page == "tour/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n[1-9]*\n```\n"


def setup(app: Any) -> None:
    app.connect("source-read", complete)
