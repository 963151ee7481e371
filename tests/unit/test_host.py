"""The identity of a host: the same for all its processes, another one in another network namespace."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.errors import ManyhandsError
from manyhands.places.local import host
from manyhands.places.local.host import host_identity

PROGRAM = "from manyhands.places.local.host import host_identity; print(host_identity())"


def identity_in(*prefix: str) -> str:
    answer = subprocess.run(
        [*prefix, sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240, check=True
    )
    return answer.stdout.strip()


def test_identity_names_the_kernel_and_the_namespace() -> None:
    boot, namespace = host_identity().split("/")
    assert boot == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert os.readlink("/proc/self/ns/net") == f"net:[{namespace}]"


def test_a_child_is_on_the_same_host_and_one_in_another_namespace_is_not() -> None:
    assert identity_in() == host_identity()
    if subprocess.run(["unshare", "-rn", "true"], capture_output=True, timeout=240).returncode != 0:
        pytest.skip("this user may not make a network namespace")
    elsewhere = identity_in("unshare", "-rn")
    assert elsewhere != host_identity()
    assert elsewhere.split("/")[0] == host_identity().split("/")[0]


def test_without_proc_there_is_a_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host, "_BOOT_ID", tmp_path / "nothing")
    with pytest.raises(ManyhandsError, match=r"nothing cannot be read.*needs Linux"):
        host_identity()
