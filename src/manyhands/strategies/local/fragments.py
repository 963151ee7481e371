"""Which fragment of the model is sent after which step, and merged after which one; pure.

With `steps=8 fragments=2 overlap=2`, s is when a fragment is sent and m when what came back is merged:

    step         1  2  3  4  5  6  7  8  9 10 11 12
    fragment 0      s     m                 s     m
    fragment 1                  s     m

So at the end of every round of `steps` steps nothing is under way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentPlan:
    """Each of `fragments` is merged once in `steps` steps, and sent `overlap` steps before; steps count from 1."""

    steps: int
    fragments: int = 1
    overlap: int = 0

    @property
    def most_overlap(self) -> int:
        """With more, a fragment would leave before the one ahead of it is merged."""
        return self.steps // self.fragments - 1

    def merged(self, step: int) -> int | None:
        """The fragment that is merged after `step`, if any."""
        within = (step - 1) % self.steps + 1
        number = -(-within * self.fragments // self.steps) - 1  # the first that is not due before this step
        return number if (number + 1) * self.steps // self.fragments == within else None

    def sent(self, step: int) -> int | None:
        """The fragment that is sent after `step`, if any."""
        return self.merged(step + self.overlap)


def cut(sizes: Sequence[int], fragments: int) -> list[range]:
    """Cut tensors of these sizes, in their order, into so many pieces of about one size, none of them empty."""
    ends = list(accumulate(sizes))
    bounds = [0]
    for number in range(1, fragments):
        share = ends[-1] * number / fragments
        nearest = min(range(len(sizes)), key=lambda index: abs(ends[index] - share)) + 1
        bounds.append(min(max(nearest, bounds[-1] + 1), len(sizes) - fragments + number))
    return [range(begin, end) for begin, end in zip(bounds, [*bounds[1:], len(sizes)], strict=True)]
