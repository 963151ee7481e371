"""What a worker holds of a split model, and how the whole is assembled on one worker.

The user's optimizer was built with the whole model's parameters. From `HeldModel` on it lists only those that this
worker holds, or the parts that it holds; the optimizer's state is cut alike. A checkpoint shows no trace of that:
model and optimizer are assembled as one process would have them, so a run may continue under another strategy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.errors import ManyhandsError, UserError
from manyhands.native.dtypes import BY_CODE, CODES
from manyhands.strategies.common.grid.grid_group import LinkGroup
from manyhands.strategies.common.sharding.optimizers import positions


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Items `begin` to `end` along dimension `dim` of a whole tensor; `dim` None: of its items in one row.

    Where several tensors lie one after another along `dim`, as query, key and value, it is the same items of each.
    """

    dim: int | None
    begin: int
    end: int
    blocks: int = 1  # how many such tensors; along a dimension only

    def of(self, whole: Tensor) -> Tensor:
        part = self._view(whole.contiguous()).clone(memory_format=torch.contiguous_format)
        return part if self.blocks == 1 else part.flatten(self.dim or 0, (self.dim or 0) + 1)

    def put(self, part: Tensor, whole: Tensor) -> None:
        view = self._view(whole)
        view.copy_(part.view(view.shape))

    def _view(self, whole: Tensor) -> Tensor:
        if self.dim is None:
            return whole.view(-1)[self.begin : self.end]
        if self.blocks > 1:
            apart = whole.view(*whole.shape[: self.dim], self.blocks, -1, *whole.shape[self.dim + 1 :])
            return apart.narrow(self.dim + 1, self.begin, self.end - self.begin)
        return whole.narrow(self.dim, self.begin, self.end - self.begin)


