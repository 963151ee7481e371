"""CUDA tensors on the backend, with as many ranks as there are GPUs (NCCL takes one rank per GPU)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from processes.c10d_launch import run_checks


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_cuda_tensors_go_to_nccl(tmp_path: Path) -> None:
    (outcome,) = run_checks("c10d_cuda", 1, tmp_path)
    assert {name: text for name, text in outcome.items() if text} == {}
