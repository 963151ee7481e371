"""The user's optimizer, run on the pieces of the parameters that one worker owns.

No second optimizer is built. For the length of a step the user's own one sees other parameters: pieces of the shared
copy, whose gradients are this worker's part of the buckets, and their state. So its settings, schedulers that change
them, hooks and whatever else it keeps are simply the user's. Between steps it lists the model's parameters as always,
and its `state` is empty: each worker keeps that of its pieces here.

A state that the optimizer is given, by its constructor or by `load_state_dict`, is taken over before the next step:
cut to this worker's pieces, the rest let go.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.central.optimizers import may_fuse
from manyhands.central.ownership import Piece
from manyhands.errors import UserError

__all__ = ["OwnedState", "SlicedOptimizer"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnedState:
    """The state that one worker keeps for one parameter, or for items `begin` to `end` of it."""

    position: int
    """The parameter's number in the optimizer's `state_dict()`."""

    begin: int
    end: int
    shape: torch.Size
    """Of the state's tensors that were cut with the parameter."""

    is_whole: bool
    state: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Owned:
    """A piece as the optimizer sees it: `proxy` shares the memory of the shared copy."""

    piece: Piece
    parameter: nn.Parameter
    proxy: nn.Parameter
    gradient: Tensor

    @property
    def is_whole(self) -> bool:
        return self.proxy.shape == self.parameter.shape

    def cut(self, value: Any) -> Any:
        """This piece's part of a value of the state: a tensor of the parameter's shape is cut as the parameter is."""
        if not isinstance(value, Tensor):
            return value
        value = value.to(self.proxy.device)  # the state of a model on a GPU stays with the shared copy
        if self.is_whole:
            return value
        if value.shape == self.parameter.shape:
            value = value.reshape(-1)[self.piece.begin : self.piece.end]
        return value.clone()


class SlicedOptimizer:
    """Steps the pieces of one worker; `parameters`, `values` and `gradients` are numbered as the pieces are.

    `values` are the shared copies of the parameters, `gradients` this worker's parts of the gradients.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pieces: Sequence[Piece],
        parameters: Sequence[nn.Parameter],
        values: Sequence[Tensor],
        gradients: Sequence[Tensor],
    ) -> None:
        self._optimizer = optimizer
        self._owned = [
            _own(piece, parameters[piece.parameter], values[piece.parameter], gradients[piece.parameter])
            for piece in pieces
        ]
        _require_known(optimizer, parameters)
        by_parameter = {id(owned.parameter): owned for owned in self._owned}
        self._groups = [
            [by_parameter[id(p)] for p in group["params"] if id(p) in by_parameter]
            for group in optimizer.param_groups
        ]
        self._sizes = [len(group["params"]) for group in optimizer.param_groups]
        self._state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        self._adopt()
        self._refusal = optimizer.register_state_dict_pre_hook(_refuse_state_dict)

    def reached(self) -> list[Tensor]:
        """The gradients of this worker's pieces of parameters that some worker reached."""
        return [owned.gradient for owned in self._owned if owned.parameter.grad is not None]

    def step(self) -> None:
        """Update this worker's pieces of the shared copy; pieces that no worker reached stay as they are."""
        self._adopt()
        for owned in self._owned:
            owned.proxy.grad = owned.gradient if owned.parameter.grad is not None else None
        with self._in_charge():
            self._optimizer.step()

    def state(self) -> list[OwnedState]:
        """What this worker keeps, in the order of the optimizer's parameters."""
        self._adopt()
        positions: dict[int, int] = {}
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                positions[id(parameter)] = len(positions)
        owned_states = [
            OwnedState(
                position=positions[id(owned.parameter)],
                begin=owned.piece.begin,
                end=owned.piece.end,
                shape=owned.proxy.shape,
                is_whole=owned.is_whole,
                state=self._state[owned.proxy],
            )
            for group in self._groups
            for owned in group
            if self._state.get(owned.proxy)
        ]
        return sorted(owned_states, key=lambda one: one.position)

    def settings(self) -> dict[str, Any]:
        """The optimizer's `state_dict()` without the state of any parameter."""
        self._refusal.remove()
        outer = self._optimizer.state
        self._optimizer.state = defaultdict(dict, _of_no_parameter(self._state))
        try:
            return self._optimizer.state_dict()
        finally:
            self._optimizer.state = outer
            self._refusal = self._optimizer.register_state_dict_pre_hook(_refuse_state_dict)

    def close(self) -> None:
        """Let go of the pieces; the optimizer is an ordinary one again, without state."""
        self._refusal.remove()
        self._owned, self._groups = [], []
        self._state.clear()

    def _adopt(self) -> None:
        """Take over what the optimizer holds; nothing, mostly."""
        given = self._optimizer.state
        if not any(given.values()):
            return
        self._state = defaultdict(dict, _of_no_parameter(given))
        for owned in self._owned:
            state = given.get(owned.parameter)
            if state:
                self._state[owned.proxy] = {name: owned.cut(value) for name, value in state.items()}
        given.clear()

    @contextmanager
    def _in_charge(self) -> Iterator[None]:
        """Show the optimizer its pieces and their state in place of the parameters, and the fused step if it may."""
        groups = self._optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._sizes:
            raise UserError(
                f"the optimizer's groups now hold {sizes} parameters and held {self._sizes} when training began; "
                "add all parameter groups before"
            )
        shown = [(group["params"], group.get("fused")) for group in groups]
        outer, self._optimizer.state = self._optimizer.state, self._state
        try:
            for group, owned in zip(groups, self._groups, strict=True):
                group["params"] = [one.proxy for one in owned]
                if may_fuse(self._optimizer, group, group["params"], self._state):
                    group["fused"] = True
            yield
        finally:
            self._state, self._optimizer.state = self._optimizer.state, outer
            for group, (parameters, fused) in zip(groups, shown, strict=True):
                group["params"] = parameters
                if "fused" in group:
                    group["fused"] = fused


def _own(piece: Piece, parameter: nn.Parameter, value: Tensor, gradient: Tensor) -> _Owned:
    if piece.end - piece.begin < value.numel():
        value = value.view(-1)[piece.begin : piece.end]
        gradient = gradient.view(-1)[piece.begin : piece.end]
    return _Owned(piece=piece, parameter=parameter, proxy=nn.Parameter(value), gradient=gradient)


def _of_no_parameter(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def _require_known(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
    known = {id(parameter) for parameter in parameters}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in known:
                raise UserError(
                    f"parameter group {number} of the optimizer holds a parameter of shape {tuple(parameter.shape)} "
                    "that is not one of the model's, so no worker would exchange its gradient"
                )


def _refuse_state_dict(_optimizer: Optimizer) -> NoReturn:
    raise UserError(
        "under central the optimizer's state lies in pieces with the workers, and state_dict() would miss it; save a "
        "checkpoint through manyhands, which gathers them"
    )
