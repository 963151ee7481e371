"""`order=priority` among threads over TCP: the bits of `order=arrival`, overlap with the next forward, no hang."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import manyhands as mh
from equality import OPTIMIZERS, TWICE, Silent, distance, make_task, same_bits, train_plainly
from manyhands.engine.computing import TrainingPlan
from manyhands.engine.exchange import Resources
from manyhands.engine.training import training_class
from manyhands.engine.worker import Trainer
from manyhands.errors import PeerTimeout, UserError, WorkerFailed
from manyhands.observe.record.events import EventKind
from manyhands.strategy import Strategy
from manyhands.transport.link.tcp import TcpLink
from ways import in_threads

STEPS = TWICE
SMALL = "buckets=1KiB"  # several buckets even for this small model


@pytest.fixture(autouse=True)
def one_thread_each() -> None:
    torch.set_num_threads(1)


@contextmanager
def linked(world: int) -> Iterator[list[dict[int, TcpLink]]]:
    """Every rank's links to all others."""
    links: list[dict[int, TcpLink]] = [{} for _ in range(world)]
    for high in range(world):
        for low in range(high):
            links[low][high], links[high][low] = TcpLink.pair((f"rank {low}", f"rank {high}"))
    try:
        yield links
    finally:
        for mine in links:
            for link in mine.values():
                link.close()


def exchange_of(text: str, links: dict[int, TcpLink], rank: int, world: int, timeout_s: float = 30.0) -> Any:
    """Through the wiring that several hosts have, where nothing is shared."""
    strategy: Any = Strategy.parse(text)
    resources = Resources(
        rank=rank,
        world=world,
        timeout_s=timeout_s,
        group=lambda: pytest.fail("no memory is shared"),
        links=lambda: links,
    )
    exchange, _ = training_class(strategy).exchange_across_hosts(strategy, resources)  # type: ignore[attr-defined]
    return exchange


