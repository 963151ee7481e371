"""What the documents say about sums on GPUs by NCCL, from the committed result."""

from __future__ import annotations

from statistics import mean

from results_read import load, markdown


def nccl_steps() -> str:
    """A step by each way beside DDP, and how far two ranks are from one process."""
    result = load("gpu-nccl")
    speed, distance = result["speed"], result["distance"]
    rows = [["", "a step", "beside DDP on NCCL"]]
    for way, seconds in speed["seconds_per_step"].items():
        times = f"{speed['times_ddp'][way]:.2f}"
        rows.append([way if way.startswith("DDP") else f"`{way}`", f"{mean(seconds) * 1e3:.0f} ms", times])
    double = max(value for name, value in distance.items() if "float64" in name)
    about = (
        f"Two ranks on one {result['gpu']}, which NCCL takes for two hosts, so that it sends over sockets (torch "
        f"{result['torch']}, {speed['parameters'] / 1e6:.1f} M parameters, autocast). Weights differ from those of one "
        f"process by {double:.0e} in float64. A rank that was killed was named after "
        f"{result['killed']['seconds']:.1f} s."
    )
    return f"{about}\n\n{markdown(rows)}"
