"""What a logistic regression learns with: the rule, its rate, its penalties, and how often it sees the data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from manyhands.workloads.task_options import CheckedOptions, option

LEARNERS = {
    "sgd": "rate / √(number of the example), the same for all features",
    "adagrad": "rate / √(0.01 + Σg²), a rate for each feature (Duchi et al., 2011)",
    "ftrl": "FTRL-proximal (McMahan et al., 2013): as adagrad, and an L1 penalty that leaves few weights",
}
_RATES = {"sgd": 0.5, "adagrad": 0.1, "ftrl": 0.1}  # for values of 1


@dataclass(frozen=True, kw_only=True)
class LogregOptions(CheckedOptions):
    """One training."""

    learner: str = option("adagrad", "learning rule: sgd, adagrad or ftrl", choices=LEARNERS)
    passes: int = option(5, "passes over the examples", at_least=1)
    rate: float | None = option(None, "learning rate", above=0, shown="0.1, or 0.5 for sgd, for values of 1")
    """None: one that fits the size of the values: 0.1 / s for adagrad and ftrl, 0.5 / s² for sgd, where s is the root
    of the mean square of the values in the first examples."""
    l1: float = option(0.0, "L1 penalty λ·|w| per example; with ftrl, of all examples", at_least=0)
    """In adagrad and sgd beside the loss of every example, for the features that it has; in ftrl the paper's λ1, beside
    the sum of all losses."""
    l2: float = option(0.0, "L2 penalty λ/2·w², likewise", at_least=0)
    bias: bool = option(True, "learn no bias", flag="--no-bias")
    """Workers that share memory always meet at it."""
    batch: int = option(256, "examples per step with allreduce, mirrored, central and ps", at_least=1)
    """The other strategies take one at a time."""
    seed: int = option(0, "fixes the order of examples for strategies that use batches")
    """The others go through the file as it is."""
    allow_overload: bool = option(False, "start even if this host seems too small for the workers")

    def with_rate(self, scale: float) -> LogregOptions:
        """These options with a rate: the one given, or that for values of size `scale`."""
        if self.rate is not None:
            return self
        return replace(self, rate=_RATES[self.learner] / (scale**2 if self.learner == "sgd" else scale))
