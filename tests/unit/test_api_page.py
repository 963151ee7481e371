"""The API reference says what the docstrings say, and every field that users meet has one."""

from __future__ import annotations

import dataclasses
import runpy
from pathlib import Path

import manyhands

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_has_everything_that_is_offered():
    module = runpy.run_path(str(DOCS / "render_api.py"))
    text = module["render"]()
    for name in manyhands.__all__:
        assert name.startswith("__") or f"mh.{name}`" in text or f"mh.{name}(" in text, name


def test_every_option_field_and_setting_has_a_sentence():
    module = runpy.run_path(str(DOCS / "render_api.py"))
    kinds = [manyhands.Options, manyhands.Task, manyhands.Run, manyhands.Slowdown, manyhands.EarlyStopping]
    kinds += [home.load_value() for home in module["STRATEGIES"].values()]
    silent = [
        f"{kind.__name__}.{row[0].strip('`')}"
        for kind in kinds
        for row in module["_fields"](kind)
        if not row[-1]
    ]
    assert silent == [], "write a string after the field"
    assert len(module["_fields"](manyhands.Options)) == len(dataclasses.fields(manyhands.Options))
