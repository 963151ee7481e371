"""One worker's endpoint of a pipeline in the common loop: its stage, its replicas, and the collectives."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from manyhands.engine.chain import ChainCall, applied, chain_of
from manyhands.engine.computing import Computed, Computer, TrainingPlan
from manyhands.engine.exchange import (
    GradientParts,
    LocalStep,
    Meter,
    Resources,
    SharedStep,
    Times,
    WorkerPart,
)
from manyhands.engine.footprint import sizes_of
from manyhands.engine.metric_states import MetricUpdates
from manyhands.errors import UserError
from manyhands.places.local.status import State
from manyhands.strategies.common.grid.grid_group import LinkGroup, agree_on, sum_gradients, waits_of
from manyhands.strategies.common.grid.grid_layout import GridAxis
from manyhands.strategies.common.grid.held import Held, HeldModel, Outline
from manyhands.strategies.pipeline.cuts import LayerCost, check_cuts, part_bytes, parts_of, planned
from manyhands.strategies.pipeline.ends import MeasureEnds, NamesGiven, TrainingEnds, call_of
from manyhands.strategies.pipeline.schedule_cost import most_held
from manyhands.strategies.pipeline.stage_messages import ChainPart, Passed, StageBorders, StageMessages
from manyhands.strategies.pipeline.stage_worker import PipelineStage, WaveStage, check_over_time
from manyhands.strategies.pipeline.strategy import Pipeline
from manyhands.strategies.tensor.exchange import GridExchange
from manyhands.strategies.tensor.slicing import check_plan, slice_modules
from manyhands.strategies.tensor.slicing_plan import Slicing, find_plan

Chain = Sequence[nn.Module]
_TIED: Final = 0x100  # message kinds from here on, one per group of stages that share weights
_MOST_EVALUATIONS: Final = 1 << 16


class PipelineExchange(GridExchange):
    """One stage of a pipeline replica; `mark(step, state, place=(stage, micro-batch))` publishes what it does."""

    def __init__(
        self, strategy: Pipeline, resources: Resources, plan: TrainingPlan | None, mark: Callable[..., None]
    ) -> None:
        """Follow `plan`; None where the batches are a caller's own."""
        links, grid = resources.links() if resources.world > 1 else {}, strategy.grid(resources.world)
        super().__init__(resources.rank, grid, links, resources.timeout_s)
        self._strategy, self._plan, self._mark = strategy, plan, mark
        self.part = WorkerPart(
            index=self._place.data,  # all stages of a pipeline work on the same samples
            count=self._grid.data,
            # Of a replica, the first slice of the last stage, which has the loss
            speaks=self._place.stage == strategy.stages - 1 and self._place.slice == 0,
            copies=self._grid.copies,
            parameters=lambda _: self._held.named(),
            buffers=self._buffers,
            total_of_copies=lambda values: self._replicas.all_reduce(values.clone()),
        )
        # A parameter that several stages hold counts once.
        self.parts = GradientParts(
            held=lambda: self._held.gradients(),
            counted=lambda: self._held.gradients(lambda one: one.reports),
            total=self.total,
        )
        self.meter = Meter(
            take_times=self._take_times,
            traffic=lambda: sum((group.traffic() for group in self._groups), self._post.traffic()),
        )
        self.table = strategy.table()
        self._stages = grid.along(GridAxis.STAGE, self.rank)
        self._post = StageMessages(self._place.stage, self._stages, links, resources.timeout_s)
        self._shared: list[tuple[LinkGroup, tuple[nn.Parameter, ...]]] = []  # with other stages

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        outline, chain = Outline.of(model), chain_of(model)
        self._names = NamesGiven(chain)
        self.cuts = self._agree_on_cuts(model, chain)
        require_own_statistics(model, chain, self.cuts, self._strategy.stages)
        for tensor in (*model.parameters(), *model.buffers()):
            self._all.broadcast(tensor.detach())
        strategy, place = self._strategy, self._place
        self._holding = holding = holding_of(model, chain, self.cuts, strategy.stages, place.stage)
        device = self._find_device()
        held = self._slice(model, holding, device)
        buffers = {
            name: model.get_buffer(name)
            for name in holding.buffers
            if name in outline.keys and place.data == 0
            if place.slice == 0 or name in self._sliced.buffers
        }
        self._fit(optimizer, strategy.facts.stepping, strategy.word)
        self._held = HeldModel(outline, optimizer, held, buffers, self._sliced.buffers)
        self._held.drop_rest()
        local = {id(one.whole): one.local for one in held}
        for number, (stages, parameters) in enumerate(holding.tied):
            members = [self._stages[stage] for stage in stages]
            group = self._group(members, _TIED + number, "stages that share weights")
            self._groups.append(group)
            self._shared.append((group, tuple(local[id(one)] for one in parameters)))
        self._borders = StageBorders(self.table, place.stage, holding.parts, self._post, str(device))
        self._borders.passed = self._passed
        self.stage: WaveStage | PipelineStage = (
            WaveStage(self._borders)
            if self.table.over_time
            else PipelineStage(self._borders, recompute=strategy.recompute)
        )
        for part in holding.parts:
            part.train()

    def compute(self, computer: Computer, model: nn.Module, step: int) -> Computed:
        del model  # the stage's parts are used instead
        waits_of(self._groups)  # drop what was counted between steps
        begin_ns = time.monotonic_ns()
        share = computer.share(step, self.part.index, self.part.count)
        ends = TrainingEnds(computer, share, step, self.part.index, self._names)
        ends.input_ns = time.monotonic_ns() - begin_ns
        stage = self._place.stage
        self._passed()  # drop what was counted between steps
        self._borders.slow_down = partial(computer.slow_down, step)

        def mark(microbatch: int) -> None:
            self._mark(step + 1, State.COMPUTING, place=(stage, microbatch))

        self.stage.run(ends, len(share.pieces), mark)
        loss = ends.mean_loss()
        samples = share.samples if self.part.speaks else 0
        return Computed(loss=loss, share=share.weight, samples=samples, input_ns=ends.input_ns)

    def evaluate(
        self, computer: Computer, model: nn.Module, *, alike: bool = False
    ) -> tuple[dict[str, float], int] | None:
        """Collective: every batch goes forward through the stages, once for each measure."""
        del model, alike
        if computer.task.evaluation is None:
            return None
        functions, stateful = computer.measures(), computer.task.stateful_metrics
        totals = torch.zeros(len(functions) + 1, dtype=torch.float64)
        updates = MetricUpdates(stateful, self.part.index, self.part.count)
        measures = [*functions.items(), *((name, one.arguments) for name, one in stateful.items())]
        parts, number = self._holding.parts, 0
        for part in parts:
            part.train(False)
        self._post.begin(checked=False)
        with torch.no_grad():
            for piece in computer.evaluation_batches(self.part.index, self.part.count):
                for column, measure in enumerate(measures):
                    ends = MeasureEnds(computer, number, piece, measure, self._names)
                    with computer.precision():
                        place = number % _MOST_EVALUATIONS
                        value = self._forward_only(place, ends.call, ends.named, ends.begin, ends.measured)
                    if value is not None and column < len(functions):
                        totals[column] += float(value) * piece.samples
                    elif value is not None:
                        updates.add(measure[0], value)
                    number += 1
                totals[-1] += piece.samples
        if not self.part.speaks:
            totals.zero_()
        for part in parts:
            part.train()
        return computer.means(self.total(totals), updates.values(self.total, counts=self.part.speaks))

    def _forward_only(
        self,
        number: int,
        call: Callable[[], ChainCall],
        named: Callable[[], Mapping[str, Any]],
        begin: Callable[[int], None],
        measure: Callable[[Any], Any],
    ) -> Any:
        """Collective: `measure` of what comes out of the last stage there, and None on the others."""
        measured = None
        for part in self._holding.parts:
            if part.number:
                x, given = self._borders.input(part, number), named() if part.takes_names else {}
            else:
                x, given = call()
            output = part.forward(x, begin, given)
            if self._borders.is_last(part):
                measured = measure(output)
            else:
                self._borders.send_output(part, number, output)
        self._post.flush()
        return measured

    def _find_device(self) -> torch.device:
        assert self._plan is not None, "or it is found in another way"
        return Computer(self._plan, self.rank).device

    def agree(self, local: LocalStep) -> SharedStep:
        """Collective: sum gradients over replicas, then over stages that share a parameter; agree on the loss."""
        self._steps += 1
        sum_gradients(self._replicas, [one.local for one in self._held.held])
        for group, parameters in self._shared:
            sum_gradients(group, parameters)
        shared = agree_on(self._all, local, counts=self.part.speaks)
        self._add_posts(self._post.take_traffic(), *(group.take_traffic() for group in self._groups))
        return shared

    def _buffers(self, _model: nn.Module) -> Iterable[Tensor]:
        modules = (module for part in self._holding.parts for module in part.modules)
        layers = (buffer for module in modules for buffer in module.buffers())
        own = (one for one in self._holding.own if not isinstance(one, nn.Parameter))
        return dict.fromkeys((*layers, *own))

    def _take_times(self) -> Times:
        """Times of the last step's work items; once the step is agreed on, also its traffic and waits."""
        posts, self._posts = self._posts, {}
        waits, items = waits_of(self._groups), self._borders.take_times()
        passed_ns = sum(item.exchange_ns for item in items)
        return Times(exchange_ns=passed_ns, wait_ns=waits, posts=posts, microbatches=items)

    def _passed(self) -> Passed:
        return Passed(self._take_spent_ns(), self._slices.take_waits())

    def _slice(self, model: nn.Module, holding: Holding, device: torch.device) -> list[Held]:
        """Slice this stage's layers and move them to the device; return what this worker holds of each parameter."""
        modules = [module for part in holding.parts for module in part.modules]
        slices = self._slices
        plan: dict[str, Slicing] = {}
        for part in holding.parts if slices.world > 1 else ():
            # part by part: no layer takes sliced input from a layer of another part
            plan |= find_plan(model, slices.world, part.modules)
        self._sliced = slice_modules(model, slices, plan, part=modules)
        for module in modules:
            module.to(device)
        for one in holding.own:
            one.data = one.data.to(device)
        held = self._holds(holding.parameters)
        return [replace(one, reports=one.reports and id(one.whole) in holding.first) for one in held]

    def _agree_on_cuts(self, model: nn.Module, chain: Chain) -> tuple[int, ...]:
        strategy, parts = self._strategy, self.table.parts
        if strategy.cuts:
            return strategy.cuts
        if parts in (1, len(chain)) and not strategy.memory:
            return tuple(range(1, parts))  # there is only one way to cut
        cuts = torch.zeros(parts - 1, dtype=torch.int64)
        if self.rank:
            return tuple(self._all.broadcast(cuts).tolist())
        assert self._plan is not None, "or cuts are found in another way"
        computer = Computer(self._plan, self.rank)
        piece = computer.share(0, 0, self.part.count).pieces[0]
        ends = TrainingEnds(computer, computer.share(0, 0, self.part.count), 0, 0)
        sizes = sizes_of(computer.task, model)
        with computer.precision():
            layers = layer_costs(
                chain,
                call_of(computer.task.loss, computer.fetch(piece), names=self._names),
                device=computer.device,
                state_copies=sizes.state / sizes.gradients if sizes.gradients else 0.0,
                begin=lambda place: ends.begin(0, place),
            )
        model.zero_grad()  # parameters that layers use without owning them got gradients, too
        need = part_bytes(layers, most_held(self.table, by_part=True), recompute=strategy.recompute)
        limit = strategy.memory * strategy.tensor  # of the slices of a stage together
        cuts.copy_(torch.tensor(planned(layers, strategy.stages, self.table.chunks, need, limit)))
        return tuple(self._all.broadcast(cuts).tolist())


