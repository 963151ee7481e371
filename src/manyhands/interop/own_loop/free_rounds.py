"""The rounds of a group whose workers do not meet at every backward: `ps`, `hogwild`.

    backward           gradients add up in `grad`, each weighted by this worker's share of its batch
    optimizer.step()   gives them away, and waits for newer parameters (`LoopEnd`)
    the next batch     a part of every batch where all take every step, else all of a batch that is this worker's alone

What all of them agree on (the order of samples, means, checkpoints) goes over the store, by names that say how many
batches the loop had passed. So a worker that is started again finds what its predecessor had said: it runs the script
from the top, passes over the batches that are done, and repeats no exchange.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ChainedScheduler, LRScheduler, ReduceLROnPlateau

from manyhands.data.batches import split
from manyhands.data.store.checkpoint import Loaded
from manyhands.data.store.state_tree import pack_tree, unpack_tree
from manyhands.engine.loop_end import GroupStore, LoopEnd, changed_settings, plain_settings
from manyhands.engine.reporting import WorkerContext
from manyhands.errors import UserError
from manyhands.interop.own_loop.backward_rounds import GradientWatch, Rounds
from manyhands.interop.own_loop.readings import Draws, LoaderPart, LoaderReading, Readings, Turn, draw_from
from manyhands.interop.own_loop.small_sums import AloneCollective, Call, Word, Words, require_same

INSIDE = " inside"  # what a position ends with while a batch is computed


class StoreWords(Words):
    """What workers exchange between steps, over the store; a successor finds what its predecessor took part in."""

    def __init__(self, end: LoopEnd) -> None:
        super().__init__(AloneCollective())
        self.rank, self.world, self._store = end.rank, end.world, end.store
        self._at, self._numbers = "", Counter[str]()
        self._inside: dict[str, list[str]] = {}  # what this worker brought inside a batch, by position
        self.position: Callable[[], str] = lambda: "0"  # how many batches the loop has passed, or is in
        self.is_apart: Callable[[], bool] = lambda: False  # whether this worker is at a batch of its own

    def name(self, what: str = "") -> str:
        """The name of the next exchange: the same on all workers, and for a worker's successor."""
        position = self.position()
        if position != self._at:
            self._at, self._numbers = position, Counter()
        self._numbers[what] += 1
        return f"{what}@{position}/{self._numbers[what]}"

    def all(self, value: bytes) -> list[bytes]:
        """Collective: what every worker brings, by rank; where each is at a batch of its own, what this one brings."""
        if self.is_apart():
            return [value]
        name = self.name()
        mine = self._store.first(f"{name}/{self.rank}", value)
        found = [
            mine if rank == self.rank else self._store.get(f"{name}/{rank}", f"worker {rank}")
            for rank in range(self.world)
        ]
        if self._at.endswith(INSIDE):
            self._forget_passed(f"{name}/{self.rank}")
        return found

    def _forget_passed(self, name: str) -> None:
        """Keep what this worker brought inside this batch; all are here, so none is inside an earlier one any more.

        A successor passes over batches that are done, with all that was exchanged inside, so nobody asks for it.
        """
        for earlier in [position for position in self._inside if position != self._at]:
            for one in self._inside.pop(earlier):
                self._store.remove(one)
        self._inside.setdefault(self._at, []).append(name)

    def meet(self, call: Call, value: float = 0.0) -> tuple[Word, ...]:
        found = map(json.loads, self.all(json.dumps([int(call), value]).encode()))
        words = tuple(Word(Call(number), value=value) for number, value in found)
        require_same(words)
        return words

    def total(self, values: Tensor) -> Tensor:
        return torch.stack([_unpacked(one) for one in self.all(_packed(values))]).sum(0)

    def broadcast(self, content: Tensor, root: int = 0) -> None:
        found = self.all(_packed(content if self.rank == root else content[:0]))
        if len(found) > 1:
            content.copy_(_unpacked(found[root]))

    def gather(self, rows: Tensor) -> Tensor:
        return torch.cat([_unpacked(one) for one in self.all(_packed(rows))])


def _packed(values: Tensor) -> bytes:
    return b"".join(pack_tree({"values": values.detach().cpu().contiguous()}))


def _unpacked(data: bytes) -> Tensor:
    values: Tensor = unpack_tree(data)["values"]
    return values


