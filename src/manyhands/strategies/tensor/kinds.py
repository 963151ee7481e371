"""Table of which class implements which kind of slicing for which module type."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from manyhands.errors import UserError
from manyhands.strategies.tensor.attention import ATTENTION
from manyhands.strategies.tensor.channels import BATCH_NORMS, CONVOLUTIONS, DROPOUT, GROUP_NORM
from manyhands.strategies.tensor.sliced_layers import EMBEDDING, LINEAR, SlicedModule
from manyhands.strategies.tensor.slicing_plan import SliceKind, Slicing
from manyhands.strategies.tensor.spatial import SPATIAL, why_not

__all__ = ["KINDS", "sliced_class"]

KINDS: dict[type[nn.Module], dict[SliceKind, type[SlicedModule]]] = {
    nn.Linear: LINEAR,
    nn.Embedding: EMBEDDING,
    NonDynamicallyQuantizableLinear: LINEAR,  # what torch's attention has for its output
    nn.MultiheadAttention: ATTENTION,
    nn.GroupNorm: GROUP_NORM,
    nn.Dropout: DROPOUT,
    **CONVOLUTIONS,
    **BATCH_NORMS,
}
for _kind, _spatial in SPATIAL.items():
    KINDS[_kind] = {**KINDS.get(_kind, {}), SliceKind.SPATIAL: _spatial}
"""Sliced classes by module type, then by slice kind."""


def sliced_class(name: str, module: nn.Module, how: Slicing) -> type[SlicedModule]:
    """Return the class that slices `module` as `how` says.

    Raises UserError where this module type cannot be sliced this way, or where the module's settings rule it out.
    """
    known = KINDS.get(type(module), {})
    if how.kind not in known:
        ways = ", ".join(kind.value for kind in known)
        raise UserError(
            f"tensor_plan: module {name!r} is a {type(module).__name__}, which cannot be {how.kind.value}; "
            f"{f'it can be {ways}' if ways else 'leave it whole'}"
        )
    reason = why_not(module) if how.kind is SliceKind.SPATIAL else ""
    if reason:
        raise UserError(
            f"tensor_plan: module {name!r} cannot be spatial: {reason}; say 'whole', or channels_out"
        )
    return known[how.kind]
