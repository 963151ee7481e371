"""Each kind of sliced layer, against torch's whole one in float64: output, input gradient, weight gradients."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.engine.chain import chain_of
from manyhands.errors import UserError
from manyhands.strategies.common.grid.grid_group import LinkGroup
from manyhands.strategies.tensor.lazy_tensor import LazyWhole
from manyhands.strategies.tensor.moves import SliceState
from manyhands.strategies.tensor.slicing import slice_modules
from manyhands.strategies.tensor.slicing_plan import Slicing, parts_of
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.tasks.digits import ImageClassifier
from sliced import EXACT, SLICES, hold_against_the_whole, numbers, reduced, together, words


def tokens(most: int, *shape: int) -> Tensor:
    return torch.randint(0, most, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("bias", [True, False])
def test_column_then_row(slices: int, bias: bool) -> None:
    model = nn.Sequential(nn.Linear(7, 13, bias), nn.GELU(), nn.Dropout(0.0), nn.Linear(13, 5, bias))
    assert words(model) == {"0": "column units=13", "2": "inside units=13", "3": "row units=13"}
    (first, *_) = hold_against_the_whole(model, numbers(3, 2, 7), slices)
    assert len(first.cut) == (0 if slices == 1 else 3 if bias else 2)


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("bias", [True, False])
def test_column_alone_gathers_its_output(slices: int, bias: bool) -> None:
    hold_against_the_whole(nn.Linear(5, 9, bias), numbers(4, 5), slices, {"": "column gather"})


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("padding", [None, 0, 6])
def test_embedding_by_vocabulary(slices: int, padding: int | None) -> None:
    model = nn.Embedding(11, 6, padding_idx=padding)
    assert words(model) == {"": "vocabulary"}
    hold_against_the_whole(model, tokens(11, 4, 5), slices)


class Language(nn.Module):
    """Tied or untied, read as an attribute, too."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.positions = nn.Embedding(5, 6)
        self.head = nn.Linear(6, 11, bias=not tied)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(x) + self.positions.weight[: x.shape[1]]))


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("tied", [True, False])
def test_tied_head_and_a_weight_that_is_read_as_an_attribute(slices: int, tied: bool) -> None:
    model = Language(tied=tied)
    assert words(model)["head"] == ("vocabulary" if tied else "column gather")
    hold_against_the_whole(model, tokens(11, 4, 3), slices)


@pytest.mark.parametrize("slices", [2, 3, 4])
@pytest.mark.parametrize(
    ("reduction", "ignored"), [("mean", -100), ("sum", -100), ("none", -100), ("mean", 3), ("none", 3)]
)
def test_cross_entropy_of_sliced_scores_needs_three_numbers_a_sample(
    slices: int, reduction: str, ignored: int
) -> None:
    targets = tokens(11, 4 * 3)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        scores = model(x)
        assert scores.shape == (4, 3, 11)
        assert scores.dtype is torch.float64
        flat = scores.view(-1, scores.size(-1)) if reduction == "sum" else scores.flatten(0, 1)
        return F.cross_entropy(
            flat * 1 if slices == 1 else flat, targets, ignore_index=ignored, reduction=reduction
        )

    found = hold_against_the_whole(
        Language(tied=False),
        tokens(11, 4, 3),
        slices,
        {"tokens": "vocabulary", "head": "vocabulary"},
        loss,
    )
    for sliced in found:
        report = sliced.traffic["head"]
        assert report.forward.bytes_sent == 3 * 12 * 8 * (slices - 1)
        assert report.forward.messages_sent == slices - 1


@pytest.mark.parametrize(
    "kwargs",
    [{"label_smoothing": 0.1}, {"weight": torch.arange(11, dtype=torch.float64)}],
    ids=["smoothing", "weights"],
)
def test_other_losses_of_sliced_scores_get_the_whole(kwargs: dict[str, Any]) -> None:
    targets = tokens(11, 12)
    for loss in (
        lambda model, x: F.cross_entropy(model(x).flatten(0, 1), targets, **kwargs),
        lambda model, x: F.cross_entropy(model(x).transpose(1, 2), targets.view(4, 3)),
        lambda model, x: -model(x).log_softmax(-1)[..., 0].mean(),
        lambda model, x: torch.cat([model(x), model(x)]).square().mean(),
    ):
        found = hold_against_the_whole(Language(tied=True), tokens(11, 4, 3), 2, None, loss)
        assert found[0].traffic["head"].forward.bytes_sent >= 12 * 5 * 8


def test_stand_in_is_not_changed_in_place_and_says_what_it_is() -> None:
    def work(group: LinkGroup) -> None:
        model = nn.Linear(3, 5).double()
        slice_modules(model, group)
        assert isinstance(model.weight, LazyWhole)
        assert (model.weight.shape, model.weight.ndim, len(model.weight)) == ((5, 3), 2, 5)
        assert model.weight.requires_grad
        assert model.weight.norm().item() > 0
        with pytest.raises(UserError, match="mul_ would change a sliced tensor"):
            model.weight.mul_(2)

    together(2, work)


