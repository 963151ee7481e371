"""Every strategy by the first word of its text: where its value and its training are.

One line a strategy. Homes are names and not imports, so that a text is parsed, a help page printed or a worker started
without importing the packages of all the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class StrategyEntry:
    """Where a strategy lives: `module:name` of its value's class and of its trainings', inside the package."""

    value: str
    training: str
    kernel: str = ""
    """The training of tasks whose step is compiled; empty where it moves their gradients instead."""
    roles: tuple[str, ...] = ()
    """The modules that its processes need; empty where that is the training's."""
    serving: str = ""
    """What cuts a trained model for serving in parts; empty where it does not."""
    traffic: str = ""
    """What finds the traffic of a step of a traced model, for `Strategy.sends`; empty where it is not modelled."""
    drawing: str = ""
    """What draws the order of its workers' work, as an SVG; empty where that is no schedule."""
    loop: str = ""
    """What joins a loop of the user's own (a `LoopEnd`); empty where that is the training's exchange."""

    @property
    def package(self) -> str:
        """The folder of the strategy, from the package's root."""
        return "/".join(self.value.split(".")[:2])

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that its processes need."""
        targets = (self.value, *(self.roles or (self.training,)), self.kernel)
        return tuple(f"manyhands.{target.partition(':')[0]}" for target in targets if target)

    def load_value(self) -> Any:
        """The class of the value."""
        return _load(self.value)

    def load_training(self, *, compiled: bool = False) -> Any:
        """The class that trains by it; of compiled tasks, None where it has none."""
        target = self.kernel if compiled else self.training
        return _load(target) if target else None

    def load_serving(self) -> Any:
        """The class that cuts a trained model (`ServedParts`), or None."""
        return _load(self.serving) if self.serving else None

    def load_traffic(self) -> Any:
        """What finds the traffic of a step; None where it is not modelled."""
        return _load(self.traffic) if self.traffic else None

    def load_drawing(self) -> Any:
        """What draws the schedule of a value; None where it has none."""
        return _load(self.drawing) if self.drawing else None

    def load_loop(self) -> Any:
        """What joins a loop of the user's own; None where that is the training's exchange."""
        return _load(self.loop) if self.loop else None


def entry_of(word: str) -> StrategyEntry:
    """Of a strategy, or of what chooses one."""
    return STRATEGIES[word] if word in STRATEGIES else CHOOSERS[word]


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(import_module(f"manyhands.{module}"), name)


STRATEGIES: Final[dict[str, StrategyEntry]] = {
    "single": StrategyEntry(
        "strategies.single.strategy:Single",
        "strategies.single.training:SingleTraining",
        "engine.kernel_threads:KernelThreads",
    ),
    "mirrored": StrategyEntry(
        "strategies.allreduce.strategy:Mirrored",
        "strategies.allreduce.training:AllReduceTraining",
        "strategies.allreduce.kernel:AllReduceKernels",
        traffic="strategies.allreduce.predicted:sent_in_step",
    ),
    "allreduce": StrategyEntry(
        "strategies.allreduce.strategy:AllReduce",
        "strategies.allreduce.training:AllReduceTraining",
        "strategies.allreduce.kernel:AllReduceKernels",
        roles=("strategies.allreduce.training", "strategies.allreduce.elastic.member_process"),
        traffic="strategies.allreduce.predicted:sent_in_step",
    ),
    "central": StrategyEntry(
        "strategies.central.strategy:Central",
        "strategies.central.training:CentralTraining",
        traffic="strategies.central.predicted:sent_in_step",
    ),
    "sharded": StrategyEntry(
        "strategies.sharded.strategy:Sharded",
        "strategies.sharded.training:ShardedTraining",
        traffic="strategies.sharded.predicted:sent_in_step",
    ),
    "ps": StrategyEntry(
        "strategies.ps.strategy:Ps",
        "strategies.ps.training:PsTraining",
        roles=("strategies.ps.live.server_process", "strategies.ps.live.worker_process"),
        loop="strategies.ps.live.served_loop:ServedLoop",
        traffic="strategies.ps.predicted:sent_in_step",
    ),
    "hogwild": StrategyEntry(
        "strategies.hogwild.strategy:Hogwild",
        "strategies.hogwild.training:HogwildTraining",
        "strategies.hogwild.kernel:HogwildKernels",
        loop="strategies.hogwild.shared_loop:SharedLoop",
    ),
    "local": StrategyEntry(
        "strategies.local.strategy:Local",
        "strategies.local.training:LocalTraining",
        traffic="strategies.local.predicted:sent_in_step",
    ),
    "federated": StrategyEntry(
        "strategies.federated.strategy:Federated",
        "strategies.federated.training:FederatedTraining",
        traffic="strategies.federated.predicted:sent_in_round",
    ),
    "pipeline": StrategyEntry(
        "strategies.pipeline.strategy:Pipeline",
        "strategies.pipeline.training:PipelineTraining",
        serving="strategies.pipeline.served_stages:ServedStages",
        traffic="strategies.pipeline.predicted:sent_in_step",
        drawing="strategies.pipeline.schedule_drawing:strategy_svg",
    ),
    "tensor": StrategyEntry(
        "strategies.tensor.strategy:Tensor",
        "strategies.tensor.training:TensorTraining",
        "strategies.tensor.kernel:TensorKernels",
        serving="strategies.tensor.served_slices:ServedSlices",
        traffic="strategies.tensor.predicted:sent_in_step",
    ),
}

CHOOSERS: Final[dict[str, StrategyEntry]] = {
    "auto": StrategyEntry("strategies.auto.strategy:Auto", "foresight.plan.auto_training:AutoTraining"),
}
"""What stands in the place of a strategy and chooses one while it trains."""

ALIASES: Final[dict[str, str]] = {
    "ddp": "mirrored",
    "dp": "mirrored",
    "horovod": "allreduce",
    "ring": "allreduce algorithm=ring",
    "zero": "sharded",
    "zero1": "central",
    "zero3": "sharded",
    "fsdp": "sharded",
    "deepspeed": "sharded",
    "parameter_server": "ps",
    "async": "ps consistency=async",
    "localsgd": "local",
    "fl": "federated",
    "fedavg": "federated",
    "gpipe": "pipeline schedule=gpipe",
    "1f1b": "pipeline",
    "pp": "pipeline",
    "megatron": "tensor",
    "tp": "tensor",
}
"""What other frameworks call it, and the text that comes nearest here."""
