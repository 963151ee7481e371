"""A placed model computes what it computed before, where it was placed, and its log says so."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.utils.backend_registration
from torch import Tensor, nn

import manyhands as mh
from manyhands.engine.placement.placed import Placed, assigned, brought
from manyhands.errors import UserError
from manyhands.workloads.language.gpt import GPT

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
NAMES = ["tokens", "blocks", "blocks.0", "blocks.0.mix", "blocks.1", "blocks.1.mix", "head"]
X = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(0))


class Matrix(nn.Module):
    def __init__(self, rows: list[list[float]]) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor(rows))

    def forward(self) -> Tensor:
        return self.values


class Times(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a @ b


class Product(nn.Module):
    """The product of [[1, 2, 3], [4, 5, 6]] and [[1, 2], [3, 4], [5, 6]]."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Matrix([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
        self.b = Matrix([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        self.times = Times()

    def forward(self) -> Tensor:
        return self.times(self.a(), self.b())


def ran(placed: Placed) -> list[tuple[str, str, str, tuple[int, ...], int]]:
    return [(one.module, one.operation, one.device, one.shape, one.copied_bytes) for one in placed.log]


def transformer(tied: bool = True) -> GPT:
    torch.manual_seed(0)
    return GPT(context=8, layers=2, width=8, heads=2, tied=tied)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"blocks.*": "x"}, {"blocks.0": "x", "blocks.0.mix": "x", "blocks.1": "x", "blocks.1.mix": "x"}),
        ({"*": "x", "head": "y"}, dict.fromkeys(NAMES, "x") | {"head": "y"}),
        ({"head": "y", "*": "x"}, dict.fromkeys(NAMES, "x") | {"head": "y"}),
        ({"blocks.0": "y", "blocks.*": "x"}, {name: "xy"["0" in name] for name in NAMES[2:6]}),
        (
            {"blocks": "x", "blocks.[1-9]": "y"},
            {"blocks": "x"} | {n: "x" if "0" in n else "y" for n in NAMES[2:6]},
        ),
        ({"blocks": "x", "*.mix": "y"}, dict.fromkeys(NAMES[1:6], "x")),  # `blocks` has more letters
        ({"hea?": "x", "h?ad": "y"}, {"head": "y"}),
        ({}, {}),
    ],
)
def test_the_most_specific_pattern_wins(where: dict[str, str], expected: dict[str, str]) -> None:
    assert assigned(NAMES, where) == expected


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        UserError, match=r"placement of 'block.\*': no module has this name; there are tokens, .*'blocks'"
    ):
        assigned(NAMES, {"block.*": "cpu"})
    with pytest.raises(
        UserError, match=r"placement of 'emb': no module .* transformer.h.0.ln_1, transformer.h.0.attn, …$"
    ):
        mh.place(transformer(), {"emb": "cpu"})


@pytest.mark.parametrize("soft", [True, False])
@pytest.mark.parametrize("where", [None, "auto", "cpu", {"a": "cpu", "b": "cpu", "times": "cpu"}])
def test_the_product(where: object, soft: bool) -> None:
    """Automatic and manual placement; on a machine with a GPU, automatic is there."""
    placed = mh.place(Product(), where, soft=soft)
    assert placed().tolist() == [[22, 28], [49, 64]]
    device = "cuda:0" if torch.cuda.is_available() and where in (None, "auto") else "cpu"
    assert ran(placed) == [("times", "matmul", device, (2, 2), 0)]


@pytest.mark.parametrize("device", ["cuda:99", "xpu"])
def test_the_product_on_a_device_that_is_not_there(device: str) -> None:
    placed = mh.place(Product(), {"times": device})
    assert placed().tolist() == [[22, 28], [49, 64]]
    assert ran(placed) == [("times", "matmul", "cpu", (2, 2), 0)]
    assert placed.log.notes == [f"'times' is on cpu because this machine has no {device}"]
    assert str(placed.log).splitlines() == [
        "module  operation  device  shape  copied",
        "times   matmul     cpu     2×2",
        f"note: 'times' is on cpu because this machine has no {device}",
    ]
    with pytest.raises(
        UserError, match=f"placement of 'times' on {device}: this machine has no such device; place it"
    ):
        mh.place(Product(), {"times": device}, soft=False)


def test_what_is_no_device_is_refused_even_softly() -> None:
    with pytest.raises(
        UserError, match="placement of 'times' on 'gpu0': torch has no such device; allowed: auto,"
    ):
        mh.place(Product(), {"times": "gpu0"})


def test_inputs_are_copied_at_borders() -> None:
    """By size and place: `meta` computes no values, and nothing can be copied out of it."""
    placed = mh.place(Product(), {"times": "meta"})
    assert placed().device.type == "meta"
    assert ran(placed) == [
        ("times", "to", "meta", (2, 3), 24),
        ("times", "to", "meta", (3, 2), 24),
        ("times", "matmul", "meta", (2, 2), 0),
    ]
    assert placed.log.copied_bytes == 48
    assert len(placed.log) == 3
    placed()
    assert len(placed.log) == 3, "the log is of the last forward pass"


