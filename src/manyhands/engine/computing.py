"""One worker's computation, for every strategy: its part of a global batch, forward, backward, evaluation.

What is computed depends on (plan, batch, part, parts) and the weights alone, so that another process, a later run or a
replay computes the same bits. Where data are made by acting, it depends on the state of the environments as well.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyhands.data.batches import BatchShares, BatchSource, Microbatch, Share
from manyhands.data.experience import Experience, ExperienceShares
from manyhands.data.randomness import mix, seed_all
from manyhands.data.reading import Key, ReadShare, ShareReader, Upcoming, batch_shares
from manyhands.engine.compiled_loss import compiled_loss, compiles
from manyhands.engine.device import BatchCopies, device_of
from manyhands.engine.dynamo import optimizer_of
from manyhands.engine.fp8 import require_fp8
from manyhands.engine.kernel_task import AnyTask
from manyhands.engine.metric_states import MetricUpdates
from manyhands.engine.options import EarlyStopping, Slowdown
from manyhands.engine.profiler import ProfiledSteps, named_span
from manyhands.errors import UserError
from manyhands.observe.record.torch_traces import INPUT
from manyhands.places.local.forking import CHILDREN_VARIABLE
from manyhands.places.local.loaders import Loaders
from manyhands.task import Metric, Task


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """Everything that decides what is computed; the same value on every worker."""

    task: AnyTask
    steps: int
    seed: int
    evaluate_every: int  # evaluate after every so many steps, and at the end
    checkpoint_every: int  # save after every so many steps and at the end; 0: never
    stopping: EarlyStopping | None = None
    restore_best: bool = False  # the run ends with the weights of the best evaluation
    log: tuple[str, ...] = ()  # what rows of steps tell besides: see `Options.log`
    profiled: ProfiledSteps | None = None  # what `TorchProfiler` asks for
    slow: Slowdown | None = None
    device: str = "cpu"
    autocast: bool = False  # compute in bfloat16 where torch's autocast finds that safe
    half: bool = False  # in float16 instead, with a scaled loss
    fp8: bool = False  # the linear layers of the model's blocks multiply in 8 bits: see `fp8_products`
    # Let torch.compile make the model and the loss faster; None: on a GPU
    compile: bool | None = False
    recompute: bool = False  # compute activations again in backward: see `recomputing`
    # How the workers' buffers become the same before they are used: see `Options.buffers`
    buffers: str = "broadcast"
    # Compare the workers' parameters after every so many steps, and at the end; 0: never
    check_every: int = 0
    # Whether a run that is asked to stop early pauses, to be continued: it is saved then, and not evaluated
    pauses: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """The model, optimizer and schedule that a task builds under its seed."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler | None = None  # advances with each global batch
    # Advances with the task's `scheduler_metric` after each evaluation
    metric_scheduler: LRScheduler | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Computed:
    """The result of one part of a batch: its mean loss (0 where the part is empty) and its weight in the batch."""

    loss: float
    share: float
    samples: int
    input_ns: int = 0  # what getting the samples took


