"""`sharded` as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from manyhands.facts import (
    ONE_DEVICE,
    Facts,
    Machines,
    ModelFootprint,
    PredictedStep,
    StepCosts,
    Stepping,
    TaskProfile,
    Truth,
)
from manyhands.strategies.common.usual_promises import CUT_ON_ONE_HOST, IN_STEP
from manyhands.strategy import (
    Strategy,
    WorkerMemory,
    check_link,
    link_setting,
)


@dataclass(frozen=True, kw_only=True)
class Sharded(Strategy):
    """Every worker holds 1/N of parameters, gradients and optimizer state; layers are gathered when they are used.

    `link` is how processes of one host talk: through `shared` memory, or by `tcp` on loopback.
    """

    word: ClassVar[str] = "sharded"
    about: ClassVar[str] = (
        "parameters, gradients and optimizer state split over the workers, gathered by layer"
    )
    truth: ClassVar[Truth] = Truth.SHARES
    refuses: ClassVar[Mapping[str, str]] = {
        "codec": "layers are gathered uncompressed; allreduce link=tcp, local link=tcp and ps link=tcp have a codec",
        "device_memory": ONE_DEVICE,
    }
    link: str = link_setting()

    def __post_init__(self) -> None:
        check_link(self.link)

    def needs(self, model: ModelFootprint, workers: int) -> list[WorkerMemory]:
        if workers == 1:
            return super().needs(model, workers)
        lasting = sum(layer.parameters for layer in model.layers if layer.lasts)
        return [
            WorkerMemory(
                who="worker",
                count=workers,
                weights=model.parameters // workers + model.buffers,
                gradients=model.gradients // workers,
                state=model.state // workers,
                activations=model.working(workers, keeps_gradients=True, share=1 / workers),
                besides=5 * model.largest_layer + 2 * lasting,
                what="this layer and the next one, gradients of two layers and received parts of one; shared "
                "parameters stay for the complete step",
            )
        ]

    def predict(self, profile: TaskProfile, machines: Machines) -> PredictedStep | None:
        """A layer is gathered while the one before it computes; its gradient goes to its owners meanwhile."""
        from manyhands.strategies.common.step_times import gathered_s, spread_s

        workers = machines.workers
        samples = profile.samples(workers)
        moves_s = [spread_s(machines, layer.gradient_bytes) for layer in profile.layers]
        forward_s = [layer.forward.seconds(samples) for layer in profile.layers]
        backward_s = [layer.backward.seconds(samples) for layer in reversed(profile.layers)]
        there_s = [gather + scatter for gather, scatter in zip(moves_s, [0.0, *moves_s], strict=False)]
        whole_s = gathered_s(forward_s, moves_s) + gathered_s(backward_s, there_s[::-1]) + moves_s[0]
        computing_s = sum(forward_s) + sum(backward_s)
        return PredictedStep(
            compute_s=profile.compute_s(workers),
            exchange_s=whole_s - computing_s,
            waiting_s=profile.waiting_s(workers),
            optimizer_s=profile.optimizer_s / workers,
        )

    @property
    def facts(self) -> Facts:
        return Facts(
            usual_costs=StepCosts(step_s=1e-3, message_s=1.7e-4, byte_s=2e-9),
            leaves_steps_out=True,
            promises=IN_STEP,
            stepping=(Stepping.IN_PIECES, Stepping.APART),
            uses_links=True,  # nobody has the whole in memory that others see
            cannot_compile="sharded frees and gathers parameters between layers, which compiled code cannot follow",
            cannot_cross_hosts="",
            cannot_loop_across_hosts=CUT_ON_ONE_HOST,
            refused_buffers={},
        )
