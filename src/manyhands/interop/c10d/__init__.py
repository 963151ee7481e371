"""A drop-in backend for torch.distributed: `import manyhands.c10d` and `init_process_group("manyhands")`.

Collectives on CPU tensors of one host go through shared memory. CUDA tensors fall back to NCCL, and groups that span
hosts to Gloo. See docs/drop-in.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from manyhands.errors import UserError
from manyhands.interop.c10d.group_session import SHARED, Options, SessionPlace, open_session
from manyhands.interop.c10d.torch_group import BACKEND, ManyhandsGroup

__all__ = ["BACKEND", "ManyhandsGroup", "Options", "new_group"]


def new_group(
    ranks: Sequence[int] | None = None, *, algorithm: str = SHARED, timeout: timedelta | None = None
) -> Any:
    """Like `torch.distributed.new_group`, for a group of this backend with its own all-reduce algorithm."""
    return dist.new_group(
        None if ranks is None else list(ranks),
        timeout=timeout,
        backend=BACKEND,
        pg_options=Options(algorithm=algorithm),
    )


def _create(given: c10d._DistributedBackendOptions, options: Any) -> ManyhandsGroup:
    if options is not None and not isinstance(options, Options):
        raise UserError(f"pg_options={options!r}: must be manyhands.c10d.Options")
    place = SessionPlace(
        name=given.group_id,
        rank=given.group_rank,
        world=given.group_size,
        global_ranks=tuple(given.global_ranks_in_group),
    )
    session = open_session(given.store, place, options or Options(), given.timeout)
    return ManyhandsGroup(session, given.timeout)


dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=["cpu", "cuda"])