def test_module_that_comes_twice_and_one_that_is_too_small() -> None:
    twice = nn.Linear(6, 6)
    model = nn.Sequential(twice, nn.Tanh(), twice, nn.Tanh(), nn.Linear(6, 1))
    assert words(model) == {"0": "column gather"}, "a single output cannot be sliced"
    hold_against_the_whole(model, numbers(3, 6), 3)


@pytest.mark.parametrize(("how", "dim"), [("inside units=5", 2), ("inside units=5 channels", 1)])
def test_dropout_inside_draws_as_one_process(how: str, dim: int) -> None:
    """And as much: what is drawn after it is the same on all slices."""
    x = numbers(3, 10, 10)
    torch.manual_seed(3)
    whole, after = F.dropout(x, 0.4), torch.rand(2)
    for index, part in enumerate(parts_of(10, 5, 3)):
        model = nn.Sequential(nn.Dropout(0.4))
        slice_modules(model, LinkGroup(index, range(3), {}, 1.0, kind=1), {"0": Slicing.parse(how)})
        torch.manual_seed(3)
        assert torch.equal(
            model(x.narrow(dim, part.start, len(part))), whole.narrow(dim, part.start, len(part))
        )
        assert torch.equal(torch.rand(2), after)
    assert torch.equal(model.eval()(x[..., :2]), x[..., :2])


def test_layers_that_do_more_than_is_known_are_whole() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather have another function, which changes the class
        computed = nn.utils.weight_norm(nn.Linear(6, 6))
    rows = nn.Embedding(9, 6, max_norm=1.0)
    model = nn.ModuleList([computed, rows, nn.Conv2d(4, 4, 3, groups=2), nn.Linear(6, 6)])
    assert words(model) == {"3": "column gather"}
    with pytest.raises(UserError, match="module '0' computes its weight from others; use 'whole'"):
        slice_modules(model, LinkGroup(0, range(2), {}, 1.0, kind=1), {"0": Slicing.parse("column gather")})


def test_draws_after_sliced_work_do_not_depend_on_how_much_it_drew() -> None:
    def after(count: int) -> Tensor:
        torch.manual_seed(5)
        draws = SliceState()
        draws.enter(x)
        torch.rand(count)
        draws.leave(x)
        return torch.rand(3)

    x = numbers(1)
    assert torch.equal(after(4), after(7))
    torch.manual_seed(5)
    plain = torch.rand(3)
    assert torch.equal(after(0), plain), "where nothing is drawn, one process draws the same"
    assert not torch.equal(after(4), plain)


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (
            {"0": "row"},
            "module '0' is row, so it needs 4 features on slice 0, but got 7; in tensor_plan, follow a layer",
        ),
        (
            {"0": "column", "2": "column"},
            "module '2' is column, so it needs 13 features on slice 0, but got 7",
        ),
        (
            {"0": "vocabulary", "2": "channels_in"},
            "module '2' is a Linear, which cannot be channels_in; it can be",
        ),
        ({"1": "row"}, "module '1' is a GELU, which cannot be row; leave it whole"),
        (
            {"0": "column units=1"},
            "module '0' is column units=1, which is too small for 2 slices; use fewer",
        ),
    ],
)
def test_a_plan_that_cannot_be_is_refused(plan: dict[str, str], sentence: str) -> None:
    model = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 5))
    with pytest.raises(UserError, match=re.escape(sentence)):
        hold_against_the_whole(model, numbers(3, 7), 2, plan)


def test_shared_parameters_are_sliced_alike_or_not_at_all() -> None:
    for plan, words_of_it in (
        (
            {"tokens": "vocabulary"},
            "module 'head' shares a parameter that another module slices; slice it too",
        ),
        (
            {"tokens": "vocabulary", "head": "row"},
            "module 'head' shares a parameter that another module slices differently",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(words_of_it)):
            hold_against_the_whole(Language(tied=True), tokens(11, 4, 3), 2, plan)


def test_replicated_gradients_have_the_same_bits_on_all_slices() -> None:
    model = nn.Sequential(nn.Linear(7, 13), nn.GELU(), nn.Linear(13, 6), nn.LayerNorm(6)).double()

    def work(group: LinkGroup) -> Tensor:
        mine = copy.deepcopy(model)
        slice_modules(mine, group)
        mine(numbers(3, 7)).square().sum().backward()
        return mine[3].weight.grad

    first, *others = together(3, work)
    assert all(torch.equal(first, other) for other in others)
    assert float(first.abs().max()) > EXACT


class Attending(nn.Module):
    """Torch's attention, called in one of its ways."""

    def __init__(self, *, batch_first: bool, bias: bool = True, **how: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, 4, batch_first=batch_first, bias=bias)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        output, weights = self.attention(x, x if x.dim() == 2 else x.flip(1), x, **self.how)
        return output if weights is None else torch.cat([output.flatten(), weights.flatten()])


CAUSAL = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
PADDED = torch.tensor([[False] * 5, [False, False, False, True, True]])


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (Attending(batch_first=True, need_weights=False, attn_mask=CAUSAL), (2, 5, 12)),
        (Attending(batch_first=True, key_padding_mask=PADDED), (2, 5, 12)),
        (Attending(batch_first=False, bias=False, average_attn_weights=False), (5, 2, 12)),
        (
            Attending(batch_first=True, attn_mask=numbers(8, 5, 5), key_padding_mask=PADDED.double()),
            (2, 5, 12),
        ),
        (Attending(batch_first=False, attn_mask=CAUSAL), (5, 12)),
    ],
    ids=["causal", "padded", "time first", "mask of each head", "no batch"],
)
def test_attention_by_heads(slices: int, model: nn.Module, shape: tuple[int, ...]) -> None:
    assert words(model) == {"attention": "heads=4"}
    (first, *_) = hold_against_the_whole(model, numbers(*shape), slices)
    assert not first.cut if slices == 1 else len(first.cut) >= 2


