"""A model as a chain: modules that are applied one after another, so that it can be cut between any two of them.

An `nn.Sequential` is a chain. Any other model says its chain with a method:

    def chain(self) -> Sequence[nn.Module]:
        return [self.embed, *self.layers, self.head]

Applied in this order to the model's input they give what the model gives, to the bit. Each is a submodule of the model,
or a `ChainFunction`, where what happens is no module's own forward.

A model may take more inputs than one: `model(tokens, mask=mask)`. The first goes through the chain; each that is given
by name goes to the modules whose forward has a parameter of that name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor, nn

from manyhands.errors import UserError

# What a recurrent module carries from one time step to the next: a tensor, or tensors in tuples, lists and dicts
State: TypeAlias = Any


@runtime_checkable
class SaysChain(Protocol):
    """A model that is not an `nn.Sequential` but declares its chain."""

    def chain(self) -> Sequence[nn.Module]:
        """The modules that make the model, in the order in which they are applied."""


@runtime_checkable
class OverTime(Protocol):
    """A module of a chain that can be applied to a slice of time after another, dimension 1 of its input being time."""

    def over_time(self, x: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """What forward gives for this slice, and the state after it, given that before it (None: at the beginning)."""


class ChainFunction(nn.Module):
    """A function with the modules it needs, as one module of a chain: `ChainFunction(embed, tokens=..., ...)`.

    The function is called with the input, then these modules by name. They stay the model's own: no parameter is
    copied, and the model's `state_dict` does not change.
    """

    def __init__(self, function: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **self._modules)


class ChainCall(NamedTuple):
    """What a model is called with: the input of its first module, and inputs by name."""

    x: Any
    named: Mapping[str, Any]


def applied(module: nn.Module, x: Any, named: Mapping[str, Any]) -> Any:
    """`module(x)`, with those of the model's named inputs that the module takes."""
    return module(x, **{name: named[name] for name in names_taken(module) if name in named} if named else {})


def names_taken(module: nn.Module) -> tuple[str, ...]:
    """The parameters of its forward besides the first."""
    return _names_taken(type(module).forward)


@cache
def _names_taken(forward: Callable[..., Any]) -> tuple[str, ...]:
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = list(inspect.signature(forward).parameters.values())[2:]
    return tuple(one.name for one in parameters if one.kind in named)


def chain_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """The modules whose composition is the model, nested `nn.Sequential`s flattened; UserError where it is no chain."""
    if isinstance(model, SaysChain):
        given = model.chain()
        is_list = isinstance(given, Sequence)
        if not is_list or not all(isinstance(module, nn.Module) for module in given):
            of = f" of {', '.join(sorted({type(one).__name__ for one in given}))}" if is_list else ""
            raise UserError(
                f"{type(model).__name__}.chain() returned a {type(given).__name__}{of}; it must return a list of "
                "nn.Modules, in the order in which they are applied"
            )
        chain = tuple(part for module in given for part in _flat(module))
    elif _is_plain(model):
        chain = tuple(_flat(model))
    else:
        raise UserError(
            f"{type(model).__name__} is not a chain: the order of its modules is not known; make it an "
            "nn.Sequential, or give it a method chain() that lists its modules in order"
        )
    if not chain:
        raise UserError(f"{type(model).__name__} has no modules; there is nothing to train")
    return chain


def named_chain(model: nn.Module) -> tuple[tuple[str, nn.Module], ...]:
    """The modules of `chain_of`, each with its name in the model.

    A `ChainFunction` is named after its modules: `tokens+positions`. A module that the model does not hold is named
    after its class.
    """
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}

    def name_of(module: nn.Module) -> str:
        held = [names[id(child)] for child in module.children() if id(child) in names]
        return names.get(id(module)) or "+".join(held) or type(module).__name__

    return tuple((name_of(module), module) for module in chain_of(model))


def _flat(module: nn.Module) -> Iterator[nn.Module]:
    if _is_plain(module):
        for child in module._modules.values():  # children() leaves out a module that comes a second time
            if child is not None:
                yield from _flat(child)
    else:
        yield module


def _is_plain(module: nn.Module) -> bool:
    """Whether `module` applies its children one after another and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
