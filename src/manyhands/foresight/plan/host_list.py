"""Hosts in a file, a line each, as `mpirun` and DeepSpeed read them: `NAME slots=WORKERS`; `#` begins a remark."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from manyhands.errors import UserError
from manyhands.foresight.plan.described_cluster import DescribedCluster

__all__ = ["with_hosts"]


def with_hosts(cluster: DescribedCluster, path: Path) -> DescribedCluster:
    """The cluster with the hosts and workers of a file; UserError names a line that makes no sense."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"host file {path} cannot be read: {error}") from None
    slots: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        match = re.fullmatch(r"(\S+)(?:\s+slots=(\d+))?", text)
        if match is None or match[2] == "0":
            raise UserError(f"host file {path}, line {number}: {text!r} must be NAME slots=WORKERS")
        if match[1] in slots:
            raise UserError(f"host file {path}, line {number}: {match[1]} was named before")
        slots[match[1]] = int(match[2] or 1)
    if not slots:
        raise UserError(f"host file {path} names no host; write a line such as hostA slots=4 for each")
    first, per_host = next(iter(slots.items()))
    for name, count in slots.items():
        if count != per_host:
            raise UserError(
                f"host file {path}: {name} has {count} slots, and {first} has {per_host}; a plan needs equal hosts"
            )
    return replace(cluster, machines=replace(cluster.machines, hosts=len(slots), per_host=per_host))
