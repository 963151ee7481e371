"""The store of a shard: its range of the values, and the user's optimizer running on it.

Gradients come as ranges of the same layout and are read where they lie; reading the values is one copy. The optimizer
is the user's own, with its state for this shard's pieces alone (`strategies.common.sharding.sliced_optimizer`), and
so is the scheduler. Where workers push parameters, the shard has no use for either (`Averaging`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from manyhands.engine.computing import Built
from manyhands.strategies.common.sharding.sliced_optimizer import SlicedOptimizer
from manyhands.strategies.common.tables.row_tables import RowGradient, RowTable
from manyhands.strategies.ps.plain_sgd import NextValues, PlainSgd, is_hooked
from manyhands.strategies.ps.shard_layout import FlatLayout, ShardRange, ShardState, Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Averaging:
    """How a shard averages pushed parameters (not gradients) into its values: x becomes x + a (m - x).

    m is the weighted mean of the parameters that make a step. If a step waits for all workers (`together`), a is
    1: the mean itself. Otherwise each push moves x part of the way: a is the number of pushes over the initial
    number of workers. A rate that depends on staleness multiplies a.
    """

    workers: int
    together: bool

    def way(self, pushes: int, rate: float) -> float:
        return rate if self.together else rate * min(1.0, pushes / self.workers)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Contribution:
    """One gradient and its factor in a step; or parameters, scaled by their weight like a gradient."""

    gradient: ShardRange
    present: Tensor
    """By piece: whether the gradient reached it; what lies in the range of one that it did not is never looked at.

    May be longer than there are pieces, as `FlatLayout.flags` are."""

    factor: float = 1.0
    rows: Mapping[str, RowGradient] = field(default_factory=dict)
    """By table: the gradient of this shard's rows, possibly none; a missing table was not reached."""
    borrows: bool = False  # whether the rows are valid only while the message with them is handled

    at: tuple[int, int] = field(init=False)  # the addresses of gradient and flags

    def __post_init__(self) -> None:
        object.__setattr__(self, "at", (self.gradient.memory.data_ptr(), self.present.data_ptr()))


def byte_view(memory: Tensor) -> memoryview:
    """A tensor of bytes as the transport takes them; made once, as it takes longer than a small message."""
    return memoryview(memory.numpy())  # type: ignore[arg-type]


