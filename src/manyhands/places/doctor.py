"""What this machine has for training, what is missing, and how to get it. Reads only; starts nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import ssl
import sys
from enum import Enum
from typing import NamedTuple

import torch

from manyhands.errors import format_bytes
from manyhands.native.cache_folder import cache_folder
from manyhands.native.segment import available_bytes
from manyhands.native.warming import jobs_of, missing_jobs
from manyhands.transport.link.torch_p2p import nccl_version


class DoctorVerdict(Enum):
    """How a finding bears on training here."""

    GOOD = "good"
    NOTE = "note"  # works without it; the advice says what it would give
    BAD = "bad"  # training will not work until this is fixed


class Finding(NamedTuple):
    """One thing looked at; `advice` says how to get what is missing."""

    subject: str
    verdict: DoctorVerdict
    found: str
    advice: str = ""


def _finding(subject: str, found: str, advice: str = "", *, needed: bool = False) -> Finding:
    """What is there; with an advice something is missing, without which training works unless it is `needed`."""
    lacking = DoctorVerdict.BAD if needed else DoctorVerdict.NOTE
    return Finding(subject, lacking if advice else DoctorVerdict.GOOD, found, advice)


def examine() -> list[Finding]:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    limited = f" (of {present}; this process may not use the others)" if usable < present else ""
    free = available_bytes()
    has_memfd = hasattr(os, "memfd_create") and platform.system() == "Linux"
    return [
        _finding(
            "Python",
            f"{platform.python_version()} on {platform.system()} {platform.machine()}",
            "" if sys.version_info >= (3, 11) else "install Python 3.11 or newer",
            needed=True,
        ),
        _finding("cores", f"{usable}{limited}", "" if usable > 1 else "all workers share one core"),
        _finding(
            "memory",
            f"{format_bytes(free)} available",
            ""
            if free >= 2 * 1024**3
            else "each worker needs about 0.5 GiB plus three times the size of the model",
        ),
        _finding(
            "shared memory",
            "anonymous segments (memfd), no /dev/shm needed" if has_memfd else "this system has no memfd",
            "" if has_memfd else "several workers on one host need Linux; strategy=single works anywhere",
            needed=True,
        ),
        _gpus(),
        *_engines(),
        _finding("numba", importlib.metadata.version("numba")),
        _kernels(),
        _tls(),
        _finding("scikit-learn", importlib.metadata.version("scikit-learn"))
        if importlib.util.find_spec("sklearn") is not None
        else _finding("scikit-learn", "missing", "the digits task needs it: pip install scikit-learn"),
    ]


def _gpus() -> Finding:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return _finding("GPUs", ", ".join(names))
    if torch.version.cuda:
        return _finding(
            "GPUs", "none", f"torch was built for CUDA {torch.version.cuda} but finds no driver or device"
        )
    return _finding("GPUs", "none", "this torch is a CPU build; for GPUs install a CUDA build of torch")


def _engines() -> list[Finding]:
    available = torch.distributed.is_available()
    gloo = available and torch.distributed.is_gloo_available()
    nccl = available and torch.distributed.is_nccl_available()
    need_gloo = "needed between hosts and by `bench`; install a torch with distributed support"
    need_nccl = "sums gradients if every worker has its own GPU; included in CUDA builds of torch"
    return [
        _finding("torch", torch.__version__),
        _finding("Gloo", "found" if gloo else "not in this torch", "" if gloo else need_gloo),
        _finding("NCCL", nccl_version() or "not in this torch", "" if nccl else need_nccl),
    ]


def _kernels() -> Finding:
    place = cache_folder()
    if place is None:
        return _finding(
            "kernels",
            "no folder for compiled code",
            "every run compiles again; set NUMBA_CACHE_DIR to a folder that you can write to",
        )
    every, missing = jobs_of("all"), missing_jobs("all")
    return _finding(
        "kernels",
        f"{len(every) - len(missing)} of {len(every)} groups compiled, in {place}",
        "the others are compiled when needed, or now with manyhands doctor --warm" if missing else "",
    )


def _tls() -> Finding:
    makes = importlib.util.find_spec("cryptography") is not None
    advice = "connections between hosts need TLS 1.3; install a Python with OpenSSL 1.1.1 or newer"
    if ssl.HAS_TLSv1_3:
        advice = "" if makes else "manyhands certificates needs it: pip install 'manyhands[tls]'"
    with_it = f"cryptography {importlib.metadata.version('cryptography')}" if makes else "no cryptography"
    return _finding("TLS", f"{ssl.OPENSSL_VERSION}, {with_it}", advice)
