"""The rounds of a group: what the workers exchange at each backward of the user's loop.

    forward            writes buffers; a stop request counts from here on
    first gradient     this worker's word is sent, without waiting (`words`)
    more gradients     weighted by this worker's share on their way into their buckets; full ones leave (`Exchange`)
    end of backward    autograd's callback: receive the words, finish the sums, synchronize buffers

So when `loss.backward()` returns, `grad` holds the gradient of the mean over the global batch, and whatever the user
does with it (clipping, GradScaler, looking at it) is the same on every worker. Where the strategy steps by itself
(`central`), `grad` holds this worker's part, which only the group may change, and `optimizer.step()` is a round of its
own, as clipping and unscaling are.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.cpu.amp.grad_scaler import GradScaler as CpuGradScaler
from torch.cuda.amp.grad_scaler import GradScaler as CudaGradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.data.batches import split
from manyhands.data.store.checkpoint import Loaded
from manyhands.data.store.state_tree import restore_optimizer
from manyhands.engine.clipping import clip_norm
from manyhands.engine.desync_check import Agreement
from manyhands.engine.exchange import BatchPiece, Exchange, LocalStep, PeerTraffic, Traffic
from manyhands.engine.reporting import StepBook, WorkerContext
from manyhands.errors import UserError
from manyhands.interop.own_loop.readings import Draws, Readings, Turn, draw_from
from manyhands.interop.own_loop.small_sums import BufferKeeper, Call, CopyWords, Word, Words, require_same
from manyhands.interop.own_loop.whole_states import WholeStates
from manyhands.native.heap import keep_freed_memory
from manyhands.places.local.status import State

MEMORY: Final = "manyhands: what the exchange remembers"  # beside the user's own `extra` in a checkpoint


class RoundClock:
    """Times one worker's rounds, as events: `start`, then `computed` and `exchanged` in each.

    The clock is read when backward has ended and before anyone is waited for, so that a slow worker shows as itself.
    What lies between two exchanges counts as computing: the step, forward and backward, less what was reduced or waited
    for meanwhile; reading from a prepared loader counts as input: `take_input_ns` returns what it took since it was
    last asked.
    """

    def __init__(
        self, words: Words, exchange: Exchange, context: WorkerContext, take_input_ns: Callable[[], int]
    ) -> None:
        self._words, self._exchange = words, exchange
        self._worker_context, self._take_input_ns = context, take_input_ns
        self.rounds = 0  # how many exchanges this worker has taken part in
        self._sent, self._waited_before = Traffic(), Counter[int]()
        self._started_ns = self._computed_ns = self._overlapped_ns = self._input_ns = 0

    def start(self) -> None:
        self._worker_context.mark(self.rounds + 1, State.COMPUTING)
        self._take()
        self._take_input_ns()
        self._sent = self._exchange.meter.traffic()
        self._started_ns = time.monotonic_ns()

    def computed(self) -> None:
        self._worker_context.mark(self.rounds + 1, State.EXCHANGING)
        self._computed_ns = time.monotonic_ns()
        self._overlapped_ns, self._waited_before, _ = self._take()
        # At the first batch of an epoch the loader asks worker 0 for its order, and waits.
        self._input_ns = max(0, self._take_input_ns() - self._waited_before.total())

    def exchanged(self, samples: int) -> None:
        now_ns, started_ns, computed_ns = time.monotonic_ns(), self._started_ns, self._computed_ns
        _, waited, posts = self._take()
        book = StepBook(self._worker_context.record, self.rounds, started_ns)
        book.input(self._input_ns, samples)
        book.compute(computed_ns, less_ns=self._overlapped_ns + self._waited_before.total())
        book.at_ns = computed_ns - self._waited_before.total()
        book.waits(self._waited_before)
        book.waits(waited)
        if self._exchange.world > 1:
            sent = self._exchange.meter.traffic() - self._sent
            book.exchange(now_ns, sent, self._exchange.wire, hidden_ns=self._overlapped_ns)
            book.posts(posts, self._exchange.wire)
        book.end(now_ns, samples)
        self.rounds += 1
        self.start()

    def _take(self) -> tuple[int, Counter[int], Mapping[int, PeerTraffic]]:
        """Nanoseconds spent reducing, and waiting for each worker, and the exchange's messages, since the last look."""
        times = (self._exchange.meter.take_times(), self._words.collective.take_times())
        waited = Counter(times[0].wait_ns)
        waited.update(times[1].wait_ns)
        return sum(one.exchange_ns for one in times), waited, times[0].posts


