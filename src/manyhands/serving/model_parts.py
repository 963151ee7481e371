"""A worker of a model server that is several processes, each of which holds a part of the model.

server ──batch──► first process ──tensors──► the others    in stages, each takes the output of the one before;
                                 ◄──────────               in slices, all take the input and compute together

The first has the predictor, with `PartedModel` in the place of its model; the others know tensors only. A frame between
them is a length and a safetensors file in memory, with a tensor `error` (a sentence in UTF-8) where a part failed. When
any of them is gone the others end as well, and the server starts all of them anew.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, BinaryIO

import torch
from safetensors.torch import load as tensors_in
from safetensors.torch import save as bytes_of
from torch import Tensor, nn

from manyhands.errors import ManyhandsError, UserError, first_line
from manyhands.places.local.children import Role
from manyhands.places.local.control import RoleContext
from manyhands.places.local.packed_job import load, pack
from manyhands.places.local.status import State
from manyhands.strategies.common.served_parts import ServedParts
from manyhands.strategies.registry import STRATEGIES, entry_of
from manyhands.strategy import Strategy
from manyhands.transport.link.mesh import SharedMesh
from manyhands.workloads.predictor import ModulePredictor, Predictor, in_precision

LENGTH = struct.Struct("!I")
MAX_FRAME_BYTES = 1 << 28  # of a batch, of its answers, and of the tensors between parts
_MOST_SHOWN = 500


class PartLost(BaseException):
    """Another process of this worker is gone, or out of step; a BaseException, because this one has to end as well."""


class PartedModel(nn.Module):
    """Stands in for a model that `kind` has cut: computes the first part, and has the other processes compute theirs.

    It is sent to the first process without any part; `open` gets it there.
    """

    def __init__(self, cut: ServedParts, precision: str) -> None:
        super().__init__()
        self.kind, self.count, self.precision = type(cut), len(cut.modules), precision
        self.modules_of_parts: Sequence[nn.Module] = cut.modules  # a tuple, so that torch does not see them
        self.first: nn.Module | None = None
        self._others: list[_OtherPart] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "modules_of_parts": ()}

    def open(self, context: RoleContext) -> None:
        ends = [socket.socket(fileno=context.descriptor(f"part {rank}")) for rank in range(1, self.count)]
        self.connect(_opened(context, 0, self.count)[1], ends)

    def connect(self, first: nn.Module, others: Sequence[socket.socket]) -> None:
        self.first = first
        self._others = [
            _OtherPart(end, f"{self.kind.part} {rank}") for rank, end in enumerate(others, start=1)
        ]

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        assert self.first is not None, "it is opened before it is called"
        if named:
            raise UserError(
                f"the model takes {next(iter(named))!r} by name; a model in parts takes tensors by place"
            )
        if self.precision == "bf16":  # the first part may have no parameters that say so
            inputs = tuple(one.bfloat16() if one.is_floating_point() else one for one in inputs)
        if self.kind.chained:
            output = self.first(*inputs)
            for other in self._others:
                other.send((output,))
                [output] = _tensors(other.received())
            return output
        for other in self._others:
            other.send(inputs)
        try:
            return self.first(*inputs)
        except UserError:  # of the input, on every slice alike
            raise
        except ManyhandsError as error:  # of the links: the slices are out of step, and stay so
            raise PartLost(str(error)) from error
        finally:
            replies = [other.received() for other in self._others]  # all of them, before one is looked at
            for reply in replies:
                _tensors(reply)


class _OtherPart:
    """The first process's connection to another one."""

    def __init__(self, end: socket.socket, name: str) -> None:
        self._socket, self._stream, self._name = end, end.makefile("rb"), name

    def send(self, tensors: Sequence[Tensor]) -> None:
        try:
            self._socket.sendall(_frame({str(place): one for place, one in enumerate(tensors)}))
        except OSError as error:
            raise PartLost(f"{self._name} of the model is gone: {error}") from error

    def received(self) -> bytes:
        body = received(self._stream)
        if body is None:
            raise PartLost(f"{self._name} of the model is gone")
        return body


def _tensors(body: bytes) -> list[Tensor]:
    found = tensors_in(body)
    if "error" in found:
        raise RuntimeError(bytes(found["error"].tolist()).decode())
    return [found[str(place)] for place in range(len(found))]


def _part_process(context: RoleContext, *, rank: int, count: int) -> None:
    kind, module = _opened(context, rank, count)
    context.mark(0, State.SERVING)
    connection = socket.socket(fileno=context.descriptor("first"))
    compute_for(connection, module, context.name, answers=kind.chained)


def compute_for(connection: socket.socket, module: nn.Module, name: str, *, answers: bool) -> None:
    """Apply `module` to what the first process sends, until that is gone; it `answers` with the output, or is done."""
    with connection, connection.makefile("rb") as stream, torch.inference_mode():
        while (body := received(stream)) is not None:
            try:
                connection.sendall(_computed(module, _tensors(body), name, answers=answers))
            except ConnectionError:  # the first process is gone, and nobody reads this
                return


