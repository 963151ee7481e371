"""A device `toy` written in Python, with few kernels: for operations that a device does not have, without a GPU.

`python toy_device.py` checks a model that is placed on it, and prints the placement log.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import manyhands as mh


class Toy(Tensor):
    """A tensor of the device; what it holds is a tensor of the host, which nobody else sees."""

    held: Tensor
    __torch_function__ = (
        torch._C._disabled_torch_function_impl
    )  # what comes out of it is not all of this class

    @staticmethod
    def __new__(cls, held: Tensor) -> Toy:
        empty = torch._C._acc.create_empty_tensor(held.shape, held.dtype)
        empty.__class__ = Toy
        empty.held = held
        return empty

    def __init__(self, held: Tensor) -> None:
        pass


def host(value: Any) -> Any:
    return value.held if isinstance(value, Toy) else value


def kernel(function: Callable[..., Tensor]) -> Callable[..., Toy]:
    return lambda *args, **kwargs: Toy(
        function(*map(host, args), **{name: host(one) for name, one in kwargs.items()})
    )


def copied(source: Tensor, device: Any = None, **_: Any) -> Tensor:
    values = host(source).detach().clone()
    return values if torch.device(device).type == "cpu" else Toy(values)


def make_device() -> torch.library.Library:
    """Register the device; it has what `torch.mm` needs for forward and backward, and nothing else."""
    _setup_privateuseone_for_python_backend("toy")
    library = torch.library.Library("aten", "IMPL")
    kernels: dict[str, Callable[..., Tensor]] = {
        "mm": kernel(torch.mm),
        "as_strided": kernel(torch.as_strided),
        "_to_copy": copied,
        "detach": kernel(torch.detach),
        "empty.memory_format": lambda size, **_: Toy(torch.zeros(size)),
    }
    for name, function in kernels.items():
        library.impl(name, function, "PrivateUse1")
    return library


class Product(nn.Module):
    """x times its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))

    def forward(self, x: Tensor) -> Tensor:
        return x.mm(self.weight)


class Surprise(nn.Module):
    """Something that the device cannot do."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu()


def main() -> None:
    library = make_device()
    x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], requires_grad=True)
    model = mh.place(nn.Sequential(Product(), Surprise()), "toy")
    assert model[0].weight.device.type == "toy"
    result = model(x)
    assert result.device.type == "cpu", "the output comes to where the input came from"
    assert host(result).tolist() == [[22, 28], [49, 64]]
    print(model.log)

    weights = torch.tensor([[1.0, -1.0], [2.0, 3.0]])
    (host(result) * weights).sum().backward()
    plain = nn.Sequential(Product(), Surprise())
    same = x.detach().clone().requires_grad_()
    (plain(same) * weights).sum().backward()
    assert torch.equal(host(x.grad), same.grad), "gradients go back through copies and kernels"
    assert model[0].weight.grad.device.type == "toy"
    assert torch.equal(host(model[0].weight.grad), plain[0].weight.grad)

    strict = mh.place(model, "toy", soft=False)
    try:
        strict(x)
    except mh.UserError as error:
        print(error)
    else:
        raise AssertionError("relu has no kernel, and nothing was said")
    del library


if __name__ == "__main__":
    main()
    # torch's thread for gradients on this device never ends, and some exits of the interpreter abort on it.
    sys.stdout.flush()
    os._exit(0)