def test_operands_of_one_operation_come_together() -> None:
    """`wpe.weight` is used by a function of `transformer`, where no module's border brings it along."""
    placed = mh.place(
        transformer(), {"transformer.wte": "meta", "transformer.h": "meta", "transformer.ln_f": "meta"}
    )
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        placed(X)  # the output comes back to where the input came from: not from there
    added = next(one for one in placed.log if one.operation == "add")
    assert (added.module, added.device, added.copied_bytes) == ("transformer", "meta", 8 * 8 * 4)
    assert placed.log.rows[-1].operation == "linear"
    assert placed.log.rows[-1].device == "meta", (
        "the head shares its weights with the embedding, and is there too"
    )


def test_modules_that_share_a_parameter_are_in_one_place() -> None:
    placed = mh.place(transformer(), {"transformer.wte": "meta", "lm_head": "cpu"})
    assert placed.lm_head.weight is placed.transformer.wte.weight
    assert placed.lm_head.weight.device.type == "meta"
    assert placed.log.notes == ["lm_head is on meta because lm_head and transformer.wte share a parameter"]
    with pytest.raises(
        UserError,
        match=r"placement of 'lm_head' on cpu and 'transformer.wte' on meta: lm_head and trans",
    ):
        mh.place(transformer(), {"transformer.wte": "meta", "lm_head": "cpu"}, soft=False)
    apart = mh.place(transformer(tied=False), {"transformer.wte": "meta", "lm_head": "cpu"}, soft=False)
    assert [apart.transformer.wte.weight.device.type, apart.lm_head.weight.device.type] == ["meta", "cpu"]


def test_a_placed_model_is_the_same_model() -> None:
    model = transformer()
    before, keys = model(X), list(model.state_dict())
    placed = mh.place(model, {"transformer.h.*": "auto"})
    assert placed is model
    assert isinstance(placed, GPT)
    assert list(placed.state_dict()) == keys
    torch.testing.assert_close(placed(X), before)
    assert {one.module for one in placed.log} >= {
        "transformer",
        "transformer.wte",
        "transformer.h.0",
        "transformer.h.1.attn.c_proj",
        "lm_head",
    }
    for same in (copy.deepcopy(placed), pickle.loads(pickle.dumps(placed))):
        assert torch.equal(same(X), placed(X))
        assert ran(same) == ran(placed)
        same.log.rows.clear()
        assert len(placed.log) > 0, "a copy has a log of its own"
    assert torch.equal(mh.place(placed, "cpu")(X), before)
    fresh = mh.place(transformer(), "cpu")
    fresh(X)
    assert ran(placed) == ran(fresh), "what is placed again has the hooks of one placement"


def test_to_changes_the_type_and_moves_nothing() -> None:
    placed = mh.place(Product(), {"a": "cpu", "times": "cpu"})
    assert placed.to("cpu", torch.float64) is placed
    assert placed.log.notes == []
    assert placed().dtype == torch.float64
    placed.to("meta", torch.float32)
    assert placed().tolist() == [[22, 28], [49, 64]]
    assert placed().dtype == torch.float32
    assert placed.log.notes == ["to(meta) moved nothing: the model is placed"]


def test_a_model_with_a_log_of_its_own_is_refused() -> None:
    class Logs(nn.Linear):
        def log(self) -> None: ...

    with pytest.raises(UserError, match="Logs already has an attribute `log`"):
        mh.place(Logs(1, 1))


class Output(OrderedDict[str, Tensor]):
    """As libraries have for what their models give."""


def test_what_a_model_gives_keeps_its_class() -> None:
    class Gives(nn.Module):
        def forward(self, x: Tensor) -> Output:
            return Output(scores=x @ x.T)

    placed = mh.place(Gives(), "cpu")
    assert isinstance(placed(torch.ones(2, 2)), Output)
    elsewhere = brought(Output(scores=torch.ones(2, 2)), torch.device("meta"))
    assert isinstance(elsewhere, Output)
    assert elsewhere["scores"].device.type == "meta"
    there = (torch.ones(1), [torch.ones(2), {"x": 3}])
    assert brought(there, torch.device("cpu")) is there