@pytest.mark.parametrize("slices", SLICES)
@pytest.mark.parametrize("norm_first", [True, False])
def test_layers_of_torchs_transformer(slices: int, norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(12, 4, 17, dropout=0.0, batch_first=True, norm_first=norm_first)
    assert words(layer) == {
        "self_attn": "heads=4",
        "linear1": "column",
        "dropout": "inside units=17",
        "linear2": "row",
    }
    hold_against_the_whole(layer, numbers(2, 5, 12), slices)
    hold_against_the_whole(layer.eval(), numbers(2, 5, 12), slices)
    decoder = nn.TransformerDecoderLayer(12, 4, 17, dropout=0.0, batch_first=True, norm_first=norm_first)
    hold_against_the_whole(
        decoder, numbers(2, 5, 12), slices, None, lambda model, x: model(x, x.flip(0), tgt_mask=CAUSAL)
    )


def test_part_of_a_chain_is_sliced_as_a_stage_of_a_pipeline() -> None:
    """Stages of one model, sliced one after another, give what the whole gives; a tied weight is cut alike in both."""
    model = GPT(context=8, layers=2, width=12, heads=3, vocabulary=17)
    classifier = ImageClassifier(side=9, white=255, width=8)

    def staged(model: nn.Module, x: Tensor) -> Tensor:
        for module in chain_of(model):
            x = module(x)
        return x

    for whole, x in ((model.double(), tokens(17, 2, 7)), (classifier.double(), numbers(2, 1, 9, 9))):
        expected = staged(whole, x).detach()

        def work(group: LinkGroup, whole: nn.Module = whole, x: Tensor = x) -> tuple[Tensor, list[Any]]:
            mine = copy.deepcopy(whole)
            chain = chain_of(mine)
            cut = len(chain) // 2
            halves = [slice_modules(mine, group, part=part) for part in (chain[:cut], chain[cut:])]
            for module in chain:
                x = module(x)
            return x.detach() * 1, [half.cut for half in halves]

        for y, (first, second) in together(2, work):
            assert float((y - expected).abs().max()) < EXACT
            tied = first.keys() & second.keys()
            assert len(tied) == (1 if whole is model else 0)
            assert all(first[one].cut == second[one].cut for one in tied)


@pytest.mark.parametrize("slices", [2, 4])
@pytest.mark.parametrize("batch", [3, 2500], ids=["small", "large"])
def test_traffic_is_that_of_the_documented_formulas(slices: int, batch: int) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 12))
    assert words(model)["4"] == "column gather"
    for one in hold_against_the_whole(model, numbers(batch, 8), slices):
        sent = {
            name: (report.forward.bytes_sent, report.backward.bytes_sent)
            for name, report in one.traffic.items()
        }
        eight = reduced(batch * 8 * 8, slices)
        gathered = (slices - 1) * batch * 12 // slices * 8
        assert sent == {"0": (0, eight), "2": (eight, 0), "4": (gathered, eight)}
    for one in hold_against_the_whole(nn.Embedding(12, 8), tokens(12, batch), slices):
        report = one.traffic[""]
        assert (report.forward.bytes_sent, report.backward.bytes_sent) == (reduced(batch * 8 * 8, slices), 0)


@pytest.mark.parametrize("slices", [2, 4])
def test_traffic_of_attention_is_that_of_the_formulas(slices: int) -> None:
    attending = Attending(batch_first=True, need_weights=False)
    for one in hold_against_the_whole(attending, numbers(2, 5, 12), slices):
        report = {
            name: (each.forward.bytes_sent, each.backward.bytes_sent) for name, each in one.traffic.items()
        }
        whole = reduced(2 * 5 * 12 * 8, slices)
        assert report == {"attention": (0, 2 * whole), "attention.out_proj": (whole, 0)}, (
            "key is another tensor"
        )
