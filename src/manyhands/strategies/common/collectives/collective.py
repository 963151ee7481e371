"""Gradients of one model, summed over workers while backward is still running.

A `Reducer` fills buckets and launches them in order; a `Collective` makes each the sum over all workers: in place in
shared memory (`SharedCollective`), by a schedule over links (`schedule_collective.py`), or by torch on GPUs.

The algorithm of DistributedDataParallel (Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel
Training", VLDB 2020): buckets in reverse registration order, launched in order as they fill. A gradient moves into its
bucket in the hook that sees it first, still warm in the cache, and stays there: the optimizer reads it in place.

One more bucket carries what the workers must agree on besides gradients, so that it costs no round of its own:

    loss · stop · pause · one flag per worker whose loss is not finite · one flag per parameter that backward reached

A gradient of some rows (`nn.Embedding(sparse=True)`) takes no room in a bucket: its rows are summed by themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, zip_longest
from typing import Any

import torch
from torch import nn

from manyhands.engine.buffers import room_for
from manyhands.engine.exchange import LocalStep, SharedStep, Times, Traffic
from manyhands.errors import ManyhandsError, UserError
from manyhands.native.dtypes import SUMMED
from manyhands.native.group.shared_group import Bucket, SharedGroup
from manyhands.native.segment import CACHE_LINE
from manyhands.strategies.common.collectives.collective_traffic import traffic_in_memory
from manyhands.strategies.common.collectives.row_sums import GradientRows, row_sparse
from manyhands.transport.link.wire import Wire
from manyhands.wire.codec import as_memory, as_one
from manyhands.wire.flat_layout import BucketLayout, lay_out, side_by_side, trainable
from manyhands.wire.names import RAW
from manyhands.wire.parcels import Parcel
from manyhands.wire.tap import GpuCopies, GradientTap, put

_LOSS, _STOP, _PAUSE, _FLAGS = 0, 1, 2, 3
_SMALLEST_STATUS = 64  # capacity for evaluation totals, which piggyback on the same bucket
_SPARE_BYTES = 1 << 20  # for names and chunks that are longer than this worker's


class Collective(ABC):
    """Sums buckets over workers; every worker allocates, launches and finishes the same ones in the same order."""

    rank: int
    world: int
    wire: int = Wire.MEMORY  # what carries the buckets, and in which codec: the result of `wire_of`
    codec: str = RAW  # the codec setting
    step: int = 0  # which step the launched buckets belong to; set it before `finish`
    sums_rows: bool = False  # whether row-sparse gradients are summed as such; otherwise only dense ones are
    instead_of_rows: str = (  # what the user can do then
        "rows of an nn.Embedding are summed only over links; add link=tcp, or build it with sparse=False"
    )

    def begin(self, step: int) -> None:
        """Begin a step: buckets launched from here on belong to it, and may be summed before `finish`."""
        self.step = step

    @abstractmethod
    def allocate(self, parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        """Collective, once: return a zeroed flat tensor for each parcel, in order, for this worker's part."""

    def rounds(self, parcel: Parcel) -> bool:
        """Whether the contents of the parcel are rounded in transit."""
        del parcel
        return False

    def sum_rows(self, mine: GradientRows, below: int) -> GradientRows:
        """Collective, if it `sums_rows`: return the sum over workers of rows of a table that has `below` of them."""
        raise NotImplementedError(f"{self}: only dense gradients can be summed, not {mine} of {below} rows")

    def summary(self) -> dict[str, Any]:
        return {}

    def memory(self) -> dict[str, torch.Tensor]:
        return {}

    def remember(self, memory: Mapping[str, torch.Tensor]) -> None:  # noqa: B027 - only codecs keep something
        """Restore the residuals that a worker of this number kept."""

    @abstractmethod
    def launch(self, index: int) -> None:
        """Mark this worker's part of a bucket as filled; returns at once."""

    def poll(self) -> bool:
        """Do what can be done without waiting; return whether a launched bucket is still to be reduced here."""
        return False

    @abstractmethod
    def finish(self) -> None:
        """Wait until every launched bucket holds its sum, or raise naming the worker waited for."""

    def synchronize(self) -> bool:
        """Wait until the results of `finish` are certain, if the host runs ahead of a GPU; call before keeping any.

        Returns whether other workers may still need this one for their results.
        """
        return False

    @abstractmethod
    def broadcast(self, index: int, root: int = 0) -> None:
        """Collective: worker `root`'s bucket becomes everyone's."""

    def spread(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Collective, if supported: give every worker worker 0's values directly; return whether it did.

        Otherwise the caller sends them through a bucket.
        """
        del tensors
        return False

    @abstractmethod
    def take_times(self) -> Times: ...
    @abstractmethod
    def traffic(self) -> Traffic: ...
    @abstractmethod
    def close(self) -> None: ...


class SharedCollective(Collective):
    """Buckets that live in shared memory and are summed in place: `direct`, in worker order, nothing copied.

    The first buckets, as many as `owned` has entries, stop halfway: of bucket i worker r gets the sum of the items
    `owned[i][r]`, and the rest of its part stays as it is.
    """

    def __init__(self, group: SharedGroup, owned: Sequence[Sequence[range]] = ()) -> None:
        self.rank, self.world = group.rank, group.world
        self._group, self._owned = group, owned
        self._buckets: list[Bucket] = []
        self._sent: list[Traffic] = []  # by bucket: what its sum takes
        self._traffic = Traffic()

    def allocate(self, parcels: Sequence[Parcel]) -> list[torch.Tensor]:
        offsets, end = side_by_side((parcel.num_bytes for parcel in parcels), CACHE_LINE)
        self._group.allocate(end, f"the gradients of {self.world} workers")
        self._buckets = [
            self._group.bucket(offset, parcel.count, parcel.dtype, ranges)
            for offset, parcel, ranges in zip_longest(offsets, parcels, self._owned)
        ]
        self._sent = traffic_in_memory(parcels, self.rank, self.world, self._owned)
        return [bucket.tensor for bucket in self._buckets]

    def launch(self, index: int) -> None:
        self._group.launch(self._buckets[index], scatter=index < len(self._owned))
        self._traffic += self._sent[index]

    def poll(self) -> bool:
        return self._group.poll()

    def finish(self) -> None:
        self._group.finish()

    def broadcast(self, index: int, root: int = 0) -> None:
        self._group.broadcast(self._buckets[index], root)

    def is_done(self, index: int) -> bool:
        return self._group.is_done(self._buckets[index])

    def parts(self, index: int) -> Sequence[torch.Tensor]:
        """Every worker's part of a bucket; read those of others between two barriers, or once all are done."""
        return self._buckets[index].parts

    def take_times(self) -> Times:
        stats = self._group.take_stats()
        waits = {peer: waited for peer, waited in enumerate(stats.waiting_ns) if waited}
        return Times(exchange_ns=stats.reducing_ns, wait_ns=waits)

    def traffic(self) -> Traffic:
        return self._traffic

    def close(self) -> None:
        self._buckets = []
        self._group.close()


def step_parcels(layouts: Sequence[BucketLayout], shapes: Sequence[torch.Size], world: int) -> list[Parcel]:
    """What is summed in a step: the buckets of these layouts, of parameters of these shapes, and the status."""
    parcels = [layout.parcel(number, shapes=shapes) for number, layout in enumerate(layouts)]
    count = max(_SMALLEST_STATUS, _FLAGS + world + len(shapes))
    return [*parcels, Parcel.whole(len(parcels), count, torch.float64, exact=True)]


class Reducer:
    """Owns the gradients of `model` from construction (collective) to `close`.

    A step is: backward (hooks fill and launch buckets), then `finish` on every worker. Afterwards the sum over workers
    has been added to each parameter's `grad`, as one backward would. Where no worker reached it, it stays what it was:
    if that is None, weight decay and momentum leave the parameter alone.
    Slots of `layouts` number the trainable parameters of `model`, in registration order.
    """

    def __init__(
        self,
        model: nn.Module,
        collective: Collective,
        layouts: Sequence[BucketLayout],
        *,
        bring_back: bool = True,
    ) -> None:
        named = trainable(model)
        self._names, self._parameters = [names[0] for names in named.values()], list(named)
        self._collective, self._layouts, self._bring_back = collective, layouts, bring_back
        shapes = [parameter.shape for parameter in named]
        *parcels, status = step_parcels(layouts, shapes, collective.world)
        rooms = collective.allocate([*parcels, status, *room_for_buffers(model, status, collective.world)])
        self._status_index = len(parcels)
        self._buckets, self._status = rooms[: len(parcels)], rooms[len(parcels)]
        self._totals, self._totals_index = rooms[-1], len(rooms) - 1  # for what is too long for the status
        devices = {parameter.device for parameter in named}
        if len(devices) > 1:
            raise UserError(f"the model is on {', '.join(sorted(map(str, devices)))}; put it on one device")
        device = devices.pop() if devices else torch.device("cpu")
        here = all(bucket.device.type == device.type for bucket in self._buckets)
        self._gpu = None if here else GpuCopies(device, self._buckets)
        self._rows = {  # by parameter without a bucket slot: this worker's part of its gradient, then the sum
            slot.parameter: GradientRows.none(self._parameters[slot.parameter])
            for layout in layouts
            for slot in layout.slots
            if not slot.count and self._parameters[slot.parameter].numel()
        }
        views: dict[int, torch.Tensor] = {}
        for layout, bucket in zip(layouts, self._buckets, strict=True):
            for number, items in layout.views(bucket):
                views[number] = items if number in self._rows else items.view(self._parameters[number].shape)
        self.gradients = [views[index] for index in range(len(views))]  # this worker's part of each
        self._bucket_of = {
            slot.parameter: index for index, layout in enumerate(layouts) for slot in layout.slots
        }
        self._held = self._pending = False
        self._earlier: dict[int, torch.Tensor] = {}
        self.weight = 1.0  # the factor for every gradient on its way into its bucket
        self.on_next_gradient: Callable[[], None] | None = None
        self._start_step()
        self._tap = GradientTap(self._parameters, self._on_gradient, self._make_room)

    @property
    def is_idle(self) -> bool:
        """Whether the buckets are free for other use: the last step was taken and no other has begun."""
        return all(parameter.grad is None for parameter in self._parameters)

    @property
    def carrier(self) -> int:
        sizes = [bucket.nbytes for bucket in (*self._buckets, self._status)]
        return sizes.index(max(sizes))

    def begin_step(self, step: int) -> None:
        self._collective.begin(step)  # from here on buckets may be sent as soon as they are full

    @contextmanager
    def holding(self) -> Iterator[None]:
        before, self._held = self._held, True
        try:
            yield
        finally:
            self._held = before

    def finish(self, local: LocalStep) -> SharedStep:
        """Collective: sum what is left, agree on the step, and put the sums where the optimizer reads them."""
        self._collective.step = local.step
        for index, layout in enumerate(self._layouts[self._next_launch :], self._next_launch):
            for slot in layout.slots:
                if not self._filled[slot.parameter]:
                    if self._parameters[slot.parameter].grad is None or not self._reached[slot.parameter]:
                        self._make_room(slot.parameter)
                    if not self._reached[slot.parameter]:
                        self.gradients[slot.parameter].zero_()
            self._unfilled[index] = 0
        self._launch_filled()
        status = self._status
        status.zero_()
        status[_LOSS] = local.loss * local.share if local.is_finite and local.share else 0.0
        status[_STOP], status[_PAUSE] = float(local.stop), float(local.pause)
        status[_FLAGS + self._collective.rank] = float(not local.is_finite)
        flags = _FLAGS + self._collective.world
        status[flags : flags + len(self._reached)] = torch.tensor(self._reached, dtype=torch.float64)
        self._collective.launch(self._status_index)
        self._collective.finish()
        for index in sorted(self._rows):
            mine = self._rows[index] if self._reached[index] else GradientRows.none(self._parameters[index])
            self._rows[index] = self._collective.sum_rows(mine, self._parameters[index].shape[0])
        found, world = status.tolist(), self._collective.world
        for index, parameter in enumerate(self._parameters):
            earlier = self._earlier.get(index)
            if found[flags + index]:  # some worker reached it
                total = self._sum(index, parameter)
                parameter.grad = total if earlier is None else total.add_(earlier)
            elif earlier is not None:
                parameter.grad = earlier if earlier.is_sparse else self._sum(index, parameter).copy_(earlier)
        self._earlier = {}
        self._start_step()
        bad = tuple(rank for rank in range(world) if found[_FLAGS + rank])
        loss = float("nan") if bad else found[_LOSS]
        return SharedStep(loss=loss, bad_workers=bad, stop=found[_STOP] > 0, pause=found[_PAUSE] > 0)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        if len(values) > len(self._status):
            return total(self._collective, self._totals_index, self._totals, values)
        return total(self._collective, self._status_index, self._status, values)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        if not self._collective.spread(tensors):
            index = self.carrier
            broadcast(self._collective, index, [*self._buckets, self._status][index], tensors)

    def residuals(self) -> Mapping[str, Any]:
        """Collective, between steps: return the codec residuals of all workers, on worker 0."""
        index = self.carrier if self.is_idle else self._status_index
        return kept_by_codecs(self._collective, index, [*self._buckets, self._status][index])

    def _sum(self, index: int, parameter: nn.Parameter) -> torch.Tensor:
        """The summed gradient where the optimizer reads it; on a GPU that does not step, any tensor in its place."""
        if index in self._rows:
            return self._rows[index].as_gradient(parameter)
        if self._gpu is None:
            return self.gradients[index]
        if self._bring_back:
            return self._gpu.back(self.gradients[index])
        return parameter.grad if parameter.grad is not None else torch.empty_like(parameter)

    def close(self) -> None:
        if self._gpu is not None:
            self._gpu.close()
        self._tap.close()
        for parameter in self._parameters:
            parameter.grad = None
        self.gradients, self._buckets = [], []
        self._status = self._totals = torch.empty(0)

    def _make_room(self, index: int) -> None:
        """Make autograd hand over a gradient separately; earlier summed gradients are added once the sum is there."""
        parameter = self._parameters[index]
        earlier, parameter.grad = parameter.grad, None
        if earlier is None:
            self._reached[index] = False  # what was held, if anything, has been dropped by zero_grad
        elif not self._reached[index]:
            is_here = not earlier.is_sparse and earlier.data_ptr() == self.gradients[index].data_ptr()
            self._earlier[index] = earlier.clone() if is_here else earlier

    def _on_gradient(self, index: int, parameter: torch.Tensor) -> None:
        if self.on_next_gradient is not None:
            listener, self.on_next_gradient = self.on_next_gradient, None
            listener()
        gradient, bucket = parameter.grad, self._bucket_of[index]
        assert gradient is not None
        if bucket < self._next_launch:
            raise UserError(
                f"parameter {self._names[index]!r} got a second gradient after the first was sent; run every "
                "backward of a step but the last inside accumulate(), and checkpoint with use_reentrant=False"
            )
        if gradient.is_sparse != (index in self._rows):
            name = repr(self._names[index])
            raise UserError(
                f"parameter {name} is in an embedding built with sparse=True, but also has a dense gradient"
                if index in self._rows
                else f"parameter {name} has a sparse gradient; {self._collective.instead_of_rows}"
            )
        if index in self._rows:
            rows = GradientRows.of(gradient).times(self.weight)
            self._rows[index] = self._rows[index].plus(rows) if self._reached[index] else rows
        elif self._gpu is None:
            put(self.gradients[index], gradient, self.weight, add=self._reached[index])
            parameter.grad = self.gradients[index]
        else:
            self._gpu.into(self.gradients[index], gradient, self.weight, add=self._reached[index])
        self._reached[index] = True
        if self._held:
            return
        if not self._filled[index]:
            self._filled[index] = True
            self._unfilled[bucket] -= 1
        if self._gpu is not None:
            return  # copies are still on their way: `finish` launches what has landed by then
        if self._next_launch == bucket and self._unfilled[bucket] == 0:
            self._launch_filled()
        elif self._pending:
            self._pending = self._collective.poll()

    def _start_step(self) -> None:
        self._reached = [False] * len(self._parameters)
        self._filled = [False] * len(self._parameters)
        self._unfilled = [len(layout.slots) for layout in self._layouts]
        self._next_launch, self._pending = 0, False

    def _launch_filled(self) -> None:
        if self._gpu is not None:
            self._gpu.landed()
        while self._next_launch < len(self._layouts) and self._unfilled[self._next_launch] == 0:
            self._collective.launch(self._next_launch)
            self._next_launch += 1
        self._pending = self._collective.poll()


def gradient_layouts(model: nn.Module, cap_bytes: int, *, rows: bool = False) -> tuple[BucketLayout, ...]:
    """Return buckets for the gradients of `model`; a UserError names a parameter of an unsupported type.

    With `rows`, embeddings with sparse gradients have slots of no items.
    """
    named = trainable(model)
    for parameter, names in named.items():
        if parameter.dtype not in SUMMED:
            raise UserError(
                f"parameter {names[0]!r} is {parameter.dtype}; all-reduce needs float32, float64, bfloat16 or float16"
            )
    sparse = row_sparse(model) if rows else set()
    counts = [0 if parameter in sparse else parameter.numel() for parameter in named]
    return lay_out([(count, one.dtype) for count, one in zip(counts, named, strict=True)], cap_bytes)


def kept_by_codecs(collective: Collective, index: int, bucket: torch.Tensor) -> Mapping[str, Any]:
    """Collective: return all workers' codec residuals on worker 0, for a checkpoint, through bucket `index`, zeroed."""
    memory = collective.memory()
    if not memory:
        return {}  # on all alike: they have sent the same buckets
    found = all_on_first(collective, index, bucket, memory)
    return {"codec": {"codec": collective.codec, "workers": found}} if collective.rank == 0 else {}


def all_on_first(
    collective: Collective, index: int, bucket: torch.Tensor, memory: Mapping[str, torch.Tensor]
) -> list[torch.Tensor]:
    """Collective: return each worker's `memory` on worker 0, as `as_one` packs it, through bucket `index`, zeroed."""
    mine, carrier = as_one(memory), bucket.view(torch.uint8)
    room = carrier[:8].view(torch.int64)
    most = 2 * mine.numel() + _SPARE_BYTES  # all workers keep about as much
    found = []
    for root in range(collective.world):
        room[0] = mine.numel()
        collective.broadcast(index, root)
        count = int(room[0])
        if not 0 <= count <= most:
            raise ManyhandsError(
                f"worker {root} reports {count} bytes of its own state; at most {most} are expected"
            )
        theirs = torch.empty(count if collective.rank == 0 else 0, dtype=torch.uint8)
        for begin in range(0, count, len(carrier)):
            end = min(count, begin + len(carrier))
            if root == collective.rank:
                carrier[: end - begin] = mine[begin:end]
            collective.broadcast(index, root)
            if collective.rank == 0:
                theirs[begin:end] = carrier[: end - begin]
        found.append(theirs)
    carrier.zero_()
    return found


def remember_kept(collective: Collective, memory: Mapping[str, Any]) -> None:
    """Restore what `kept_by_codecs` returned; with another codec or other workers, start without residuals."""
    kept = memory.get("codec")
    workers = kept["workers"] if kept is not None and kept["codec"] == collective.codec else ()
    if len(workers) == collective.world:
        collective.remember(as_memory(workers[collective.rank]))


def room_for_buffers(model: nn.Module, status: Parcel, world: int) -> list[Parcel]:
    """Return a parcel after `status` so that the buffers of `model` take few sums; none if they fit into `status`."""
    count = room_for(model, world)
    return [Parcel.whole(status.number + 1, count, torch.float64, exact=True)] if count > status.count else []


def total(collective: Collective, index: int, bucket: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    pieces = []
    for piece in torch.split(values, len(bucket)):
        bucket.zero_()
        bucket[: len(piece)] = piece
        collective.launch(index)
        collective.finish()
        pieces.append(bucket[: len(piece)].clone())
    return torch.cat(pieces)


@torch.no_grad()
def broadcast(
    collective: Collective, index: int, bucket: torch.Tensor, tensors: Iterable[torch.Tensor]
) -> None:
    """Collective: give every worker worker 0's values, through the bytes of bucket `index`, zeroed afterwards."""
    carrier = bucket.view(torch.uint8)
    flats = [(one, one.detach().contiguous().flatten().view(torch.uint8)) for one in tensors]
    together: list[torch.Tensor] = []  # as many as the bucket holds, which is sent whole

    def send() -> None:
        ends = [*accumulate(map(len, together))]
        places = [carrier[end - len(piece) : end] for piece, end in zip(together, ends, strict=True)]
        for piece, place in zip(together, places, strict=True):
            place.copy_(piece)
        collective.broadcast(index)
        for piece, place in zip(together, places, strict=True):
            piece.copy_(place)
        together.clear()

    for _, flat in flats:
        for piece in torch.split(flat, len(carrier)):
            if sum(map(len, together)) + len(piece) > len(carrier):
                send()
            together.append(piece)
    if together:
        send()
    for tensor, flat in flats:
        tensor.copy_(flat.view(tensor.dtype).view(tensor.shape))
    carrier.zero_()
