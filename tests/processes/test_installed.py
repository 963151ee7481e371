"""What users install: a wheel, alone in an environment, has every command, all data, and a place for its cache.

The notebook of `examples/` is run there, the scripts by forks of a process that has imported the same sources, as their
docstrings say, and all do what they claim; timing decides nothing.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import warm
from manyhands.cli.main import COMMANDS
from manyhands.native.version import __version__

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

_EVERY_HELP = """
import sys
import manyhands
asked = sys.argv[1:]
from manyhands.cli.main import COMMANDS, main
assert manyhands.__file__.startswith(sys.prefix), manyhands.__file__
for words in (*([name] for name in COMMANDS), ["train", "digits"], ["train", "glove"], ["train", "logreg"]):
    sys.argv = ["manyhands", *words, "--help"]
    try:
        main()
    except SystemExit as end:
        assert end.code in (0, None), words
    print("shown:", *words)
"""

_NOTEBOOK = """
import json
print("the notebook:")
namespace = {"__name__": "__main__"}
with open(asked[0]) as file:
    cells = json.load(file)["cells"]
for number, cell in enumerate(cells):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"notebook.ipynb, cell {number}", "exec"), namespace)
"""

_WHERE_KERNELS_GO = """
import manyhands.native.counters
from manyhands.native.cache_folder import cache_folder
print(cache_folder())
"""


def _run(*command: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command that knows nothing of this checkout."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist, made of a copy of the checkout without the network."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    options = ("--no-isolation", "--skip-dependency-check", "--outdir", "dist")
    done = _run(sys.executable, "-m", "build", *options, ".", folder=source)
    assert done.returncode == 0, done.stderr
    return source / "dist"


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare environment with the wheel; what the wheel depends on comes from the environment of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    environment = folder / "venv"
    done = _run(sys.executable, "-m", "venv", "--without-pip", environment, folder=folder)
    assert done.returncode == 0, done.stderr
    python = environment / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    options = ("--disable-pip-version-check", "--no-deps", "--no-index", "--no-compile")
    done = _run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, folder=folder)
    assert done.returncode == 0, done.stderr
    # A path in a .pth file is searched, and the .pth files there (those of an editable install) are not read.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return environment


@pytest.fixture(scope="module")
def shown(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What the environment's Python prints: every command's help, and then, in the same process, the notebook."""
    words = ("-c", _EVERY_HELP + _NOTEBOOK, EXAMPLES / "notebook.ipynb")
    done = _run(installed / "bin" / "python", *words, folder=tmp_path_factory.mktemp("shown"))
    assert done.returncode == 0, done.stderr
    helped, said, by_notebook = done.stdout.partition("the notebook:\n")
    assert said, done.stdout
    return helped, by_notebook


