"""Encoding and decoding: each codec beside the arithmetic of torch's own hooks and a plain numpy form.

    python benchmarks/codecs.py [--rounds 9] [--items 4194304] [--out benchmarks/results/codecs.json]

One thread each, on gradients of float32 in memory: the rate is their bytes over the processor time to encode and
decode them. Contenders take turns within each round; medians are reported.
Error feedback is left out, as the others have none.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import _orthogonalize

from manyhands.wire.codec import codec_named
from manyhands.wire.parcels import Matrix, Parcel

CODECS = (
    "fp32", "bf16", "fp16", "fp8", "fp8:e5m2", "int8", "qsgd:7", "qsgd:127", "ternary", "sign",
    "topk:0.01", "topk:0.01,sampled", "topk:0.01+int8", "randomk:0.01", "dgc:0.001", "powersgd:2",
)  # fmt: skip


def ours(text: str, values: torch.Tensor) -> tuple[Callable[[], Any], int]:
    codec, side = codec_named(text, feedback=False), int(len(values) ** 0.5)
    assert codec is not None
    dtype = torch.float64 if text == "fp32" else torch.float32
    given = values.to(dtype)
    parcel = replace(Parcel.whole(0, len(values), dtype), matrices=(Matrix(0, side, side),))
    room, into = torch.empty(codec.size(parcel), dtype=torch.uint8), torch.empty(len(values), dtype=dtype)

    def run() -> None:
        codec.decode(parcel, room[: codec.encode(parcel, given, room)], into)

    return run, codec.size(parcel)


def halved(values: torch.Tensor, dtype: torch.dtype) -> Callable[[], Any]:
    """What `fp16_compress_hook` does besides the exchange: convert and divide, and copy back."""
    into = torch.empty_like(values)
    return lambda: into.copy_(values.to(dtype).div_(2))


def powersgd(values: torch.Tensor) -> Callable[[], Any]:
    """What `powerSGD_hook` does with one matrix: P = M Q, orthogonal; Q = Mᵀ P; P Qᵀ."""
    side = int(len(values) ** 0.5)
    matrix = values[: side * side].view(1, side, side)
    q, p, out = torch.randn(1, side, 2), torch.empty(1, side, 2), torch.empty(1, side, side)

    def run() -> None:
        _orthogonalize(q)
        torch.bmm(matrix, q, out=p)
        _orthogonalize(p)
        torch.bmm(matrix.transpose(1, 2), p, out=q)
        torch.bmm(p, q.transpose(1, 2), out=out)

    return run


def fp8(values: torch.Tensor) -> Callable[[], Any]:
    """A scale for each block of 256, and torch's conversion."""

    def run() -> torch.Tensor:
        blocks = values.view(-1, 256)
        scale = blocks.abs().amax(1, keepdim=True) / 448
        return (blocks / scale).to(torch.float8_e4m3fn).float() * scale

    return run


def numpy_forms(values: np.ndarray) -> dict[str, Callable[[], Any]]:
    wide = values.astype(np.float64)  # as ours is given it
    forms: dict[str, Callable[[], Any]] = {
        "fp32": lambda: wide.astype(np.float32).astype(np.float64),
        "fp16": lambda: values.astype(np.float16).astype(np.float32),
    }
    return forms | numpy_blocks(values) | numpy_items(values)


