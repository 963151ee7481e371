"""One member's way through an epoch: how many exchanges it knows to be complete, and what becomes of one that was cut.

An exchange is complete for one member only when every member has its result in memory; so members are never more than
one exchange apart, and after a loss one number settles all: the highest count among the survivors. Whoever is one
behind has the result in its memory and goes on with it; nobody has taken what comes after. Pure.
"""

from __future__ import annotations

from manyhands.strategies.allreduce.elastic.elastic_messages import EpochView

__all__ = ["StepChannel"]


class StepChannel:
    """One member's count; `begin` is called for every view that it is in."""

    def __init__(self, member: int) -> None:
        self.member = member
        self.view: EpochView | None = None
        self.passed = 0
        """Exchanges of the epoch that it knows to be complete."""

        self.next: EpochView | None = None
        """The view after this one, once the launcher has told it and until the member is in it."""

    @property
    def epoch(self) -> int:
        """0 before the first."""
        return self.view.epoch if self.view is not None else 0

    def begin(self, view: EpochView) -> None:
        """Be in this epoch from now on."""
        self.view, self.passed, self.next = view, 0, None

    def passes(self) -> None:
        """One more exchange is complete."""
        self.passed += 1

    def learn(self, view: EpochView) -> bool:
        """The epoch is over, and this one follows: whether the exchange that this member was in is complete."""
        if self.view is not None and not self.passed <= view.passed <= self.passed + 1:
            raise AssertionError(
                f"member {self.member} has passed {self.passed} exchanges of epoch {self.epoch}, and the survivors "
                f"{view.passed}"
            )
        self.next = view
        return self.view is not None and view.passed == self.passed + 1
