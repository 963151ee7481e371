"""The user's optimizer, run on the pieces of the parameters that one owner has: a worker, or a shard of a server.

No second optimizer is built. For the length of a step the user's own one sees other parameters: pieces of the owner's
values, with their gradients and their state. So its settings, schedulers and hooks are simply the user's. Between steps
it lists the model's parameters as always, and its `state` is empty: each owner keeps that of its pieces here. A state
that the optimizer is given, by its constructor or by `load_state_dict`, is taken over before the next step.
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

from manyhands.engine.fusing import may_fuse
from manyhands.errors import UserError
from manyhands.strategies.common.sharding.optimizers import positions


@dataclass(frozen=True, slots=True)
class Piece:
    """Items `begin` to `end` of a parameter: the part that one owner keeps and updates."""

    parameter: int
    begin: int
    end: int


_SHOWN = ("params", "fused", "lr")  # what a group holds in another way during a step


@dataclass(frozen=True, slots=True, eq=False)
class OwnedPiece:
    """A piece as the optimizer sees it: `proxy` shares the memory of the owner's values."""

    piece: Piece
    parameter: nn.Parameter
    proxy: nn.Parameter

    @property
    def is_whole(self) -> bool:
        return self.proxy.shape == self.parameter.shape

    def cut(self, value: Any) -> Any:
        """This piece's part of a value of the state: a tensor of the parameter's shape is cut as the parameter is."""
        if not isinstance(value, Tensor):
            return value
        value = value.to(self.proxy.device)  # the state of a model on a GPU stays with the values
        if self.is_whole:
            return value
        if value.shape == self.parameter.shape:
            value = value.reshape(-1)[self.piece.begin : self.piece.end]
        return value.clone()


class SlicedOptimizer:
    """Steps the pieces of one owner; `parameters`, `values` and `gradients` are numbered as the pieces are.

    `values` and `gradients` have the shapes of the parameters, and only the owner's pieces of them are touched; an
    owner that has no more than its pieces gives these.
    Without `gradients`, each call of `step` brings its own.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        pieces: Sequence[Piece],
        parameters: Sequence[nn.Parameter],
        values: Sequence[Tensor] | Mapping[int, Tensor],
        gradients: Sequence[Tensor] = (),
    ) -> None:
        self._optimizer = optimizer
        self._owned = [
            OwnedPiece(
                piece, parameters[piece.parameter], nn.Parameter(_part(piece, values[piece.parameter]))
            )
            for piece in pieces
        ]
        self._gradients = [_part(piece, gradients[piece.parameter]) for piece in pieces] if gradients else []
        known = {id(parameter) for parameter in parameters}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if parameter.requires_grad and id(parameter) not in known:
                    raise UserError(
                        f"parameter group {number} of the optimizer holds a parameter of shape "
                        f"{tuple(parameter.shape)} that is not in the model, so no worker would exchange its "
                        "gradient"
                    )
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
        return [gradient for gradient in self._present() if gradient is not None]

    def step(self, given: Sequence[Tensor | None] | None = None, rate: float = 1.0) -> None:
        """Update the owner's pieces by a gradient each, with learning rates times `rate` for this once.

        Those without a gradient stay as they are. None `given`: by those of the constructor.
        """
        self._adopt()
        gradients = self._present() if given is None else given
        for owned, gradient in zip(self._owned, gradients, strict=True):
            owned.proxy.grad = gradient
        try:
            with self._in_charge(rate):
                self._optimizer.step()
        finally:
            for owned in self._owned:  # or the memory of a gradient would be held beyond its step
                owned.proxy.grad = None

    def state(self) -> dict[int, tuple[OwnedPiece, dict[str, Any]]]:
        """The state of the owner's pieces, by the parameter's number in the optimizer's `state_dict()`."""
        self._adopt()
        owned = {id(one.parameter): one for group in self._groups for one in group}
        return {
            position: (owned[key], self._state[owned[key].proxy])
            for key, position in positions(self._optimizer).items()
            if key in owned and self._state.get(owned[key].proxy)
        }

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

    def restore(self, settings: Mapping[str, Any], states: Mapping[int, Mapping[str, Any]]) -> None:
        """Restore what `settings` and `state` returned: the state of the owner's pieces, by position.

        The tensors of `states` become the owner's.
        """
        self._optimizer.load_state_dict(dict(settings))
        self._state = defaultdict(dict, _of_no_parameter(self._optimizer.state))
        self._optimizer.state.clear()
        position_of = positions(self._optimizer)
        for owned in (one for group in self._groups for one in group):
            state = states.get(position_of[id(owned.parameter)])
            if state:
                self._state[owned.proxy] = dict(state)

    def close(self) -> None:
        """Let go of the pieces; the optimizer is an ordinary one again, without state."""
        self._refusal.remove()
        self._owned, self._groups, self._gradients = [], [], []
        self._state.clear()

    def _present(self) -> list[Tensor | None]:
        return [
            gradient if owned.parameter.grad is not None else None
            for owned, gradient in zip(self._owned, self._gradients, strict=True)
        ]

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
    def _in_charge(self, rate: float) -> Iterator[None]:
        """Show the optimizer its pieces and their state in place of the parameters, and the fused step if it may."""
        groups = self._optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._sizes:
            raise UserError(
                f"the optimizer's groups now hold {sizes} parameters, but held {self._sizes} when training started; "
                "add all parameter groups before training"
            )
        shown = [{key: group[key] for key in _SHOWN if key in group} for group in groups]
        outer, self._optimizer.state = self._optimizer.state, self._state
        try:
            for group, owned in zip(groups, self._groups, strict=True):
                group["params"] = [one.proxy for one in owned]
                if may_fuse(self._optimizer, group, group["params"], self._state):
                    group["fused"] = True
                if rate != 1 and "lr" not in group:
                    raise UserError(
                        f"optimizer {type(self._optimizer).__name__} has no setting 'lr', so its steps cannot be "
                        "scaled; use SGD or AdamW, for example"
                    )
                if rate != 1:
                    group["lr"] = group["lr"] * rate
            yield
        finally:
            self._state, self._optimizer.state = self._optimizer.state, outer
            for group, settings in zip(groups, shown, strict=True):
                group.update(settings)