@dataclass(frozen=True, slots=True, eq=False)
class Outline:
    """A model's names before it was split."""

    parameters: Mapping[str, nn.Parameter]  # by every name: a tied one has several
    buffers: Mapping[str, Tensor]  # by every name: that of a module that stands at two places has several
    keys: tuple[str, ...]  # of its `state_dict()`, in order
    shapes: Mapping[str, torch.Size]  # by those keys

    @staticmethod
    def of(model: nn.Module) -> Outline:
        """Return the outline of a whole model; UserError if its state has something that is not a tensor."""
        state = model.state_dict()
        for key, value in state.items():
            if not isinstance(value, Tensor):
                raise UserError(
                    f"model.state_dict() has {key!r}, a {type(value).__name__}; a model that is split over workers can "
                    "only save tensors; register a buffer instead of get_extra_state"
                )
        return Outline(
            parameters=dict(model.named_parameters(remove_duplicate=False)),
            buffers=dict(model.named_buffers(remove_duplicate=False)),
            keys=tuple(state),
            shapes={key: value.shape for key, value in state.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Held:
    """A parameter as this worker holds it."""

    whole: nn.Parameter  # the parameter that the user's optimizer was built with
    local: nn.Parameter  # the parameter that is used and stepped here; it may be `whole`
    shape: torch.Size  # the shape of the whole
    cut: Cut | None = None  # which part `local` is; None: all of it, as for a parameter without dimensions
    reports: bool = True
    """Whether this worker sends it when the whole is assembled: one holder of each part does."""

    def part_of(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """This worker's part of the optimizer's state of the whole; what has another shape is not cut."""
        found = dict(state)
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == self.shape and value.dim():
                part = self.cut.of(value) if self.cut is not None else value
                found[name] = part.view(self.local.shape).to(self.local.device)
        return found


class HeldModel:
    """What one worker holds; `buffers` are those that it sends, by their names in the whole.

    `buffer_cuts` has those of them of which it holds a part.
    """

    def __init__(
        self,
        outline: Outline,
        optimizer: Optimizer,
        held: Sequence[Held],
        buffers: Mapping[str, Tensor] | None = None,
        buffer_cuts: Mapping[str, Cut] | None = None,
    ) -> None:
        self.held = tuple(held)
        self._outline, self._optimizer = outline, optimizer
        self._buffers, self._buffer_cuts = dict(buffers or {}), dict(buffer_cuts or {})
        named = (*outline.parameters.items(), *outline.buffers.items())
        self._names = {id(tensor): name for name, tensor in reversed(named)}  # the first one of each
        self._position = positions(optimizer)
        self._listed = [
            [self._position[id(one)] for one in group["params"]] for group in optimizer.param_groups
        ]
        by_whole = {id(one.whole): one for one in self.held}
        given = dict(optimizer.state)
        for group in optimizer.param_groups:  # from here on it has the local parameters, and its state is cut
            mine = [by_whole[id(parameter)] for parameter in group["params"] if id(parameter) in by_whole]
            for parameter in group["params"]:
                optimizer.state.pop(parameter, None)
            group["params"] = [one.local for one in mine]
            for one in mine:
                if one.whole in given:
                    optimizer.state[one.local] = one.part_of(given[one.whole])

    def drop_rest(self) -> None:
        """Free the memory of parameters, or of their wholes, that this worker does not compute with."""
        kept = {id(one.local) for one in self.held}
        for parameter in self._outline.parameters.values():
            if id(parameter) not in kept:
                parameter.data = torch.empty(0, dtype=parameter.dtype)
                parameter.grad = None

    def gradients(self, wanted: Callable[[Held], bool] = lambda _: True) -> list[Tensor]:
        return [one.local.grad for one in self.held if one.local.grad is not None and wanted(one)]

    def named(self) -> Iterator[tuple[str, Tensor | None]]:
        """Every parameter of the whole by the first of its names, and what this worker holds of it, if anything."""
        local = {id(one.whole): one.local for one in self.held}
        for parameter in dict.fromkeys(self._outline.parameters.values()):
            yield self._names[id(parameter)], local.get(id(parameter))

    def cut_state(self, state: dict[str, Tensor]) -> None:
        """Replace the whole tensors of a model's `state_dict()` by this worker's parts, which its model loads."""
        held = {id(one.whole): one for one in self.held}
        for name, parameter in self._outline.parameters.items():
            whole, one = state.get(name), held.get(id(parameter))
            if whole is None or whole.shape != self._outline.shapes[name]:
                continue  # the model itself reports it
            if one is None:
                state[name] = whole.new_empty(0)
            elif one.cut is not None:
                state[name] = one.cut.of(whole)
        for name, cut in self._buffer_cuts.items():
            if name in state:
                state[name] = cut.of(state[name])

    def optimizer_part(self, whole: Mapping[str, Any]) -> dict[str, Any]:
        """This worker's part of the optimizer's whole `state_dict()`; UserError where that is another optimizer's."""
        groups, found = self._optimizer.param_groups, [len(one["params"]) for one in whole["param_groups"]]
        expected = [len(listed) for listed in self._listed]
        if found != expected:
            raise UserError(
                f"the loaded optimizer has parameter groups of {found} parameters, this one of {expected}; load the "
                "state of the same optimizer"
            )
        local, parts = positions(self._optimizer), dict[int, Any]()
        for one in self.held:
            state = whole["state"].get(self._position.get(id(one.whole)))
            if state is not None and id(one.local) in local:
                parts[local[id(one.local)]] = one.part_of(state)
        cut = [
            {**settings, "params": [local[id(one)] for one in group["params"]]}
            for settings, group in zip(whole["param_groups"], groups, strict=True)
        ]
        return {**whole, "state": parts, "param_groups": cut}

    def make_whole(self, state: Mapping[str, Tensor]) -> None:
        """Give the model's own parameters the values of its whole `state_dict()`."""
        for name, parameter in self._outline.parameters.items():
            parameter.data = state[name].to(parameter.device)

    def model_state(self, group: LinkGroup, model: nn.Module | None = None) -> dict[str, Tensor] | None:
        """Collective: the whole model's `state_dict()` on the first member, None on the others.

        A module of `model` may have put another buffer in the place of the one that was there: it is sent as it is now.
        """
        entries = [
            _Entry({"name": self._names[id(one.whole)], "cut": _words(one.cut)}, one.local.detach())
            for one in self.held
            if one.reports
        ]
        for name, tensor in self._buffers.items():
            now = model.get_buffer(name) if model is not None else tensor
            entries.append(_Entry({"name": name, "cut": _words(self._buffer_cuts.get(name))}, now))
        gathered = _gather(group, entries)
        if gathered is None:
            return None
        state: dict[str, Tensor] = {}
        for entry in gathered:
            name = str(entry.facts["name"])
            _lay(state, name, entry, self._outline.shapes[name])
        for name, tensor in (*self._outline.parameters.items(), *self._outline.buffers.items()):
            first = self._names[id(tensor)]
            if name != first and first in state:
                state[name] = state[first]
            if name in self._outline.shapes and not self._outline.shapes[name].numel():
                state.setdefault(name, torch.empty(self._outline.shapes[name], dtype=tensor.dtype))
        missing = [key for key in self._outline.keys if key not in state]
        if missing:
            raise ManyhandsError(f"no worker sent the tensor {missing[0]!r} of the model")
        return {key: state[key] for key in self._outline.keys}

    def optimizer_state(self, group: LinkGroup) -> dict[str, Any] | None:
        entries = []
        for one in self.held:
            position = self._position.get(id(one.whole)) if one.reports else None
            for name, value in (
                self._optimizer.state.get(one.local, {}).items() if position is not None else ()
            ):
                facts = {"position": position, "name": name}
                if not isinstance(value, Tensor):
                    entries.append(_Entry({**facts, "value": value}, None))
                    continue
                is_cut = one.cut is not None and value.shape == one.local.shape
                shape, words = (one.shape, _words(one.cut)) if is_cut else (value.shape, None)
                entries.append(_Entry({**facts, "cut": words, "shape": list(shape)}, value))
        gathered = _gather(group, entries)
        if gathered is None:
            return None
        state: dict[int, dict[str, Any]] = {}
        for entry in gathered:
            of_one = state.setdefault(int(entry.facts["position"]), {})
            name = str(entry.facts["name"])
            if entry.tensor is None:
                of_one[name] = entry.facts["value"]
            else:
                _lay(of_one, name, entry, torch.Size(entry.facts["shape"]))
        own = self._optimizer.state_dict()
        groups = [
            {**settings, "params": listed}
            for settings, listed in zip(own["param_groups"], self._listed, strict=True)
        ]
        return {**own, "state": dict(sorted(state.items())), "param_groups": groups}


class _Entry(NamedTuple):
    """Something that a worker reports: facts of JSON, and a tensor or none."""

    facts: dict[str, Any]
    tensor: Tensor | None


def _words(cut: Cut | None) -> dict[str, int | None] | None:
    return None if cut is None else asdict(cut)


def _lay(into: dict[str, Any], name: str, entry: _Entry, shape: torch.Size) -> None:
    assert entry.tensor is not None, "only tensors are laid"
    if entry.facts["cut"] is None:
        into[name] = entry.tensor
        return
    if name not in into:
        into[name] = torch.empty(shape, dtype=entry.tensor.dtype)
    Cut(**entry.facts["cut"]).put(entry.tensor, into[name])


def _gather(group: LinkGroup, entries: Sequence[_Entry]) -> list[_Entry] | None:
    """Collective: what all members report, in their order, on the first; None on the others."""
    headers = [
        (facts, None if tensor is None else (CODES[tensor.dtype], list(tensor.shape)))
        for facts, tensor in entries
    ]
    header = torch.frombuffer(bytearray(json.dumps(headers).encode()), dtype=torch.uint8)
    counts = group.all_gather(torch.tensor([len(header), len(headers)]))
    sizes, rounds = ([int(one[place]) for one in counts] for place in (0, 1))
    others = range(1, group.world)
    if group.index:
        group.exchange({0: header}, {})
        for number in range(max(rounds)):
            tensor = entries[number].tensor if number < len(entries) else None
            group.exchange({0: _bytes(tensor)} if tensor is not None else {}, {})
        return None
    rooms = {index: torch.empty(sizes[index], dtype=torch.uint8) for index in others}
    group.exchange({}, rooms)
    announced = {index: json.loads(room.numpy().tobytes()) for index, room in rooms.items()}
    found: dict[int, list[_Entry]] = {index: [] for index in others}
    for number in range(max(rounds)):
        arriving = {}
        for index in (one for one in others if number < rounds[one]):
            facts, kind = announced[index][number]
            tensor = torch.empty(kind[1], dtype=BY_CODE[kind[0]]) if kind is not None else None
            if tensor is not None:
                arriving[index] = _bytes(tensor)
            found[index].append(_Entry(facts, tensor))
        group.exchange({}, arriving)
    mine = [_Entry(facts, None if one is None else one.detach().cpu().clone()) for facts, one in entries]
    return [*mine, *(entry for index in others for entry in found[index])]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