class GradientWatch:
    """Detects changes of the gradients that `optimizer` reads since they were last remembered; keeps none alive.

    Where the group works in parts, `grad` holds this worker's own gradient, of which one part is the sum over
    workers. Torch's `clip_grad_norm_` would take a norm of that, another one on each worker, and the weights would be
    wrong without a word. What torch changes in place it counts, and what is put in place of a gradient lies elsewhere:
    so a change that the group did not make shows.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self.remember()

    def remember(self) -> None:
        self._known = self._look()

    def require_untouched(self) -> None:
        """Raise UserError if a gradient is another one than was remembered; to drop one is allowed."""
        pairs = zip(self._look(), self._known, strict=True)
        if any(now is not None and now != known for now, known in pairs):
            raise UserError(
                "a gradient was changed between backward() and optimizer.step(), but under this strategy grad is only "
                "this worker's part; clip with group.clip_grad_norm_ instead of torch's own, or use strategy=mirrored "
                "for other changes"
            )

    def _look(self) -> list[tuple[int, int] | None]:
        gradients = (parameter.grad for parameter in self._parameters)
        return [(one.data_ptr(), one._version) if one is not None else None for one in gradients]


def unscale(parts: Sequence[torch.Tensor], factor: torch.Tensor) -> bool:
    """Multiply this worker's parts by `factor`; whether any item was not finite. In one pass, that of GradScaler."""
    if any(part.dtype == torch.float16 for part in parts):
        raise UserError(
            "GradScaler is for float32 parameters under autocast, but the model holds float16; leave out "
            "model.half()"
        )
    found = torch.zeros(())
    for part in parts:
        torch._amp_foreach_non_finite_check_and_unscale_([part], found, factor.cpu())
    return bool(found)


