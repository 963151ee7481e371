"""A model's graph: what ran, what each module passes on, what is cut, and `manyhands graph`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from manyhands.cli import model_commands as command
from manyhands.cli.main import app
from manyhands.engine.placement.tracing import (
    Crossing,
    Edge,
    Graph,
    Node,
    TiedParameters,
    cut_of,
    places_by_name,
    trace,
)
from manyhands.errors import UserError
from manyhands.facts import Facts, Truth
from manyhands.foresight.graph_drawing import graph_svg, graph_text
from manyhands.strategies.common.usual_promises import IN_STEP
from manyhands.strategy import Strategy
from manyhands.workloads.language.gpt import GPT

FIGURES = Path(__file__).parent.parent.parent / "docs" / "figures"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def node(name: str, num_bytes: int) -> Node:
    return Node(name=name, kind="Linear", modules=(name,), parameters=1, shape=(2,), output_bytes=num_bytes)


def graph(edges: Sequence[tuple[int, int]]) -> Graph:
    """Nodes a, b, c, d, of which each gives ten times the bytes of the one before."""
    return Graph(
        nodes=tuple(node(name, 10**number) for number, name in enumerate("abcd")),
        edges=tuple(Edge(source=source, target=target) for source, target in edges),
        samples=2,
        parameters=4,
        parameter_bytes=16,
        shared=(),
        is_chain=True,
    )


class Skips(nn.Module):
    """a → act → b → act → c, whose sum with the first act goes through functions to out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act, self.out = nn.ReLU(), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.act(self.a(x))
        third = self.c(self.act(self.b(first)))
        return self.out(torch.cat([third + first], dim=1).tanh())


def test_the_cut_is_what_lies_between_two_places() -> None:
    chain = graph([(0, 1), (1, 2), (2, 3)])
    assert cut_of(chain, ["x", "x", "y", "y"]) == (
        Crossing(source=1, targets=(2,), from_place="x", to_place="y", num_bytes=10),
    )
    assert cut_of(chain, ["x"] * 4) == ()
    back = cut_of(chain, ["x", "y", "x", "y"])
    assert [(one.source, one.to_place, one.num_bytes) for one in back] == [
        (0, "y", 1),
        (1, "x", 10),
        (2, "y", 100),
    ]
    with pytest.raises(ValueError, match="3 places for 4 nodes"):
        cut_of(chain, ["x"] * 3)


def test_a_value_travels_once_to_each_place_that_needs_it() -> None:
    spread = graph([(0, 1), (0, 2), (0, 3), (1, 3)])
    cut = cut_of(spread, ["x", "y", "y", "z"])
    assert [(one.source, one.targets, one.to_place, one.num_bytes) for one in cut] == [
        (0, (1, 2), "y", 1),
        (0, (3,), "z", 1),
        (1, (3,), "z", 10),
    ]


def test_places_by_name_are_those_of_a_placement() -> None:
    chain = graph([(0, 1), (1, 2), (2, 3)])
    assert places_by_name(chain, list("abcd"), {"*": "cuda:0", "c": "cpu"}, "x") == (
        "cuda:0",
        "cuda:0",
        "cpu",
        "cuda:0",
    )
    assert places_by_name(chain, list("abcd"), {"b": "cuda:0"}, "cpu") == ("cpu", "cuda:0", "cpu", "cpu")


def test_a_chain_is_traced_module_by_module() -> None:
    model = GPT(context=8, layers=2, width=16, heads=2)
    tokens = torch.zeros(3, 8, dtype=torch.long)
    found = trace(model, lambda model: model(tokens).sum(), samples=3)
    assert [one.name for one in found.nodes] == [
        "transformer.wte+transformer.wpe",
        *("transformer.h.0", "transformer.h.1", "transformer.ln_f", "lm_head"),
    ]
    assert [one.kind for one in found.nodes][:2] == ["Embedding+Embedding", "GPTBlock"]
    assert found.nodes[0].modules == ("transformer.wte", "transformer.wpe")
    assert [one.shape for one in found.nodes] == [(3, 8, 16)] * 4 + [(3, 8, 256)]
    assert [one.output_bytes for one in found.nodes] == [3 * 8 * 16 * 4] * 4 + [3 * 8 * 256 * 4]
    assert found.is_chain
    assert len(found.edges) == 4
    assert found.parameters == sum(one.numel() for one in model.parameters())
    assert found.parameter_bytes == 4 * found.parameters
    assert found.shared == (TiedParameters(nodes=(0, 4), num_bytes=256 * 16 * 4),)
    assert found.parameters == sum(one.parameters for one in found.nodes) - 256 * 16
    assert all(one.seconds > 0 for one in found.nodes)
    assert not model._forward_pre_hooks