class Computer:
    """Computes for one worker; `worker_rank` chooses its GPU and selects the slowdown that applies to it."""

    def __init__(self, plan: TrainingPlan, worker_rank: int) -> None:
        self.plan, self._rank = plan, worker_rank
        self.device = device_of(plan.device, worker_rank)
        if plan.fp8:
            require_fp8(self.device)
        assert isinstance(plan.task, Task), "a compiled task computes its own steps"
        self.task = task = plan.task
        made_of = task.data, task.collate, task.batch_size, task.microbatches, task.weights, plan.seed
        self._make_shares: Callable[[], BatchShares]
        if isinstance(task.data, Experience):
            given = task.data, task.batch_size, worker_rank, plan.seed, lambda: self._model
            self._make_shares = partial(ExperienceShares, *given)
        else:
            self._make_shares = partial(batch_shares, *made_of, streams=task.streams, sampler=task.sampler)
        self._shares = self._make_shares()
        self._model: nn.Module  # that is computed with
        self.batch_samples = 0  # in the global batch that was shared out last
        self.reader = NumberReader(self.device)
        self._copies = BatchCopies(self.device)
        self._loss = compiled_loss(task.loss) if compiles(plan.compile, self.device) else task.loss
        self.loss_scale = 1.0  # of every loss that is differentiated, and not of those that are reported

    def build(self, first_step: int = 0, *, on_host: bool = False) -> Built:
        """Model, optimizer and schedule as before `first_step`, untrained; on the worker's device unless `on_host`."""
        seed_all(self.plan.seed)
        model = self.task.model()
        if not on_host:
            model = model.to(self.device)
        optimizer = optimizer_of(self.task, model)
        # A scheduler wraps the optimizer's own step, so the parameters are those of its class.
        _, *asked = inspect.signature(type(optimizer).step).parameters.values()
        if any(one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD for one in asked):
            raise UserError(
                f"optimizer {type(optimizer).__name__} evaluates the loss several times in one step, but a run "
                "computes it once; use another optimizer, such as AdamW"
            )
        scheduler = self.task.scheduler(optimizer) if self.task.scheduler is not None else None
        if self.task.scheduler_metric is not None:
            return Built(model=model, optimizer=optimizer, metric_scheduler=scheduler)
        if isinstance(scheduler, ReduceLROnPlateau):
            raise UserError(
                "task.scheduler is a ReduceLROnPlateau, which needs a metric; give scheduler_metric='evaluation_loss'"
            )
        if scheduler is not None:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns of a scheduler that goes first
            for _ in range(first_step):
                scheduler.step()
        return Built(model=model, optimizer=optimizer, scheduler=scheduler)

    @contextmanager
    def loading_ahead(self) -> Iterator[None]:
        """While this is open, the task's loader processes read batches ahead, or it acts; both end on exit."""
        task, shares = self.task, self._shares
        if isinstance(shares, ExperienceShares):
            with closing(shares):
                yield
            return
        if not task.loaders:
            yield
            return

        def pinned(found: ReadShare) -> ReadShare:
            from torch.utils.data._utils.pin_memory import pin_memory

            return replace(found, batches=pin_memory(found.batches))  # type: ignore[no-untyped-call]

        prepare = pinned if task.loading.pinned and self.device.type == "cuda" else None
        read, owner = partial(ShareReader, self._make_shares), f"worker {self._rank}"
        with Loaders[Key](read, task.loading, task.loaders, owner, prepare) as loaders:
            known = None if task.streams else shares
            self._shares = _SharesAhead(known, loaders, Upcoming(self.plan.steps))
            try:
                yield
            finally:
                self._shares = shares

    def compute(
        self,
        model: nn.Module,
        step: int,
        part: int,
        parts: int,
        backward: Callable[[Tensor, float], None],
        prepare: Callable[[Any], None] | None = None,
        accumulate: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Computed:
        """Forward and backward of part `part` of `parts` of batch `step`; `backward` gets the loss and its share.

        `prepare` gets the batch before the model does, unless it is empty; it draws no random numbers. Where a part is
        computed in several pieces, `prepare` gets the first, and all backwards but the last are run inside
        `accumulate()`.
        """
        self._model = model
        begin = time.monotonic()
        asked_ns = time.monotonic_ns()
        with self._getting():
            share = self.share(step, part, parts)
        answers, input_ns = list[tuple[Callable[[], float], float]](), time.monotonic_ns() - asked_ns
        for number, piece in enumerate(share.pieces, 1):
            asked_ns = time.monotonic_ns()
            with self._getting():
                batch = self.fetch(piece)
            input_ns += time.monotonic_ns() - asked_ns
            if number == 1:  # getting the first piece may have drawn
                seed_all(mix(self.plan.seed, step, part))
            if prepare is not None and number == 1:
                prepare(batch)
                begin = time.monotonic()
            with nullcontext() if number == len(share.pieces) else accumulate():
                loss = self.loss(model, batch, piece, share)
                answers.append((self.reader.ask(loss), piece.weight))
                weight = piece.weight * self.loss_scale
                backward(loss if weight == 1 else loss * weight, share.weight)
        # Only now: a GPU still has the backward of the last piece to do while the host reads and goes on.
        value = sum(answer() * weight for answer, weight in answers)
        self.slow_down(step, time.monotonic() - begin)
        return Computed(loss=value, share=share.weight, samples=share.samples, input_ns=input_ns)

    def _getting(self) -> AbstractContextManager[object]:
        return nullcontext() if self.plan.profiled is None else named_span(INPUT)

    def act_as(self, process: int, rank: int) -> None:
        """Compute what worker `rank` did in this process of a recorded run, where that depends on who acts."""
        if isinstance(self._shares, ExperienceShares):
            self._shares.act_as(process, rank)

    def collected(self) -> Mapping[str, Any]:
        """What the last batch tells besides its loss, where it was made by acting."""
        return self._shares.facts() if isinstance(self._shares, ExperienceShares) else {}

    def notices(self) -> Sequence[str]:
        """What of acting the user is to be told, each once."""
        return self._shares.notices() if isinstance(self._shares, ExperienceShares) else ()

    def share(self, step: int, part: int, parts: int) -> Share:
        share = self._shares.share(step, part, parts)
        self.batch_samples = share.batch_samples
        return share

    def fetch(self, piece: Microbatch) -> Any:
        batch = piece.fetch()
        return batch if self.device.type == "cpu" else self._copies(batch)

    def slow_down(self, step: int, spent_s: float) -> None:
        if self.plan.slow is not None:
            self.plan.slow.sleep(self.plan.seed, step, self._rank, spent_s)

    def evaluate(
        self,
        model: nn.Module,
        part: int = 0,
        parts: int = 1,
        total: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[dict[str, float], int] | None:
        """Means over (this part of) the evaluation data and the samples; None without data. `total` sums over parts."""
        if self.task.evaluation is None:
            return None
        functions, stateful = self.measures(), self.task.stateful_metrics
        totals = torch.zeros(len(functions) + 1, dtype=torch.float64)
        updates = MetricUpdates(stateful, part, parts)
        model.eval()
        with torch.no_grad(), self.precision():
            for piece in self.evaluation_batches(part, parts):
                batch = self.fetch(piece)
                for column, function in enumerate(functions.values()):
                    totals[column] += float(function(model, batch)) * piece.samples
                for name, metric in stateful.items():
                    updates.add(name, metric.arguments(model, batch))
                totals[-1] += piece.samples
        model.train()
        values = updates.values(total if parts > 1 else None)
        return self.means(total(totals) if total is not None else totals, values)

    def measures(self) -> dict[str, Metric]:
        """The loss and the metrics that are means over batches."""

        def mean_loss(model: nn.Module, batch: Any) -> Tensor:
            loss = self._loss(model, batch)
            return loss if self.task.weights is None else loss.mean()  # evaluation data all weigh the same

        stateful = self.task.stateful_metrics
        plain = {name: one for name, one in self.task.metrics.items() if name not in stateful}
        return {"evaluation_loss": mean_loss, **plain}

    def evaluation_batches(self, part: int = 0, parts: int = 1) -> Iterator[Microbatch]:
        """Every `parts`-th batch of the evaluation data, from number `part` on; as large as a micro-batch at most."""
        task = self.task
        size = -(-task.batch_size // task.microbatches)
        source = BatchSource(task.evaluation, task.collate)
        for number, first in enumerate(range(0, len(source), size)):
            if number % parts == part:
                indices = range(first, min(first + size, len(source)))
                yield Microbatch(samples=len(indices), weight=1.0, fetch=partial(source.fetch, indices))

    def means(self, totals: Tensor, values: Mapping[str, float]) -> tuple[dict[str, float], int]:
        """From the sum of each measure over samples, and their number last: the means, with `values`; and that number.

        They come in the task's order.
        """
        means = (totals[:-1] / totals[-1]).tolist()
        found = {**dict(zip(self.measures(), means, strict=True)), **values}
        return {name: found[name] for name in ("evaluation_loss", *self.task.metrics)}, int(totals[-1])

    def loss(self, model: nn.Module, batch: Any, piece: Microbatch, share: Share) -> Tensor:
        """The weighted mean loss of a piece; of a sum, times the batch's size, so that weighted pieces add up."""
        with self.precision():
            loss = self._loss(model, batch)
        if piece.sample_weights is None:
            require_loss(loss)
            weight = share.weight * piece.weight
            return loss / weight if self.task.reduction == "sum" and weight != 1 else loss
        if not isinstance(loss, Tensor) or loss.numel() != piece.samples or not loss.dim():
            what = f"tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"task.loss returned a {what}; with task.weights return one loss for each of the {piece.samples} "
                "samples, as reduction='none' gives"
            )
        _require_graph(loss)
        weights = torch.as_tensor(piece.sample_weights, dtype=loss.dtype, device=loss.device)
        return (loss.reshape(-1) * weights).sum()

    def precision(self) -> AbstractContextManager[object]:
        if not self.plan.autocast:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.float16 if self.plan.half else torch.bfloat16)


class NumberReader:
    """Reads single numbers from a device without waiting for work that was queued after them."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def ask(self, value: Tensor) -> Callable[[], float]:
        """Begin to read `value`; the returned function waits for the number."""
        value = value.detach()
        if not self._on_gpu or value.device.type == "cpu":
            return lambda: float(value)
        host = value.to("cpu", non_blocking=True)  # page-locked
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(value.device))

        def answer() -> float:
            copied.synchronize()
            return float(host)

        return answer


def worker_environment(plan: TrainingPlan, threads: int, *, loads: bool = True) -> dict[str, str]:
    """The environment of a worker's process: its threads, and its loaders and actors unless it `loads` nothing."""
    task = plan.task if loads and isinstance(plan.task, Task) else None
    children = (
        0 if task is None else task.data.processes if isinstance(task.data, Experience) else task.loaders
    )
    return {"OMP_NUM_THREADS": str(threads), **({CHILDREN_VARIABLE: str(children)} if children else {})}


def require_loss(loss: object) -> None:
    if not isinstance(loss, Tensor):
        kind = type(loss).__name__
        raise UserError(
            f"task.loss returned a {kind}; return a tensor with one number, computed from model(…)"
        )
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise UserError(f"task.loss returned a tensor of shape {shape}; return one number, as .mean() gives")
    _require_graph(loss)


def _require_graph(loss: Tensor) -> None:
    if not loss.requires_grad:
        raise UserError(
            "task.loss returned a tensor that depends on no parameter; compute it from model(…) without detach, "
            "no_grad or .item(), and leave a parameter trainable"
        )


class _SharesAhead(BatchShares):
    """Requests shares from a loader process and keeps the one that was requested last.

    The sizes of shares of indexed samples are known here, and only what is fetched is loaded. Only the loader process
    draws from a stream (then `shares` is None), and reports how large a batch is.
    """

    def __init__(self, shares: BatchShares | None, loaders: Loaders[Key], upcoming: Upcoming) -> None:
        self._shares, self._loaders, self._upcoming = shares, loaders, upcoming
        self._key: Key | None = None
        self._held: ReadShare | None = None

    def _read(self, key: Key) -> ReadShare:
        if self._held is None or key != self._key:
            self._held = None  # capacity for the next
            upcoming = self._upcoming.after(key, self._loaders.window)
            self._held, self._key = self._loaders.get(key, upcoming, kept_from=key[0]), key
        return self._held

    def share(self, step: int, part: int, parts: int) -> Share:
        key = step, part, parts
        share = self._shares.share(*key) if self._shares is not None else self._read(key).share

        def piece_of(number: int) -> Any:
            return self._read(key).batches[number]

        pieces = enumerate(share.pieces)
        return replace(share, pieces=tuple(replace(one, fetch=partial(piece_of, at)) for at, one in pieces))
