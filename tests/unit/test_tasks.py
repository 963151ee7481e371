"""Built-in tasks can be split, repeated and sent, and learn what they promise in a plain loop."""

from __future__ import annotations

import gzip
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyhands.data.batches import BatchPlan, BatchSource
from manyhands.errors import DataError, UserError
from manyhands.task import Task
from manyhands.workloads.language.gpt import GPT, GPTOptions, gpt
from manyhands.workloads.language.next_token import bits_per_byte, next_byte_loss
from manyhands.workloads.language.recurrent import RecurrentNetwork
from manyhands.workloads.tasks import TASKS, build
from manyhands.workloads.tasks.digits import ImageClassifier, accuracy, digits


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small train faster on one thread, whatever else the machine does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


TINY = {"context": 16, "layers": 1, "width": 16, "heads": 2, "evaluation_bytes": 2048}
READING = [name for name in TASKS if name != "rl"]  # rl makes its samples by acting: see test_rl_runs.py
SMALL = {"gpt": TINY, "recurrent": {"context": 16, "layers": 2, "width": 16, "evaluation_bytes": 2048}}


def train(task: Task, steps: int, seed: int = 0) -> nn.Module:
    """The plain loop: one process, one optimizer step per batch of the plan."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    source = BatchSource(task.data, task.collate)
    plan = BatchPlan(len(source), task.batch_size, seed)
    for step in range(steps):
        optimizer.zero_grad()
        task.loss(model, source.fetch(plan.indices(step))).backward()
        optimizer.step()
    return model


@torch.no_grad()
def evaluate(task: Task, model: nn.Module, metric: str, limit: int = 10**9) -> float:
    """Mean of a metric over the first `limit` evaluation samples, weighted by batch size."""
    source = BatchSource(task.evaluation, task.collate)
    count = min(limit, len(source))
    total = 0.0
    for start in range(0, count, 250):
        indices = np.arange(start, min(start + 250, count))
        total += float(task.metrics[metric](model, source.fetch(indices))) * len(indices)
    return total / count


def small(name: str, folder: Path) -> Task:
    """A built-in task on little data."""
    if name == "mnist":
        write_mnist(folder)
        return build("mnist", path=folder)
    return build(name, **SMALL.get(name, {}))


@pytest.fixture(params=READING)
def small_task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    return small(request.param, tmp_path)


def test_initial_weights_follow_from_the_seed(small_task: Task) -> None:
    states = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        states.append(torch.cat([p.detach().flatten() for p in small_task.model().parameters()]))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_the_loss_of_a_batch_is_the_mean_of_its_parts(small_task: Task) -> None:
    """What lets workers split a batch: in float64, the size-weighted mean over shares is the whole batch's loss."""
    torch.manual_seed(0)
    model = small_task.model().double()
    source = BatchSource(small_task.data)
    whole = small_task.loss(model, source.fetch(range(7)))
    parts = 3 * small_task.loss(model, source.fetch(range(3))) + 4 * small_task.loss(
        model, source.fetch(range(3, 7))
    )
    assert whole.dtype == torch.float64
    assert whole.shape == ()
    torch.testing.assert_close(parts / 7, whole, rtol=1e-12, atol=0)
    (metric,) = small_task.metrics.values()
    with torch.no_grad():
        split = 3 * metric(model, source.fetch(range(3))) + 4 * metric(model, source.fetch(range(3, 7)))
        torch.testing.assert_close(split / 7, torch.as_tensor(metric(model, source.fetch(range(7)))))


def test_every_parameter_is_trained_and_training_repeats(small_task: Task) -> None:
    first, second = train(small_task, steps=3), train(small_task, steps=3)
    for (name, one), two in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(one, two), name
        assert one.grad is not None, name


