"""`torch._dynamo` when somebody compiles, and not before: torch imports it to make and step any optimizer.

That import takes 2.3 s of processor time before the first step, nearly as long as torch's own, and a worker that trains
eagerly uses a few functions of it, which do nothing there. So the process that workers come from puts a stand-in in its
place that has these. Whatever else is asked of it (`torch.compile`, a submodule, a setting) imports the real module
first, and the stand-in is gone for good.

Only processes of ours are treated so; the caller's own is left as it is. There an optimizer may be made to be looked at
and not stepped: `optimizer_of` does that without the import.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.task import Task

_NAME: Final = "torch._dynamo"
_IDLE: Final[Mapping[str, Mapping[str, Callable[[], Any]]]] = {
    "compiled_autograd": {"_disable": nullcontext},  # around every gradient of torch.func
    "trace_rules": {"clear_lru_cache": lambda: None},  # of a process group that is made
    "utils": {"get_optimize_ddp_mode": lambda: "ddp_optimizer"},  # its value unless something sets it
}
_DISABLED: Final = "__dynamo_disable"  # where torch keeps a function that its compiler must skip


def defer() -> None:
    if _NAME in sys.modules:
        return
    spec = importlib.util.find_spec(_NAME)
    if spec is None:
        return
    stand_in = _StandIn(spec)
    sys.meta_path.insert(0, _SubmoduleFinder(stand_in))
    sys.modules[_NAME] = stand_in
    vars(torch)["_dynamo"] = stand_in


def optimizer_of(task: Task, model: nn.Module) -> Optimizer:
    """The task's optimizer for a model, made without the imports that only stepping it needs."""
    plain = getattr(Optimizer.add_param_group, "__wrapped__", None)
    if plain is None or _NAME in sys.modules or hasattr(plain, _DISABLED):
        return task.optimizer(model.parameters())
    setattr(plain, _DISABLED, plain)
    try:
        return task.optimizer(model.parameters())
    finally:
        vars(plain).pop(_DISABLED, None)  # another thread may have imported it first


def is_deferred() -> bool:
    return isinstance(sys.modules.get(_NAME), _StandIn)


class _StandIn(ModuleType):
    """Has what eager training uses of `torch._dynamo`; any other attribute imports the real module in its place."""

    def __init__(self, spec: importlib.machinery.ModuleSpec) -> None:
        super().__init__(_NAME, "torch._dynamo, not imported yet: see manyhands.engine.dynamo.")
        vars(self).update(
            __spec__=spec,
            __loader__=spec.loader,
            __file__=spec.origin,
            __package__=_NAME,
            __path__=list(spec.submodule_search_locations or ()),
            graph_break=nullcontext,  # takes a message, and does nothing
            disable=self._disable,
            **{name: _Part(self, name, idle) for name, idle in _IDLE.items()},
            _replacing=threading.Lock(),
            _plain=[],  # methods for which torch keeps the plain function until the real module is there
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.real(), name, value)

    def __dir__(self) -> list[str]:
        return dir(self.real())

    def real(self) -> ModuleType:
        with vars(self)["_replacing"]:  # not held during the import, which takes locks of its own
            if sys.modules.get(_NAME) is self:
                del sys.modules[_NAME]
                vars(torch).pop("_dynamo", None)
                for function in vars(self)["_plain"]:
                    vars(function).pop(_DISABLED, None)  # torch asks the real module at the next call
                sys.meta_path[:] = [
                    finder for finder in sys.meta_path if not isinstance(finder, _SubmoduleFinder)
                ]
        return importlib.import_module(_NAME)

    def _disable(
        self, fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any
    ) -> Callable[..., Any]:
        """What `torch._compile` keeps at its methods: the plain one while nothing can be compiling."""
        if fn is None or options.get("wrapping", True):
            disabled: Callable[..., Any] = self.real().disable(fn, recursive, **options)
            return disabled
        vars(self)["_plain"].append(fn)
        return fn


class _Part:
    """Stand-in for a submodule: `idle` attributes work while nothing is compiled; others come from the real one."""

    def __init__(self, stand_in: _StandIn, name: str, idle: Mapping[str, Callable[[], Any]]) -> None:
        vars(self).update(_real=lambda: getattr(stand_in.real(), name), _idle=idle)

    def __getattr__(self, name: str) -> Any:
        if name in vars(self)["_idle"] and is_deferred():
            return vars(self)["_idle"][name]
        return getattr(vars(self)["_real"](), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_real"](), name, value)


class _SubmoduleFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import finder that imports the real package before any submodule of it."""

    def __init__(self, stand_in: _StandIn) -> None:
        self._stand_in = stand_in
        self._own: dict[str, importlib.machinery.ModuleSpec] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del target
        if not fullname.startswith(f"{_NAME}."):
            return None
        self._stand_in.real()
        module = sys.modules.get(fullname)
        if module is None:
            return importlib.machinery.PathFinder.find_spec(fullname, path)
        # It came along. The import system goes by the specification of what it finds imported, and would run it again.
        self._own[fullname] = vars(module)["__spec__"]
        vars(module)["__spec__"] = importlib.machinery.ModuleSpec(fullname, self)
        return module.__spec__

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__spec__"] = self._own.pop(module.__name__)
