"""What this machine has for training, what is missing, and how to get it. Reads only; starts nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import ssl
import sys
from dataclasses import dataclass
from enum import Enum

import torch

from manyhands.errors import format_bytes
from manyhands.native.cache_folder import cache_folder
from manyhands.native.segment import available_bytes
from manyhands.native.warming import jobs_of, missing_jobs
from manyhands.transport.link.torch_p2p import nccl_version

__all__ = ["DoctorVerdict", "examine"]


class DoctorVerdict(Enum):
    """How a finding bears on training here."""

    GOOD = "good"
    NOTE = "note"
    """Works without it; the advice says what it would give."""
    BAD = "bad"
    """Training will not work until this is fixed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing looked at; `advice` says how to get what is missing."""

    subject: str
    verdict: DoctorVerdict
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    return [
        _python(),
        _cores(),
        _memory(),
        _shared_memory(),
        _gpus(),
        *_engines(),
        _numba(),
        _kernels(),
        _tls(),
        *_extras(),
    ]


def _python() -> Finding:
    version = platform.python_version()
    good = sys.version_info >= (3, 11)
    return Finding(
        subject="Python",
        verdict=DoctorVerdict.GOOD if good else DoctorVerdict.BAD,
        found=f"{version} on {platform.system()} {platform.machine()}",
        advice="" if good else "install Python 3.11 or newer",
    )


def _cores() -> Finding:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    limited = f" (of {present}; this process may not use the others)" if usable < present else ""
    return Finding(
        subject="cores",
        verdict=DoctorVerdict.GOOD if usable > 1 else DoctorVerdict.NOTE,
        found=f"{usable}{limited}",
        advice="" if usable > 1 else "more than one worker will take turns on one core",
    )


def _memory() -> Finding:
    room = available_bytes()
    small = room < 2 * 1024**3
    return Finding(
        subject="memory",
        verdict=DoctorVerdict.NOTE if small else DoctorVerdict.GOOD,
        found=f"{format_bytes(room)} available",
        advice="each worker holds torch and a model: expect about 0.5 GiB and three times the model"
        if small
        else "",
    )


def _shared_memory() -> Finding:
    works = hasattr(os, "memfd_create") and platform.system() == "Linux"
    return Finding(
        subject="shared memory",
        verdict=DoctorVerdict.GOOD if works else DoctorVerdict.BAD,
        found="anonymous segments (memfd), no /dev/shm needed" if works else "no memfd on this system",
        advice="" if works else "several workers on one host need Linux; strategy=single works anywhere",
    )


def _gpus() -> Finding:
    if not torch.cuda.is_available():
        built = torch.version.cuda
        advice = (
            f"torch is built for CUDA {built} but finds no driver or device"
            if built
            else "this torch is a CPU build; for GPUs install a CUDA build of torch"
        )
        return Finding(subject="GPUs", verdict=DoctorVerdict.NOTE, found="none", advice=advice)
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Finding(subject="GPUs", verdict=DoctorVerdict.GOOD, found=", ".join(names))


def _engines() -> list[Finding]:
    available = torch.distributed.is_available()
    gloo = available and torch.distributed.is_gloo_available()
    nccl = available and torch.distributed.is_nccl_available()
    return [
        Finding(subject="torch", verdict=DoctorVerdict.GOOD, found=torch.__version__),
        Finding(
            subject="Gloo",
            verdict=DoctorVerdict.GOOD if gloo else DoctorVerdict.NOTE,
            found="found" if gloo else "not in this torch",
            advice=""
            if gloo
            else "needed between hosts and by `bench`; install a torch with distributed support",
        ),
        Finding(
            subject="NCCL",
            verdict=DoctorVerdict.GOOD if nccl else DoctorVerdict.NOTE,
            found=nccl_version() or "not in this torch",
            advice=""
            if nccl
            else "sums gradients on the GPUs where every worker has one of its own; comes with CUDA builds of torch",
        ),
    ]


def _numba() -> Finding:
    return Finding(
        subject="numba",
        verdict=DoctorVerdict.GOOD,
        found=importlib.metadata.version("numba"),
    )


def _kernels() -> Finding:
    place = cache_folder()
    if place is None:
        return Finding(
            subject="kernels",
            verdict=DoctorVerdict.NOTE,
            found="no folder to keep compiled code in",
            advice="every run compiles again; set NUMBA_CACHE_DIR to a folder of your own",
        )
    every, missing = jobs_of("all"), missing_jobs("all")
    return Finding(
        subject="kernels",
        verdict=DoctorVerdict.NOTE if missing else DoctorVerdict.GOOD,
        found=f"{len(every) - len(missing)} of {len(every)} groups compiled, in {place}",
        advice="the others are compiled when they are needed, or now with manyhands doctor --warm"
        if missing
        else "",
    )


def _tls() -> Finding:
    makes = importlib.util.find_spec("cryptography") is not None
    advice = "connections between hosts need TLS 1.3; install a Python with OpenSSL 1.1.1 or newer"
    if ssl.HAS_TLSv1_3:
        advice = "" if makes else "manyhands certificates needs it: pip install 'manyhands[tls]'"
    with_it = f"cryptography {importlib.metadata.version('cryptography')}" if makes else "no cryptography"
    return Finding(
        subject="TLS",
        verdict=DoctorVerdict.NOTE if advice else DoctorVerdict.GOOD,
        found=f"{ssl.OPENSSL_VERSION}, {with_it}",
        advice=advice,
    )


def _extras() -> list[Finding]:
    found = importlib.util.find_spec("sklearn") is not None
    return [
        Finding(
            subject="scikit-learn",
            verdict=DoctorVerdict.GOOD if found else DoctorVerdict.NOTE,
            found=importlib.metadata.version("scikit-learn") if found else "missing",
            advice="" if found else "the digits task needs it: pip install scikit-learn",
        )
    ]
