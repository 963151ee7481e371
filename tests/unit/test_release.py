"""A release's own rules: what is locked, what the matrix and the workflow test, and that a changed file is found."""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def script(name: str) -> ModuleType:
    module = ModuleType(name)
    path = ROOT / "release" / f"{name}.py"
    module.__dict__.update(__file__=str(path), __name__=name)
    sys.modules[name] = module  # dataclasses look for their module
    exec(compile(path.read_text(), path, "exec"), module.__dict__)
    return module


release, matrix = script("release"), script("matrix")


def locked() -> dict[str, str]:
    lines = (ROOT / "release/tested-versions.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))  # type: ignore[arg-type, misc]


def test_every_dependency_is_locked_within_its_range() -> None:
    versions = locked()
    for text in PROJECT["dependencies"]:
        needed = Requirement(text)
        assert needed.specifier.contains(versions[needed.name]), text


def test_the_lock_names_no_local_version_and_no_place() -> None:
    assert all(version.replace(".", "").isalnum() for version in locked().values())


def test_every_locked_package_has_a_row_with_its_licence() -> None:
    rows = (ROOT / "release/licences.md").read_text()
    assert all(f"| {name} | {version} |" in rows for name, version in locked().items())


def test_the_lowest_and_newest_torch_are_those_of_the_range() -> None:
    low, new = matrix.allowed_torch(PROJECT["dependencies"])
    (torch,) = (Requirement(one) for one in PROJECT["dependencies"] if one.startswith("torch"))
    assert torch.specifier.contains(f"{low}.0")
    assert torch.specifier.contains(f"{new}.0")
    for outside in (low, new):
        major, minor = map(int, outside.split("."))
        beyond = minor - 1 if outside == low else minor + 1
        assert not torch.specifier.contains(f"{major}.{beyond}.0")


def test_the_matrix_says_which_python_is_absent() -> None:
    row = matrix.tested("python3.999", "2.13", ["tests/unit/test_release.py"])
    assert row.passed is None
    assert row.found == "not installed here"


def test_the_workflow_tests_what_the_project_allows() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]["test"]
    axes = job["strategy"]["matrix"]
    allowed = SpecifierSet(PROJECT["requires-python"])
    assert all(allowed.contains(f"{python}.0") for python in axes["python"])
    assert [f"python{python}" for python in axes["python"]] == list(matrix.PYTHONS)
    assert tuple(axes["torch"]) == matrix.allowed_torch(PROJECT["dependencies"])
    assert job["steps"][-1]["run"] == "bash .ci/run"


def test_a_version_needs_the_day_of_its_release() -> None:
    assert release.dated("# Changes\n\n## 1.2.0 (2027-01-02)\n", "1.2.0")
    assert not release.dated("## 1.2.0 (unreleased)\n", "1.2.0")
    assert not release.dated("## 1x2.0 (2027-01-02)\n", "1.2.0")


def test_licences_are_read_from_each_of_their_places() -> None:
    facts = importlib.metadata.metadata("numpy")
    assert "BSD" in release.licence_of(facts)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="there is no ssh-keygen here")
def test_a_changed_file_and_a_changed_list_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "release"
    folder.mkdir()
    (folder / "a.whl").write_bytes(b"content")
    (folder / "SHA256SUMS").write_text(hashlib.sha256(b"content").hexdigest() + "  a.whl\n")
    key = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True, timeout=60)
    words = ["ssh-keygen", "-Y", "sign", "-f", key, "-n", release.NAMESPACE, folder / "SHA256SUMS"]
    subprocess.run(words, check=True, timeout=60, capture_output=True)
    signers = tmp_path / "signers"
    signers.write_text("release " + key.with_suffix(".pub").read_text())
    release.verify(folder, signers)

    (folder / "a.whl").write_bytes(b"another")
    with pytest.raises(release.ReleaseError, match=r"a\.whl is not the file that was released"):
        release.verify(folder, signers)
    (folder / "SHA256SUMS").write_text(hashlib.sha256(b"another").hexdigest() + "  a.whl\n")
    with pytest.raises(release.ReleaseError, match="signature"):
        release.verify(folder, signers)
    (folder / "SHA256SUMS").write_text("0  ../key\n")
    with pytest.raises(release.ReleaseError, match="not a file of the release"):
        release.verify(folder, signers)
