"""Linear layers in 8 bits: products and gradients equal those of the quantised numbers in double precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

import manyhands as mh
from manyhands.engine import fp8
from manyhands.engine.compiled_loss import Loss, compiled_loss
from manyhands.engine.fp8 import fp8_products, require_fp8, scaled_linear
from manyhands.engine.recomputing import recomputing
from manyhands.errors import UserError
from manyhands.workloads.language.bert import BERT
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.next_token import next_byte_loss
from manyhands.workloads.tasks import build

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
MOST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
HALF_A_STEP = 2.0**-8  # of bfloat16, relative
SIZES = {"context": 16, "layers": 2, "width": 32, "heads": 2, "vocabulary": 64}


def in_eight_bits(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What `values` are after quantisation, in double precision."""
    scale = (values.abs().max().float() / MOST[dtype]).double()
    return (values.double() / scale).float().to(dtype).double() * scale


def assert_rounded(found: Tensor, wanted: Tensor, terms: Tensor) -> None:
    """`found` is `wanted`, but for bfloat16's last bit and the rounding of float32 sums of `terms` in magnitude."""
    difference = (found.double() - wanted).abs()
    assert bool((difference <= HALF_A_STEP * wanted.abs() + 2.0**-12 * terms).all()), difference.max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [64, 23])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_and_gradients_are_those_of_the_quantised_numbers(
    device: str, rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(rows, 48, device=device)).to(dtype).requires_grad_()
    weight = (0.02 * torch.randn(32, 48, device=device)).requires_grad_()
    bias = torch.randn(32, device=device, requires_grad=True)
    gradient = (1e-6 * torch.randn(rows, 32, device=device)).bfloat16()
    y = scaled_linear(x, weight, bias)
    y.backward(gradient)

    with torch.no_grad():
        qx, qw = (in_eight_bits(one, torch.float8_e4m3fn) for one in (x, weight))
        qg = in_eight_bits(gradient, torch.float8_e5m2)
        assert y.dtype == torch.bfloat16
        assert_rounded(y, qx @ qw.T + bias.bfloat16().double(), qx.abs() @ qw.abs().T + bias.abs())
        assert x.grad is not None
        assert weight.grad is not None
        assert bias.grad is not None
        assert (x.grad.dtype, weight.grad.dtype) == (dtype, torch.float32)
        assert_rounded(x.grad, qg @ qw, qg.abs() @ qw.abs())
        assert_rounded(weight.grad, qg.T @ qx, qg.abs().T @ qx.abs())
        torch.testing.assert_close(bias.grad, gradient.float().sum(0))
        assert not torch.equal(y.double(), (x.double() @ weight.double().T + bias).bfloat16().double())


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen() -> None:
    zeros, weight = torch.zeros(16, 16), torch.eye(16)
    assert torch.equal(scaled_linear(zeros, weight, None), zeros.bfloat16())
    assert torch.equal(scaled_linear(weight, weight, None), weight.bfloat16())
    zeros[3, 3] = torch.inf
    assert not scaled_linear(zeros, weight, None).isfinite().all()


def test_frozen_weights_get_no_gradient() -> None:
    x, weight = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16)
    scaled_linear(x, weight, None).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize(("model", "each"), [(GPT, 4), (BERT, 6)])
def test_it_is_the_linear_layers_of_the_blocks_and_for_as_long_as_it_is_open(
    model: type[GPT] | type[BERT], each: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = model(**SIZES), list[tuple[int, ...]]()
    tokens = torch.randint(4, 64, (2, 16))

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(tuple(weight.shape))
        return scaled_linear(x, weight, bias)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = made(tokens)
        with monkeypatch.context() as patched, fp8_products(made):
            patched.setattr(fp8, "scaled_linear", counted)
            near = made(tokens)
        assert torch.equal(made(tokens), plain)
    assert len(seen) == each * SIZES["layers"]
    assert (64, 32) not in seen, "the layer of the scores"
    assert 0 < (near - plain).abs().max() < 0.1 * plain.abs().max()
    assert set(made.state_dict()) == set(model(**SIZES).state_dict())


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.*should not be instantiated")  # dynamo's own
def test_one_compiled_program_has_it_all() -> None:
    torch.manual_seed(0)
    model, batch = GPT(**SIZES), torch.randint(0, 64, (4, 17), dtype=torch.int32)

    def gradients(loss: Loss, *around: AbstractContextManager[None]) -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16), ExitStack() as stack:
            for one in around:
                stack.enter_context(one)
            loss(model, batch).backward()  # type: ignore[no-untyped-call]
        return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])

    def apart(one: Tensor, other: Tensor) -> float:
        return float((one - other).norm() / one.norm())

    wide, narrow = gradients(next_byte_loss), gradients(next_byte_loss, fp8_products(model))
    for more in ((), (recomputing(model),)):
        counters.clear()
        compiled = compiled_loss(next_byte_loss, backend="aot_eager")
        found = gradients(compiled, fp8_products(model), *more)
        assert apart(narrow, found) < 0.7 * apart(wide, found), "bfloat16 rounds differently"
        assert not counters["graph_break"]
        assert counters["stats"]["unique_graphs"] == 1


def test_what_cannot_compute_it_says_so_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    task, options = build("gpt"), mh.Options(autocast="fp8")
    with pytest.raises(UserError, match=r"autocast=fp8: a CPU has no products in 8 bits; use autocast=True"):
        mh.fit(task, "single", steps=1, options=options)
    with pytest.raises(UserError, match=r"autocast=fp8: strategy ps .*leave it out, or use mirrored"):
        mh.fit(task, "ps", workers=2, steps=1, options=options)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    with pytest.raises(
        UserError,
        match=r"autocast=fp8: NVIDIA A100 has compute capability 8.0, and .* need 8.9; use autocast=True",
    ):
        require_fp8(torch.device("cuda"))
    with (
        pytest.raises(
            UserError, match=r"no block of the model has a torch.nn.Linear whose sizes are multiples of 16"
        ),
        fp8_products(nn.Sequential(nn.Linear(16, 16))),
    ):
        pass


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it needs a GPU")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch's compiler imports
@pytest.mark.parametrize("name", ["gpt", "bert"])
def test_a_run_in_eight_bits_learns_what_one_in_sixteen_does(name: str) -> None:
    run = partial(mh.fit, build(name), "single", steps=40, seed=0, device="cuda")
    wide, narrow = (run(options=mh.Options(autocast=how, progress="none")) for how in (True, "fp8"))
    ends = [one.history[-1]["metrics"]["evaluation_loss"] for one in (wide, narrow)]
    assert ends[0] != ends[1]
    assert abs(ends[1] / ends[0] - 1) < 0.03
    assert {one.dtype for one in narrow.model.parameters()} == {torch.float32}
