"""`single`: the plain loop in the caller's process."""

from __future__ import annotations

from contextlib import closing
from typing import cast

import torch

from manyhands.engine.device import device_of
from manyhands.engine.exchange import Exchange, SingleExchange
from manyhands.engine.text_speed import device_use, largest_use
from manyhands.engine.training import Result, Stage, Training
from manyhands.engine.worker import Trainer
from manyhands.native.heap import freed_memory_kept
from manyhands.observe.record.event_ring import EventRing
from manyhands.places.local.status import State
from manyhands.strategies.single.offload import OffloadExchange
from manyhands.strategies.single.strategy import Single


class SingleTraining(Training):
    """Trains in the caller's process; starts no process and shares nothing."""

    def run(self, stage: Stage) -> Result:
        del self._model  # the trainer builds its own, and a large one is not in memory twice
        with EventRing.create(role=0) as ring, stage.collector({"worker-0": ring}) as collector:
            with stage.view(collector):
                worker_context = _Here(ring, stage)
                strategy = cast(Single, self._request.strategy)
                device = device_of(self._request.plan.device, 0)
                if device.type == "cuda":  # of this run alone
                    torch.cuda.reset_peak_memory_stats(device)
                exchange: Exchange = SingleExchange()
                if strategy.device_memory:
                    exchange = OffloadExchange(strategy.device_memory, device, strategy.offload)
                with closing(exchange), freed_memory_kept():
                    trainer = Trainer(self._request.plan, exchange, worker_context, stage.checkpoints())
                    trained = trainer.run(self._start)
                    used = device_use(device)
                if self._request.plan.restore_best:
                    trained.model.load_state_dict(trained.state_dict())
            collector.flush()
            return Result(
                model=trained.model.cpu(),
                steps_done=trained.steps_done,
                samples=trained.samples,
                seconds=trained.seconds,
                stopped_early=trained.stopped_early,
                observed={**collector.summary(), **largest_use([used])},
            )


class _Here:
    """The worker context of the plain loop, in the caller's process."""

    def __init__(self, ring: EventRing, stage: Stage) -> None:
        self.record = ring.record
        self.note = stage.hear
        self.stop_requested = stage.stop_wanted  # Ctrl-C reaches the loop itself

    def mark(self, step: int, state: State, *, place: tuple[int, int] | None = None) -> None:
        """Ignored: no liveness monitor watches a single worker."""