def numpy_blocks(values: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Of codecs that make every item smaller, with a scale for each block."""
    rng = np.random.default_rng(0)

    def int8() -> Any:
        blocks = values.reshape(-1, 256)
        scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
        return np.rint(blocks / scale).astype(np.int8) * scale

    def qsgd(levels: int) -> Any:
        blocks = values.reshape(-1, 512)
        norm = np.sqrt((blocks * blocks).sum(1, keepdims=True))
        drawn = np.floor(np.abs(blocks) * (levels / norm) + rng.random(blocks.shape, np.float32))
        codes = (np.copysign(drawn, blocks) + levels).astype(np.uint8).ravel()
        if levels < 8:
            packed = codes[::2] | codes[1::2] << 4
            codes = np.stack([packed & 15, packed >> 4], 1).ravel()
        return (codes.astype(np.float32) - levels).reshape(blocks.shape) * (norm / levels)

    def ternary() -> Any:
        blocks = values[: len(values) // 640 * 640].reshape(-1, 640)
        scale = np.abs(blocks).max(1, keepdims=True)
        trits = np.where(rng.random(blocks.shape, np.float32) * scale < np.abs(blocks), np.sign(blocks), 0)
        packed = (trits.astype(np.int8) + 1).reshape(-1, 5) @ np.array([1, 3, 9, 27, 81], np.int8).astype(
            np.uint8
        )
        table = np.array([[code // 3**k % 3 - 1 for k in range(5)] for code in range(243)], np.float32)
        return table[packed].reshape(blocks.shape) * scale

    def sign() -> Any:
        blocks = values.reshape(-1, 1024)
        scale = np.abs(blocks).mean(1, keepdims=True)
        bits = np.packbits(blocks < 0, axis=1)
        return (1 - 2 * np.unpackbits(bits, axis=1).astype(np.float32)) * scale

    return {
        "int8": int8,
        "qsgd:7": lambda: qsgd(7),
        "qsgd:127": lambda: qsgd(127),
        "ternary": ternary,
        "sign": sign,
    }


def numpy_items(values: np.ndarray) -> dict[str, Callable[[], Any]]:
    """Of codecs that send a few items."""
    rng, into = np.random.default_rng(0), np.empty_like(values)
    velocity, owed = np.zeros_like(values), np.zeros_like(values)

    def topk() -> Any:
        kept = len(values) // 100
        places = np.sort(np.argpartition(np.abs(values), -kept)[-kept:])
        into.fill(0)
        into[places] = values[places]
        return into

    def dgc() -> Any:
        kept = len(values) // 1000
        np.multiply(velocity, np.float32(0.9), out=velocity)
        np.add(velocity, values, out=velocity)
        np.add(owed, velocity, out=owed)
        places = np.sort(np.argpartition(np.abs(owed), -kept)[-kept:])
        into.fill(0)
        into[places] = owed[places]
        owed[places] = velocity[places] = 0
        return into

    def randomk() -> Any:
        kept = len(values) // 100
        places = rng.choice(len(values), kept, replace=False, shuffle=False)
        into.fill(0)
        into[places] = values[places] * 100
        return into

    return {"topk:0.01": topk, "randomk:0.01": randomk, "dgc:0.001": dgc}


def measure(items: int, rounds: int) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    values = torch.randn(items, generator=torch.Generator().manual_seed(0))
    plain = numpy_forms(values.numpy())
    torch_forms = {
        "fp16": halved(values, torch.float16),
        "bf16": halved(values, torch.bfloat16),
        "fp8": fp8(values),
        "powersgd:2": powersgd(values),
    }
    rows: list[dict[str, Any]] = []
    for text in CODECS:
        run, num_bytes = ours(text, values)
        contenders = {"manyhands": run}
        contenders |= {"torch": torch_forms[text]} if text in torch_forms else {}
        contenders |= {"numpy": plain[text]} if text in plain else {}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for number in range(rounds + 1):
            for name, call in contenders.items():
                begin = time.process_time()
                call()
                if number:  # the first one warms up
                    times[name].append(time.process_time() - begin)
        given = items * (8 if text == "fp32" else 4)
        rates = {name: given / statistics.median(took) / 1e9 for name, took in times.items()}
        rows.append({"codec": text, "share": num_bytes / given, "gb_per_s": rates})
        print(text, {name: round(rate, 2) for name, rate in rates.items()}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--items", type=int, default=1 << 22)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    result = {
        "benchmark": "codecs",
        "items": given.items,
        "rounds": given.rounds,
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "rows": measure(given.items, given.rounds),
    }
    if given.out is not None:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