def _part(piece: Piece, values: Tensor) -> Tensor:
    is_whole = piece.end - piece.begin == values.numel()
    return values if is_whole else values.view(-1)[piece.begin : piece.end]


def _of_no_parameter(state: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: value for key, value in state.items() if not isinstance(key, Tensor)}


def _refuse_state_dict(_optimizer: Optimizer) -> NoReturn:
    raise UserError(
        "the optimizer's state is split over the workers, and state_dict() would miss it; save a checkpoint "
        "with manyhands, which gathers it"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Some rows of a parameter, or of the optimizer's state for it; the rows of a dense one are its items."""

    shape: torch.Size  # of the whole
    rows: slice | Tensor
    count: int  # how many rows these are
    width: int = 1  # items in a row

    @property
    def is_whole(self) -> bool:
        return self.count * self.width == self.shape.numel()

    def cut(self, value: Any) -> Any:
        """A copy of this part of a whole; what has another shape than the parameter is not cut."""
        if not isinstance(value, Tensor):
            return value
        if self.is_whole or value.shape != self.shape:
            return value.detach().clone()
        return value.detach().reshape(-1, self.width)[self.rows].reshape(-1).clone()

    def is_cut(self, value: Any) -> bool:
        return isinstance(value, Tensor) and not self.is_whole and value.shape == (self.count * self.width,)

    def lay_into(self, whole: Tensor | None, value: Tensor) -> Tensor:
        """The whole with this part in it; the part itself where that is all."""
        if not self.is_cut(value):
            return value
        if whole is None:
            whole = torch.empty(self.shape, dtype=value.dtype)
        whole.view(-1, self.width)[self.rows] = value.view(-1, self.width)
        return whole


class MergedState:
    """The `state` that a single process's `state_dict()` would hold, out of what the owners of parts keep.

    A tensor that has the parameter's shape is cut as it is; anything else (Adam's count of steps) every owner has, and
    the first one's is taken.
    """

    def __init__(self) -> None:
        self._kept: dict[int, dict[str, Any]] = {}

    def add(self, position: int, state: Mapping[str, Any], part: Part | None = None) -> None:
        """Take in what one owner keeps for its part of a parameter; None: its tensors are laid in place already.

        Tensors that it has whole become the state's own, not copies.
        """
        kept = self._kept.setdefault(position, {})
        for key, value in state.items():
            if part is not None and part.is_cut(value):
                kept[key] = part.lay_into(kept.get(key), value)
            else:
                kept.setdefault(key, value)

    def to_dict(self) -> dict[int, dict[str, Any]]:
        return dict(sorted(self._kept.items()))
