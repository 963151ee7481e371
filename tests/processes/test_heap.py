"""Freed memory that stays with the process: counted in page faults, in a process of its own."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from manyhands.native.heap import freed_memory_kept, keep_freed_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def use_and_free():
    before = faults()
    for megabytes in (48, 3, 20):
        bytearray(b"x") * (megabytes << 20)
    return faults() - before

if sys.argv[1] == "keep":
    assert keep_freed_memory()
if sys.argv[1] == "kept for a while":
    with freed_memory_kept():
        use_and_free()

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

if sys.argv[1] == "given back":
    with freed_memory_kept():
        use_and_free()
        print(resident())
    print(resident())
    sys.exit()
use_and_free()
print(min(use_and_free() for _ in range(3)))
"""


def faults_per_round(mode: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=240, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library, with habits of its own")
def test_what_is_freed_is_not_faulted_in_again() -> None:
    assert 4 * faults_per_round("keep") < faults_per_round("plain")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library, with habits of its own")
def test_what_was_kept_for_a_while_is_given_back_and_later_blocks_are_no_slower_than_before() -> None:
    program = [sys.executable, "-c", PROGRAM, "given back"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=True)
    inside, after = map(int, done.stdout.split())
    assert inside - after > 40 << 20
    assert faults_per_round("kept for a while") <= 1.1 * faults_per_round("plain") + 100
