"""What a logistic regression learns with: the rule, its rate, its penalties, and how often it sees the data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from manyhands.errors import UserError, nearest

__all__ = ["LEARNERS", "LogregOptions"]

LEARNERS = {
    "sgd": "rate / √(number of the example), the same for all features",
    "adagrad": "rate / √(0.01 + Σg²), a rate for each feature (Duchi et al., 2011)",
    "ftrl": "FTRL-proximal (McMahan et al., 2013): as adagrad, and an L1 penalty that leaves few weights",
}
"""The learning rules by name."""

_RATES = {"sgd": 0.5, "adagrad": 0.1, "ftrl": 0.1}  # for values of 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LogregOptions:
    """One training, checked when made: a UserError names the field, its value and what is allowed."""

    learner: str = "adagrad"
    passes: int = 5
    rate: float | None = None
    """None: one that fits the size of the values: 0.1 / s for adagrad and ftrl, 0.5 / s² for sgd, where s is the root
    of the mean square of the values in the first examples."""
    l1: float = 0.0
    """λ of λ·|w|: in adagrad and sgd beside the loss of every example, for the features that it has; in ftrl the
    paper's λ1, beside the sum of all losses."""
    l2: float = 0.0
    """λ of λ/2·w², in the same places."""
    bias: bool = True
    """Learn a weight that every example has. Workers that share memory always meet at it."""
    batch: int = 256
    """Examples in a step of the strategies that work on batches (allreduce and ps); the others take one at a time."""
    seed: int = 0
    """The order of examples where batches are drawn; the others go through the file as it is."""
    allow_overload: bool = False
    """Start even if the workers do not seem to fit into the memory and the limits of this host."""

    def __post_init__(self) -> None:
        if self.learner not in LEARNERS:
            raise UserError(f"unknown learner {self.learner!r}; {nearest(self.learner, LEARNERS)}")
        for name in ("passes", "batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name}={value!r} must be a whole number of at least 1")
        if self.rate is not None and not 0 < self.rate < float("inf"):
            raise UserError(f"rate={self.rate!r} must be a number above 0")
        for name in ("l1", "l2"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise UserError(f"{name}={value!r} must be a number of at least 0")

    def settled(self, scale: float) -> LogregOptions:
        """These options with a rate: the one given, or that for values of size `scale`."""
        if self.rate is not None:
            return self
        return replace(self, rate=_RATES[self.learner] / (scale**2 if self.learner == "sgd" else scale))
