"""A model says its chain: applied one after another, its modules give what the model gives, to the bit."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from manyhands.engine.chain import ChainFunction, OverTime, chain_of, named_chain
from manyhands.errors import UserError
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.recurrent import RecurrentLayer, RecurrentNetwork
from manyhands.workloads.tasks.digits import ImageClassifier

TOKENS = torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randint(0, 256, (3, 1, 28, 28), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
BLOCK = ["ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj"]
MODELS = {
    "transformer": lambda: GPT(context=16, layers=2, width=16, heads=4),
    "classifier": lambda: ImageClassifier(side=28, white=255, width=8, stride=2),
    "deep classifier": lambda: ImageClassifier(side=28, white=255, width=8, stride=2, depth=6),
    "lstm": lambda: RecurrentNetwork(layers=3, width=16),
}


def applied(model: nn.Module, x: Tensor) -> Tensor:
    for module in chain_of(model):
        x = module(x)
    return x


@pytest.mark.parametrize("name", MODELS)
def test_the_chain_applied_is_the_model_to_the_bit(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    before = list(model.state_dict())
    x = IMAGES if "classifier" in name else TOKENS
    whole, chained = model(x), applied(model, x)
    assert torch.equal(whole, chained)
    gradients = [
        torch.autograd.grad(one.square().sum(), list(model.parameters())) for one in (whole, chained)
    ]
    assert all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))
    assert list(model.state_dict()) == before, "saying its chain adds nothing to a model"
    named = {id(one) for one in model.parameters()}
    chained_parameters = [id(one) for module in chain_of(model) for one in module.parameters()]
    assert set(chained_parameters) == named
    shared = 1 if name == "transformer" else 0  # the tied weights stand at both ends
    assert len(chained_parameters) == len(named) + shared


def test_names_of_weights_are_those_that_checkpoints_have() -> None:
    states = {name: list(make().state_dict()) for name, make in MODELS.items()}
    assert states["transformer"] == [
        "transformer.wte.weight",
        "transformer.wpe.weight",
        *(
            f"transformer.h.{at}.{part}.{kind}"
            for at in (0, 1)
            for part in BLOCK
            for kind in ("weight", "bias")
        ),
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
        "lm_head.weight",
    ]
    convolutions = [f"features.{at}.{kind}" for at in (0, 1, 3, 4, 7, 8) for kind in ("weight", "bias")]
    assert states["classifier"] == [*convolutions, "head.weight", "head.bias"]
    assert states["lstm"][:3] == ["tokens.weight", "layers.0.lstm.weight_ih_l0", "layers.0.lstm.weight_hh_l0"]


def test_modules_of_a_chain_are_named_as_in_the_model() -> None:
    names = {name: [one for one, _ in named_chain(make())] for name, make in MODELS.items()}
    assert names["transformer"] == [
        "transformer.wte+transformer.wpe",
        *("transformer.h.0", "transformer.h.1", "transformer.ln_f", "lm_head"),
    ]
    assert names["lstm"] == ["tokens", "layers.0", "layers.1", "layers.2", "head"]
    assert names["classifier"][:3] == ["features.0", "features.1", "features.2"]
    assert names["classifier"][-2:] == ["Flatten", "head"], (
        "what is no module of the model is called by its class"
    )


def test_a_sequential_is_its_children_and_nested_ones_are_flat() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(3, 1))))
    assert [type(one) for one in chain_of(model)] == [nn.Linear, nn.ReLU, nn.Linear]
    assert [name for name, _ in named_chain(model)] == ["0", "1.0", "1.1.0"]


def test_a_module_that_comes_twice_is_applied_twice() -> None:
    square, act = nn.Linear(3, 3), nn.Tanh()
    model = nn.Sequential(square, act, square, act)
    assert chain_of(model) == (square, act, square, act)
    x = torch.ones(2, 3)
    assert torch.equal(applied(model, x), model(x))


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Says(nn.Module):
    def __init__(self, said: object) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.said = said

    def chain(self) -> object:
        return self.said


def test_a_sequential_with_a_forward_of_its_own_stays_whole() -> None:
    residual = Residual(nn.Linear(2, 2), nn.ReLU())
    assert chain_of(nn.Sequential(residual, nn.ReLU()))[0] is residual
    with pytest.raises(
        UserError, match=r"Residual is not a chain: .* make it an nn.Sequential, or give it a method"
    ):
        chain_of(residual)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Bilinear(2, 2, 2), "Bilinear is not a chain"),
        (nn.Sequential(), "Sequential has no modules"),
        (Says(None), r"Says.chain\(\) returned a NoneType; it must return a list of nn.Modules"),
        (
            Says([nn.ReLU(), torch.relu]),
            r"Says.chain\(\) returned a list of ReLU, builtin_function_or_method; it must",
        ),
    ],
)
def test_what_is_no_chain_is_told_how_to_say_it(model: nn.Module, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chain_of(model)


def test_an_applied_function_keeps_its_modules_when_copied() -> None:
    """A stage of a pipeline is a copy of some modules: tied weights stay tied, and nothing else comes along."""
    model = GPT(context=16, layers=1, width=16, heads=2)
    stage = copy.deepcopy(nn.Sequential(*chain_of(model)))
    assert isinstance(stage[0], ChainFunction)
    assert stage[0].wte.weight is stage[-1].weight
    assert torch.equal(stage(TOKENS), model(TOKENS))


@pytest.mark.parametrize("cuts", [[5], [1, 2, 11], list(range(1, 12))])
def test_slices_of_time_give_the_whole_sequence(cuts: list[int]) -> None:
    torch.manual_seed(0)
    layer = RecurrentLayer(8).double()
    assert isinstance(layer, OverTime)
    x = torch.randn(3, 12, 8, dtype=torch.float64, requires_grad=True)
    state, outputs = None, []
    for begin, end in zip([0, *cuts], [*cuts, 12], strict=True):
        output, state = layer.over_time(x[:, begin:end], state)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, dim=1), layer(x), rtol=1e-12, atol=1e-12)
    whole = torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()])
    sliced = torch.autograd.grad(torch.cat(outputs, dim=1).square().sum(), [x, *layer.parameters()])
    for one, two in zip(whole, sliced, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)


def test_layers_equal_torchs_stacked_lstm() -> None:
    torch.manual_seed(0)
    ours = RecurrentNetwork(layers=3, width=8).double()
    theirs = nn.LSTM(8, 8, num_layers=3, batch_first=True, dtype=torch.float64)
    weights = {
        f"{name[:-1]}{at}": value
        for at, layer in enumerate(ours.layers)
        for name, value in layer.lstm.state_dict().items()
    }
    theirs.load_state_dict(weights)
    expected = ours.head(theirs(ours.tokens(TOKENS))[0])
    torch.testing.assert_close(ours(TOKENS), expected, rtol=1e-12, atol=1e-12)