def test_a_module_that_comes_twice_in_a_chain_is_two_nodes() -> None:
    square, act = nn.Linear(3, 3), nn.Tanh()
    found = trace(nn.Sequential(square, act, square, act), lambda model: model(torch.ones(2, 3)), samples=2)
    assert [one.kind for one in found.nodes] == ["Linear", "Tanh", "Linear", "Tanh"]
    assert found.shared == (TiedParameters(nodes=(0, 2), num_bytes=12 * 4),)


def test_what_is_no_chain_is_followed_through_its_operations() -> None:
    model = Skips()
    found = trace(model, lambda model: model(torch.zeros(3, 4)), samples=3)
    assert [one.name for one in found.nodes] == ["a", "act", "b", "act (2)", "c", "out"]
    edges = [(one.source, one.target) for one in found.edges]
    assert edges == [(0, 1), (1, 2), (2, 3), (3, 4), (1, 5), (4, 5)], "the sum comes from act and from c"
    assert not found.is_chain
    assert [one.output_bytes for one in found.nodes] == [96] * 5 + [24]
    assert not any(one._forward_hooks or one._forward_pre_hooks for one in model.modules())


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_a_sequential_with_a_forward_of_its_own_is_followed_too() -> None:
    found = trace(
        nn.Sequential(Residual(nn.Linear(2, 2)), nn.ReLU()), lambda model: model(torch.ones(1, 2)), 1
    )
    assert [one.kind for one in found.nodes] == ["Residual", "ReLU"]
    inside = trace(Residual(nn.Linear(2, 2), nn.ReLU()), lambda model: model(torch.ones(1, 2)), 1)
    assert [one.kind for one in inside.nodes] == ["Linear", "ReLU"]


