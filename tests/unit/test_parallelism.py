"""Work and depth of graphs against closed forms, torch's own count of arithmetic, and schedules made by hand."""

import heapq
import math
import random

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import manyhands as mh
from manyhands.errors import UserError
from manyhands.foresight.estimate import estimate
from manyhands.foresight.op_graph import trace_ops
from manyhands.foresight.work_depth import Op, WorkDepth, work_depth
from manyhands.lab.studies.parallelism_study import PARALLELISM, ParallelismOptions, answer_of_ops
from manyhands.workloads.tasks import build

WIDTH, BATCH = 16, 8
MATRIX = 2 * BATCH * WIDTH * WIDTH  # operations of a batch times a square matrix


def op(flops: int, *needs: int) -> Op:
    return Op(name="op", is_backward=False, flops=flops, outputs=1, needs=needs)


def flops(one: Op) -> float:
    return one.flops


def test_a_chain_has_parallelism_1() -> None:
    chain = [op(5), *(op(5 + n, n) for n in range(9))]
    assert work_depth(chain, flops).parallelism == 1.0


@pytest.mark.parametrize("branches", [1, 3, 8])
def test_independent_branches_have_as_much_as_they_are(branches: int) -> None:
    graph = [op(7, *([number - 1] if number % 4 else [])) for number in range(4 * branches)]
    assert work_depth(graph, flops) == WorkDepth(28 * branches, 28)
    assert work_depth(graph, flops).parallelism == branches


@pytest.mark.parametrize("levels", [1, 4, 10])
def test_a_binary_tree_of_sums_has_n_minus_1_operations_and_log_n_levels(levels: int) -> None:
    graph, row = [], [op(0)] * 2**levels
    graph += row
    numbers = list(range(len(row)))
    while len(numbers) > 1:
        pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
        numbers = list(range(len(graph), len(graph) + len(pairs)))
        graph += [op(1, *pair) for pair in pairs]
    assert work_depth(graph, flops) == WorkDepth(2**levels - 1, levels)


def greedy_time(graph: list[Op], processors: int) -> float:
    """How long it takes where no processor is idle while an operator is ready: Graham's list schedule."""
    waits_for = [set(one.needs) for one in graph]
    ready = [number for number, needs in enumerate(waits_for) if not needs]
    running: list[tuple[float, int]] = []
    now = 0.0
    while ready or running:
        while ready and len(running) < processors:
            number = ready.pop()
            heapq.heappush(running, (now + graph[number].flops, number))
        now, done = heapq.heappop(running)
        for number, needs in enumerate(waits_for):
            if done in needs:
                needs.discard(done)
                if not needs:
                    ready.append(number)
    return now


@pytest.mark.parametrize("seed", range(20))
def test_greedy_schedules_stay_within_the_bounds(seed: int) -> None:
    draw = random.Random(seed)
    graph = [
        op(draw.randint(1, 20), *draw.sample(range(number), min(number, draw.randint(0, 3))))
        for number in range(60)
    ]
    found = work_depth(graph, flops)
    for processors in (1, 2, 3, 7, 64):
        speedup = found.work / greedy_time(graph, processors)
        assert found.at_least(processors) <= speedup * (1 + 1e-12)
        assert speedup <= found.at_most(processors) * (1 + 1e-12)


class Branches(nn.Module):
    """So many matrices, each applied to the input."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.matrices = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([matrix(x) for matrix in self.matrices])


def task(model, loss=lambda model, batch: model(batch[0]).sum()) -> mh.Task:
    return mh.Task(
        model=model,
        loss=loss,
        data=(torch.randn(BATCH, WIDTH),),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=BATCH,
    )


def traced(made: mh.Task) -> tuple[Op, ...]:
    found = estimate(made).footprint.traced
    assert found is not None
    return trace_ops(found, made.batch_size)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_traced_branches_wait_only_for_what_joins_them(count: int) -> None:
    numbers = count * BATCH * WIDTH  # that are stacked, and summed
    found = work_depth(traced(task(lambda: Branches(count))), flops, backward=False)
    assert found == WorkDepth(count * MATRIX + 2 * numbers, MATRIX + 2 * numbers)


def test_a_traced_chain_has_no_parallelism_forward_and_two_matrices_at_once_backward() -> None:
    chain = traced(task(lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False)] * 6)))
    assert work_depth(chain, flops, backward=False).parallelism == 1.0
    products = [one.flops for one in chain if one.is_backward and one.name == "mm"]
    assert products == [MATRIX] * 11, "of weight and input in each layer, and none of the first one's input"


def test_a_product_is_a_tree_of_sums_over_its_products() -> None:
    chain = traced(task(lambda: nn.Linear(WIDTH, WIDTH, bias=False)))
    spans = {one.name: one.span for one in chain if not one.is_backward}
    assert spans == {"mm": 1 + math.log2(WIDTH), "sum": math.log2(BATCH * WIDTH)}


@pytest.mark.parametrize("name", ["digits", "gpt"])
def test_matrix_arithmetic_is_what_torch_counts_of_a_real_step(name: str) -> None:
    made = build(name)
    found = estimate(made).footprint.traced
    assert found is not None
    ops = trace_ops(found, 2)
    ours = sum(one.flops for one in ops if one.name in {"mm", "addmm", "bmm", "convolution"})
    ours += sum(
        one.flops for one in ops if one.name == "convolution_backward" and one.outputs > 32
    )  # no bias
    model = made.model()
    with (
        FlopCounterMode(display=False) as counter,
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        made.loss(model, found.batch(2)).backward()
    assert ours == counter.get_total_flops()


def test_the_study_of_a_task_tells_what_a_batch_brings() -> None:
    answer = PARALLELISM.run(ParallelismOptions(task="digits", batch_size=16), lambda _: None)
    of_step = {
        (one["pieces"], one["samples"]): one["parallelism"]
        for one in answer.figures["parts"]
        if one["part"] == "forward and backward"
    }
    assert 8 < of_step["single operations", 16] / of_step["single operations", 1] < 16
    assert 1 < of_step["whole operators", 16] < 2
    assert all(one["at_least"] <= one["at_most"] for one in answer.figures["bounds"])
    assert "<svg" in answer.charts[0].picture


def test_one_sample_alone_is_compared_with_nothing() -> None:
    answer = answer_of_ops({1: [op(4), op(4, 0)]}, "two")
    assert not any("instead of" in sentence for sentence in answer.sentences)


def test_what_makes_no_sense_is_one_sentence() -> None:
    with pytest.raises(UserError, match="batch_size is 0"):
        ParallelismOptions(batch_size=0)
    with pytest.raises(UserError, match="give at most that"):
        PARALLELISM.run(ParallelismOptions(batch_size=10**6), lambda _: None)
    with pytest.raises(UserError, match="no built-in task 'digitz'"):
        PARALLELISM.run(ParallelismOptions(task="digitz"), lambda _: None)
