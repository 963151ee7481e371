"""`single device_memory=…` on the CPU, whose memory is limited on purpose: the same bits, within the limit."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import manyhands as mh
from equality import OPTIMIZERS, Silent, distance, make_task, same_bits, train_plainly
from manyhands.data.store.checkpoint import CheckpointStore
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import SingleExchange
from manyhands.engine.worker import Trainer
from manyhands.errors import NonFinite, UserError
from manyhands.strategies.common.sharding.layer_units import REST
from manyhands.strategies.single.movers import ThreadMover
from manyhands.strategies.single.offload import OffloadedTensors, OffloadExchange
from manyhands.strategies.single.strategy import Budget, UnitBytes, plan_budget
from manyhands.strategy import Strategy
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.next_token import next_byte_loss

KIB = 1 << 10
STEPS = 6


def task(dtype: torch.dtype = torch.float64, *, layers: int = 5, tied: bool = False, **more: Any) -> mh.Task:
    torch.manual_seed(0)
    options: dict[str, Any] = {"optimizer": OPTIMIZERS["adamw"], "batch_size": 4, **more}
    return mh.Task(
        model=lambda: GPT(context=8, layers=layers, width=24, heads=4, tied=tied, vocabulary=21).to(dtype),
        loss=next_byte_loss,
        data=torch.randint(0, 21, (10, 9)),
        **options,
    )


def offloaded(limit: int, home: str = "host") -> OffloadExchange:
    return OffloadExchange(limit, torch.device("cpu"), home)


def train_limited(one: mh.Task, steps: int, limit: int, home: str = "host") -> dict[str, torch.Tensor]:
    plan = TrainingPlan(task=one, steps=steps, seed=0, evaluate_every=0, checkpoint_every=0)
    with closing(offloaded(limit, home)) as exchange:
        weights = Trainer(plan, exchange, Silent()).run().weights
        assert weights is not None
        return {name: value.clone() for name, value in weights.items()}


@cache
def in_one_process(tied: bool = False) -> dict[str, torch.Tensor]:
    """What the plain loop makes of `task`, to which several tests compare; not to be written to."""
    return train_plainly(task(tied=tied), STEPS)


LIMITS = {"one layer at a time": 330 * KIB, "one ahead": 800 * KIB, "everything": 1 << 30}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("tied", [False, True])
def test_the_same_bits_as_the_plain_loop(limit: int, tied: bool) -> None:
    assert same_bits(train_limited(task(tied=tied), STEPS, limit), in_one_process(tied))


class Counted(OffloadExchange):
    """Counts what is on the device after everything that is done to it."""

    peak = 0

    def count(self) -> None:
        tensors = [flat for layer in self._layers for flat in layer.memory.flats]
        tensors += [state for layer in self._layers for state in layer._here.values()]
        parameters = [one for layer in self._layers for one in layer.unit.parameters]
        tensors += [one.grad for one in parameters if one.grad is not None]
        now = sum(one.untyped_storage().nbytes() for one in tensors) + self._saved._kept
        self.peak = max(self.peak, now)

    def _carry_out(self, actions: Any) -> None:
        for action in actions:
            super()._carry_out([action])
            self.count()

    def _need_optimizer(self) -> optim.Optimizer:
        self.count()  # a step is about to be taken
        return super()._need_optimizer()


@pytest.mark.parametrize(("layers", "limit"), [(5, 330 * KIB), (20, 800 * KIB)])
@pytest.mark.parametrize("more", [{}, {"clip_norm": 1.0}], ids=["in backward", "two passes"])
def test_what_is_on_the_device_stays_within_the_limit(layers: int, limit: int, more: dict[str, Any]) -> None:
    one = task(layers=layers, **more)
    states = 4 * sum(parameter.nbytes for parameter in one.model().parameters())
    assert states > 3 * limit
    plan = TrainingPlan(task=one, steps=3, seed=0, evaluate_every=0, checkpoint_every=0)
    with closing(Counted(limit, torch.device("cpu"))) as exchange:
        Trainer(plan, exchange, Silent()).run()
        assert 0.25 * limit < exchange.peak <= 0.86 * limit


@pytest.mark.parametrize(
    "more", [{}, {"clip_norm": 1.0, "microbatches": 2}], ids=["in backward", "two passes"]
)
def test_blocks_are_computed_again(more: dict[str, Any]) -> None:
    one, options = task(**more), mh.Options(recompute=True)
    plain = mh.fit(one, "single", steps=STEPS, options=options)
    limited = mh.fit(one, "single device_memory=330KiB", steps=STEPS, options=options)
    if more:
        assert distance(limited.model.state_dict(), plain.model.state_dict()) < 1e-12
    else:
        assert same_bits(limited.model.state_dict(), plain.model.state_dict())


# torch says so once on processors without instructions for bfloat16, and computes all the same.
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed:UserWarning")
def test_autocast_keeps_no_copies_of_all_layers() -> None:
    one = task(torch.float32)
    plan = TrainingPlan(task=one, steps=STEPS, seed=0, evaluate_every=0, checkpoint_every=0, autocast=True)
    weights = []
    for exchange in (offloaded(330 * KIB), SingleExchange()):
        with closing(exchange):
            found = Trainer(plan, exchange, Silent()).run().weights
            assert found is not None
            weights.append({name: value.clone() for name, value in found.items()})
    assert same_bits(*weights)


@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": OPTIMIZERS["momentum"]},
        {"optimizer": lambda rows: optim.Adafactor(rows, lr=1e-2)},
        {"clip_norm": 0.05},
        {"clip_value": 1e-3},
        {"microbatches": 2},
    ],
    ids=["momentum", "adafactor", "clip_norm", "clip_value", "microbatches"],
)
def test_optimizers_clipping_and_accumulation(more: dict[str, Any]) -> None:
    one = task(**more)
    assert distance(train_limited(one, STEPS, 500 * KIB), train_plainly(one, STEPS)) < 1e-12


def test_a_model_that_leaves_layers_out_and_one_in_float32() -> None:
    awkward = make_task(OPTIMIZERS["momentum"])
    assert same_bits(train_limited(awkward, 12, 1 << 20), train_plainly(awkward, 12))
    small = task(torch.float32)
    assert same_bits(train_limited(small, STEPS, 300 * KIB), train_plainly(small, STEPS))


class Again(GPT):
    """Keeps only the inputs of its blocks, and computes the rest again in backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.transformer.wte(tokens)
        for block in self.transformer.h:
            x = checkpoint(block, x, use_reentrant=False)
        return self.lm_head(self.transformer.ln_f(x))


