"""Memory of live workers: what torch allocates and frees from the first batch on, on the thread that computes."""

from __future__ import annotations

import gc
import json
import os
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch._subclasses.fake_tensor import FakeTensor


def tensors_here() -> dict[int, int]:
    """The storages of all tensors that Python knows, by address, and their bytes."""
    found = {}
    for one in gc.get_objects():
        if type(one) in (Tensor, nn.Parameter) and one.layout is torch.strided:
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def shared_spans() -> list[tuple[int, int, str, int]]:
    """Memory that this process shares with others: its addresses, and which file it is, from which place on."""
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, rights, offset, _, file, *_ = line.split()
        if rights.endswith("s"):
            begin, end = (int(one, 16) for one in span.split("-"))
            spans.append((begin, end, file, int(offset, 16)))
    return sorted(spans)


class Watch:
    """Watches the process that computes with a model whose modules are `hooked`; writes what it saw to `folder`.

    It begins with the first module of the first batch, when nothing is saved for backward, and writes after `until`
    more; what counts is the second half of that. Tensors of `data` are not the model's. What other threads have made
    and kept is told apart, as a codec's memory is where gradients are exchanged beside backward.
    """

    def __init__(self, folder: Path, until: int, data: Iterable[Tensor]) -> None:
        self.folder, self._until = folder, until
        self._not = {one.untyped_storage().data_ptr() for one in data}
        self._caller: int | None = os.getpid()
        self._calls = 0
        self._before: dict[int, int] = {}
        self._profile: Any = None

    def in_caller(self) -> None:
        """The process that calls `fit` computes as well."""
        self._caller = None

    def hooked(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if not any(True for _ in module.children()):
                module.register_forward_pre_hook(self._enter)
        return model

    def _enter(self, _module: nn.Module, given: Any) -> None:
        if os.getpid() == self._caller or any(isinstance(one, FakeTensor) for one in given):
            return
        self._calls += 1
        if self._calls == 1:
            gc.collect()
            self._before = {place: size for place, size in tensors_here().items() if place not in self._not}
            self._profile = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU],
                profile_memory=True,
            )
            self._profile.start()
        elif self._calls == self._until:
            self._profile.stop()
            self._write()

    def _write(self) -> None:
        events, todo = [], list(self._profile.profiler.kineto_results.experimental_event_tree())
        while todo:
            one = todo.pop()
            todo.extend(one.children)
            if one.tag == _EventType.Allocation:
                events.append((one.start_time_ns, one.extra_fields.alloc_size, one.extra_fields.ptr))
        events.sort(key=lambda event: event[0])
        spans = shared_spans()
        begins = [span[0] for span in spans]
        shared, common = set[int](), dict[str, int]()
        for place, size in {**tensors_here(), **self._before}.items():
            at = bisect_right(begins, place)
            if at and place < spans[at - 1][1]:
                begin, _, file, offset = spans[at - 1]
                shared.add(place)
                common[f"{file}:{place - begin + offset}"] = size
        alive = {place: size for place, size in self._before.items() if place not in shared}
        now, peak = sum(alive.values()), 0
        for number, (_, size, place) in enumerate(events):
            now -= alive.pop(place, 0)
            if size > 0:
                alive[place] = size
                now += size
            if number > len(events) // 2:
                peak = max(peak, now)
        mine = {*alive, *shared, *self._not}
        elsewhere = sum(size for place, size in tensors_here().items() if place not in mine)
        found = {"own": peak, "shared": common, "elsewhere": elsewhere}
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(found))
