"""`tensor` has no training of networks yet: its value refuses `fit` before this is asked for."""

from __future__ import annotations

from manyhands.training.training import Result, Stage, Training

__all__ = ["TensorTraining"]


class TensorTraining(Training):
    """Refused, with what can be done instead."""

    def run(self, stage: Stage) -> Result:
        """Never trains; the sentence is the value's."""
        request = stage.request
        request.strategy.check(request.workers, request.plan.device)
        raise AssertionError("the value refuses every task")
