"""Lightning, Fabric, Hugging Face and Accelerate on the backend, and their pages: two workers for all of them."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import warm
from processes import integrations
from processes.c10d_launch import TESTS
from processes.c10d_worker import checks_of
from unit.test_docs import SCRIPTS

DOCS = Path(__file__).parent.parent.parent / "docs"
WORLD = 2
PATIENCE_S = 360.0

NEEDS = {
    "lightning": ("lightning",),
    "fabric": ("lightning",),
    "accelerate": ("accelerate",),
    "hugging": ("transformers", "accelerate"),
}
"""The packages that a check or page with such a word in its name needs."""

IMPORTS = {
    "lightning": ("lightning.pytorch",),
    "fabric": ("lightning.fabric",),
    "accelerate": ("accelerate",),
    "hugging": ("transformers.trainer", "transformers.models.gpt2.modeling_gpt2"),
}
"""What takes seconds to import is imported once for all workers."""

PROGRAMS = [*checks_of(integrations), *SCRIPTS]


def missing(program: str) -> list[str]:
    words = [word for word in NEEDS if word in program]
    assert words, program
    return sorted({package for word in words for package in NEEDS[word] if find_spec(package) is None})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What became of every program on each worker."""
    folder = tmp_path_factory.mktemp("integrations")
    here = [program for program in PROGRAMS if not missing(program)]
    given = [str(DOCS / program) if program.endswith(".md") else program for program in here]
    slow = sorted({name for program in here for word in IMPORTS if word in program for name in IMPORTS[word]})
    done = warm.run(
        [sys.executable, "-m", "processes.integrations_worker", str(WORLD), folder, *given],
        starts=WORLD,
        imports=slow,
        capture_output=True,
        text=True,
        cwd=TESTS,
        env={**os.environ, "PYTHONWARNINGS": "default", "OMP_NUM_THREADS": "1"},
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_weights_are_those_of_gloo_and_pages_run(program: str, request: pytest.FixtureRequest) -> None:
    if missing(program):
        pytest.skip(f"{', '.join(missing(program))} not installed: pip install 'manyhands[integrations]'")
    for rank, outcome in enumerate(request.getfixturevalue("outcomes")):
        assert outcome.get(program, "did not run") == "", f"rank {rank}: {outcome.get(program)}"
