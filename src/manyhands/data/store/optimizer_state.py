"""Loads a saved state into a torch optimizer, to the last bit.

`Optimizer.load_state_dict` casts every floating-point state to its parameter's dtype. That is wrong for
states that never had it: NAdam's running product and ASGD's rates are float32 whatever the parameter is, and
an optimizer may keep float32 moments for bfloat16 weights. After such a cast the next step differs in the
last bits, and the resumed run drifts from the uninterrupted one. So torch does the loading, and then each
state that was cast is replaced by the saved one.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from manyhands.errors import UserError

__all__ = ["restore_optimizer"]

# A scheduler adds this one to the groups of its optimizer, and may not have been built yet when the state
# comes back.
_OF_SCHEDULERS = {"initial_lr"}


def restore_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Make `optimizer` continue exactly where the one that gave `state` (its `state_dict()`) stopped.

    The tensors of `state` become the optimizer's own: use it once. UserError says how the two optimizers
    differ where the state is not of this kind of optimizer or not of these parameter groups.
    """
    _require_same_kind(optimizer, state)
    optimizer.load_state_dict(dict(state))
    saved_names = chain.from_iterable(group["params"] for group in state["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for saved_name, parameter in zip(saved_names, parameters, strict=True):
        saved = state["state"].get(saved_name, {})
        live = optimizer.state[parameter] if saved else {}
        for name, value in saved.items():
            if isinstance(value, Tensor) and live[name].dtype != value.dtype:
                live[name] = value.to(live[name].device)


def _require_same_kind(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    saved_groups, groups = state["param_groups"], optimizer.param_groups
    saved_counts = [len(group["params"]) for group in saved_groups]
    counts = [len(group["params"]) for group in groups]
    if saved_counts != counts:
        raise UserError(
            f"the saved optimizer has parameter groups of {saved_counts} parameters, this one of {counts}; "
            "resume with the optimizer that the run was started with"
        )
    for saved, own in zip(saved_groups, groups, strict=True):
        only_saved = saved.keys() - own.keys() - _OF_SCHEDULERS
        only_own = own.keys() - saved.keys() - _OF_SCHEDULERS
        # One side alone may know more settings: another version of torch, which `load_state_dict` handles.
        if only_saved and only_own:
            raise UserError(
                f"the saved optimizer has the settings {', '.join(sorted(only_saved))}, where "
                f"{type(optimizer).__name__} has {', '.join(sorted(only_own))}; resume with the optimizer "
                "that the run was started with"
            )
