"""The list of studies is shown at once: nothing heavy is imported before one of them runs."""

import subprocess
import sys


def test_studies_are_listed_without_waiting_for_torch() -> None:
    code = """
import sys
from importlib import import_module
from manyhands.lab.studies.registry import STUDIES
for text in STUDIES.values():
    module, _, value = text.partition(":")
    study = getattr(import_module(f"manyhands.lab.studies.{module}"), value)
    assert study.question.endswith("?") and study.options_type()
print([name for name in ("torch", "numpy", "numba", "sklearn", "multiprocessing") if name in sys.modules])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n"
