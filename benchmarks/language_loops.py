"""The loops that `language.py` compares. Each trains some steps and returns when they ended, and their losses.

ours      `mh.fit` with strategy=single and `autocast`; what it compiles and fuses on a GPU by itself is not chosen
fp8       the same with the linear layers of the blocks in 8 bits
two       the same with strategy=allreduce and two workers, which share the GPU or the cores; half a batch each
plain     a loop by hand with every trick: bfloat16, one compiled program of model and loss, fused AdamW, batches
          prefetched from page-locked memory on a stream of their own, losses read a step late
usual     nanoGPT as its users run it: its own model and optimizer from a checkout of it, and its loop: the compiled
          model gives scores and loss, batches at random offsets, a GradScaler that is off, clipping, `.item()` of the
          loss in every step
trainer   Hugging Face's Trainer over transformers' model of the same sizes, with bf16, torch_compile and fused AdamW

`usual` computes micro-batches of 12 and has no biases, as nanoGPT's configuration for GPT-2 says; the others' batches
are all of the same size, and have biases, as GPT-2 has.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import manyhands as mh
from language_work import CLIP, SEED, Work, adamw
from manyhands.engine.device import BatchCopies
from manyhands.observe.analyse.gpu_idle import gpu_time
from manyhands.observe.record.torch_traces import read_traces


@dataclass(kw_only=True)
class Course:
    """When each step ended, in seconds since the training began, and its loss where the loop reads it."""

    ends: list[float]
    losses: list[float] = field(default_factory=list)


class Unavailable(Exception):
    """Why a loop cannot run here."""


def ours(
    work: Work,
    device: str,
    steps: int,
    workers: int = 1,
    callbacks: Sequence[mh.Callback] = (),
    autocast: bool | str = True,
) -> Course:
    if device == "cpu" and autocast == "fp8":
        raise Unavailable("a CPU has no products in 8 bits")
    task = mh.Task(
        model=work.model,
        loss=work.loss,
        data=work.data(),
        optimizer=adamw,
        batch_size=work.batch,
        microbatches=work.pieces,
        clip_norm=CLIP,
    )
    options = mh.Options(
        autocast=autocast if device != "cpu" else False,
        progress="none",
        checkpoint_every=10**9,
        callbacks=callbacks,
    )
    run = mh.fit(
        task,
        "single" if workers == 1 else "allreduce",
        workers=workers,
        steps=steps,
        seed=SEED,
        device=device,
        options=options,
    )
    rows = [row for row in run.history if "loss" in row]
    return Course(ends=[row["at_s"] for row in rows], losses=[row["loss"] for row in rows])


def plain(work: Work, device: str, steps: int) -> Course:
    torch.manual_seed(SEED)
    model = work.model().to(device)
    optimizer, of_batch = adamw(model.parameters(), fused=True), torch.compile(partial(_loss, work, model))
    copied = _prefetched(work.batches(work.micro), device)
    on_gpu = device != "cpu"
    ends, totals = [], []
    began = _now(on_gpu)
    for _ in range(steps):
        total = torch.zeros((), device=device)
        for _ in range(work.pieces):
            with _autocast(device):
                loss = of_batch(next(copied))
            (loss / work.pieces).backward()
            total += loss.detach() / work.pieces
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        totals.append(total)
        ends.append(_now(on_gpu))
    losses = torch.stack(totals).tolist()  # the only time that the loop waits for the GPU
    return Course(ends=[_seconds(began, end) for end in ends], losses=losses)


def _now(on_gpu: bool) -> Any:
    """This moment of the GPU's work, which the host does not wait for; on a CPU, of the clock."""
    if not on_gpu:
        return time.perf_counter()
    moment = torch.cuda.Event(enable_timing=True)
    moment.record()
    return moment


def _seconds(begin: Any, end: Any) -> float:
    return end - begin if isinstance(end, float) else begin.elapsed_time(end) / 1e3


def _loss(work: Work, model: nn.Module, batch: Any) -> Tensor:
    return work.loss(model, batch)


def _prefetched(batches: Iterator[Any], device: str) -> Iterator[Any]:
    """One batch ahead of what is computed."""
    copies: Callable[[Any], Any] = (
        BatchCopies(torch.device(device)) if device != "cpu" else lambda batch: batch
    )
    ahead = copies(next(batches))
    while True:
        now, ahead = ahead, copies(next(batches))
        yield now


def usual(work: Work, device: str, steps: int, source: Path | None = None) -> Course:
    if work.name != "gpt":
        raise Unavailable("nanoGPT trains no BERT")
    if source is None or not (source / "model.py").is_file():
        raise Unavailable("--nanogpt names no folder with nanoGPT's model.py")
    sys.path.insert(0, str(source))
    nanogpt = importlib.import_module("model")
    torch.manual_seed(SEED)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    size, context = min(12, work.micro), work.context
    text = np.random.default_rng(SEED).integers(0, work.vocabulary, 4 * work.batch * context, np.uint16)

    def get_batch() -> tuple[Tensor, Tensor]:
        offsets = torch.randint(len(text) - context, (size,))
        x, y = (
            torch.stack([torch.from_numpy(text[i + by : i + by + context].astype(np.int64)) for i in offsets])
            for by in (0, 1)
        )
        if device == "cpu":
            return x, y
        return tuple(one.pin_memory().to(device, non_blocking=True) for one in (x, y))  # type: ignore[return-value]

    sizes = nanogpt.GPTConfig(
        block_size=context, vocab_size=work.vocabulary, n_layer=work.layers, n_head=work.heads,
        n_embd=work.width, dropout=0.0, bias=False,
    )  # fmt: skip
    with redirect_stdout(sys.stderr):
        raw = nanogpt.GPT(sizes).to(device)
        optimizer = raw.configure_optimizers(0.1, 1e-4, (0.9, 0.95), torch.device(device).type)
    model = torch.compile(raw)
    scaler = torch.amp.GradScaler(torch.device(device).type, enabled=False)
    pieces = work.batch // size
    ends, losses = [], []
    x, y = get_batch()
    began = time.perf_counter()
    for _ in range(steps):
        for _ in range(pieces):
            with _autocast(device):
                _, loss = model(x, y)
                loss = loss / pieces
            x, y = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(raw.parameters(), CLIP)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item() * pieces)
        ends.append(time.perf_counter() - began)
    return Course(ends=ends, losses=losses)


