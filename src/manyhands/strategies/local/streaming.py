"""Streaming DiLoCo (Douillard et al., "Streaming DiLoCo with overlapping communication", 2025), one worker's end.

The model is cut into fragments that are averaged in turn, and what is sent travels beside the next steps. A fragment is
merged after a step that is fixed beforehand, however fast the links are: so a run gives the same weights every time.
Each worker keeps parameters and optimizer state of its own, and the centre, which is equal on all and is the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhands.engine.exchange import ExchangeState, LocalStep, SharedStep, Traffic
from manyhands.strategies.common.collectives.collective import Collective, all_on_first
from manyhands.strategies.local.fragments import FragmentPlan
from manyhands.strategies.local.local_exchange import LocalExchange, Replica
from manyhands.strategies.local.outer import Mixed
from manyhands.wire.codec import as_memory

_WINDOWS = "windows"


class FragmentReplica(Replica):
    """One worker's replica: its fragments are sent, as changes from the centre, and merged one by one."""

    def __init__(
        self, collective: Collective, model: nn.Module, optimizer: Optimizer, outer: Mixed, fragments: int
    ) -> None:
        super().__init__(collective, model, optimizer, outer, fragments)
        self._mixed = outer
        outer.begin(self.parameters)

    @torch.no_grad()
    def send(self, fragment: int, weight: float) -> None:
        """Collective: launch the sum of `weight` times how far each replica has come from the centre."""
        for place in self._places:
            if place.fragment == fragment:
                number = place.held.number
                change = self.parameters[number] - self._mixed.centre[number]
                place.room.copy_(change.reshape(-1)).mul_(weight)
        for bucket, its in enumerate(self._fragment_of):
            if its == fragment:
                self._collective.launch(bucket)

    @torch.no_grad()
    def merge(self, fragment: int, *, plainly: bool) -> None:
        """Give the mean to the outer step, once the sum is there; `plainly`: replicas and centre become the mean."""
        take = self._mixed.plainly if plainly else self._mixed.take
        for place in self._places:
            if place.fragment == fragment:
                number = place.held.number
                centre = self._mixed.centre[number]
                mean = place.room.view(centre.shape).to(centre.device) + centre
                take(number, self.parameters[number], mean)

    def own(self) -> dict[str, Tensor]:
        """What this worker alone has: its parameters and its optimizer's state."""
        found = {}
        for number, parameter in enumerate(self.parameters):
            state = self._optimizer.state.get(parameter, {})
            kept = {name: value for name, value in state.items() if isinstance(value, Tensor)}
            for name, value in {"": parameter.detach(), **kept}.items():
                found[f"{number} {'x'.join(map(str, value.shape))} {name}"] = value.reshape(-1).cpu()
        return found

    @torch.no_grad()
    def take_own(self, own: Mapping[str, Tensor]) -> None:
        """Load what `own` returned, flat."""
        for parameter in self.parameters:
            state = self._optimizer.state.pop(parameter, {})
            plain = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
            if plain:
                self._optimizer.state[parameter] = plain
        for key, flat in own.items():
            number, shape, name = key.split(" ", 2)
            parameter, value = (
                self.parameters[int(number)],
                flat.view([*map(int, filter(None, shape.split("x")))]),
            )
            if name:
                device = parameter.device if value.dim() else value.device
                self._optimizer.state[parameter][name] = value.to(device)
            else:
                parameter.copy_(value)


class StreamedExchange(LocalExchange):
    """Sends and merges fragments as the plan says; after the last step, and each of the `first`, all of them at once.

    A round of the plan ends with a settled step: nothing is under way then, and what workers report is agreed on.
    """

    hooks: FragmentReplica | None = None
    _outer: Mixed

    def __init__(self, collective: Collective, plan: FragmentPlan, outer: Mixed, *, first: int = 0) -> None:
        super().__init__(collective, plan.steps, first=first, outer=outer)
        self.kept = ExchangeState(gather=self._gather, load=self._restore)
        self.meter = replace(self.meter, traffic=self._traffic)
        self._plan, self._last = plan, False
        # By fragment: this worker's shares of the batches since it was sent, and how many batches those were.
        self._windows = torch.zeros(plan.fragments, 2, dtype=torch.float64)
        self._under_way: Sequence[int] = ()
        self._sent: Traffic | None = None  # before that was launched; None: all of it has arrived

    def attach(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self.hooks = FragmentReplica(self._collective, model, optimizer, self._outer, self._plan.fragments)

    def agree(self, local: LocalStep) -> SharedStep:
        self._last = local.last
        self._windows += torch.tensor([local.share, 1.0], dtype=torch.float64)
        return super().agree(local)

    def total(self, values: Tensor) -> Tensor:
        self._arrive()  # all workers send one thing after the other
        return super().total(values)

    def _average(self, end: bool) -> bool:
        """Collective: merge and send what is due after this step; returns whether anything was."""
        del end  # loops of one's own are refused
        step, plan = self._step, self._plan
        if self._due:
            self._weight, self._losses, self._due = 0.0, [], False
        plainly = step <= self._first
        if plainly or self._last:
            self._merge()
            self._send(range(plan.fragments))
            self._merge(own=0.0, plainly=plainly)
            return True
        merged, sent = plan.merged(step), plan.sent(step)
        if merged is not None:
            self._merge()
        if sent is not None:
            self._send([sent])
        if not plan.overlap:
            self._merge()
        return merged is not None or sent is not None

    def _send(self, fragments: Sequence[int]) -> None:
        self._sent, self._under_way = self._collective.traffic(), fragments
        self._collective.begin(self._step)
        for fragment in fragments:
            share, batches = self._windows[fragment].tolist()
            self._replica.send(fragment, share / batches)
            self._windows[fragment] = 0.0

    def _arrive(self) -> None:
        """Wait until what is under way is summed."""
        if self._sent is not None:
            self._collective.finish()
            self._sent = None

    def _merge(self, *, own: float | None = None, plainly: bool = False) -> None:
        self._arrive()
        usual, self._outer.own = self._outer.own, self._outer.own if own is None else own
        for fragment in self._under_way:
            self._replica.merge(fragment, plainly=plainly)
        self._outer.own, self._under_way = usual, ()

    def _traffic(self) -> Traffic:
        """What was sent, counted once it has arrived: so each step has the same traffic in every run."""
        return self._collective.traffic() if self._sent is None else self._sent

    def _gather(self) -> Mapping[str, Any]:
        """Collective, at the end of a round: what all have in common, and what each worker has for itself."""
        common = self._memory()
        own = {_WINDOWS: self._windows.view(-1), **self._replica.own()}
        replicas = all_on_first(self._collective, *self._replica.carrier, own)
        return {**common, "replicas": replicas} if self.rank == 0 else common

    def _restore(self, memory: Mapping[str, Any]) -> None:
        """Without what this worker had, as where there were others, it starts at the centre."""
        self._load(memory)
        replicas = memory.get("replicas", ())
        if len(replicas) == self.world:
            own = as_memory(replicas[self.rank])
            windows = own.pop(_WINDOWS)
            if windows.numel() == self._windows.numel():
                self._windows.copy_(windows.view_as(self._windows))
            self._replica.take_own(own)

    @property
    def _replica(self) -> FragmentReplica:
        assert self.hooks is not None, "attach comes first"
        return self.hooks
