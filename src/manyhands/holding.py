"""What a model needs and who holds how much of it, in bytes: what strategies say before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LayerFootprint", "ModelFootprint", "WorkerMemory", "shared_copy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFootprint:
    """One layer of a model, or what layers share."""

    name: str
    parameters: int
    """Bytes of its parameters."""
    activations: float = 0.0
    """Bytes that its forward leaves for backward, for each sample."""
    lasts: bool = False
    """Whether it is used all over the model, so that it cannot come and go with one layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFootprint:
    """The bytes of one whole model in training, each part counted once."""

    parameters: int
    gradients: int
    state: int = 0
    """What the optimizer keeps."""
    buffers: int = 0
    fixed: float = 0.0
    """What forward leaves for backward whatever the number of samples."""
    per_sample: float = 0.0
    """What it leaves for each sample."""
    batch_size: int = 1
    """Samples of a global batch."""
    microbatches: int = 1
    """In how many pieces a share of it is computed."""
    layers: tuple[LayerFootprint, ...] = ()

    @property
    def weights(self) -> int:
        """Parameters and buffers."""
        return self.parameters + self.buffers

    @property
    def largest_layer(self) -> int:
        """Bytes of the parameters of the largest layer that may come and go."""
        return max((layer.parameters for layer in self.layers if not layer.lasts), default=0)

    def activations(self, workers: int = 1) -> int:
        """Bytes at the end of a forward of one of so many parts of a batch, or of the largest piece of it."""
        samples = -(-self.batch_size // workers)
        return round(self.fixed + self.per_sample * -(-samples // self.microbatches))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """What each of `count` processes holds at its peak, or what is there once where they share it."""

    who: str
    count: int = 1
    weights: int = 0
    gradients: int = 0
    state: int = 0
    """What the optimizer keeps."""
    activations: int = 0
    besides: int = 0
    """Anything else that grows with the model."""
    what: str = ""
    """What that is."""

    @property
    def total(self) -> int:
        """Of one of them."""
        return self.weights + self.gradients + self.state + self.activations + self.besides


def shared_copy(model: ModelFootprint, workers: int, parts: int) -> list[WorkerMemory]:
    """Of workers that share parameters and optimizer state, and have gradients of their own."""
    return [
        WorkerMemory(
            who="worker",
            count=workers,
            weights=model.buffers,
            gradients=model.gradients,
            activations=model.activations(parts),
        ),
        WorkerMemory(who="shared by all", weights=model.parameters, state=model.state),
    ]