class Rounds:
    """One worker's part in all rounds of a group, from `attach` to `leave`; owns the words and the exchange.

    Where workers hold copies, their parameters are compared every `check_every` rounds; 0: never.
    """

    synchronous = True  # every batch is split over all workers, and all take every step

    def __init__(
        self, words: Words, exchange: Exchange, worker_context: WorkerContext, check_every: int = 0
    ) -> None:
        self.rank, self.world = words.rank, words.world
        self.words, self.exchange = words, exchange

        def weigh(share: float) -> None:
            if self._model is not None and exchange.hooks is not None:
                exchange.hooks.weight = share

        # Where each worker holds a part of the gradient, only the group may change it
        self.in_parts = exchange.steps_itself or exchange.cuts_model
        self.part = exchange.part
        self.readings = Readings(exchange.part.count, weigh)
        self.clock = RoundClock(words, exchange, worker_context, self.readings.take_input_ns)
        self.wants_stop = False  # this worker asked to stop
        self.is_stopped = False  # all have agreed to
        self._worker_context = worker_context
        self._check_every = check_every if exchange.part.copies else 0
        self._agreement: Agreement | None = None
        self._sends_stop = self._stepping = False
        self._for_others = 0  # rounds that this worker has brought nothing to, since it left
        self._holding = 0
        self._model: nn.Module | None = None
        self._buffers: BufferKeeper | None = None
        self._optimizer: Optimizer | None = None
        self._watch: GradientWatch | None = None  # where gradients are in parts
        self._states: WholeStates | None = None  # where the model is
        self._end_state: Mapping[str, torch.Tensor] | None = None
        self._hooks = ExitStack()

    def require_model(self) -> nn.Module:
        if self._model is None:
            raise UserError("the group has no model yet: call prepare first")
        return self._model

    def attach(self, models: Sequence[nn.Module], optimizer: Optimizer, buffers: str) -> None:
        """Collective: take over the models' gradients, and give every worker worker 0's weights."""
        self.words.meet(Call.PREPARE)
        model = models[0] if len(models) == 1 else nn.ModuleList(models)
        self.exchange.attach(model, optimizer)
        keep_freed_memory()  # every step frees what the next one takes
        self._model = model
        copies = self.words if self.part.total_of_copies is None else CopyWords(self.part)
        self._buffers = BufferKeeper(model, buffers, copies)
        if self._check_every and self.world > 1:
            self._agreement = Agreement(
                partial(self.part.parameters, model),
                rank=self.rank,
                world=self.world,
                total=self.words.total,
                copies=self.part.copies,
            )
        self.readings.weigh(self.readings.part.share)
        self._watch_backward()
        for one in models:
            self._hooks.callback(one.register_forward_pre_hook(self._on_forward).remove)
        if self.exchange.cut is not None:
            self.words.arrive = self.exchange.cut.arrive
            self._states = WholeStates(self.words, self.exchange, model, models, optimizer)
            self._hooks.callback(self._states.close)
        if self.in_parts:
            self._optimizer, self._watch = optimizer, GradientWatch(optimizer)
            self._hooks.callback(optimizer.register_step_pre_hook(self._on_step).remove)
            # A GradScaler that was not prepared then shows in the optimizer's step.
            self._hooks.enter_context(declaring(optimizer, handles_scales=True))
        else:
            self._hooks.callback(optimizer.register_step_post_hook(lambda *_: self._average()).remove)
        self.clock.start()

    @contextmanager
    def holding(self) -> Iterator[None]:
        self.require_model()
        hooks = self.exchange.hooks
        with hooks.holding() if hooks is not None else nullcontext():
            self._holding += 1
            try:
                yield
            finally:
                self._holding -= 1

    def run(self, pieces: Sequence[BatchPiece], loss: Callable[..., torch.Tensor | float]) -> float:
        """Collective: forward and backward of one batch by the strategy's runner; what that returns."""
        model, runner = self.require_model(), self.exchange.runner
        assert runner is not None, "or the script runs them"
        self._on_forward(model, ())
        exchanges = torch.is_grad_enabled() and not self._holding
        if exchanges:
            self._send_word()
        value = runner.run(pieces, loss)
        if exchanges:
            self._end_round()
        return value

    def clip(self, max_norm: float) -> float:
        """Scale the gradient to `max_norm`; the norm it had. Collective where the strategy holds it in parts."""
        model = self.require_model()
        if self._watch is None:
            return clip_norm(self.exchange, model, max_norm)
        self._watch.require_untouched()
        self.words.meet(Call.CLIP, max_norm)
        norm = clip_norm(self.exchange, model, max_norm)
        self._watch.remember()
        return norm

    def unscale(self, optimizer: Optimizer, factor: torch.Tensor) -> bool:
        """Collective: multiply the gradient by `factor`; whether any of it, on any worker, was not finite."""
        if optimizer is not self._optimizer or self._watch is None:
            raise UserError(
                f"the GradScaler of a group works only with its own optimizer, not with another "
                f"{type(optimizer).__name__}; use a second one"
            )
        self._watch.require_untouched()
        assert self.exchange.parts is not None, "who watches holds parts"
        found = unscale(self.exchange.parts.held(), factor)
        self._watch.remember()
        return any(word.value for word in self.words.meet(Call.UNSCALE, float(found)))

    def model_state(self) -> Mapping[str, torch.Tensor] | None:
        """Collective: the whole model's state, on worker 0 at least."""
        return self.exchange.model_state(self.require_model())

    def optimizer_state(self, folder: Path) -> Mapping[str, Any] | None:
        """Collective, before a checkpoint is written to `folder`: the optimizer's whole state, on worker 0."""
        del folder
        found = self.exchange.optimizer_state() if self._states is None else self._states.optimizer_state()
        return found or {}

    def load_model(self, state: Mapping[str, torch.Tensor]) -> None:
        self.require_model().load_state_dict(state)

    def load_optimizer(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        load = restore_optimizer if self._states is None else self._states.load_optimizer
        load(optimizer, state)

    def in_worker_0s_order(self, draw: Callable[[], Any], generators: Sequence[torch.Generator]) -> Any:
        """Collective: call `draw` as if torch's random numbers, and these generators, were worker 0's."""
        if self.world == 1:
            return draw()
        self.words.meet(Call.EPOCH)
        mine = [torch.get_rng_state(), *(generator.get_state() for generator in generators)]
        states = torch.cat(mine)
        self.words.broadcast(states)
        return draw() if self.rank == 0 else draw_from(states, draw, mine, generators)

    def count_reading(self) -> None:
        """A prepared loader is about to be read."""

    def all_have_a_batch(self, mine: bool) -> bool:
        return all(word.value for word in self.words.meet(Call.EPOCH, float(mine)))

    def worker_0s_draws(self) -> Draws:
        """Collective: worker 0's random generators, as they are now."""
        self.words.meet(Call.EPOCH)
        content = Draws().content()
        self.words.broadcast(content)
        return Draws.from_content(content)

    def require_one_batch(self, mark: int) -> None:
        """Collective: UserError unless the batch that all workers have read is the same."""
        found = enumerate(self.words.meet(Call.EPOCH, mark))
        _require_one_batch({rank: int(word.value) for rank, word in found})

    def sharing(self) -> Callable[[int], Turn | None]:
        """How a loader is shared out that is read from now on: of a batch's size, this worker's samples, if any."""
        return lambda size: Turn(split(size, self.part.index, self.part.count))

    def require_own_streams(self) -> None:
        """UserError where a worker cannot have a stream of its own."""
        if self.part.count != self.world:
            raise UserError(
                f"split=False: under this strategy {self.world // self.part.count} workers compute on the same "
                "batch, so a worker cannot have a stream of its own; leave split=False out"
            )

    def prepare_scheduler(self, scheduler: LRScheduler) -> None:
        """Nothing to do: it is stepped as often as in one process."""

    def loaded(self, folder: Path, loaded: Loaded) -> None:
        """Collective, when every worker has loaded model and optimizer: the rest of the checkpoint."""
        del folder
        memory, kept = loaded.extra.pop(MEMORY, {}), self.exchange.kept
        if kept is not None:
            kept.load(memory)

    def leave(self) -> None:
        """Collective: leave together. A worker that leaves early contributes nothing to the rounds of the others.

        At the end every worker has the weights of the worker that took the most rounds.
        """
        while True:
            self.words.send(Word(call=Call.LEAVE, value=self.clock.rounds))
            words = self.words.receive()
            others = {word.call for word in words} - {Call.LEAVE}
            if not others:
                break
            if others != {Call.BACKWARD}:
                require_same(words)
            self._require_alike(words)
            for parameter in self.require_model().parameters():  # a part in the round, without a contribution
                parameter.grad = None
            self._exchange(words, share=0.0)
            self._for_others += 1
            self._average()
        self._average(end=True)
        if self._states is not None:
            self._end_state = self._states.model_state()
        rounds = [word.value for word in words]
        if min(rounds) == max(rounds):
            return
        model, root = self.require_model(), rounds.index(max(rounds))
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                flat = tensor.detach().contiguous().view(-1).view(torch.uint8).clone()
                self.words.broadcast(flat, root)
                tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))

    def close(self) -> None:
        self._hooks.close()
        self.exchange.close()
        if self._end_state is not None and self.exchange.cut is not None:
            self.exchange.cut.make_whole(self._end_state)
        self._end_state = None
        self.words.collective.close()

    def _watch_backward(self) -> None:
        # A lone worker has nothing to exchange, and a runner says itself when it has computed.
        if self.exchange.hooks is not None and self.exchange.runner is None:
            self.exchange.hooks.on_next_gradient = self._begin_backward

    def _average(self, *, end: bool = False) -> None:
        if self.exchange.average is not None:
            self.exchange.average(end)

    def _on_forward(self, module: nn.Module, _: Any) -> None:
        self._average()  # a step that was due may have been left out, as a GradScaler does
        if not module.training or not torch.is_grad_enabled():
            return
        self._sends_stop = self.wants_stop or self._worker_context.stop_requested()
        if self._sends_stop and self.world == 1:
            self.is_stopped = True
            self.readings.stop()

    def _on_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._stepping:  # the strategy itself calls the optimizer, for this worker's part
            return
        has_closure = (
            len(args) > 1 or kwargs.get("closure") is not None
        )  # the first argument is the optimizer
        if has_closure and self.exchange.steps_itself:
            raise UserError(
                "optimizer.step(closure) is not supported by central; call backward() before step()"
            )
        assert self._watch is not None
        if getattr(optimizer, "found_inf", None) is not None:  # laid on it by a scaler that was not prepared
            raise UserError(
                "a GradScaler that was not prepared sees only this worker's part of the gradient; give it to "
                "group.prepare with the others, and use the one it returns"
            )
        self._watch.require_untouched()
        self.words.meet(Call.STEP)
        if not self.exchange.steps_itself:
            return
        self._stepping = True
        try:
            self.exchange.apply()  # leaves no gradient, so the step that brought us here finds nothing to do
        finally:
            self._stepping = False

    def _begin_backward(self) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if not self._holding:
            self._send_word()

    def _send_word(self) -> None:
        assert self._buffers is not None
        part, news = self.readings.part, self._buffers.news()
        self.words.send(Word(Call.BACKWARD, self._sends_stop, part.last, part.mark, news))
        assert self.exchange.hooks is not None, "they have called"
        self.exchange.hooks.begin_step(self.clock.rounds)

    def _end_backward(self) -> None:
        self._watch_backward()
        if not self._holding:
            self._end_round()

    @torch.no_grad()
    def _end_round(self) -> None:
        part = self.readings.part
        self.clock.computed()
        words = self.words.receive()
        self._require_alike(words)
        self._exchange(words, part.share)
        rounds = self.clock.rounds
        is_due = rounds and self._check_every and rounds % self._check_every == 0
        if is_due and self._agreement is not None and all(word.call is Call.BACKWARD for word in words):
            self._agreement.check(rounds)  # who has left takes no steps, and differs in peace
        if any(word.stop for word in words):
            self.is_stopped = True
            self.readings.stop()
        elif any(word.last for word in words):
            self.readings.end_stream()
        self.clock.exchanged(part.samples)

    def _exchange(self, words: Sequence[Word], share: float) -> None:
        assert self._buffers is not None
        step = self.clock.rounds + self._for_others  # on all alike: what is done together may hang on it
        self.exchange.agree(LocalStep(loss=0.0, share=share, step=step))
        self._buffers.exchange(words, share)
        if self._watch is not None:
            self._watch.remember()

    def _require_alike(self, words: Sequence[Word]) -> None:
        """UserError unless all are in backward, or have left where the strategy can continue without them."""
        allowed = {Call.BACKWARD} if self.in_parts else {Call.BACKWARD, Call.LEAVE}
        if any(word.call not in allowed for word in words):
            require_same(words)
        _require_one_batch({rank: word.mark for rank, word in enumerate(words) if word.call is Call.BACKWARD})