def check_model(strategy: Pipeline, model: nn.Module) -> None:
    chain, parts = chain_of(model), strategy.table().parts
    if parts > len(chain):
        each = f" of {parts // strategy.stages} parts each" if parts > strategy.stages else ""
        raise UserError(
            f"stages={strategy.stages}{each}: {type(model).__name__} is a chain of {len(chain)} layers, which "
            f"cannot be cut into {parts} parts; use at most stages={len(chain) * strategy.stages // parts}"
        )
    if strategy.cuts:
        check_cuts(strategy.cuts, len(chain), parts)
    if strategy.table().over_time:
        check_over_time(chain)
    check_plan(model, strategy.tensor)


# The measured costs of a chain's layers, and what each stage holds of the model after a cut.

_TRIES: Final = 3


def layer_costs(
    chain: Chain,
    call: ChainCall,
    *,
    device: torch.device,
    state_copies: float,
    begin: Callable[[int], None],
) -> list[LayerCost]:
    """Measure the cost of each layer for a micro-batch with this `call`; the modules are left as they were.

    `state_copies` is how many numbers the optimizer keeps per trained parameter. `begin` seeds the random generators
    for the layer at that place in the chain. Of several tries the fastest counts.
    """
    costs, x = [], call.x
    for place, module in enumerate(chain):
        with _visiting(module, device):
            tries = []
            for _ in range(_TRIES):
                begin(place)
                tries.append(_try(module, x, call.named))
        _, kept, output = tries[-1]
        trained = sum(one.nbytes for one in module.parameters() if one.requires_grad)
        whole = sum(one.nbytes for one in (*module.parameters(), *module.buffers()))
        costs.append(
            LayerCost(
                seconds=min(seconds for seconds, _, _ in tries),
                held_bytes=int(whole + trained * (1 + state_copies)),
                activation_bytes=kept,
                input_bytes=x.nbytes if isinstance(x, Tensor) else 0,
                gives_tensor=isinstance(output, Tensor),
            )
        )
        x = output
    return costs


