"""`njit` and `cfunc`: numba's, with compiled code kept where `manyhands.native` says."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.ccallback import CFunc
from numba.core.registry import CPUDispatcher

from manyhands.native.cache_folder import folder_of

Function = Callable[..., Any]


def njit(signature: Any = None, *, cache: bool = False, **options: Any) -> Callable[[Function], Any]:
    """Compile a function: at once for `signature`, else when it is called, for the types that it is called with.

    `cache` keeps the code for later processes, with that of all functions that it calls: what only other kernels call
    needs none.
    """

    def decorate(function: Function) -> Any:
        dispatcher = numba.njit(**options)(function)
        if cache:
            _keep(dispatcher, function)
        if signature is not None:
            dispatcher.compile(signature)
            dispatcher.disable_compile()
        return dispatcher

    return decorate


def helper(**options: Any) -> Callable[[Function], Any]:
    """`njit` for a function that kernels call and Python does not: without the code that Python would call."""

    def decorate(function: Function) -> Any:
        dispatcher = njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **options)(function)
        dispatcher.__class__ = _ForKernels
        return dispatcher

    return decorate


def inlined(**options: Any) -> Callable[[Function], Any]:
    """`helper` for a small function that LLVM shall put into its callers.

    Far cheaper to compile than `inline="always"`, which has numba infer the types of every copy anew. Not for arguments
    that are arrays: their references would be counted, so give addresses.
    """
    return helper(forceinline=True, **options)


def cfunc(signature: Any) -> Callable[[Function], Any]:
    def decorate(function: Function) -> Any:
        types = signature.args, signature.return_type
        compiled = CFunc(function, types, locals={}, options={"nopython": True})
        _keep(compiled, function)
        compiled.compile()
        return compiled

    return decorate


class _ForKernels(CPUDispatcher):  # type: ignore[misc]
    """A compiled function without an entrance for Python, which numba itself would look for where there is none."""

    def __call__(self, *_values: Any) -> Any:
        name = self.py_func.__name__
        raise TypeError(f"{name} is for compiled code only; decorate it with njit to call it from Python")


def _keep(compiled: Any, function: Function) -> None:
    if _folder(function.__code__.co_filename) is not None:
        compiled._cache = _KernelCache(function)


@cache
def _folder(file: str) -> Path | None:
    return folder_of(Path(file).resolve())


class _Place:
    """Numba's cache locator: where the code of one function is kept."""

    def __init__(self, function: Function, file: str) -> None:
        self._py_file = file
        self._folder = _folder(file)
        self._line = function.__code__.co_firstlineno

    @classmethod
    def from_function(cls, function: Function, file: str) -> _Place:
        return cls(function, file)

    def ensure_cache_path(self) -> None:
        os.makedirs(self.get_cache_path(), exist_ok=True)

    def get_cache_path(self) -> str:
        return str(self._folder)

    def get_source_stamp(self) -> str:
        return os.path.basename(self.get_cache_path())

    def get_disambiguator(self) -> str:
        return str(self._line)


class _KernelCacheImpl(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_Place,)


class _KernelCache(FunctionCache):  # type: ignore[misc]
    """Numba's cache, made robust to a full disk and truncated files."""

    _impl_class = _KernelCacheImpl

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except (EOFError, pickle.UnpicklingError):  # written while the machine went down
            return None  # compiled and written again

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            warnings.warn(
                f"compiled code cannot be stored in {self._cache_path}: {error.strerror}; it will be compiled again",
                stacklevel=2,
            )
