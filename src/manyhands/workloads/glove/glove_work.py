"""What GloVe trains on, and in which portions: plain values, which are sent to worker processes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from manyhands.engine.kernel_task import Portion
from manyhands.native.segment import round_up
from manyhands.workloads.glove.glove_kernels import STEP
from manyhands.workloads.glove.options import GloveOptions

__all__ = ["GloveWork", "turn_number"]

_MOST = 1 << 16  # records of a step: a megabyte, some milliseconds
_PER_PASS = 16  # steps that a short file has, so that all workers have some


@dataclass(frozen=True, kw_only=True)
class GloveWork:
    """A file of shuffled records, and how to train on them."""

    path: Path
    num_records: int
    vocabulary_size: int
    glove: GloveOptions

    @property
    def step_records(self) -> int:
        """Records of a step: a whole number of batches, or of records that pass a gate at once."""
        wanted = min(_MOST, -(-self.num_records // _PER_PASS))
        if self.glove.batch == 1:
            return round_up(wanted, STEP)
        return self.glove.batch * max(1, wanted // self.glove.batch)


def turn_number(num_records: int, portion: Portion) -> int:
    """The number at the gate of a portion's first STEP records, over all passes."""
    return portion.passed * -(-num_records // STEP) + portion.begin // STEP
