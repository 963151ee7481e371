"""A group: the workers of one training, as one of them sees it. What `mh.join()` returns.

The script is the same for one worker and for many, and so is what it computes: batch k of a prepared loader is the
global batch, of which each worker reads its share, and after `loss.backward()` every gradient is that of the mean over
the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from manyhands.data.store.checkpoint import CheckpointStore, Loaded, NoCheckpoint, Snapshot
from manyhands.engine.device import moved
from manyhands.errors import UserError
from manyhands.interop.own_loop.backward_rounds import MEMORY, PartsScaler, Rounds
from manyhands.interop.own_loop.prepared_loader import pieces_of, prepare_loader
from manyhands.interop.own_loop.small_sums import Call
from manyhands.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resumed:
    """What `load` found besides weights and optimizer state: the step, and the `extra` that was saved with it."""

    step: int
    extra: Mapping[str, Any]


class WorkerGroup:
    """One worker's end of a group; made by `join`, a context manager.

    Every method that is *collective* is called by all workers, in the same order; workers that go different ways get a
    UserError that says who is where. Leaving the `with` block is collective too: a worker that leaves early brings
    nothing to the exchanges of the others until they come. Leaving by an exception ends the waiting of all.
    """

    def __init__(
        self,
        name: str,
        rounds: Rounds,
        *,
        strategy: Strategy,
        device: torch.device,
        buffers: str = "broadcast",
        on_abort: Callable[[], None] = lambda: None,
    ) -> None:
        """Work through `rounds`; `on_abort` ends the waits of the other workers."""
        self.name, self.strategy, self.device = name, strategy, device
        self.rank, self.world = rounds.rank, rounds.world
        self._rounds, self._words = rounds, rounds.words
        self._buffers, self._on_abort = buffers, on_abort
        self._closing = ExitStack()
        self._models: list[nn.Module] = []
        self._optimizers: list[Optimizer] = []
        self._loaded: set[tuple[Path, int]] = set()  # the checkpoints that were loaded

    @property
    def is_main(self) -> bool:
        """Whether this is worker 0."""
        return self.rank == 0

    @property
    def is_stopped(self) -> bool:
        """Whether all workers have agreed to stop."""
        return self._rounds.is_stopped

    def prepare(self, *objects: Any, split: bool = True) -> Any:
        """Collective: make models, optimizers and loaders those of the group; returned in the same order.

        Models and optimizers stay what they are, all of them in one call: every worker gets worker 0's weights, and
        gradients are exchanged from here on. Loaders, in this or any later call, become loaders of each worker's share;
        with `split=False` those of this call are streams of each worker's own, which the script has split itself: every
        batch weighs 1/world, and all leave the loop when the shortest stream ends.
        A GradScaler comes back as one that all workers obey; it must be prepared under `central`, and may be elsewhere.
        Where the group was joined with a GPU, models and batches are moved there.
        """
        models = [one for one in objects if isinstance(one, nn.Module)]
        optimizers = [one for one in objects if isinstance(one, Optimizer)]
        scalers = [one for one in objects if isinstance(one, GradScaler)]
        others = nn.Module | Optimizer | LRScheduler | GradScaler
        loaders = [one for one in objects if not isinstance(one, others)]
        for one in loaders:
            if not isinstance(one, Iterable) or isinstance(one, str | bytes | torch.Tensor):
                raise UserError(
                    f"prepare got a {type(one).__name__}; allowed: models, optimizers, schedulers, scalers and loaders"
                )
        if models or optimizers:
            self._attach(models, optimizers)

        def move(batch: Any) -> Any:
            # On the CPU nothing is moved: a user may have put things elsewhere.
            return moved(batch, self.device) if self.device.type != "cpu" else batch

        read = (prepare_loader(one, self._rounds, move, to_split=split) for one in loaders)
        prepared: dict[int, Any] = dict(zip(map(id, loaders), read, strict=True))
        if self._rounds.in_parts:
            enabled = (one for one in scalers if one.is_enabled())
            prepared |= {id(one): PartsScaler(one, self._rounds.unscale) for one in enabled}
        for one in objects:
            if isinstance(one, LRScheduler):
                self._rounds.prepare_scheduler(one)
        results = tuple(prepared.get(id(one), one) for one in objects)
        return results[0] if len(results) == 1 else results

    def step(self, batch: Any, loss: Callable[..., torch.Tensor | float]) -> torch.Tensor:
        """Collective: forward and backward of this worker's batch; the mean of `loss(model, batch)` over all workers.

        The same under every strategy; `pipeline`, where no worker can call the model, needs it. Then comes
        `optimizer.step()`. Where gradients are disabled it only evaluates. Of several models, `loss` gets all.
        """
        runner = self._rounds.exchange.runner
        if runner is None:
            value = torch.as_tensor(loss(*self._models, batch))
            if value.requires_grad:
                value.backward()  # type: ignore[no-untyped-call]
            return self.mean(value)
        found = self._rounds.run(pieces_of(batch, runner.pieces), loss)
        return self.mean(torch.tensor(found, dtype=torch.float64))

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside only add to this worker's gradients; the first one after it exchanges them all."""
        return self._rounds.holding()

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale the gradient of all prepared models down to `max_norm`, and return the norm it had.

        The same under every strategy. Under `mirrored` and `allreduce`, torch's own function does the same; under
        `central` the next step refuses gradients that it has changed.
        """
        return self._rounds.clip(max_norm)

    def stop(self) -> None:
        """Ask all workers to stop: the next forward and backward are the last of the loaders being read.

        Every worker leaves its loop after the same step; loaders that were being read give nothing from then on.
        """
        self._rounds.wants_stop = True

    def print(self, *values: object, **options: Any) -> None:
        """Print once: on worker 0."""
        if self.is_main:
            print(*values, **options)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Collective: every worker's rows, in rank order; the number of rows may differ, a scalar is one row.

        Workers whose share of the batch being read is empty are left out: what they computed was a filler.
        """
        rows = tensor.detach().cpu()
        rows = rows.reshape(1) if rows.dim() == 0 else rows
        self._words.meet(Call.GATHER)
        counts = self._rounds.part.speaks and self._rounds.readings.part.share
        gathered = self._words.gather(rows if counts else rows[:0])
        return gathered.to(tensor.device)

    def mean(self, value: torch.Tensor | float) -> torch.Tensor:
        """Collective: the mean over workers, each weighted by its share of the batch being read: a loss, say."""
        given = torch.as_tensor(value).detach()
        share = self._rounds.readings.part.share if self._rounds.part.speaks else 0.0
        values = torch.cat([given.cpu().double().reshape(-1), torch.ones(1, dtype=torch.float64)])
        self._words.meet(Call.MEAN)
        total = self._words.total(values * share if share else torch.zeros_like(values))
        kind = given.dtype if given.is_floating_point() else torch.get_default_dtype()
        return (total[:-1] / total[-1]).reshape(given.shape).to(given.device, kind)

    def barrier(self) -> None:
        """Collective: wait for all workers."""
        self._words.meet(Call.BARRIER)

    def save(
        self, folder: str | Path, *, step: int, extra: Mapping[str, Any] | None = None, keep: int = 3
    ) -> None:
        """Collective, between steps: write a checkpoint of models and optimizers, with `extra` of worker 0.

        Worker 0 writes; all return when it is on disk. The last `keep` stay, and those that were loaded. `extra` may
        hold plain values and tensors.
        """
        model = self._rounds.require_model()
        self._words.meet(Call.SAVE, step)
        optimizer: Mapping[str, Any] | None
        if len(self._optimizers) == 1:
            optimizer = self._rounds.optimizer_state(Path(folder))
        else:
            optimizer = {str(number): one.state_dict() for number, one in enumerate(self._optimizers)}
        kept, state = self._rounds.exchange.kept, self._rounds.model_state()
        memory = kept.gather() if kept is not None else {}
        if self.is_main and state is not None and optimizer is not None:
            snapshot = Snapshot(
                step=step,
                model=state,
                optimizer=dict(optimizer),
                extra={**(extra or {}), **({MEMORY: dict(memory)} if memory else {})},
                may_hold_infinity=frozenset(name for name, _ in model.named_buffers()),
            )
            # A process that is started again runs the script from the top, and loads what was loaded.
            spared = {one for where, one in self._loaded if where == Path(folder).resolve()}
            CheckpointStore(Path(folder), keep, spared).save(snapshot)
        self._words.meet(Call.SAVE, step)
        self._rounds.clock.start()

    def load(self, folder: str | Path, step: int | None = None) -> Resumed | None:
        """Collective, after `prepare`: put the newest good checkpoint of `folder` back, or that of `step`.

        None where there is none yet. Worker 0 decides which it is; all hosts must see the same folder.
        """
        self._rounds.require_model()
        self._words.meet(Call.LOAD)
        loaded = self._find(CheckpointStore(Path(folder)), step)
        if loaded is not None:
            self._rounds.load_model(loaded.model)
            many = len(self._optimizers) > 1
            for number, optimizer in enumerate(self._optimizers):
                self._rounds.load_optimizer(
                    optimizer, loaded.optimizer[str(number)] if many else loaded.optimizer
                )
                optimizer.zero_grad()
            self._rounds.loaded(Path(folder), loaded)
            self._loaded.add((Path(folder).resolve(), loaded.step))
        self._words.meet(Call.LOAD)
        self._rounds.clock.start()
        return Resumed(step=loaded.step, extra=loaded.extra) if loaded is not None else None

    def close(self) -> None:
        """Let go of everything, without a word to the others; idempotent. Leaving `with` does it."""
        self._closing.close()

    def on_close(self, call: Callable[[], None]) -> None:
        """Call this when the group is closed; the latest comes first."""
        self._closing.callback(call)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._rounds.leave()
            else:
                self._on_abort()
        except BaseException:
            self._on_abort()
            raise
        finally:
            self.close()

    def _attach(self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        if self._optimizers:
            raise UserError("prepare already has models; give all models and optimizers in one call")
        if not models or not optimizers:
            missing = "no optimizer" if models else "no model"
            raise UserError(
                f"prepare got {missing}; give models and their optimizers in one call (a model that is only "
                "evaluated does not need prepare)"
            )
        if len(optimizers) > 1 and self._rounds.in_parts:
            raise UserError(f"prepare got {len(optimizers)} optimizers; {self.strategy.word} supports one")
        if self._rounds.exchange.cuts_model and any(hasattr(one, "_orig_mod") for one in models):
            raise UserError(f"prepare got a model of torch.compile: {self.strategy.facts.cannot_compile}")
        known = {id(parameter) for model in models for parameter in model.parameters()}
        for optimizer in optimizers:
            for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                if id(parameter) not in known:
                    raise UserError(
                        f"the optimizer {type(optimizer).__name__} has a parameter of shape {tuple(parameter.shape)} "
                        "that is not in any prepared model, so its gradient would not be exchanged"
                    )
        if self.device.type != "cpu":
            for model in models:
                model.to(self.device)  # the parameters stay the same objects, which the optimizers know
        self._models, self._optimizers = list(models), list(optimizers)
        self._rounds.attach(models, optimizers[0], self._buffers)

    def _find(self, store: CheckpointStore, step: int | None) -> Loaded | None:
        """Collective: the checkpoint that worker 0 found, read by every worker."""
        loaded: Loaded | None = None
        if self.is_main and not self._rounds.exchange.is_replay:
            try:
                loaded = store.load(step)
            except NoCheckpoint:
                if step is not None:
                    raise
        found = torch.tensor([-1.0 if loaded is None else loaded.step], dtype=torch.float64)
        self._words.broadcast(found.view(torch.uint8))
        which = int(found.item())
        if which < 0 or (loaded is not None and loaded.step == which):
            return loaded if which >= 0 else None
        try:
            return store.load(which)
        except NoCheckpoint as error:
            raise UserError(
                f"worker {self.rank} does not see the checkpoint of step {which} that worker 0 found ({error}); the "
                "folder must be the same one on every host"
            ) from error