def _try(module: nn.Module, x: Any, named: Mapping[str, Any]) -> tuple[float, int, Any]:
    # A copy: the module may change it in place.
    given = _each(x, lambda one: one.detach().requires_grad_(one.is_floating_point()).clone())
    saved: dict[int, int] = {}
    own = {one.untyped_storage().data_ptr() for one in (*module.parameters(), *module.buffers())}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    began = time.perf_counter()
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = applied(module, given, named)
    roots: list[Tensor] = []
    _each(output, lambda one: roots.append(one) if one.requires_grad else None)
    if roots:
        torch.autograd.backward(roots, [torch.ones_like(one) for one in roots])
        if roots[0].device.type == "cuda":
            torch.cuda.synchronize(roots[0].device)
    seconds = time.perf_counter() - began
    return seconds, sum(saved.values()), _each(output, Tensor.detach)


def _each(value: Any, act: Callable[[Tensor], Any]) -> Any:
    """Apply `act` to a tensor, or to each one in tuples, lists and dicts; anything else is returned unchanged."""
    if isinstance(value, Tensor):
        return act(value)
    if isinstance(value, dict):
        return {key: _each(one, act) for key, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_each(one, act) for one in value)
    return value


@contextmanager
def _visiting(module: nn.Module, device: torch.device) -> Iterator[None]:
    """The module on another device; afterwards it is back, with its gradients and buffers (running statistics)."""
    devices = {one.device for one in module.parameters()}
    module.to(device)
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    gradients = [(one, one.grad) for one in module.parameters()]
    for one, _ in gradients:
        one.grad = None
    yield
    for buffer, value in before:
        with torch.no_grad():
            buffer.copy_(value)
    for one, gradient in gradients:
        one.grad = gradient
    if len(devices) == 1:
        module.to(devices.pop())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Holding:
    """What one stage holds of the model."""

    parts: tuple[ChainPart, ...]  # the stage's parts of the chain, in order
    parameters: tuple[nn.Parameter, ...]
    """The parameters it computes with, each once; including those that belong to no layer, which any may use."""
    first: frozenset[int]  # identities of the parameters that no earlier stage holds: this stage reports them
    tied: tuple[tuple[tuple[int, ...], tuple[nn.Parameter, ...]], ...]
    """Parameters shared with other stages, grouped by the stages that hold them, in the same order on all stages."""
    own: tuple[Tensor, ...]  # parameters and buffers that belong to the model itself and to no layer
    buffers: tuple[str, ...]  # names of the buffers that this stage reports


