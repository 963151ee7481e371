"""The benchmark of trained models: workers that begin together, and tell how long each batch took."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from manyhands.lab.bench.inference import _measured, _work


def test_workers_compute_for_the_time_they_were_given() -> None:
    model, inputs = nn.Linear(4, 2), torch.rand(8, 4)
    job = partial(_work, model=model, inputs=inputs, precision="fp32", batch=2, seconds=0.1)
    found = _measured(2, job, 0.1)
    assert set(found) == {"inputs_per_s", "p50_ms", "p95_ms"}
    assert 0 < found["p50_ms"] <= found["p95_ms"]
    assert found["inputs_per_s"] > 0