def test_builtin_tasks_are_imported_where_they_arrive(tmp_path: Path) -> None:
    """Another process unpickles the tasks from their bytes and gets the same losses; scikit-learn stays unloaded."""
    tasks = [small(name, tmp_path) for name in READING]
    (tmp_path / "tasks").write_bytes(cloudpickle.dumps(tasks))
    script = """
import pickle, sys, torch
from manyhands.data.batches import BatchSource
torch.set_num_threads(1)
for task in pickle.load(open("tasks", "rb")):
    torch.manual_seed(0)
    print(task.loss(task.model(), BatchSource(task.data).fetch([1, 2])).item().hex())
assert "sklearn" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for task, printed in zip(tasks, done.stdout.split(), strict=True):
        torch.manual_seed(0)
        here = task.loss(task.model(), BatchSource(task.data).fetch([1, 2]))
        assert float.fromhex(printed) == pytest.approx(here.item(), rel=1e-6)


def test_digits_reaches_its_accuracy() -> None:
    task = digits()
    plan = BatchPlan(len(task.data[0]), task.batch_size, seed=0)
    epochs = TASKS["digits"].epochs
    assert epochs is not None
    model = train(task, epochs * plan.batches_per_epoch)
    assert evaluate(task, model, "accuracy") >= 0.975


def test_digits_are_all_of_scikit_learns_split_in_two() -> None:
    from sklearn.datasets import load_digits

    task = digits()
    images = torch.cat([task.data[0], task.evaluation[0]]).flatten(1)
    labels = torch.cat([task.data[1], task.evaluation[1]])
    ours = np.column_stack([images.numpy(), labels.numpy()])
    theirs = np.column_stack([load_digits().data, load_digits().target])
    assert sorted(map(tuple, ours)) == sorted(map(tuple, theirs))
    assert len(task.evaluation[1]) == 360
    assert np.bincount(task.evaluation[1], minlength=10).min() >= 20, (
        "a digit is all but absent from the test set"
    )


def test_the_split_of_digits_follows_its_own_seed() -> None:
    assert torch.equal(digits().evaluation[0], build("digits", batch_size=8).evaluation[0])
    assert not torch.equal(digits().evaluation[0], build("digits", split_seed=1).evaluation[0])


def test_accuracy_is_the_mean_of_hits() -> None:
    scores = torch.eye(4)

    class Fixed(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            return scores

    assert accuracy(Fixed(), [torch.zeros(4), torch.tensor([0, 1, 2, 0])]) == 0.75


@pytest.mark.parametrize(("side", "stride"), [(8, 1), (28, 2)])
def test_a_sample_is_classified_alike_in_any_company(side: int, stride: int) -> None:
    """No statistics over the batch: otherwise splitting a batch would change the result."""
    torch.manual_seed(0)
    model = ImageClassifier(side=side, white=255, width=8, stride=stride).double()
    images = torch.randint(0, 256, (5, 1, side, side), dtype=torch.uint8)
    together = model(images)
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)


def test_mnist_learns(shared_data: Path) -> None:
    task = build("mnist", path=shared_data / "mnist", batch_size=32)
    assert (len(task.data[0]), len(task.evaluation[0])) == (60000, 10000)
    assert evaluate(task, train(task, steps=140), "accuracy", limit=2000) >= 0.93


def idx(code: int, array: np.ndarray) -> bytes:
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, code, array.ndim]) + sizes + array.tobytes()


def write_mnist(folder: Path) -> None:
    """Forty training and ten test images of noise, under the four names."""
    numbers = np.random.default_rng(0)
    for part, count in (("train", 40), ("t10k", 10)):
        images = numbers.integers(0, 256, (count, 28, 28)).astype(np.uint8)
        labels = numbers.integers(0, 10, count).astype(np.uint8)
        (folder / f"{part}-images-idx3-ubyte").write_bytes(idx(8, images))
        (folder / f"{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(8, labels)))


def test_mnist_files_may_be_plain_or_gzip_under_either_name(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    before = build("mnist", path=str(tmp_path))
    (tmp_path / "train-images-idx3-ubyte").rename(tmp_path / "train-images.idx3-ubyte")
    after = build("mnist", path=tmp_path)
    assert torch.equal(before.data[0], after.data[0])
    assert after.data[0].shape == (40, 1, 28, 28)
    assert after.data[0].dtype == torch.uint8


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train-images-idx3-ubyte", None, "has no train-images-idx3-ubyte"),
        (
            "train-images-idx3-ubyte",
            idx(8, np.zeros((40, 28, 27), np.uint8)),
            "byte 4: sizes 40×28×27; expected n×28×28",
        ),
        (
            "train-images-idx3-ubyte",
            idx(9, np.zeros((40, 28, 28), np.int8)),
            "byte 2: items of int8; expected uint8",
        ),
        (
            "train-images-idx3-ubyte",
            idx(8, np.zeros((39, 28, 28), np.uint8)),
            "has 39 images, but .* has 40 labels",
        ),
        ("t10k-labels-idx1-ubyte", idx(8, np.zeros((10, 1), np.uint8)), "byte 4: sizes 10×1; expected n"),
        (
            "t10k-labels-idx1-ubyte",
            idx(8, np.array([*range(9), 10], np.uint8)),
            "byte 17: label 10; expected 0 to 9",
        ),
    ],
)
def test_mnist_files_that_do_not_fit_are_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    write_mnist(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        build("mnist", path=tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("gpt", {"context": 16, "layers": 1, "heads": 2, "learning_rate": 2e-3}, 125),
        ("recurrent", {"layers": 1, "learning_rate": 2e-2}, 40),
    ],
)
def test_models_of_text_beat_the_frequencies_of_bytes(name: str, options: dict[str, Any], steps: int) -> None:
    """The entropy of single bytes is the best that any model without context can reach."""
    task = build(name, **{"context": 32, "width": 64, "evaluation_bytes": 16_384} | options)
    counts = np.bincount(task.evaluation[:, 1:].ravel(), minlength=256)
    parts = counts[counts > 0] / counts.sum()
    entropy = float(-(parts * np.log2(parts)).sum())
    untrained = evaluate(task, train(task, steps=0), "bits_per_byte")
    assert untrained == pytest.approx(8, abs=0.5), "before training every byte is about equally likely"
    assert evaluate(task, train(task, steps), "bits_per_byte") < 0.85 * entropy


@pytest.mark.parametrize("name", list(SMALL))
def test_a_text_is_read_from_a_file_and_its_end_held_out(tmp_path: Path, name: str) -> None:
    text = "".join(chr(97 + i % 26) for i in range(1000))
    (tmp_path / "text").write_text(text)
    task = build(name, **SMALL[name] | {"path": tmp_path / "text"})
    read = bytes(task.data[:, :-1].ravel()).decode()
    held_out = bytes(task.evaluation[:, :-1].ravel()).decode()
    assert text.startswith(read)
    assert text[900:].startswith(held_out)
    assert 900 - 16 <= len(read) < 900
    assert 100 - 16 <= len(held_out) < 100


def test_a_text_too_short_for_its_windows_is_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("x" * 160)
    with pytest.raises(DataError, match=r"short: of 160 bytes of text 16 are held out .* give a longer text"):
        build("gpt", **TINY | {"path": tmp_path / "short"})


def transformer(**changes: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"context": 12, "layers": 2, "width": 16, "heads": 4} | changes).double()


def test_a_position_sees_nothing_that_follows() -> None:
    model = transformer()
    tokens = torch.randint(0, 256, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(dim=-1).all(), "what follows sees the change"


def test_attention_equals_torchs_own_layer() -> None:
    """A block against nn.TransformerEncoderLayer(norm_first) given the same weights."""
    block = transformer().transformer.h[0]
    gelu_new = partial(F.gelu, approximate="tanh")
    layer = nn.TransformerEncoderLayer(
        16,
        4,
        64,
        dropout=0.0,
        activation=gelu_new,
        batch_first=True,
        norm_first=True,
        dtype=torch.float64,
    )
    pairs: list[tuple[Any, Any]] = [
        (layer.self_attn.in_proj_weight, block.attn.c_attn.weight),
        (layer.self_attn.in_proj_bias, block.attn.c_attn.bias),
        (layer.self_attn.out_proj, block.attn.c_proj),
        (layer.linear1, block.mlp.c_fc),
        (layer.linear2, block.mlp.c_proj),
        (layer.norm1, block.ln_1),
        (layer.norm2, block.ln_2),
    ]
    with torch.no_grad():
        for theirs, ours in pairs:
            if isinstance(theirs, nn.Module):
                theirs.load_state_dict(ours.state_dict())
            else:
                theirs.copy_(ours)
    x = torch.randn(3, 12, 16, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(12, dtype=torch.float64)
    torch.testing.assert_close(block(x), layer(x, src_mask=mask), rtol=1e-10, atol=1e-10)


def test_tied_embeddings_are_one_parameter() -> None:
    tied, untied = transformer(), transformer(tied=False)
    assert tied.lm_head.weight is tied.transformer.wte.weight
    count: Callable[[nn.Module], int] = lambda model: sum(p.numel() for p in model.parameters())  # noqa: E731
    assert count(untied) - count(tied) == 256 * 16


def test_a_window_longer_than_the_context_is_refused() -> None:
    with pytest.raises(UserError, match="a row of 13 tokens is longer than context=12"):
        transformer()(torch.zeros(1, 13, dtype=torch.long))


def test_depth_is_the_number_of_convolutions(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    for depth in (3, 5):
        model = build("mnist", path=tmp_path, depth=depth).model()
        assert sum(isinstance(one, nn.Conv2d) for one in model.modules()) == depth
        assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    with pytest.raises(UserError, match="depth is 2; it must be an integer of at least 3"):
        build("mnist", path=tmp_path, depth=2)


def test_recurrent_takes_its_layers_and_width() -> None:
    model = build("recurrent", layers=4, width=24).model()
    assert isinstance(model, RecurrentNetwork)
    assert len(model.layers) == 4
    assert model(torch.zeros(2, 7, dtype=torch.long)).shape == (2, 7, 256)
    with pytest.raises(UserError, match="layers is 7; it must be an integer of at least 1 and at most 4"):
        build("recurrent", layers=7)


def test_bits_are_nats_over_ln_2() -> None:
    model, windows = transformer(), torch.randint(0, 256, (4, 13), dtype=torch.uint8)
    scores = model(windows[:, :-1].long())
    chosen = scores.log_softmax(-1).gather(2, windows[:, 1:, None].long())
    torch.testing.assert_close(next_byte_loss(model, windows), -chosen.mean())
    torch.testing.assert_close(bits_per_byte(model, windows), -chosen.mean() / math.log(2))


def test_gpt_without_options_uses_the_standard_library() -> None:
    task = gpt()
    assert task.name == "gpt"
    assert task.data.shape[1] == GPTOptions().context + 1
    assert task.data.size > 3_000_000
