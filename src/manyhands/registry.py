"""Every strategy by the first word of its text: where its value and its training are.

One line a strategy. Homes are names and not imports, so that a text is parsed, a help page printed or a worker started
without importing the packages of all the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

__all__ = ["ELSEWHERE", "STRATEGIES", "Home"]


@dataclass(frozen=True, slots=True)
class Home:
    """Where a strategy lives: `module:name` of its value's class and of its trainings', inside the package."""

    value: str
    training: str
    kernel: str = ""
    """The training of tasks whose step is compiled; empty where it moves their gradients instead."""

    roles: tuple[str, ...] = ()
    """The modules that its processes need; empty where that is the training's."""

    @property
    def package(self) -> str:
        """The package of ours that is the strategy's own."""
        return self.value.partition(".")[0]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules that its processes need."""
        homes = (self.value, *(self.roles or (self.training,)), self.kernel)
        return tuple(f"manyhands.{home.partition(':')[0]}" for home in homes if home)

    def load_value(self) -> Any:
        """The class of the value."""
        return _load(self.value)

    def load_training(self, *, compiled: bool = False) -> Any:
        """The class that trains by it; of compiled tasks, None where it has none."""
        home = self.kernel if compiled else self.training
        return _load(home) if home else None


def _load(home: str) -> Any:
    module, _, name = home.partition(":")
    return getattr(import_module(f"manyhands.{module}"), name)


STRATEGIES: Final[dict[str, Home]] = {
    "single": Home("single.strategy:Single", "single.training:SingleTraining", "single.kernel:SingleKernels"),
    "mirrored": Home(
        "allreduce.strategy:Mirrored",
        "allreduce.training:AllReduceTraining",
        "allreduce.kernel:AllReduceKernels",
    ),
    "allreduce": Home(
        "allreduce.strategy:AllReduce",
        "allreduce.training:AllReduceTraining",
        "allreduce.kernel:AllReduceKernels",
        roles=("allreduce.training", "allreduce.elastic.work"),
    ),
    "central": Home("central.strategy:Central", "central.training:CentralTraining"),
    "sharded": Home("sharded.strategy:Sharded", "sharded.training:ShardedTraining"),
    "ps": Home(
        "server.strategy:Ps",
        "server.training:PsTraining",
        roles=("server.live.server", "server.live.worker"),
    ),
    "hogwild": Home(
        "hogwild.strategy:Hogwild", "hogwild.training:HogwildTraining", "hogwild.kernel:HogwildKernels"
    ),
    "local": Home("local.strategy:Local", "local.training:LocalTraining"),
    "federated": Home("federated.strategy:Federated", "federated.training:FederatedTraining"),
    "pipeline": Home("pipeline.strategy:Pipeline", "pipeline.training:PipelineTraining"),
    "tensor": Home("tensor.strategy:Tensor", "tensor.training:TensorTraining", "tensor.kernel:TensorKernels"),
}

ELSEWHERE: Final[dict[str, str]] = {
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
