"""Nested state (of an optimizer, a scheduler, a random generator) as named tensors and JSON, without pickle.

A tree of None, bool, int, float, str, list, tuple, dict and tensors becomes a flat dictionary of tensors
and one JSON value in which each tensor is only its key, and comes back equal: floats to the last bit,
tuples as tuples, integer keys as integers, one tensor that stood in two places as one tensor. What JSON has
no word for is an object with one `$` key:

    {"$tensor": "optimizer.state.0.exp_avg"}   {"$tuple": [0.9, 0.999]}   {"$float": "inf"}
    {"$nan": "7ff8000000000001"}        a NaN that is not the usual one, by its bits
    {"$items": [[0, ...], [1, ...]]}    a dict whose keys are not all plain strings
    {"$counter": [[30, 1], [80, 1]]}    a collections.Counter (MultiStepLR keeps its milestones in one)
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Final, TypeAlias

import numpy as np
import safetensors
import safetensors.torch
from torch import Tensor
from torch.optim import Optimizer

from manyhands.data.store.tensorfile import encode_tensors, view_key
from manyhands.errors import ManyhandsError, UserError

_USUAL_NAN = struct.pack(">d", math.nan)

_LENGTH_BYTES: Final = 8

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def flatten(tree: Any) -> tuple[dict[str, Tensor], Json]:
    """Split `tree` into its own tensors, by their path, and the JSON of the rest; UserError names what is neither."""
    tensors: dict[str, Tensor] = {}
    return tensors, _flatten(tree, "", tensors, {})


def unflatten(tensors: Mapping[str, Tensor], meta: Json) -> Any:
    """The tree that `flatten` took apart; ValueError says what does not fit together."""
    match meta:
        case dict() if any(key.startswith("$") for key in meta):
            return _untag(tensors, meta)
        case dict():
            return {key: unflatten(tensors, item) for key, item in meta.items()}
        case list():
            return [unflatten(tensors, item) for item in meta]
        case _:
            return meta


def _flatten(value: Any, path: str, tensors: dict[str, Tensor], seen: dict[Hashable, str]) -> Json:
    def inside(items: Iterable[tuple[object, Any]]) -> list[Json]:
        return [_flatten(item, f"{path}.{key}".lstrip("."), tensors, seen) for key, item in items]

    if isinstance(value, np.generic):
        value = value.item()
    kind = type(value)
    if isinstance(value, Tensor):  # kept under its path, or that of the same tensor met before
        identity, key = view_key(value), path or "tensor"
        if identity is not None and identity in seen:
            return {"$tensor": seen[identity]}
        while key in tensors:  # {"a": {"b": x}, "a.b": y}: two paths that read the same
            key += "'"
        tensors[key] = value
        if identity is not None:
            seen[identity] = key
        return {"$tensor": key}
    if value is None or kind in (bool, int, str):
        return value  # type: ignore[no-any-return]
    if kind is float:
        if math.isfinite(value):
            return float(value)
        bits = struct.pack(">d", value)
        return {"$nan": bits.hex()} if math.isnan(value) and bits != _USUAL_NAN else {"$float": repr(value)}
    if kind is list:
        return inside(enumerate(value))
    if kind is tuple:
        return {"$tuple": inside(enumerate(value))}
    if kind in (dict, OrderedDict, Counter):
        for key in value:
            if type(key) not in (str, int):
                where = path or "the state"
                raise UserError(f"{where} has the key {key!r}, a {type(key).__name__}; allowed: str and int")
        items = inside(value.items())
        if kind is not Counter and all(type(key) is str and not key.startswith("$") for key in value):
            return dict(zip(value, items, strict=True))
        pairs: list[Json] = [[key, item] for key, item in zip(value, items, strict=True)]
        return {"$counter" if kind is Counter else "$items": pairs}
    raise UserError(
        f"{path or 'the state'} is a {kind.__name__}, which a checkpoint does not hold; allowed: None, bool, "
        "int, float, str, list, tuple, dict and tensors"
    )


def _untag(tensors: Mapping[str, Tensor], meta: dict[str, Json]) -> Any:
    match meta:
        case {"$tensor": str(key), **others} if not others:
            if key not in tensors:
                raise ValueError(f"tensor {key!r} is missing")
            return tensors[key]
        case {"$tuple": list(items), **others} if not others:
            return tuple(unflatten(tensors, item) for item in items)
        case {"$float": "inf" | "-inf" | "nan" as text, **others} if not others:
            return float(text)
        case {"$nan": str(text), **others} if not others:
            bits = bytes.fromhex(text) if re.fullmatch("[0-9a-f]{16}", text) else bytes(8)
            (value,) = struct.unpack(">d", bits)
            if not math.isnan(value):
                raise ValueError(f"{text[:40]!r} is not the bits of a NaN")
            return float(value)
        case {"$items": list(pairs), **others} if not others:
            return dict(_pairs(tensors, pairs))
        case {"$counter": list(pairs), **others} if not others:
            return Counter(dict(_pairs(tensors, pairs)))
    raise ValueError(f"unknown form {sorted(meta)}")


def _pairs(tensors: Mapping[str, Tensor], pairs: list[Json]) -> Iterable[tuple[str | int, Any]]:
    for pair in pairs:
        match pair:
            case [str() | int() as key, item]:
                yield key, unflatten(tensors, item)
            case _:
                raise ValueError("a dict is not written as pairs of key and value")


def pack_tree(tree: Any) -> Iterator[bytes]:
    """The bytes for another process, chunk by chunk: length, JSON, safetensors; nothing of it is ever executed."""
    tensors, meta = flatten(tree)
    head = json.dumps(meta, allow_nan=False).encode()
    yield len(head).to_bytes(_LENGTH_BYTES, "little") + head
    yield from encode_tensors(tensors)


def unpack_tree(data: bytes | bytearray) -> Any:
    """What `pack_tree` packed; ManyhandsError for other bytes. Each tensor has memory of its own."""
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    try:
        if not _LENGTH_BYTES <= end <= len(data):
            raise ValueError(f"{end} bytes announced, {len(data)} received")
        meta = json.loads(data[_LENGTH_BYTES:end])
        viewed = safetensors.torch.load(bytes(memoryview(data)[end:]))
        return unflatten({name: tensor.clone() for name, tensor in viewed.items()}, meta)
    except (ValueError, KeyError, TypeError, RecursionError, safetensors.SafetensorError) as error:
        raise ManyhandsError(f"received an invalid state of a run: {error}") from error


# A scheduler adds this to the groups of its optimizer, and may not have been built yet when the state comes back.
_OF_SCHEDULERS = {"initial_lr"}


def restore_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Have `optimizer` continue where `state` (used once) stopped; UserError says how the two differ."""
    saved_groups, groups = state["param_groups"], optimizer.param_groups
    saved_counts, counts = ([len(group["params"]) for group in found] for found in (saved_groups, groups))
    instead = "resume with the optimizer that the run was started with"
    if saved_counts != counts:
        raise UserError(
            f"the saved optimizer has parameter groups of {saved_counts} parameters, this one of {counts}; {instead}"
        )
    for saved, own in zip(saved_groups, groups, strict=True):
        only_saved = saved.keys() - own.keys() - _OF_SCHEDULERS
        only_own = own.keys() - saved.keys() - _OF_SCHEDULERS
        # One side alone may know more settings: another version of torch, which `load_state_dict` handles.
        if only_saved and only_own:
            raise UserError(
                f"the saved optimizer has the settings {', '.join(sorted(only_saved))}, where "
                f"{type(optimizer).__name__} has {', '.join(sorted(only_own))}; {instead}"
            )
    optimizer.load_state_dict(dict(state))
    saved_names = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for saved_name, parameter in zip(saved_names, parameters, strict=True):
        saved = state["state"].get(saved_name, {})
        live = optimizer.state[parameter] if saved else {}
        for name, value in saved.items():
            if isinstance(value, Tensor) and live[name].dtype != value.dtype:
                live[name] = value.to(live[name].device)