class FreeReadings(Readings):
    """Readings that tell when a batch of the training is handed out."""

    def __init__(
        self,
        share: float,
        weigh: Callable[[float], None],
        hand_out: Callable[[LoaderPart], None],
        ask: Callable[[], None],
    ) -> None:
        super().__init__(1, weigh)
        self._whole, self._hand_out, self._ask = LoaderPart(share=share), hand_out, ask

    def read(self, batches: Iterator[Any]) -> Any:
        self._ask()
        return super().read(batches)

    def begin(self, reading: LoaderReading, part: LoaderPart) -> None:
        super().begin(reading, part)
        if part.index >= 0:
            self._hand_out(part)

    @property
    def passed(self) -> int | None:
        """How many batches the training has passed, while it reads one."""
        indices = [one.part.index for one in self._open if one.part.index >= 0]
        return max(indices) + 1 if indices else None


class FreeRounds(Rounds):
    """One worker's part, from `attach` to `leave`; the exchange is a `LoopEnd`."""

    exchange: LoopEnd
    words: StoreWords

    def __init__(
        self, words: StoreWords, exchange: LoopEnd, worker_context: WorkerContext, check_every: int = 0
    ) -> None:
        super().__init__(words, exchange, worker_context, check_every)
        self.synchronous = exchange.synchronous
        self._share = 1 / self.world if self.synchronous else 1.0
        self._schedule = LoopSchedule(exchange.store, self.rank)
        self.readings: FreeReadings = FreeReadings(
            self._share, self._weigh, self._handed_out, self._schedule.asked_for_more
        )
        words.position = self._position
        words.is_apart = lambda: not self.synchronous and self.readings.passed is not None
        self._drawn = 0  # batches of the training that were drawn from loaders, of all workers
        self._begun = 0  # how often a loader was read for the training
        self._start = 0  # of those, how many a predecessor had done
        self._draws = 0  # how often an order of samples was drawn
        self._unstepped = False  # a batch was handed out, and no step followed
        self._pace: tuple[int, ...] = (
            -1,
            0,
            0,
        )  # from this clock and these passed batches on, so many for each step
        self._clip: float | None = None
        self._first_settings: list[dict[str, Any]] = []
        self._in_backward = False
        self._passes_states = False  # states go in and out as they are

    def attach(self, models: Sequence[nn.Module], optimizer: Optimizer, buffers: str) -> None:
        """Give every worker the parameters of the group; a process that serves does not return."""
        if buffers == "mean":
            raise UserError("buffers=mean: these workers do not meet at every step; use broadcast or local")
        end = self.exchange
        model = models[0] if len(models) == 1 else nn.ModuleList(models)
        self._first_settings = plain_settings(optimizer)
        self._keeps_buffers = buffers != "local"
        end.begin(model, optimizer, self._worker_context)
        self._model, self._optimizer = model, optimizer
        if self.synchronous and self.world > 1:
            self._watch = GradientWatch(optimizer)
        for parameter in model.parameters():
            if parameter.requires_grad:
                self._hooks.callback(parameter.register_hook(self._on_gradient).remove)  # type: ignore[no-untyped-call]
        self._hooks.callback(optimizer.register_step_pre_hook(self._on_step).remove)
        if not end.holds_state:
            self._refuse_states(models, optimizer)
        known = end.store.find(f"pace/{self.rank}")
        if end.clock and known is not None:
            self._pace = tuple(json.loads(known))
        self.clock.start()

    def require_own_streams(self) -> None:
        if self.synchronous:
            raise UserError(
                "prepare(split=False): workers that step together cannot end with the shortest stream here; use "
                "consistency=async, or strategy=mirrored"
            )

    def prepare_scheduler(self, scheduler: LRScheduler) -> None:
        if not isinstance(scheduler, ReduceLROnPlateau):  # a step of that belongs to a metric, not to a batch
            self._schedule.schedulers.append(scheduler)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Nothing to do: gradients add up until the next step."""
        self.require_model()
        yield

    def clip(self, max_norm: float) -> float:
        """Scale the gradient to `max_norm`: here, or in the step the sum over workers; returns this worker's norm."""
        model = self.require_model()
        norm = self.exchange.clips(model, max_norm)
        if norm is None:
            self._clip = max_norm
            there = [one.grad for one in model.parameters() if one.grad is not None]
            norm = float(nn.utils.get_total_norm(there))
        return norm

    def unscale(self, optimizer: Optimizer, factor: Tensor) -> bool:
        del optimizer, factor
        raise UserError("a GradScaler does not work with this strategy; use bfloat16, which needs none")

    def in_worker_0s_order(self, draw: Callable[[], Any], generators: Sequence[torch.Generator]) -> Any:
        """Call `draw` as if torch's random numbers, and these generators, were those of the group."""
        mine = [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
        states = _unpacked(self._agreed(_packed(torch.cat(mine))))
        return draw() if self.rank == 0 else draw_from(states, draw, mine, generators)

    def worker_0s_draws(self) -> Draws:
        return Draws.from_content(_unpacked(self._agreed(_packed(Draws().content()))))

    def count_reading(self) -> None:
        self._begun += self._trains

    def all_have_a_batch(self, mine: bool) -> bool:
        return mine

    def require_one_batch(self, mark: int) -> None:
        """Nothing to do: who reads another batch would show in no exchange."""

    def sharing(self) -> Callable[[int], Turn | None]:
        """How a loader is shared out that is read from now on: for the training, or for an evaluation.

        Workers that do not step together meet before an evaluation, so that it measures one state of the model.
        """
        if not self._trains:
            if self.words.is_apart():
                return lambda size: Turn(range(size))  # at a batch of its own, a worker evaluates alone
            if self._model is not None and not self.synchronous:
                self.words.all(b"-")
                self.exchange.refresh()
            return super().sharing()
        return self._own_part if self.synchronous else self._own_batch

    def optimizer_state(self, folder: Path) -> Mapping[str, Any] | None:
        """Collective: the optimizer's state on worker 0; None where a predecessor has done this."""
        with self._once("save") as again, self._passing_states():
            return None if again else self.exchange.save(folder, self.require_model())

    def load_model(self, state: Mapping[str, Tensor]) -> None:
        with self._passing_states():
            super().load_model(state)

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        with self._passing_states():
            super().load_optimizer(optimizer, state)

    def loaded(self, folder: Path, loaded: Loaded) -> None:
        with self._once("load") as again:
            self.exchange.load(folder, loaded, again=again)

    def leave(self) -> None:
        """Collective: leave together, with the same parameters, and the buffers of worker 0."""
        if self._model is None:
            return
        self.exchange.leave()
        # Wherever each has left its loop, all of them are at its end.
        self.words.position, self.words.is_apart = lambda: "end", lambda: False
        buffers = list(self._model.buffers()) if self._keeps_buffers and self.world > 1 else []
        for buffer in buffers:
            flat = buffer.detach().contiguous().view(-1).view(torch.uint8).clone()
            self.words.broadcast(flat)
            with torch.no_grad():
                buffer.copy_(flat.view(buffer.dtype).view(buffer.shape))
        self.exchange.finish()

    def _agreed(self, mine: bytes) -> bytes:
        """The same on all workers: worker 0's where all wait for it anyway, else that of the first to come here."""
        if self._trains:
            name, self._draws = f"order/{self._draws}", self._draws + 1
        elif self.words.is_apart():
            return mine
        else:
            name = self.words.name("order")
        store = self.exchange.store
        return store.get(name, "worker 0") if self.synchronous and self.rank else store.first(name, mine)

    @contextmanager
    def _once(self, what: str) -> Iterator[bool]:
        """Gives whether a predecessor has done what is done inside, and keeps that it is done now."""
        store, mark = self.exchange.store, f"{self.words.name(what)}/{self.rank} is done"
        yield store.find(mark) is not None
        store.put(mark, b"1")

    def _refuse_states(self, models: Sequence[nn.Module], optimizer: Optimizer) -> None:
        """Reject what would change, or read, only this worker's copy of what the servers have."""

        def refuse(*_: Any) -> None:
            if not self._passes_states:
                raise UserError(
                    "the servers have the optimizer's state and the parameters, which a state_dict of this worker's "
                    "optimizer would lack and load_state_dict would not change; use group.save and group.load"
                )

        untyped: list[Any] = list(models)
        for handle in (
            optimizer.register_state_dict_pre_hook(refuse),
            optimizer.register_load_state_dict_pre_hook(refuse),
            *(one.register_load_state_dict_pre_hook(refuse) for one in untyped),
        ):
            self._hooks.callback(handle.remove)

    @contextmanager
    def _passing_states(self) -> Iterator[None]:
        self._passes_states = True
        try:
            yield
        finally:
            self._passes_states = False

    @property
    def _trains(self) -> bool:
        """Whether what is read from now on is for the training."""
        model = self._model
        return model is not None and model.training and torch.is_grad_enabled()

    def _passed(self) -> int:
        passed = self.readings.passed
        return self._drawn if passed is None else passed

    def _position(self) -> str:
        """A successor passes over a batch: what was exchanged inside must not count among what comes after it.

        Who has batches of its own may leave a loop at another one than the others: there, loops count.
        """
        place = str(self._passed()) if self.synchronous else f"loop {self._begun}"
        return f"{place}{'' if self.readings.passed is None else INSIDE}"

    def _own_part(self, size: int) -> Turn | None:
        index, self._drawn = self._drawn, self._drawn + 1
        clock, passed, each = self._pace
        if clock >= 0:  # steps were taken without this worker, which was late, or had a predecessor
            self._start = max(self._start, passed + (self.exchange.clock - clock) * each)
        return Turn(split(size, self.rank, self.world), index) if index >= self._start else None

    def _own_batch(self, size: int) -> Turn | None:
        """All of the batch, where it is this worker's; one that it has read and not stepped with counts as nothing."""
        end, index, self._drawn = self.exchange, self._drawn, self._drawn + 1
        while self._unstepped or end.batch < index:  # the latter after the return of a server to a snapshot
            self._unstepped = False
            end.skip()
        return Turn(range(size), index) if end.batch == index else None

    def _weigh(self, share: float) -> None:
        self._share = share

    def _handed_out(self, part: LoaderPart) -> None:
        self._unstepped = True
        self._schedule.handed_out(part.index)
        self.exchange.enter()
        stop, ends = self.exchange.store.find("stop"), self.exchange.stop_requested()
        if ends or (stop is not None and (not self.synchronous or part.index >= int(stop))):
            self.is_stopped = True
            self.readings.stop()

    def _on_gradient(self, gradient: Tensor) -> Tensor | None:
        if not self._in_backward:
            self._in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._ended)
        return gradient * self._share if self.synchronous and self._share != 1 else None

    def _ended(self) -> None:
        self._in_backward = False
        if self._watch is not None:
            self._watch.remember()

    def _on_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stepping:
            return
        if len(args) > 1 or kwargs.get("closure") is not None:
            raise UserError("optimizer.step(closure) is not for this strategy; call backward() before step()")
        if self._watch is not None:
            self._watch.require_untouched()
        end, settings = self.exchange, changed_settings(self._first_settings, optimizer)
        if self._clip is not None:
            settings["clip"], self._clip = self._clip, None
        if self.wants_stop:
            end.store.put("stop", str(self._passed()).encode())
        self._keep_pace()
        self._stepping = True
        try:
            end.push(self._share, settings)
        finally:
            self._stepping = False
        self._unstepped = False
        self.clock.rounds = end.clock
        for parameter in self.require_model().parameters():
            parameter.grad = None  # so the step that brought us here finds nothing to do
        if self._watch is not None:
            self._watch.remember()

    def _keep_pace(self) -> None:
        """Tell a successor how far the loop has come with each step: only where that changes."""
        clock, passed, each = self._pace
        now, there = self.exchange.clock, self._passed()
        expected = passed + (now + 1 - clock) * each
        if self.synchronous and (clock < 0 or there != expected):
            before = 0 if clock < 0 else passed + (now - clock) * each
            self._pace = (now, before, there - before)
            self.exchange.store.put(f"pace/{self.rank}", json.dumps(self._pace).encode())