class ShardStore:
    """One shard's values and optimizer. Takes over `built`, whose parameters are empty afterwards.

    Memory: the values, the optimizer's state for them and, once several gradients make a step, one range for their
    sum. Not for use by several threads at once.
    """

    def __init__(self, built: Built, layout: FlatLayout, shard: int, memory: Tensor | None = None) -> None:
        """Keep the values in `memory`, a range of bytes that others may read, or in private memory."""
        self._layout = layout
        self._shard = shard
        named = dict(built.model.named_parameters())
        parameters = [named[entry.name] for entry in layout.entries]
        self.values = layout.range_in(memory, shard) if memory is not None else self._new_range()
        """The current values where they lie; the next `apply` changes them."""
        self.buffer = byte_view(self.values.memory)
        pieces = layout.pieces[shard]
        for value, piece in zip(self.values.pieces, pieces, strict=True):
            initial = parameters[piece.parameter].detach().reshape(-1)[piece.begin : piece.end]
            value.copy_(initial.view(value.shape))
        by_number = {piece.parameter: view for piece, view in zip(pieces, self.values.pieces, strict=True)}
        tables = [named[table.name] for table in layout.tables]
        self._slices = SlicedOptimizer(built.optimizer, pieces, [*parameters, *tables], by_number)
        self._optimizer = built.optimizer
        self.tables: dict[str, RowTable] = {}
        for table, parameter in zip(layout.tables, tables, strict=True):
            placement = table.placed(layout.shards)
            mine = placement.rows(shard)
            values = parameter.detach().cpu()[mine].reshape(len(mine), table.width).contiguous()
            self.tables[table.name] = RowTable(table.name, values, type(built.optimizer), placement, shard)
        self._scheduler = built.scheduler
        self.votes = False  # whether a step uses the signs of the sum: a majority vote of signs
        self.averaging: Averaging | None = None  # of pushed parameters; the optimizer is then unused
        self.followed = False  # whether the last step was begun in `following`
        self._batches = 0
        self._settings = ""  # that the optimizer was given last
        self._first_settings = [
            {key: value for key, value in group.items() if key != "params"}
            for group in built.optimizer.param_groups
        ]
        self._sum: ShardRange | None = None
        self.plain: PlainSgd | None = None  # the step as one compiled call, where the optimizer is plain SGD
        self._following: NextValues | None = None
        self._recognise_sgd()
        # Then the optimizer's step is a no-op, and no hook observes it, so it is skipped.
        nothing_dense = not pieces and self._scheduler is None and bool(self.tables)
        self._has_tables_alone = nothing_dense and not is_hooked(built.optimizer)
        for (
            parameter
        ) in built.model.parameters():  # free its memory; the optimizer still lists it, with its shape
            parameter.data = parameter.data.new_zeros(()).expand(parameter.shape)
            parameter.grad = None

    def mark_rows(self, slack: float | None) -> None:
        """Mark the rows of tables that stay 0, as `filter=kkt` wants it; None: do not."""
        for table in self.tables.values():
            table.slack = slack

    @property
    def nbytes(self) -> int:
        """The memory of values, optimizer state and, where there is one, sum."""
        state = sum(
            value.nbytes
            for _, kept in self._slices.state().values()
            for value in kept.values()
            if isinstance(value, Tensor)
        )
        tables = sum(table.nbytes for table in self.tables.values())
        return self.values.memory.nbytes + state + tables + (self._sum.memory.nbytes if self._sum else 0)

    def apply(
        self, contributions: Sequence[Contribution], rate: float = 1.0, batches: int = 1, settings: str = ""
    ) -> None:
        """Take one optimizer step on the sum of the contributions, in their order, then advance the scheduler.

        With `settings`, of a loop of the user's own, the optimizer has these instead of its own, and `clip` among them
        is the norm to which the sum is scaled down.

        Learning rates are multiplied by `rate` for this step alone. A piece that no contribution reached has no
        gradient. A single contribution of factor 1 is read where it lies. Without contributions, the scheduler alone
        advances. Where parameters are pushed, they are averaged instead.
        """
        if self.averaging is not None:
            way = self.averaging.way(len(contributions), rate)
            means = self._combined(contributions) if contributions else []
            for value, mean in zip(self.values.pieces, means, strict=bool(means)):
                if mean is not None:
                    value.copy_(mean) if way == 1 else value.lerp_(mean, way)
            self._batches += batches
            return
        self.followed = self._follow(contributions if rate == 1 and not settings else [])
        if self.followed:
            self._batches += batches
            return
        if contributions:
            [first, *others] = contributions
            clip = self._use(settings) if settings else None
            if (
                self.plain is not None
                and not others
                and first.factor == 1
                and not self.votes
                and clip is None
            ):
                self.plain.step(*first.at, rate)
                self._batches += batches
                return
            if not self._has_tables_alone:
                combined = self._combined(contributions)
                if clip is not None:
                    combined = _clipped(combined, clip)
                if self.votes:
                    for gradient in combined:
                        if gradient is not None:
                            gradient.sign_()
                self._slices.step(combined, rate)
            self._apply_rows(contributions, rate)
        if self._scheduler is not None:
            for _ in range(batches):
                self._scheduler.step()
        self._batches += batches

    def _follow(self, contributions: Sequence[Contribution]) -> bool:
        """Whether this step was begun in `following`; then it is complete now."""
        if self._following is None:
            return False
        as_they_are = all(one.factor == 1 for one in contributions)
        return self._following.take([one.gradient.memory for one in contributions] if as_they_are else [])

    def _use(self, settings: str) -> float | None:
        """Let the optimizer have these settings from now on; returns the norm to clip to, if there is one."""
        given = json.loads(settings)
        if settings != self._settings:
            self._settings = settings
            for number, group in enumerate(self._optimizer.param_groups):
                changed = given.get(str(number), {})
                values = {key: tuple(one) if isinstance(one, list) else one for key, one in changed.items()}
                group.update({**self._first_settings[number], **values})
            self._recognise_sgd()
        clip: float | None = given.get("clip")
        return clip

    def read_into(self, values: Tensor) -> None:
        """Copy the current values into a range of bytes, such as a worker's."""
        values.copy_(self.values.memory)

    def first_bad(self, contribution: Contribution) -> str | None:
        """The name of the first parameter with a non-finite gradient; None if all are finite.

        Sums are checked first: a finite sum has finite terms. Only a non-finite sum, perhaps from overflow, is
        searched. IndexError or ValueError for rows that do not fit the table: call this before `apply`.
        """
        if self.plain is not None and self.plain.is_finite(*contribution.at):
            return None
        for name, gradient in contribution.rows.items():
            self.tables[name].require_fit(gradient)
            if not math.isfinite(_total(gradient.values)) and not _is_finite(gradient.values):
                return name
        if all(math.isfinite(_total(run)) for run in contribution.gradient.runs):
            return None
        for piece, values, present in zip(
            self._layout.pieces[self._shard],
            contribution.gradient.pieces,
            contribution.present.tolist(),
            strict=False,
        ):
            if present and not _is_finite(values):
                return self._layout.entries[piece.parameter].name
        return None

    def state(self) -> ShardState:
        """Everything that a store of the same shard needs to continue; the tensors are not copied."""
        settings = self._slices.settings()
        slots = {position: kept for position, (_, kept) in self._slices.state().items()}
        model: dict[str, Tensor] = {}
        for piece, values in zip(self._layout.pieces[self._shard], self.values.pieces, strict=True):
            model[self._layout.entries[piece.parameter].name] = values
        for table in self._layout.tables:
            held = self.tables[table.name]
            model[table.name] = _outside(table, held.values)
            slots[table.position] = {key: _outside(table, value) for key, value in held.state.items()}
        return ShardState(
            model=model,
            optimizer={**settings, "state": {**settings["state"], **slots}},
            batches=self._batches,
        )

    def load_state(self, state: ShardState) -> None:
        """Continue from `state`, which is copied; ValueError if it is not of this shard of this layout.

        A scheduler only advances: if the task has one, `state` may not be older than the store.
        """
        own = self.state().model
        shapes, given = (
            {name: tuple(tensor.shape) for name, tensor in model.items()} for model in (own, state.model)
        )
        if shapes != given:
            raise ValueError(f"the state has {given}, but shard {self._shard} has {shapes}")
        if self._scheduler is not None:
            if state.batches < self._batches:
                raise ValueError(
                    f"the state is of batch {state.batches}, but the scheduler is already at {self._batches}"
                )
            for _ in range(state.batches - self._batches):
                self._scheduler.step()
        self._batches = state.batches
        for name, value in own.items():
            value.copy_(state.model[name])
        slots = state.optimizer["state"]
        for table in self._layout.tables:
            held = self.tables[table.name]
            held.state = {  # one row each
                key: value.view(held.values.shape) if isinstance(value, Tensor) and value.dim() else value
                for key, value in _copied(slots.get(table.position, {})).items()
            }
        settings = {
            **state.optimizer,
            "state": {key: slots[key] for key in slots if not isinstance(key, int)},
        }
        self._slices.restore(
            settings,
            {position: _copied(slot) for position, slot in slots.items() if isinstance(position, int)},
        )
        self._settings = ""
        self._recognise_sgd()  # by the settings that came

    @property
    def following(self) -> NextValues | None:
        """Where the next step may be taken before its gradients are here completely, if it may."""
        if self._sgd is None or self.votes or self.averaging is not None:
            return None
        if self._following is None:
            self._following = NextValues(self.values, self._sgd)
        return self._following

    def _recognise_sgd(self) -> None:
        self._sgd, self._following = self._plain_sgd(), None
        self.plain = self._sgd if self._sgd is not None and self._sgd.is_small else None

    def _plain_sgd(self) -> PlainSgd | None:
        if self._scheduler is not None or self._layout.tables:
            return None
        pieces = self._layout.pieces[self._shard]
        owns_all = all(self._layout.entries[piece.parameter].position is not None for piece in pieces)
        return PlainSgd.of(self._optimizer, self.values, owns_all=owns_all)

    def _new_range(self) -> ShardRange:
        memory = torch.zeros(self._layout.range_bytes(self._shard), dtype=torch.uint8)
        return self._layout.range_in(memory, self._shard)

    def _apply_rows(self, contributions: Sequence[Contribution], rate: float) -> None:
        groups = [group for group in self._optimizer.param_groups for _ in group["params"]]
        for table in self._layout.tables:
            terms = [(one.rows[table.name], one.factor) for one in contributions if table.name in one.rows]
            if terms:
                self.tables[table.name].apply(RowGradient.total(terms), groups[table.position], rate)

    def _combined(self, contributions: Sequence[Contribution]) -> list[Tensor | None]:
        [first, *others] = contributions
        if not others and first.factor == 1:
            return _masked(first.gradient.pieces, first.present[: len(self.values.pieces)].tolist())
        if self._sum is None:
            self._sum = self._new_range()
        return _masked(self._sum.pieces, add_up(contributions, self._sum))