def test_wheel_and_sdist_hold_every_source_and_all_data(built: Path) -> None:
    ours = {
        str(file.relative_to(ROOT / "src"))
        for file in (ROOT / "src" / "manyhands").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    (wheel,) = built.glob(f"manyhands-{__version__}-*.whl")
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    assert ours <= names
    assert "manyhands/py.typed" in names
    assert {name.split("/")[0] for name in names} == {"manyhands", f"manyhands-{__version__}.dist-info"}
    with tarfile.open(built / f"manyhands-{__version__}.tar.gz") as archive:
        packed = {name.partition("/src/")[2] for name in archive.getnames()}
    assert ours <= packed


def test_the_installed_program_says_its_version_and_helps_with_every_command(
    installed: Path, shown: tuple[str, str]
) -> None:
    folder = installed.parent
    version = _run(installed / "bin" / "manyhands", "--version", folder=folder)
    assert (version.returncode, version.stdout) == (0, f"{__version__}\n"), version.stderr
    module = _run(installed / "bin" / "python", "-m", "manyhands", "--help", folder=folder)
    assert module.returncode == 0, module.stderr
    assert all(name in module.stdout for name in COMMANDS)
    helped, _ = shown
    assert all(f"shown: {name}" in helped for name in COMMANDS)


def test_the_installed_program_trains(installed: Path) -> None:
    folder = installed.parent
    done = _run(
        installed / "bin" / "manyhands", "train", "digits", "--workers", "2", "--steps", "20", "--out", "run",
        folder=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (folder / "run" / "report.html").is_file()


def test_the_commands_of_the_readme_run_in_their_order_in_an_empty_folder(
    installed: Path, tmp_path: Path
) -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 90
    (block,) = re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line.removeprefix("$ "), comments=True) for line in block.splitlines()]
    assert len(commands) > 5
    for command in commands:
        assert command[0] == "manyhands", "what the package installs"
        done = _run(installed / "bin" / "manyhands", *command[1:], folder=tmp_path)
        assert done.returncode == 0, f"{command}: {done.stderr}"
    script = tmp_path / "ten_lines.py"
    script.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)))
    done = _run(installed / "bin" / "python", script, folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_kernels_go_to_the_users_cache_and_not_beside_the_package(installed: Path, tmp_path: Path) -> None:
    (site,) = installed.glob("lib/python*/site-packages/manyhands")
    folders = [site, *(folder for folder in site.rglob("*") if folder.is_dir())]
    for folder in folders:
        folder.chmod(0o555)  # as where another user has installed it
    try:
        done = _run(
            installed / "bin" / "python", "-c", _WHERE_KERNELS_GO, folder=tmp_path, XDG_CACHE_HOME=str(tmp_path),
            NUMBA_CACHE_DIR="",
        )  # fmt: skip
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert done.returncode == 0, done.stderr
    cache = tmp_path / "manyhands" / "kernels"
    assert done.stdout == f"{cache}\n"
    assert list(cache.glob("native.counters-*/*.nbi"))
    assert not list(site.rglob("*.nb[ic]"))


def _warm_example(folder: Path, *command: str | Path, **options: Any) -> str:
    """What an example printed that asks nothing of an installation, run by forks that have the same sources."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # beside others, two threads wait for each other
        "JE_ARROW_MALLOC_CONF": "background_thread:false",  # a process that is forked has one thread
    }
    done = warm.run(
        [sys.executable, *command],
        trains=True,
        **options,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_example_is_told_of_and_tested() -> None:
    report = (EXAMPLES / "README.md").read_text()
    for file in EXAMPLES.iterdir():
        if file.suffix in (".py", ".ipynb"):
            assert f"]({file.name})" in report
            assert file.name in Path(__file__).read_text()


@pytest.mark.usefixtures("compiler_imported")
def test_own_loop_has_the_same_losses_alone_and_on_two_workers(tmp_path: Path) -> None:
    script, words = EXAMPLES / "own_loop_cnn.py", ("--epochs", "1")
    alone = _warm_example(tmp_path, script, *words, compiler=True)
    launch = ("-m", "manyhands", "launch", script, "--workers", "2", "--")
    once = {"compiler": True, "imports": ["sklearn.datasets"]}  # for both workers
    launched = _warm_example(tmp_path, *launch, *words, **once)
    line = re.compile(r"epoch 1: loss ([\d.]+), test accuracy ([\d.]+)")
    (loss, right), (other_loss, other_right) = (line.findall(text)[0] for text in (alone, launched))
    assert float(loss) == pytest.approx(float(other_loss), abs=2e-3)
    assert float(right) == pytest.approx(float(other_right), abs=0.02)
    assert float(right) > 0.5


def test_glove_learns_and_names_neighbours(tmp_path: Path) -> None:
    words = ("--bytes", "200000", "--passes", "3", "--dim", "16", "--workers", "2")
    printed = _warm_example(tmp_path, EXAMPLES / "glove.py", *words)
    costs = [float(cost) for cost in re.findall(r"pass \d: cost ([\d.]+)", printed)]
    assert len(costs) == 3
    assert costs[-1] < costs[0]
    assert re.search(r"^list: \w+ \d", printed, re.M)


def test_a_model_that_fits_nowhere_here_is_planned_and_said_not_to_be_run(tmp_path: Path) -> None:
    printed = _warm_example(tmp_path, EXAMPLES / "plan_100b.py")
    title, *rows = printed.splitlines()
    assert title == "101 billion parameters on 256 devices; not run, not measured"
    assert rows[0].startswith("pipeline ")
    assert [row.split()[0] for row in rows if "does not fit" in row].count("allreduce") == 1
    assert rows[-1].endswith("Not run, not measured.")
    # Between what Megatron's runs of 76 and 146 billion parameters reached, give or take a fifth
    rate = re.search(r": (\d+) TFLOP/s", rows[-1])
    assert rate is not None
    assert 140 * 0.8 < float(rate[1]) < 148 * 1.2


def test_straggler_is_given_fewer_batches_by_the_asynchronous_server(tmp_path: Path) -> None:
    printed = _warm_example(tmp_path, EXAMPLES / "straggler.py", "--steps", "60", "--factor", "20")
    rows = {line.split()[1]: line.split() for line in printed.splitlines() if line.startswith("ps ")}
    assert set(rows) == {"consistency=sync", "consistency=async"}
    assert rows["consistency=sync"][-2:] == ["60", "60"]
    fast, slow = map(int, rows["consistency=async"][-2:])
    assert fast + slow == 60
    assert slow < fast


def test_notebook_runs_cell_by_cell(shown: tuple[str, str]) -> None:
    book = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    assert book["nbformat"] == 4
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    assert all(cell.get("outputs", []) == [] for cell in book["cells"])
    _, printed = shown
    assert "largest difference of a weight" in printed


def test_hugging_face_trainer_learns_on_two_workers(tmp_path: Path) -> None:
    if (
        find_spec("transformers") is None or find_spec("accelerate") is None
    ):  # importing them here takes a second
        pytest.skip("the example needs transformers and accelerate")
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    command = (*launch, EXAMPLES / "hugging_face.py", "--steps", "12")
    slow = [
        "transformers.trainer",
        "transformers.models.gpt2.modeling_gpt2",
        "transformers.models.auto.modeling_auto",
    ]
    printed = _warm_example(tmp_path, *command, starts=2, imports=slow)
    report = re.search(r"2 workers, .*: loss ([\d.]+) before, ([\d.]+) after", printed)
    assert report is not None, printed
    assert float(report[2]) < float(report[1]) - 0.3