def trainer(work: Work, device: str, steps: int) -> Course:
    try:
        import accelerate  # noqa: F401
        import transformers as hf
    except ImportError as error:
        raise Unavailable(f"{error.name} is not installed") from error
    sizes = {"vocab_size": work.vocabulary, "attn_implementation": "sdpa"}
    torch.manual_seed(SEED)
    if work.name == "gpt":
        config = hf.GPT2Config(
            n_layer=work.layers, n_embd=work.width, n_head=work.heads, n_positions=work.context,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=0, eos_token_id=0, **sizes,
        )  # fmt: skip
        model = hf.GPT2LMHeadModel(config)
    else:
        config = hf.BertConfig(
            num_hidden_layers=work.layers, hidden_size=work.width, num_attention_heads=work.heads,
            intermediate_size=4 * work.width, max_position_embeddings=work.context,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes,
        )  # fmt: skip
        model = hf.BertForMaskedLM(config)
    ends: list[float] = []

    class Ends(hf.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if len(ends) in (WARM_UP - 1, steps - 1) and device != "cpu":
                torch.cuda.synchronize()
            ends.append(time.perf_counter() - began)

    with tempfile.TemporaryDirectory() as folder:
        asked = hf.TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=work.micro,
            gradient_accumulation_steps=work.pieces, bf16=True, torch_compile=True, max_grad_norm=CLIP,
            optim="adamw_torch_fused", learning_rate=1e-4, lr_scheduler_type="constant", weight_decay=0.1,
            save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=device == "cpu",
            dataloader_num_workers=2 if device != "cpu" else 0, dataloader_drop_last=True,
        )  # fmt: skip
        run = hf.Trainer(model, asked, train_dataset=_Rows(work), callbacks=[Ends()])
        began = time.perf_counter()
        run.train()
    return Course(ends=ends)


class _Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Samples as transformers wants them: targets beside the tokens, -100 where there is none."""

    def __init__(self, work: Work) -> None:
        self._data, self._gpt = work.data(), work.name == "gpt"

    def __len__(self) -> int:
        return len(self._data if self._gpt else self._data["tokens"])

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        if self._gpt:
            tokens = torch.from_numpy(self._data[number][:-1].astype(np.int64))
            return {"input_ids": tokens, "labels": tokens}
        row = {name: torch.from_numpy(values[number].astype(np.int64)) for name, values in self._data.items()}
        labels = torch.full_like(row["tokens"], -100).scatter_(0, row["places"], row["labels"])
        return {"input_ids": row["tokens"], "labels": labels}


def _autocast(device: str) -> AbstractContextManager[object]:
    return torch.autocast(torch.device(device).type, dtype=torch.bfloat16)


WARM_UP = 3  # steps that are not counted: they compile
LOOPS: dict[str, Callable[..., Course]] = {
    "ours": ours,
    "fp8": partial(ours, autocast="fp8"),
    "two": partial(ours, workers=2),
    "plain": plain,
    "usual": usual,
    "trainer": trainer,
}

_GROUPS = (
    ("attention", ("flash", "fmha", "attention", "cudnn_generated_fort_native_sdpa")),
    ("matrix products", ("gemm", "cutlass", "nvjet", "xmma", "matmul", "splitk")),
    ("optimizer and clipping", ("multi_tensor", "foreach", "fusedoptimizer", "adam", "lpnorm")),
    ("compiled, between products", ("triton",)),
    ("copies", ("memcpy", "memset")),
)


def traced(work: Work, device: str) -> dict[str, Any]:
    """Of three steps of ours: the share of the time that the GPU does nothing, and what it does otherwise."""
    with tempfile.TemporaryDirectory() as folder:
        ours(work, device, 8, callbacks=[mh.TorchProfiler(folder, first=5, steps=3)])
        events = read_traces(Path(folder))[0]
    found = gpu_time(events)
    if found is None:
        return {"why": "no GPU was traced"}
    kernels = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    took: Counter[str] = Counter()
    names: Counter[str] = Counter()
    for one in kernels:
        name = one["name"].lower()
        group = next((group for group, words in _GROUPS if any(word in name for word in words)), "other")
        took[group] += one["dur"]
        names[one["name"][:100]] += one["dur"]
    total = sum(took.values())
    return {
        "idle": found.idle,
        "waits": dict(found.waits),
        "groups": {name: took[name] / total for name in sorted(took, key=lambda name: -took[name])},
        "top_kernels": {name: spent / total for name, spent in names.most_common(12)},
    }
