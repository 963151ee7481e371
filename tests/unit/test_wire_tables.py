"""The table of time to accuracy: its verdicts, from a result that was never measured."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def row(codec: str, seconds: float | None, steps: int | None = 10, **more: Any) -> dict[str, Any]:
    step_s = seconds / steps if seconds and steps else 0.1
    return {
        "task": "mnist", "bandwidth": "100Mbit", "codec": codec, "steps": steps,
        "busiest_bytes_per_step": 2048.0, "step_s": step_s, "step_s_rounds": [0.95 * step_s, 1.05 * step_s], **more,
    }  # fmt: skip


def test_each_codec_is_judged_beside_the_better_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    tables = runpy.run_path(str(BENCHMARKS / "render_wire.py"))["wire_tables"]
    ddp: dict[str, Any] = {"task": "mnist", "bandwidth": "100Mbit", "codec": "ddp fp16", "step_s": 0.4}
    ddp["step_s_rounds"] = [0.39, 0.41]  # 10 steps: 4 s
    rows = [
        row("raw", 8.0), row("fp16", 5.0), ddp, row("int8", 2.0), row("qsgd", 4.1), row("sign", 6.0, 30),
        row("topk:0.01", None, None),
    ]  # fmt: skip
    about = {"target": "accuracy ≥ 0.95", "gradient_bytes": 4096}
    text = tables({"workers": 2, "tasks": {"mnist": about}, "rows": rows})
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    assert lines[0] == ["codec", "sent in a step", "steps", "100 Mbit/s"]
    assert {line[0]: line[-1] for line in lines[2:]} == {
        "none": "8.0 s, 0.50×, loses",
        "`fp16`": "5.0 s",
        "fp16 by DDP on Gloo": "4.0 s",
        "`int8`": "2.0 s, 2.00×, pays",
        "`qsgd`": "4.1 s, 0.98×, no difference",
        "`sign`": "6.0 s, 0.67×, loses",
        "`topk:0.01`": "never",
    }
    assert {line[0]: line[2] for line in lines[2:]}["`topk:0.01`"] == "never"