@pytest.mark.parametrize(
    ("model", "run", "message"),
    [
        (nn.Linear(2, 2), lambda model: model.weight.sum(), "the loss does not call Linear"),
        (nn.ModuleList(), lambda model: None, "the loss does not call ModuleList"),
    ],
)
def test_what_cannot_be_drawn_is_refused(model: nn.Module, run: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        trace(model, run, 1)


def test_the_table_names_what_is_cut_and_what_is_shared() -> None:
    found = trace(Skips(), lambda model: model(torch.zeros(3, 4)), samples=3)
    places = ["stage 0"] * 2 + ["stage 1"] * 2 + ["stage 2"] * 2
    assert graph_text(found, places).splitlines() == [
        "module     kind  parameters  output  bytes    place",
        "a        Linear          40     3×8   96 B  stage 0",
        "act        ReLU           0     3×8   96 B  stage 0",
        "b        Linear          72     3×8   96 B  stage 1",
        "act (2)    ReLU           0     3×8   96 B  stage 1",
        "c        Linear          72     3×8   96 B  stage 2",
        "out      Linear          18     3×2   24 B  stage 2",
        "",
        "cut edges: 288 B forward, and the same in gradients backward",
        "  act → b: 96 B, 3×8, stage 0 → stage 1",
        "  act → out: 96 B, 3×8, stage 0 → stage 2",
        "  act (2) → c: 96 B, 3×8, stage 1 → stage 2",
    ]
    tied = trace(GPT(context=4, layers=1, width=8, heads=1), lambda model: model(torch.zeros(1, 4).long()), 1)
    lines = graph_text(tied, ["x", "x", "y", "y"]).splitlines()
    assert (
        lines[-1] == "shared parameters: transformer.wte+transformer.wpe, lm_head: 8.0 KiB, in several places"
    )
    assert graph_text(tied, ["x"] * 4).splitlines()[-2:] == [
        "no edge is cut",
        "shared parameters: transformer.wte+transformer.wpe, lm_head: 8.0 KiB",
    ]


def test_the_picture_has_a_box_for_each_module_and_marks_the_cut() -> None:
    found = trace(Skips(), lambda model: model(torch.zeros(3, 4)), samples=3)
    picture = graph_svg(found, ["<cpu>"] * 2 + ["cuda:0"] * 4, 'skips & "quotes"')
    tree = ElementTree.fromstring(picture)
    texts = ["".join(one.itertext()) for one in tree.iter("{http://www.w3.org/2000/svg}text")]
    assert [text for text in texts if text in {one.name for one in found.nodes}] == [
        one.name for one in found.nodes
    ]
    assert texts.count("96 B · <cpu> → cuda:0") == 2
    paths = [one.get("class") for one in tree.iter("{http://www.w3.org/2000/svg}path")]
    assert paths.count("edge cut") == 2
    assert paths.count("edge") == len(found.edges) - 2
    boxes = [one for one in tree.iter("{http://www.w3.org/2000/svg}rect") if one.get("width") == "460"]
    assert len(boxes) == len(found.nodes)


def shown(*words: str) -> str:
    done = CliRunner().invoke(app, ["graph", *words], catch_exceptions=False)
    assert done.exit_code == 0
    return done.output


def test_workers_that_have_parts_of_a_model_work_on_the_same_samples() -> None:
    sliced = shown("digits", "--workers", "4", "--strategy", "tensor slices=2")
    assert "split by dimensions · 32 samples\n" in sliced
    assert "sliced over 2 workers" in sliced
    staged = shown("digits", "--workers", "8", "--strategy", "pipeline stages=2 tensor=2")
    assert "split by layers · 32 samples\n" in staged


@pytest.mark.parametrize("name", ["digits", "gpt", "recurrent"])
def test_every_strategy_that_has_whole_models_cuts_nothing(name: str) -> None:
    output = shown(name, "--workers", "4")
    assert re.match(rf"{name} · mirrored · 4 workers · split by data · (8|16) samples\n", output)
    assert "no edge is cut" in output
    assert "each of 4 workers" in output


def test_options_of_the_task_and_strategy_are_heeded() -> None:
    output = shown("recurrent", "--layers", "4", "--width", "32", "--batch-size", "6", "--strategy", "single")
    assert output.startswith("recurrent · single · 1 worker · 6 samples\n")
    assert "layers.3" in output
    assert "6×64×32" in output


class Halves(Strategy):
    """Cuts a chain in the middle of its costs."""

    word: ClassVar[str] = "halves"
    about: ClassVar[str] = "for a test"
    truth: ClassVar[Truth] = Truth.EVERYONE

    @property
    def facts(self) -> Facts:
        return Facts(promises=IN_STEP)

    def stages_of(self, costs: Sequence[float], workers: int) -> tuple[int, ...]:
        return tuple(int(sum(costs[:at]) >= sum(costs) / 2) for at in range(len(costs)))


def test_a_strategy_that_cuts_layers_says_the_stages() -> None:
    chain = graph([(0, 1), (1, 2), (2, 3)])
    costs = zip(chain.nodes, (1, 1, 1, 3), strict=True)
    timed = replace(chain, nodes=tuple(replace(one, seconds=cost) for one, cost in costs))
    places = command._split(timed, Halves(), workers=2)
    assert places == ("stage 0", "stage 0", "stage 0", "stage 1")
    assert [one.num_bytes for one in cut_of(timed, places)] == [100]


def test_the_figure_in_the_docs_is_what_the_command_draws(tmp_path: Path) -> None:
    picture = tmp_path / "graph.svg"
    output = shown("gpt", "--place", "transformer.h.*=cuda:0", "--svg", str(picture))
    assert "  transformer.h.1 → transformer.ln_f: 1.0 MiB, 32×64×128, cuda:0 → cpu" in output
    assert f"picture in {picture}" in output
    assert picture.read_text() == (FIGURES / "graph-gpt.svg").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--place", "transform=cpu"],
            r"placement of 'transform': no module has this name; .* did you mean 'transformer'\?",
        ),
        (["--place", "blocks"], r"--place 'blocks': it must be PATTERN=DEVICE, such as"),
        (["--workers", "0"], "workers=0 must be an integer of at least 1"),
        (["--strategy", "mirrord"], "did you mean 'mirrored'"),
        (
            ["--place", "transformer.h.*=gpu"],
            r"placement of 'transformer.h.\*' on 'gpu': torch has no such device",
        ),
        (["--strategy", "pipeline stages=9", "--workers", "9"], "stages=9: .* 5 layers .* at most stages=5"),
        (["--strategy", "single", "--workers", "2"], "single runs one process"),
        (["--svg", "/nowhere/at/all.svg"], "there is no folder /nowhere/at"),
        (["--layers", "none"], "layers is 'none'; it must be an integer of at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        CliRunner().invoke(app, ["graph", "gpt", *words], catch_exceptions=False)


def test_a_pipeline_says_which_layers_its_stages_have() -> None:
    strategy = Strategy.parse("pipeline stages=2 microbatches=4")
    assert strategy.stages_of([1.0, 4.0, 2.0, 2.0], 2) == (0, 0, 1, 1)
    assert Strategy.parse("pipeline stages=2 microbatches=4 cuts=1").stages_of([1.0] * 4, 2) == (0, 1, 1, 1)
    interleaved = Strategy.parse("pipeline stages=2 microbatches=4 schedule=interleaved")
    assert interleaved.stages_of([1.0] * 4, 2) == (0, 1, 0, 1)
    with pytest.raises(UserError, match="stages=3: a chain of 2 layers cannot be cut into 3 parts"):
        Strategy.parse("pipeline stages=3 microbatches=3").stages_of([1.0, 1.0], 3)
    with pytest.raises(UserError, match="workers=3: must be a multiple of 2"):
        strategy.stages_of([1.0] * 4, 3)