def _require_one_batch(marks: Mapping[int, int]) -> None:
    first, *rest = marks
    odd = next((rank for rank in rest if marks[rank] != marks[first]), None)
    if odd is not None:
        raise UserError(
            f"worker {odd} reads a different batch than worker {first}: all must read samples in the same order; "
            "let the sampler or dataset draw from torch's generators, which are synchronized, or seed its own on every "
            "worker; if each worker reads its own data, use group.prepare(loader, split=False)"
        )


# Mixed precision by loss scaling where the strategy steps by itself: a GradScaler for a gradient that lies in parts.
#
# Torch's GradScaler divides each `grad` by the scale, and leaves the step out where it finds an infinity. Where each
# worker holds its part of the gradient (`central`), both belong to the parts, and what one worker finds must count for
# all. So `prepare` gives the script a scaler that differs from torch's in this only, as ShardedGradScaler for FSDP.
#
# A scaler that was not prepared would see this worker's part and decide for itself. It is refused through what torch
# has for optimizers that handle scales: on one that says so, the scaler lays `found_inf` before each step.

_HANDLES_SCALES: Final = "_step_supports_amp_scaling"
_OWN_KINDS: Final = (GradScaler, CpuGradScaler, CudaGradScaler)  # the latter two are older names of it

# Collective: multiply the gradient by a factor; whether any of it, on any worker, was not finite
Unscale = Callable[[Optimizer, torch.Tensor], bool]