def test_layers_may_be_computed_again_in_backward() -> None:
    one = replace(
        task(),
        model=lambda: Again(context=8, layers=5, width=24, heads=4, tied=False, vocabulary=21).double(),
    )
    assert same_bits(train_limited(one, STEPS, 330 * KIB), train_plainly(one, STEPS))


def test_layers_may_live_in_a_file(tmp_path: Path) -> None:
    assert same_bits(train_limited(task(), STEPS, 500 * KIB, str(tmp_path)), in_one_process())
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_run_goes_on_from_a_checkpoint_of_either_kind(tmp_path: Path) -> None:
    one = task()

    def go_on(exchange: Any, steps: int, start: int | None) -> None:
        store = CheckpointStore(tmp_path)
        plan = TrainingPlan(task=one, steps=steps, seed=0, evaluate_every=0, checkpoint_every=3)
        with closing(exchange):
            Trainer(plan, exchange, Silent(), store).run(store.load(start) if start else None)

    go_on(offloaded(500 * KIB), 3, None)
    go_on(SingleExchange(), 6, 3)
    go_on(offloaded(500 * KIB), 9, 6)
    ended = CheckpointStore(tmp_path).load(9).model
    assert same_bits(dict(ended), train_plainly(one, 9))


def test_fit_trains_and_evaluates_by_its_text() -> None:
    one = replace(task(), evaluation=task().data)
    limited = mh.fit(one, "single device_memory=500KiB", steps=STEPS)
    plain = mh.fit(one, "single", steps=STEPS)
    assert same_bits(dict(limited.model.state_dict()), dict(plain.model.state_dict()))
    assert limited.summary["final"] == plain.summary["final"]


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    broken = replace(task(), loss=lambda model, batch: next_byte_loss(model, batch) * float("nan"))
    with pytest.raises(NonFinite, match=r"worker 0, step 1: .*check that batch"):
        train_limited(broken, STEPS, 500 * KIB)