def holding_of(model: nn.Module, chain: Chain, cuts: Sequence[int], stages: int, stage: int) -> Holding:
    """What `stage` holds of a model with these cuts; part k is on stage k mod `stages`."""
    places = parts_of(cuts, len(chain))
    holders: dict[int, set[int]] = {}  # stages by parameter or buffer, of those that layers have
    for number, within in enumerate(places):
        for module in chain[within.start : within.stop]:
            for one in (*module.parameters(), *module.buffers()):
                holders.setdefault(id(one), set()).add(number % stages)
    parameters, buffers = list(model.parameters()), dict(model.named_buffers())
    own = [one for one in (*parameters, *buffers.values()) if id(one) not in holders]
    of_model = [one for one in own if isinstance(one, nn.Parameter)]
    parts = [
        ChainPart(number, within.start, chain[within.start : within.stop], of_model)
        for number, within in enumerate(places)
    ]
    mine, first = [], set()
    tied: dict[tuple[int, ...], list[nn.Parameter]] = {}
    for parameter in parameters:
        having = tuple(sorted(holders.get(id(parameter), range(stages))))
        if stage in having:
            mine.append(parameter)
            if having[0] == stage:
                first.add(id(parameter))
            if len(having) > 1:
                tied.setdefault(having, []).append(parameter)
    return Holding(
        parts=tuple(part for part in parts if part.number % stages == stage),
        parameters=tuple(mine),
        first=frozenset(first),
        tied=tuple((having, tuple(tied[having])) for having in sorted(tied)),
        own=tuple(own),
        buffers=tuple(name for name, buffer in buffers.items() if min(holders.get(id(buffer), {0})) == stage),
    )


def require_own_statistics(model: nn.Module, chain: Chain, cuts: Sequence[int], stages: int) -> None:
    """Raise UserError for a layer with running statistics that is on several stages: the copies would diverge."""
    having: dict[int, set[int]] = {}
    for number, within in enumerate(parts_of(cuts, len(chain))):
        for layer in chain[within.start : within.stop]:
            for module in layer.modules():
                having.setdefault(id(module), set()).add(number % stages)
    for name, module in model.named_modules():
        found = sorted(having.get(id(module), ()))
        keeps = isinstance(module, _NormBase) and module.running_mean is not None
        if keeps and len(found) > 1 and module.train().training:  # some stay in evaluation mode
            raise UserError(
                f"layer {name!r} ({type(module).__name__}) is in stages {' and '.join(map(str, found))}, and each "
                "would keep its own running statistics; use separate layers, or cuts= that keep both in one "
                "stage"
            )