class PartsScaler(GradScaler):
    """A GradScaler that continues from `given`, which must be enabled; its `unscale_` and `step` are collective."""

    def __init__(self, given: GradScaler, unscale: Unscale) -> None:
        if type(given) not in _OWN_KINDS:
            raise UserError(
                f"prepare got a {type(given).__name__}; if each worker holds a part of the gradient, the scaler "
                "must be torch's own GradScaler"
            )
        super().__init__(given._device)
        self.load_state_dict(given.state_dict())
        self._unscale = unscale

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """All workers step, or none; an optimizer that could unscale by itself (`fused=True`) is not asked to."""
        with declaring(optimizer, handles_scales=False):
            return super().step(optimizer, *args, **kwargs)

    def _unscale_grads_(
        self,
        optimizer: Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,  # noqa: ARG002 - true only for optimizers that handle scales
    ) -> dict[torch.device, torch.Tensor]:
        found_inf.fill_(float(self._unscale(optimizer, inv_scale)))
        return {found_inf.device: found_inf}


@contextmanager
def declaring(optimizer: Optimizer, *, handles_scales: bool) -> Iterator[None]:
    """While this is open, torch's scalers take the optimizer for one that handles scales, or for one that does not."""
    before = vars(optimizer).get(_HANDLES_SCALES)
    setattr(optimizer, _HANDLES_SCALES, handles_scales)
    try:
        yield
    finally:
        if before is None:
            delattr(optimizer, _HANDLES_SCALES)
        else:
            setattr(optimizer, _HANDLES_SCALES, before)