class LoopSchedule:
    """Schedulers that are stepped between batches: they count the batches that other workers have, too."""

    def __init__(self, store: GroupStore, rank: int = 0) -> None:
        self._store, self._found, self.schedulers = store, f"rates/{rank}", list[LRScheduler]()
        self._handed = self._asked = self._taken = 0  # batches, steps by the loop, and all steps
        self._seen: int | None = None  # the first scheduler's count when the batch in hand was handed out
        self._rate = 0.0  # steps of a scheduler for each batch

    def handed_out(self, index: int) -> None:
        """Before batch `index`: take the steps of the batches that this worker has not had."""
        if not self.schedulers:
            return
        if not self._handed and index:
            found = json.loads(self._store.find(self._found) or b"{}")  # in a replay, what was found then
            rate = found.setdefault(str(index), float(self._store.find("scheduled") or 0))
            self._store.put(self._found, json.dumps(found).encode())
            self._rate = rate
        self._handed += 1
        due = int(index * self._rate + 1e-6) - self._taken
        for _ in range(due):
            for scheduler in self.schedulers:
                scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns of one that goes first
                scheduler.step()
        self._taken += max(due, 0)
        self._seen = _count(self.schedulers[0])

    def asked_for_more(self) -> None:
        """After a batch: learn how often the loop has stepped the schedule meanwhile."""
        if self._seen is None:
            return
        steps, self._seen = _count(self.schedulers[0]) - self._seen, None
        self._asked, self._taken = self._asked + steps, self._taken + steps
        rate = self._asked / self._handed
        if steps and rate != self._rate:
            self._rate = rate
            self._store.put("scheduled", str(rate).encode())


def _count(scheduler: LRScheduler) -> int:
    if isinstance(scheduler, ChainedScheduler):  # which counts nothing itself
        return _count(scheduler._schedulers[0])
    return int(scheduler.last_epoch)
