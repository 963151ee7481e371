"""One member's progress through an epoch: how many exchanges are complete, and whether an interrupted one counts.

An exchange is complete for one member only when every member has its result in memory. Members are therefore never
more than one exchange apart, and after a loss one number decides: the highest count among the survivors. A member
that is one behind has the result in its memory and continues with it; no member has taken anything later. Pure.
"""

from __future__ import annotations

from manyhands.strategies.allreduce.elastic.elastic_messages import EpochView

__all__ = ["StepChannel"]


class StepChannel:
    """One member's count of complete exchanges; `begin` is called for every view that the member is in."""

    def __init__(self, member: int) -> None:
        self.member = member
        self.view: EpochView | None = None
        self.passed = 0
        """The number of exchanges of the epoch that this member knows to be complete."""

        self.next: EpochView | None = None
        """The next view, from when the launcher announces it until the member has entered it."""

    @property
    def epoch(self) -> int:
        """The number of the current epoch; 0 before the first."""
        return self.view.epoch if self.view is not None else 0

    def begin(self, view: EpochView) -> None:
        """Enter the epoch of this view."""
        self.view, self.passed, self.next = view, 0, None

    def passes(self) -> None:
        """Count one more complete exchange."""
        self.passed += 1

    def learn(self, view: EpochView) -> bool:
        """The epoch is over and this view follows: return whether the interrupted exchange is complete."""
        if self.view is not None and not self.passed <= view.passed <= self.passed + 1:
            raise AssertionError(
                f"member {self.member} has passed {self.passed} exchanges of epoch {self.epoch}, and the survivors "
                f"{view.passed}"
            )
        self.next = view
        return self.view is not None and view.passed == self.passed + 1
