"""A guard that makes every read of a parameter that is still to be stepped wait for that parameter, and no other.

A module's forward waits for its parameters. Parameters are also read elsewhere (tied weights, a penalty in the loss,
an exponential average): while a step is computed, every torch function that is given a tensor in a parameter's memory
waits for it as well. So nothing reads a value of the previous step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

__all__ = ["ParameterGuard"]


class ParameterGuard(TorchFunctionMode):
    """While entered, calls `wait(numbers)` before pending parameters of these numbers are read.

    `wait` returns when they are stepped, and has called `stepped` for them and possibly for others. `close` removes
    the hooks from the modules.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        wait: Callable[[Iterable[int]], None],
    ) -> None:
        super().__init__()
        self._wait = wait
        self._pending: set[int] = set()
        self._numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._in_memory: dict[int, list[int]] = {}
        for number, parameter in enumerate(parameters):
            self._in_memory.setdefault(_memory_of(parameter), []).append(number)
        self._hooks = [
            module.register_forward_pre_hook(self._before_forward)
            for module in model.modules()
            if any(id(one) in self._numbers for one in module.parameters(recurse=False))
        ]

    @property
    def pending(self) -> frozenset[int]:
        """The numbers of parameters that are still to be stepped."""
        return frozenset(self._pending)

    def expect(self, numbers: Iterable[int]) -> None:
        """Mark parameters as pending: they must be stepped before they are read."""
        self._pending.update(numbers)

    def stepped(self, numbers: Iterable[int]) -> None:
        self._pending.difference_update(numbers)

    def close(self) -> None:
        """Remove the hooks; idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Wait for pending parameters among the arguments, then call the torch function."""
        del types
        if self._pending:
            self._look_at(args)
            if kwargs:
                self._look_at(kwargs.values())
        return func(*args, **(kwargs or {}))

    def _look_at(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self._before_reading(value)
            elif isinstance(value, (list, tuple)):
                self._look_at(value)

    def _before_reading(self, tensor: Tensor) -> None:
        try:
            memory = _memory_of(tensor)
        except (RuntimeError, NotImplementedError):  # a wrapper tensor does not say whose memory it reads
            self._wait(self.pending)
            return
        if awaited := self._pending.intersection(self._in_memory.get(memory, ())):
            self._wait(awaited)

    def _before_forward(self, module: nn.Module, _inputs: Any) -> None:
        if self._pending:
            own = {self._numbers.get(id(one), -1) for one in module.parameters(recurse=False)}
            if awaited := self._pending & own:
                self._wait(awaited)


def _memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