class Recording(Silent):
    """WorkerContext that keep the events."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def record(self, kind: EventKind, begin_ns: int, took_ns: int = 0, **fields: Any) -> None:
        self.events.append((kind, begin_ns, took_ns, fields))


def train(
    task: mh.Task, text: str, world: int, steps: int = STEPS, **plan: Any
) -> list[dict[str, torch.Tensor]]:
    whole = TrainingPlan(
        **{
            "task": task,
            "steps": steps,
            "seed": 0,
            "evaluate_every": 0,
            "checkpoint_every": 0,
            "check_every": 5,
            **plan,
        }
    )
    with linked(world) as links:

        def work(rank: int) -> dict[str, torch.Tensor]:
            with closing(exchange_of(text, links[rank], rank, world)) as exchange:
                trained = Trainer(whole, exchange, Silent()).run()
                return {name: value.clone() for name, value in trained.model.state_dict().items()}

        return in_threads(world, work)


@pytest.mark.parametrize(
    ("settings", "world", "optimizer"),
    [
        ("", 2, "adamw"),
        ("", 3, "momentum"),
        ("", 4, "adamw"),
        ("algorithm=ring", 2, "momentum"),
        ("algorithm=all-to-all", 3, "adamw"),
        ("codec=bf16", 3, "momentum"),
        ("codec=int8", 2, "adamw"),
    ],
)
def test_weights_have_the_bits_of_order_arrival(settings: str, world: int, optimizer: str) -> None:
    """Sums in worker order are the same however they are cut; of two numbers there is one sum.

    What a codec rounds depends on how the gradient is cut: there, slices are the buckets.
    """
    dtype = torch.float32 if "codec" in settings else torch.float64
    task = make_task(OPTIMIZERS[optimizer], dtype)
    whole, credit = ("buckets=25MiB", "credit=1MiB") if "codec" in settings else (SMALL, "credit=256")
    ours = train(task, f"allreduce link=tcp {settings} {whole} order=priority {credit}", world)
    arrival = train(task, f"allreduce link=tcp {settings} {whole}", world)
    for weights in ours:
        assert same_bits(weights, arrival[0])
    if "codec" not in settings:
        assert distance(ours[0], train_plainly(task, STEPS)) < 1e-9


def test_a_ring_of_three_gives_one_process_weights_on_all_workers() -> None:
    """Where a chunk begins decides who adds first: with other slices than buckets a ring rounds elsewhere."""
    task = make_task(OPTIMIZERS["adamw"])
    ours = train(task, f"allreduce algorithm=ring {SMALL} order=priority credit=512", 3)
    assert distance(ours[0], train_plainly(task, STEPS)) < 1e-9
    assert all(same_bits(weights, ours[0]) for weights in ours)


def test_schedules_accumulation_and_averages_in_the_loss_are_those_of_arrival() -> None:
    def averaged(model: nn.Module, batch: Any) -> torch.Tensor:
        tokens, targets = batch
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        return nn.functional.cross_entropy(model(tokens), targets) + 1e-3 * penalty

    task = replace(
        make_task(OPTIMIZERS["momentum"]),
        loss=averaged,
        microbatches=3,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.3, total_steps=STEPS + 1
        ),
    )
    ours = train(task, "allreduce link=tcp order=priority credit=256", 3)
    arrival = train(task, "allreduce link=tcp", 3)
    assert all(same_bits(weights, arrival[0]) for weights in ours)


def test_a_forward_begins_while_the_last_layer_is_on_its_way() -> None:
    """The last layer's sum is held back until the next step's first layer is computed: it waited for its own only."""
    layers = 4
    task = mh.Task(
        model=lambda: nn.Sequential(*(nn.Linear(16, 16) for _ in range(layers))),
        loss=lambda model, batch: model(batch).square().mean(),
        data=torch.randn(8, 16),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
    )
    plan = TrainingPlan(task=task, steps=2, seed=0, evaluate_every=0, checkpoint_every=0)
    held: list[tuple[int, bool]] = []
    with linked(2) as links:

        def work(rank: int) -> None:
            text = "allreduce order=priority link=tcp credit=1KiB"
            with closing(exchange_of(text, links[rank], rank, 2)) as exchange:
                computed, full = threading.Event(), []
                attach, sum_part = exchange.attach, exchange._collective.sum_part

                def watching(model: nn.Sequential, optimizer: Any) -> None:
                    attach(model, optimizer)
                    model[0].register_forward_hook(
                        lambda *_: computed.set() if exchange._gradients.step else None
                    )
                    sender = exchange._sender
                    agree = sender.agree

                    def with_all_at_once(local: Any, reached: Any) -> Any:
                        with sender._changed:  # so that what goes first is what is most urgent
                            while full:
                                sender.fill(full.pop())
                            sender.agree = agree
                        return agree(local, reached)

                    sender.agree = with_all_at_once
                    exchange._gradients._filled = lambda number: (
                        sender.fill(number) if exchange._gradients.step else full.append(number)
                    )

                def hold_the_last(part: Any) -> None:
                    if part.priority >= 2 * (layers - 1) and exchange._collective.step == 0:
                        held.append((rank, computed.wait(240)))
                    sum_part(part)

                exchange.attach, exchange._collective.sum_part = watching, hold_the_last
                Trainer(plan, exchange, Silent()).run()

        in_threads(2, work)
    assert {rank for rank, _ in held} == {0, 1}
    assert all(was_computed for _, was_computed in held)


def test_exposed_communication_is_booked_apart_from_waiting_for_others() -> None:
    task = make_task(OPTIMIZERS["sgd"])
    plan = TrainingPlan(
        task=task,
        steps=6,
        seed=0,
        evaluate_every=0,
        checkpoint_every=0,
    )
    worker_context = [Recording(), Recording()]
    with linked(2) as links:

        def work(rank: int) -> None:
            with closing(exchange_of("allreduce order=priority link=tcp", links[rank], rank, 2)) as exchange:
                Trainer(plan, exchange, worker_context[rank]).run()

        in_threads(2, work)
    for one in worker_context:
        steps = [event for event in one.events if event[0] is EventKind.STEP]
        exchanges = [event for event in one.events if event[0] is EventKind.EXCHANGE]
        assert len(steps) == len(exchanges) == 6
        assert sum(event[3]["num_bytes"] for event in exchanges) > 0
        assert all(event[2] <= step[2] for event, step in zip(exchanges, steps, strict=True))


def test_loss_that_is_not_finite_stops_all_and_changes_nothing() -> None:
    task = make_task(OPTIMIZERS["sgd"])
    plain = task.loss
    calls = threading.local()

    def breaking(model: nn.Module, batch: Any) -> torch.Tensor:
        calls.number = getattr(calls, "number", 0) + torch.is_grad_enabled()
        return plain(model, batch) * (float("nan") if calls.number > 3 else 1.0)

    broken = replace(task, loss=breaking)
    plan = TrainingPlan(task=broken, steps=8, seed=0, evaluate_every=0, checkpoint_every=0)
    models: list[Any] = [None, None]
    with linked(2) as links:

        def work(rank: int) -> str:
            with closing(
                exchange_of("allreduce order=priority link=tcp credit=256", links[rank], rank, 2)
            ) as exchange:
                attach = exchange.attach

                def keeping(model: nn.Module, optimizer: Any) -> None:
                    models[rank] = model
                    attach(model, optimizer)

                exchange.attach = keeping
                try:
                    Trainer(plan, exchange, Silent()).run()
                except Exception as error:
                    return str(error)
                return ""

        report = in_threads(2, work)
    assert "worker 0, step 4: the loss is not finite" in report[0]
    assert report[1] == "", "one tells"
    expected = train_plainly(task, 3)
    for model in models:
        assert distance(dict(model.state_dict()), expected) < 1e-9


@pytest.mark.parametrize("how", ["dies", "falls silent"])
def test_a_peer_that_is_lost_while_a_forward_waits_is_named(how: str) -> None:
    task = make_task(OPTIMIZERS["sgd"])
    plan = TrainingPlan(task=task, steps=8, seed=0, evaluate_every=0, checkpoint_every=0)
    over = threading.Event()
    with linked(2) as links:

        def work(rank: int) -> tuple[type, str]:
            exchange = exchange_of(
                "allreduce order=priority link=tcp credit=256", links[rank], rank, 2, timeout_s=1.0
            )
            with closing(exchange):
                if rank == 1:
                    plain = exchange._collective.sum_part
                    left = [7]

                    def dying(part: Any) -> None:
                        left[0] -= 1
                        if not left[0]:
                            if how == "dies":
                                links[1][0].interrupt()
                            over.wait(240)
                            raise ArithmeticError("on purpose")
                        plain(part)

                    exchange._collective.sum_part = dying
                try:
                    Trainer(plan, exchange, Silent()).run()
                except (WorkerFailed, PeerTimeout, ArithmeticError) as error:
                    over.set()
                    return type(error), str(error)
                return type(None), ""

        (kind, sentence), (other, _) = in_threads(2, work)
    assert kind is (WorkerFailed if how == "dies" else PeerTimeout)
    assert "rank 1" in sentence
    assert other is ArithmeticError


def test_what_needs_all_gradients_is_refused() -> None:
    sparse = mh.Task(
        model=lambda: nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 1)),
        loss=lambda model, batch: model(batch).mean(),
        data=torch.arange(8),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=8,
    )
    with pytest.raises(
        UserError, match=r"'0.weight' has a sparse gradient, which order=priority does not slice"
    ):
        train(sparse, "allreduce order=priority link=tcp", 2, steps=2)
