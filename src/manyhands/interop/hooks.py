"""Codecs for users of plain DistributedDataParallel: as communication hooks.

    model = DistributedDataParallel(net)
    model.register_comm_hook(None, manyhands.interop.hooks.compressed("topk:0.01"))

Every worker's encoded bucket is gathered by all, who decode and add up in the order of ranks: the mean has the same
bits on all of them. Factors of PowerSGD are all-reduced. The state that torch passes on is the process group, None for
the default one.
"""

# No `from __future__ import annotations`: torch looks at the annotations of a hook, and wants types.

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from manyhands.errors import ManyhandsError, UserError
from manyhands.wire.codec import BadBytes, ErrorFeedback, ParcelCodec, codec_named, encodes
from manyhands.wire.codecs.powersgd import PowerSgd, sum_factors
from manyhands.wire.names import RAW, check_feedback
from manyhands.wire.parcels import Matrix, Parcel

_LENGTH: Final = 8
_STEP: Final = "step"

Hook = Callable[[Any, GradBucket], Future[Tensor]]


def compressed(codec: str, *, feedback: bool = True, seed: int = 0, start: int = 2) -> Hook:
    """A hook that exchanges buckets in a codec, given as in `codec=topk:0.01+int8`; make one for each model.

    The first `start` steps go as they are: DistributedDataParallel lays its buckets out anew after the first one, and
    a residual belongs to a place in a bucket. With `feedback`, what a biased codec leaves out is kept as a residual.
    What the hook keeps is `hook.memory()`, a dict of tensors, to be saved by every worker; `hook.remember(memory)`
    continues with it, and with the number of the step: so a warm-up and what is drawn at random continue, too. In a new
    process the first `start` steps go as they are again, for the same reason; residuals wait.
    """
    check_feedback(codec, feedback)
    made = codec_named(codec, feedback=feedback)
    if made is None:
        raise UserError(f"codec={RAW}: this hook would change nothing; leave it out")
    if start < 2:
        raise UserError(f"start={start} must be at least 2: torch rebuilds the buckets after the first step")
    buckets = _Buckets(made, seed, start)

    def compressed_hook(state: Any, bucket: GradBucket) -> Future[Tensor]:
        return buckets.exchange(state, bucket)

    compressed_hook.memory = buckets.memory  # type: ignore[attr-defined]
    compressed_hook.remember = buckets.remember  # type: ignore[attr-defined]
    return compressed_hook


class _Buckets:
    """One worker's end of the hook: the codec state of its buckets."""

    def __init__(self, codec: ParcelCodec, seed: int, start: int) -> None:
        self._codec, self._seed = codec, seed
        self._as_they_are = start  # steps
        self._step = 0

    def memory(self) -> dict[str, Tensor]:
        return {_STEP: torch.tensor(self._step), **self._codec.memory()}

    def remember(self, memory: dict[str, Tensor]) -> None:
        if _STEP not in memory:
            raise UserError(f"memory has no {_STEP!r}; give a dict that memory() of such a hook returned")
        self._step = int(memory[_STEP])
        self._codec.remember({name: kept for name, kept in memory.items() if name != _STEP})

    def exchange(self, group: Any, bucket: GradBucket) -> Future[Tensor]:
        """The mean over workers of a bucket, when it is there."""
        buffer, step, as_it_is = bucket.buffer(), self._step, self._as_they_are > 0
        self._step += bucket.is_last()
        self._as_they_are -= bucket.is_last()
        world, parcel = dist.get_world_size(group), _parcel_of(bucket)
        self._codec.from_worker(self._seed, dist.get_rank(group))
        self._codec.at(step)
        values = buffer.detach().to("cpu", copy=True).div_(world)
        if as_it_is or not encodes(self._codec, parcel):
            buffer.div_(world)
            work: Any = dist.all_reduce(buffer, group=group, async_op=True)
            whole: Future[Tensor] = work.get_future().then(lambda _: buffer)
            return whole
        feedback = self._codec if isinstance(self._codec, ErrorFeedback) else None
        codec = feedback.inner if feedback is not None else self._codec
        if isinstance(codec, PowerSgd):
            sum_factors(codec, feedback, parcel, values, lambda part: dist.all_reduce(part, group=group))
            done: Future[Tensor] = Future()
            done.set_result(values.to(buffer.device))
            return done
        return self._gather(parcel, values, buffer, group)

    def _gather(self, parcel: Parcel, values: Tensor, buffer: Tensor, group: Any) -> Future[Tensor]:
        size = self._codec.size(parcel)
        mine = torch.zeros(_LENGTH + size, dtype=torch.uint8)
        num_bytes = self._codec.encode(parcel, values, mine[_LENGTH:])
        mine[:_LENGTH].view(torch.int64)[0] = num_bytes
        mine = mine.to(buffer.device)
        found = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
        work = dist.all_gather(found, mine, group=group, async_op=True)

        def add_up(_: Future[Any]) -> Tensor:
            total = values.zero_()
            for rank, one in enumerate(found):
                came = one.cpu()
                length = int(came[:_LENGTH].view(torch.int64).item())
                try:
                    if not 0 <= length <= size:
                        raise BadBytes(f"received {length} bytes, at most {size} are allowed")
                    self._codec.add(parcel, came[_LENGTH : _LENGTH + length], total)
                except BadBytes as error:
                    raise ManyhandsError(f"bucket {parcel.number}, from rank {rank}: {error}") from error
            self._codec.finalize(parcel, total)
            return buffer.copy_(total)

        future: Future[Tensor] = work.get_future().then(add_up)
        return future


def _parcel_of(bucket: GradBucket) -> Parcel:
    buffer = bucket.buffer()
    whole = Parcel.whole(bucket.index(), buffer.numel(), buffer.dtype)
    matrices, first = [], buffer.data_ptr()
    for gradient in bucket.gradients():
        if gradient.dim() > 1 and gradient.numel():
            begin = (gradient.data_ptr() - first) // buffer.element_size()
            matrices.append(Matrix(begin, gradient.shape[0], gradient.numel() // gradient.shape[0]))
    return replace(whole, matrices=tuple(matrices))