def test_a_limit_below_the_largest_layer_says_the_need() -> None:
    with pytest.raises(
        UserError, match=r"device_memory=100KiB: the largest layer, 'transformer.h.0', needs .* use at least"
    ):
        train_limited(task(), STEPS, 100 * KIB)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("single device_memory=lots", "size 'lots' is not a number"),
        ("single offload=/tmp", "needs device_memory"),
        ("sharded device_memory=1GiB", "device_memory=1GiB"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Strategy.parse(text)


def test_what_was_refused_leaves_no_run_behind(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    mine = mh.Options(own_files=frozenset({"notes.txt"}))
    with pytest.raises(UserError, match="the largest layer"):
        mh.fit(task(), "single device_memory=100KiB", steps=1, out=tmp_path / "run", options=mine)
    assert [one.name for one in (tmp_path / "run").iterdir()] == ["notes.txt"]
    with pytest.raises(UserError, match="the largest layer"):
        mh.fit(task(), "single device_memory=100KiB", steps=1, out=tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_not_there_is_refused() -> None:
    with pytest.raises(UserError, match="offload=/nowhere/at/all: must be a writable folder"):
        mh.fit(task(), "single device_memory=1MiB offload=/nowhere/at/all", steps=1)


def test_an_optimizer_that_computes_the_loss_by_itself_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"^optimizer LBFGS evaluates the loss several times .*; use .*, such as AdamW$"
    ):
        mh.fit(task(optimizer=lambda parameters: optim.LBFGS(parameters)), "single", steps=1)
    scheduled = task(
        scheduler=lambda optimizer: optim.lr_scheduler.StepLR(optimizer, 1)
    )  # which wraps `step`
    assert mh.fit(scheduled, "single", steps=1).history.loss


def test_a_budget_is_spent_on_a_layer_then_on_the_next_and_then_on_activations() -> None:
    units = [
        UnitBytes(name="a", values=100, gradients=100, state=200),
        UnitBytes(name="b", values=10, gradients=10, state=20, lasts=True),
    ]
    assert plan_budget(500, units) == Budget(ahead=False, activations=425 - 410)
    assert plan_budget(2000, units, buffers=5) == Budget(ahead=True, activations=1700 - 15 - 400 - 300 - 300)
    with pytest.raises(UserError, match="the largest layer, 'a', needs 400 B"):
        plan_budget(480, units)
    shared = UnitBytes(name=REST, values=100, gradients=100, state=0, lasts=True)
    with pytest.raises(
        UserError,
        match=r": what layers share needs 200 B .*, and tensors kept for the complete step need 100 B",
    ):
        plan_budget(200, [shared])


def test_the_least_limit_that_is_said_is_enough_and_not_much_more() -> None:
    units = [UnitBytes(name="a", values=20 * KIB, gradients=20 * KIB, state=40 * KIB)]
    with pytest.raises(UserError, match=r"use at least device_memory=95KiB$"):
        plan_budget(10 * KIB, units)
    assert plan_budget(95 * KIB, units).activations < KIB


def test_what_is_saved_first_goes_to_the_host_once_the_sum_is_known() -> None:
    mover = ThreadMover()
    saved = OffloadedTensors(mover, room=10 * KIB)
    tensors = [torch.full((KIB,), float(k)) for k in range(4)]  # of 4 KiB each

    def stay() -> list[bool]:
        packed = [saved.pack(tensor) for tensor in tensors]
        for tensor, one in zip(tensors, packed, strict=True):
            assert torch.equal(saved.unpack(one), tensor)
        saved.end_step()
        return [isinstance(one, torch.Tensor) for one in packed]

    assert stay() == [True, True, False, False]
    assert stay() == [False, False, True, True]
    mover.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
def test_a_gpu_stays_within_the_limit() -> None:
    one = task(torch.float32)
    big = replace(
        one,
        model=lambda: GPT(context=8, layers=24, width=512, heads=8, tied=False, vocabulary=21),
        optimizer=lambda rows: optim.AdamW(rows, lr=1e-4),
    )
    plain = mh.fit(big, "single", steps=STEPS, device="cuda")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    limited = mh.fit(big, "single device_memory=320MiB", steps=STEPS, device="cuda")
    assert torch.cuda.max_memory_allocated() - before < 320 << 20
    for ours, reference in zip(limited.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)


def test_modules_without_parameters_are_fine() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.0), nn.Linear(3, 1)).double()
    with closing(offloaded(1 << 20)) as exchange:
        exchange.attach(model, optim.SGD(model.parameters(), lr=0.1))
    assert model(torch.ones(1, 3, dtype=torch.float64)).shape == (1, 1)
