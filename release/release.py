"""A release: the wheel built twice to the same bytes, what it depends on, checksums, and a signature.

    python release/release.py lock                    tested-versions.txt and licences.md from what is installed here
    python release/release.py build [--key KEY]       build/release: wheel, source, SBOM, SHA256SUMS, SHA256SUMS.sig
    python release/release.py verify FOLDER SIGNERS   the checksums and the signature of a release

`build` needs `pip install '.[release]'`, a clean checkout, and a heading `## VERSION (YYYY-MM-DD)` in CHANGELOG.md;
`--draft` does without the last two. KEY is an SSH key that signs; SIGNERS is a file of allowed signers as ssh-keygen
reads it. It uploads and tags nothing: it prints what to type.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "release"
NAMESPACE = "manyhands-release"
NEVER_LOCKED = {"manyhands", "pip", "setuptools", "wheel"}


class ReleaseError(Exception):
    """Why there is no release, in one sentence."""


def version() -> str:
    text = (ROOT / "src/manyhands/native/version.py").read_text()
    found = re.search(r'__version__ = "([^"]+)"', text)
    if found is None:
        raise ReleaseError("src/manyhands/native/version.py has no __version__")
    return found[1]


def dated(changelog: str, number: str) -> bool:
    """Whether the version's heading has the day of its release."""
    return re.search(rf"^## {re.escape(number)} \(\d{{4}}-\d\d-\d\d\)$", changelog, re.MULTILINE) is not None


def licence_of(facts: importlib.metadata.PackageMetadata) -> str:
    """What a package says of its licence: an expression, a short field, or its classifiers."""
    expression = facts.get("License-Expression") or facts.get("License") or ""
    if expression and "\n" not in expression and len(expression) < 60:
        return expression
    classifiers = [
        one.rpartition(" :: ")[2] for one in facts.get_all("Classifier") or [] if "License ::" in one
    ]
    return ", ".join(classifiers) or "in the package's own file"


def lock() -> None:
    """Write what is installed here, without local versions, and each licence."""
    found = {
        one.metadata["Name"].lower().replace("_", "-"): one for one in importlib.metadata.distributions()
    }
    locked = {name: one for name, one in sorted(found.items()) if name not in NEVER_LOCKED}
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    lines = [
        f"# What `make test` passed with on Python {python}: pip install -c release/tested-versions.txt ."
    ]
    lines += [f"{name}=={one.version.partition('+')[0]}" for name, one in locked.items()]
    (HERE / "tested-versions.txt").write_text("\n".join(lines) + "\n")
    rows = [
        f"| {name} | {one.version.partition('+')[0]} | {licence_of(one.metadata)} |"
        for name, one in locked.items()
    ]
    head = "# Licences of what is installed for tests\n\nWritten by `python release/release.py lock`.\n\n"
    (HERE / "licences.md").write_text(
        head + "| package | version | licence |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def build(key: Path | None, draft: bool) -> Path:
    """Everything of a release in build/release."""
    number = version()
    if not draft:
        if said("git", "status", "--porcelain"):
            raise ReleaseError("the checkout has changes; commit them, or build a --draft")
        if not dated((ROOT / "CHANGELOG.md").read_text(), number):
            raise ReleaseError(
                f"CHANGELOG.md has no heading '## {number} (YYYY-MM-DD)'; write it, or build a --draft"
            )
    target = ROOT / "build" / "release"
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        old.unlink()
    first, second = built_wheel(), built_wheel()
    if first != second:
        raise ReleaseError("two builds of one commit differ: the wheel is not reproducible")
    (target / f"manyhands-{number}-py3-none-any.whl").write_bytes(first)
    prefix = f"--prefix=manyhands-{number}/"
    archive = subprocess.run(
        ["git", "archive", prefix, "HEAD"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    packed = subprocess.run(["gzip", "-n"], input=archive, capture_output=True, check=True).stdout
    (target / f"manyhands-{number}.tar.gz").write_bytes(packed)
    bom = target / f"manyhands-{number}.cdx.json"
    words = (
        "--short-PURLs",
        "--output-reproducible",
        "--pyproject",
        "pyproject.toml",
        "-o",
        str(bom),
        sys.executable,
    )
    said(sys.executable, "-m", "cyclonedx_py", "environment", "--mc-type", "library", *words)
    sums = [f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}" for one in sorted(target.iterdir())]
    (target / "SHA256SUMS").write_text("\n".join(sums) + "\n")
    if key is not None:
        said("ssh-keygen", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(target / "SHA256SUMS"))
    return target


def built_wheel() -> bytes:
    """The wheel of the last commit, from a copy of its own, with its time as that of every file."""
    moment = said("git", "log", "-1", "--format=%ct")
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
        source = Path(folder) / "source"
        source.mkdir()
        packed = Path(folder) / "source.tar"
        packed.write_bytes(archive)
        with tarfile.open(packed) as opened:
            opened.extractall(source, filter="data")
        words = [sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(source)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": moment}
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ReleaseError(
                f"the wheel was not built: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
            )
        (wheel,) = Path(folder).glob("*.whl")
        return wheel.read_bytes()


def verify(folder: Path, signers: Path) -> None:
    """Raise where a file or the signature is not that of the release."""
    sums = folder / "SHA256SUMS"
    for line in sums.read_text().splitlines():
        digest, _, name = line.partition("  ")
        if Path(name).name != name:
            raise ReleaseError(f"SHA256SUMS names {name}, which is not a file of the release")
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise ReleaseError(f"{name} is not the file that was released: its SHA-256 differs")
    words = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "release", "-n", NAMESPACE]
    words += ["-s", str(sums) + ".sig"]
    with sums.open("rb") as content:
        done = subprocess.run(words, stdin=content, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(
            f"the signature of SHA256SUMS does not hold: {done.stderr.strip() or done.stdout.strip()}"
        )


def said(*words: str) -> str:
    """What a command prints; ReleaseError with its last line where it fails."""
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise ReleaseError(f"{' '.join(words[:4])} failed: {lines[-1] if lines else 'no output'}")
    return done.stdout.strip()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("lock")
    building = verbs.add_parser("build")
    building.add_argument("--key", type=Path, help="the SSH key that signs")
    building.add_argument(
        "--draft", action="store_true", help="neither a clean checkout nor a dated heading is needed"
    )
    verifying = verbs.add_parser("verify")
    verifying.add_argument("folder", type=Path)
    verifying.add_argument("signers", type=Path, help="allowed signers; the identity is `release`")
    asked = parser.parse_args()
    try:
        if asked.verb == "lock":
            lock()
        elif asked.verb == "verify":
            verify(asked.folder, asked.signers)
            print("checksums and signature hold")
        else:
            target = build(asked.key, asked.draft)
            print(f"{target}: {', '.join(sorted(one.name for one in target.iterdir()))}")
            print(f"then: git tag -s v{version()} && git push --tags, and upload the files")
    except (ReleaseError, OSError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
