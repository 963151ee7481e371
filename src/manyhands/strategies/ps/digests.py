"""Digests that tell whether two runs are equal: a hash of gradients, and digests of the layout and of values."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyhands.native.hashing import xxh64
from manyhands.strategies.common.tables.row_tables import RowGradient
from manyhands.strategies.ps.shard_layout import FlatLayout, ShardRange
from manyhands.strategies.ps.shard_store import ShardStore


def gradient_hash(
    present: Tensor, gradient: ShardRange, rows: Mapping[str, RowGradient] | None = None
) -> str:
    """Hash a shard's part of a gradient and its presence flags, as 16 hexadecimal digits.

    The memory of pieces that backward did not reach is not included.
    """
    flags = present[: len(gradient.pieces)]
    total = xxh64(_bytes(flags))
    if bool(flags.all()):
        total = xxh64(_bytes(gradient.memory), total)
    else:
        for piece, reached in zip(gradient.pieces, flags.tolist(), strict=True):
            if reached:
                total = xxh64(_bytes(piece), total)
    for name, of_table in sorted((rows or {}).items()):
        for data in (np.frombuffer(name.encode(), np.uint8), _bytes(of_table.rows), _bytes(of_table.values)):
            total = xxh64(data, total)
    return f"{total:016x}"


def layout_digest(layout: FlatLayout) -> str:
    """The SHA-256 of the layout; equal in every process of a run."""
    text = repr((layout.entries, layout.bounds, layout.tables))
    return hashlib.sha256(text.encode()).hexdigest()


def shard_digest(store: ShardStore, layout: FlatLayout, shard: int) -> str:
    """The SHA-256 of the values of a shard: its range, then its rows of each table."""
    digest = hashlib.sha256(_bytes(store.values.memory))
    for table in layout.tables:
        own = table.placed(layout.shards).rows(shard)
        digest.update(_bytes(store.tables[table.name].gather(own)))
    return digest.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