def test_layers_that_are_no_plain_functions_are_followed_too() -> None:
    """LSTM and attention of torch's own, and an operation of somebody's library."""
    library = torch.library.Library("manyhands_placed", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CPU")

    class All(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            seen, _ = self.lstm(x)
            mixed, _ = self.attention(seen, seen, seen)
            return torch.ops.manyhands_placed.twice(mixed)

    torch.manual_seed(0)
    model, x = All(), torch.randn(2, 3, 4)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(mh.place(model, "cpu")(x), expected)
    operations = [(one.module, one.operation) for one in model.log]
    assert ("lstm", "lstm") in operations
    assert ("attention", "multi_head_attention_forward") in operations
    assert operations[-1] == ("", "twice")


def test_errors_leave_the_course_in_order() -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > 0:
                raise ValueError("no")
            return x

    placed = mh.place(nn.Sequential(nn.Sequential(Fails())), "cpu")
    with pytest.raises(ValueError, match="no"):
        placed(torch.ones(1))
    placed(torch.zeros(1))
    assert [one.module for one in placed.log] == ["0.0", "0.0"], (
        "the sum and the comparison, where they are called"
    )


def test_a_placed_model_trains_as_it_did() -> None:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))

    def task(where: object) -> mh.Task:
        def model() -> nn.Module:
            plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
            return plain if where is None else mh.place(plain, where)

        return mh.Task(
            model=model,
            loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
            data=(x, x.sum(1, keepdim=True)),
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            batch_size=16,
        )

    plain = mh.fit(task(None), "single", steps=6, seed=0)
    placed = mh.fit(task({"0": "cpu", "2": "cuda:99"}), "single", steps=6, seed=0)
    for one, two in zip(plain.model.parameters(), placed.model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.skipif(
    not hasattr(torch.utils.backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch has no devices that are written in Python",
)
def test_an_operation_without_a_kernel_runs_on_the_cpu() -> None:
    """On a device made for it, in a process of its own: values, gradients and the log; see toy_device.py."""
    script = Path(__file__).parent.parent / "toy_device.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "module   operation  device  shape  copied",
        "(model)  to         toy:0   2×3    24 B",
        "0        mm         toy:0   2×2",
        "1        relu       cpu     2×2    32 B    no kernel on toy:0",
        "(model)  to         cpu     2×2    16 B",
        "1: relu has no kernel on toy:0; place '1' on 'cpu', or use soft=True",
    ]


@needs_gpu
def test_the_product_with_its_operands_elsewhere_than_itself() -> None:
    placed = mh.place(Product(), {"a": "cpu", "b": "cuda:0", "times": "cuda:0"}, soft=False)
    assert placed().tolist() == [[22, 28], [49, 64]]
    assert ran(placed) == [("times", "to", "cuda:0", (2, 3), 24), ("times", "matmul", "cuda:0", (2, 2), 0)]
    placed().sum().backward()
    assert placed.a.values.grad is not None
    assert placed.a.values.grad.device.type == "cpu"
    assert placed.a.values.grad.tolist() == [[3, 7, 11], [3, 7, 11]]


@needs_gpu
@pytest.mark.filterwarnings(
    "ignore:Attempting to run cuBLAS"
)  # torch's own thread for backward has no context yet
@pytest.mark.parametrize(
    "where",
    [{"transformer.h.*": "cuda:0"}, {"transformer.wte": "cuda", "transformer.ln_f": "cuda:0"}, "auto"],
)
def test_a_transformer_on_two_devices_gives_the_same_gradients(where: object) -> None:
    plain, placed = transformer().double(), mh.place(transformer().double(), where)
    results = [model(X).square().sum() for model in (plain, placed)]
    assert results[1].device.type == "cpu"
    for result in results:
        result.backward()
    for (name, one), two in zip(plain.named_parameters(), placed.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad.cpu(), rtol=1e-9, atol=1e-9, msg=name)
    assert {one.device for one in placed.log} >= {"cuda:0"}
    placed.to("cpu")
    assert "to(cpu) moved nothing: the model is placed" in placed.log.notes
    assert {one.device.type for one in placed.parameters()} >= {"cuda"}


@needs_gpu
def test_an_operation_without_a_kernel_on_the_gpu_runs_on_the_cpu() -> None:
    library = torch.library.Library("manyhands_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: 2 * x, "CPU")

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.manyhands_test.twice(x)

    model = nn.Sequential(nn.Linear(2, 2), Twice())
    expected = 2 * model[0](torch.ones(3, 2))
    placed = mh.place(model, "cuda:0")
    torch.testing.assert_close(placed(torch.ones(3, 2)), expected)
    row = next(one for one in placed.log if one.module == "1")
    assert (row.device, row.note, row.copied_bytes) == ("cpu", "no kernel on cuda:0", 48)
    with pytest.raises(UserError, match="has no kernel on cuda:0; place '1' on 'cpu', or use soft=True"):
        mh.place(placed, "cuda:0", soft=False)(torch.ones(3, 2))


@needs_gpu
def test_a_model_on_two_devices_trains_under_single() -> None:
    task = mh.Task(
        model=lambda: mh.place(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), {"0": "cuda:0"}),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        data=(torch.ones(32, 8), torch.zeros(32, 1)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    )
    run = mh.fit(task, "single", steps=5, seed=0)
    assert run.history.loss[-1] < run.history.loss[0]