def _computed(module: nn.Module, given: Sequence[Tensor], name: str, *, answers: bool) -> bytes:
    try:
        output = module(*given)
        if answers and not isinstance(output, Tensor):
            raise TypeError(f"it gives a {type(output).__name__}; parts of a model exchange one tensor")
        return _frame({"0": output} if answers else {})
    except Exception as error:
        said = f"{name}: {type(error).__name__}: {first_line(error)}"[:_MOST_SHOWN].encode(errors="replace")
        return _frame({"error": torch.tensor(list(said), dtype=torch.uint8)})


def _frame(tensors: Mapping[str, Tensor]) -> bytes:
    body = bytes_of({name: one.detach().contiguous() for name, one in tensors.items()})
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(
            f"{len(body)} bytes go from one part to another; at most {MAX_FRAME_BYTES} can; use smaller batches"
        )
    return LENGTH.pack(len(body)) + body


def frame_length(head: bytes | bytearray) -> int:
    """How many bytes follow the head of a frame; ManyhandsError where it announces more than are allowed."""
    (length,) = LENGTH.unpack_from(head)
    if length > MAX_FRAME_BYTES:
        raise ManyhandsError(f"a frame announces {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return int(length)


def received(stream: BinaryIO) -> bytes | None:
    """The next frame; None where the other side is gone."""
    try:
        head = stream.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        length = frame_length(head)
        body = stream.read(length)
    except ConnectionError:  # it was killed before it had read all that was sent
        return None
    return None if len(body) < length else body


def _opened(context: RoleContext, rank: int, count: int) -> tuple[type[ServedParts], nn.Module]:
    kind, module, precision = load(context.descriptor("model part"))
    links = {}
    if not kind.chained:
        peers = (peer for peer in range(count) if peer != rank)
        ends = {peer: [context.descriptor(f"{peer} {name}") for name in SharedMesh.parts] for peer in peers}
        links = SharedMesh.attach(rank, ends)
    return kind, kind.attach(in_precision(module, precision), rank, links)


def cut_predictor(predictor: Predictor[Any], strategy: Strategy) -> None:
    """Cut the model of `predictor` as `strategy` does, for several processes; UserError where it cannot be."""
    served_by = entry_of(strategy.word).load_serving()
    if served_by is None:
        by = " or ".join(word for word, one in STRATEGIES.items() if one.serving)
        raise UserError(
            f"--strategy {strategy}: a model is served in parts by {by}; leave it out for whole copies"
        )
    if predictor.device != "cpu":
        raise UserError(f"--device {predictor.device}: a model in parts is served on the CPU; leave one out")
    if not isinstance(predictor, ModulePredictor):
        raise UserError(
            f"--strategy {strategy}: the model of {predictor.task!r} is not a PyTorch module; leave it out"
        )
    cut: ServedParts = served_by(strategy, predictor.model, predictor.example_batch(2))
    if predictor.precision not in cut.precisions:
        raise UserError(
            f"--precision {predictor.precision}: {strategy.word} computes in {', '.join(cut.precisions)} only"
        )
    predictor.model, predictor.precision = PartedModel(cut, predictor.precision), "fp32"


class ModelParts:
    """The parts of a server's model as files in memory, and the roles of a worker's processes besides the first.

    Closed by the stack that it is given. A model that is not cut has no parts.
    """

    def __init__(self, model: Any, stack: ExitStack) -> None:
        self.count, self._chained, self._name, self._packed = 1, True, "", list[int]()
        if not isinstance(model, PartedModel):
            return
        self.count, self._chained, self._name = model.count, model.kind.chained, model.kind.part
        files: dict[int, int] = {}
        for module in model.modules_of_parts:
            if id(module) not in files:
                files[id(module)] = pack((model.kind, module, model.precision))
                stack.callback(os.close, files[id(module)])
            self._packed.append(files[id(module)])
        model.modules_of_parts = ()  # from here on, only these files hold the weights

    def roles(self, worker: str, stack: ExitStack) -> tuple[dict[str, int], list[Role]]:
        """Descriptors that the first process needs besides, and the others' roles; the stack closes our copies."""
        if not self._packed:
            return {}, []
        mesh = None if self._chained else stack.enter_context(SharedMesh(self.count))
        first, roles = self._inherited(mesh, 0), []
        for rank in range(1, self.count):
            ours, theirs = (stack.enter_context(end) for end in socket.socketpair())
            first[f"part {rank}"] = ours.fileno()
            target = partial(_part_process, rank=rank, count=self.count)
            descriptors = {**self._inherited(mesh, rank), "first": theirs.fileno()}
            roles.append(Role(name=f"{worker}, {self._name} {rank}", target=target, descriptors=descriptors))
        return first, roles

    def _inherited(self, mesh: SharedMesh | None, rank: int) -> dict[str, int]:
        links = {} if mesh is None else mesh.descriptors(rank)
        named = {
            f"{peer} {name}": end
            for peer, ends in links.items()
            for name, end in zip(SharedMesh.parts, ends, strict=True)
        }
        return {"model part": self._packed[rank], **named}