def add_up(contributions: Sequence[Contribution], into: ShardRange) -> list[bool]:
    """`into` becomes the sum of the contributions, each times its factor, in their order; which pieces any reached."""
    count = len(into.pieces)
    present = [one.present[:count].tolist() for one in contributions]
    if all(map(all, present)):
        for out, *terms in zip(into.runs, *(one.gradient.runs for one in contributions), strict=True):
            _add_up(out, [(term, one.factor) for term, one in zip(terms, contributions, strict=True)])
        return [True] * count
    for number, out in enumerate(into.pieces):
        pairs = zip(contributions, present, strict=True)
        _add_up(out, [(one.gradient.pieces[number], one.factor) for one, flags in pairs if flags[number]])
    return [any(flags) for flags in zip(*present, strict=True)]


def _clipped(gradients: Sequence[Tensor | None], max_norm: float) -> list[Tensor | None]:
    """Scaled down to `max_norm` as torch's `clip_grad_norm_` does; the memory of what came stays as it is."""
    there = [one for one in gradients if one is not None]
    norm = torch.nn.utils.get_total_norm(there)
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    return [None if one is None else one * scale for one in gradients]


def _masked(pieces: Sequence[Tensor], present: Sequence[int]) -> list[Tensor | None]:
    return [piece if flag else None for piece, flag in zip(pieces, present, strict=True)]


def _add_up(out: Tensor, terms: Sequence[tuple[Tensor, float]]) -> None:
    """`out` becomes the sum of factor times gradient, from left to right."""
    if not terms:
        return
    (gradient, factor), *others = terms
    if factor == 1 and others:  # the usual case saves a pass
        torch.add(gradient, others[0][0], alpha=others[0][1], out=out)
        others = others[1:]
    else:
        torch.mul(gradient, factor, out=out)
    for gradient, factor in others:
        out.add_(gradient, alpha=factor)


def _total(run: Tensor) -> float:
    return float(run.sum(dtype=torch.float64 if run.dtype == torch.float64 else torch.float32))


def _is_finite(values: Tensor) -> bool:
    return bool(torch.isfinite(values).all())


def _outside(table: Table, value: Any) -> Any:
    """Rows as a state has them: in the table's shape where they are all of it, else flat."""
    if not isinstance(value, Tensor) or value.dim() == 0:
        return value
    return value.view(table.shape) if value.numel() == table.shape.numel() else value.view(-1)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in state.items()}
