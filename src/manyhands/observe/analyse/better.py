"""Whether a metric is better when it is smaller, by its name."""

from __future__ import annotations

__all__ = ["lower_is_better"]

_LOWER = ("loss", "error", "perplexity", "cost", "distance", "mae", "mse", "rmse", "nll")
_LOWER_BEGINS = ("bits_per_", "error_", "loss_")  # bits per byte or per character: lower is better


def lower_is_better(metric: str) -> bool:
    """Whether a metric of this name is better when it is smaller."""
    name = metric.lower()
    return name.endswith(_LOWER) or name.startswith(_LOWER_BEGINS)
