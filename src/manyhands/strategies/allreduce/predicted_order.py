"""The time of a step whose gradients leave in the order in which the next forward needs them."""

from __future__ import annotations

from collections.abc import Callable

from manyhands.facts import TaskProfile
from manyhands.strategies.allreduce.priority.overlap_model import LayeredStep, step_seconds

__all__ = ["beyond_computing_s"]


def beyond_computing_s(
    profile: TaskProfile, samples: float, slice_bytes: int, seconds: Callable[[float], float]
) -> float:
    """What a step takes beyond forward and backward, if `seconds` are those of exchanging so many bytes.

    A slice is at most as large as what may be on its way, so one is exchanged after the other.
    """
    largest = min(slice_bytes, max((one.gradient_bytes for one in profile.layers), default=0))
    if not largest:
        return 0.0
    whole_s, half_s = seconds(largest), seconds(largest / 2)
    byte_s = max(0.0, whole_s - half_s) / (largest / 2)
    step = LayeredStep(
        forward_s=[one.forward.seconds(samples) for one in profile.layers],
        backward_s=[one.backward.seconds(samples) for one in profile.layers],
        num_bytes=[one.gradient_bytes for one in profile.layers],
        bytes_per_s=1 / byte_s if byte_s else float("inf"),
        message_s=max(0.0, whole_s - largest * byte_s),
        slice_bytes=slice_bytes,
        credit_bytes=slice_bytes,
    )
    return max(0.0, step_seconds(step, "priority") - profile.forward_s(samples) - profile.backward_s(samples))
