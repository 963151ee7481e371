"""Texts of 16 clients at once: ours beside transformers' `generate`, on the same machine, weights and prompts.

    python benchmarks/generating.py --json benchmarks/results/generating-2.json
    python benchmarks/generating.py --device cuda --models gpt2 --longer 4 --json benchmarks/results/generating-gpu.json

`served` is `manyhands serve` with one worker, asked over HTTP by 16 threads; `engine` is the same without HTTP, in this
process; `batch` is one call of `generate` with 16 rows, padded at the left, until the longest text is
complete; `one by one` is a call for each of the first `--alone` texts. In `uneven`, prompts and texts have different
lengths. Tokens that nobody asked for do not count. All are greedy, and take turns; on a GPU all compute in bfloat16,
where rounding decides some tokens, elsewhere in single precision.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from manyhands.errors import UserError
from manyhands.serving.batching import BatchLimits
from manyhands.serving.model_server import ModelServer, ServeOptions
from manyhands.serving.text_coding import TextCoding
from manyhands.serving.text_generator import TextGenerator
from manyhands.serving.text_scheduler import TextLimits, TextRequest, TokenWritten
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.presets import GPT_PRESETS

CLIENTS = 16
Texts = list[list[int]]


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    tokens: int

    @property
    def text(self) -> str:
        return " ".join(map(str, self.prompt))


def asked_for(case: str, vocabulary: int, longer: int) -> list[Asked]:
    drawn = torch.Generator().manual_seed(1)
    lengths = [12] * CLIENTS if case == "even" else list(range(2, 2 + CLIENTS))
    tokens = (
        [24] * CLIENTS if case == "even" else [3 + 43 * (7 * number % 16) // 15 for number in range(CLIENTS)]
    )
    return [
        Asked(torch.randint(0, vocabulary, (length,), generator=drawn).tolist(), count * longer)
        for length, count in zip(lengths, tokens, strict=True)
    ]


def models(preset: str) -> tuple[GPT, Any]:
    """Ours and theirs, on the CPU, with the same weights: random, wide enough that rounding decides no token."""
    sizes = asdict(GPT_PRESETS[preset])
    torch.manual_seed(0)
    ours = GPT(**sizes)
    for parameter in ours.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.1)
    written = {ours.layout.sizes[name]: value for name, value in sizes.items()}
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**written, bos_token_id=None, eos_token_id=None)
    )
    weights = {name: ours.layout.as_written(name, value) for name, value in ours.state_dict().items()}
    theirs.load_state_dict(weights)
    return ours.eval(), theirs.eval()


def generator_of(model: GPT, device: str) -> TextGenerator:
    """Its texts are numbers of tokens, so that random prompts need no tokenizer."""
    coding = TextCoding(
        encode=lambda text: [int(one) for one in text.split()],
        decode=lambda tokens: " ".join(map(str, tokens)),
        vocabulary=model.sizes.vocabulary,
        unit="token",
    )
    made = TextGenerator(model, model.sizes.context, coding)
    made.warm = lambda: None  # type: ignore[method-assign] # its prompt is a letter
    made.task, made.device, made.precision = "gpt", device, "fp32" if device == "cpu" else "bf16"
    return made


def by_engine(generator: TextGenerator, asked: Sequence[Asked]) -> Texts:
    engine, texts = generator.engine(TextLimits(rows=CLIENTS)), [list[int]() for _ in asked]
    for number, one in enumerate(asked):
        engine.submit(TextRequest(number=number, prompt=one.prompt, tokens=one.tokens))
    while not engine.is_idle:
        for event in engine.step(0.0):
            assert isinstance(event, TokenWritten)
            assert event.token is not None
            texts[event.number].append(event.token)
    return texts


def by_server(server: ModelServer, clients: ThreadPoolExecutor, asked: Sequence[Asked]) -> Texts:
    def ask(one: Asked) -> list[int]:
        connection = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=200)
        with closing(connection):
            body = json.dumps({"prompt": one.text, "tokens": one.tokens})
            connection.request("POST", "/generate", body, {"Authorization": f"Bearer {server.token}"})
            return [int(token) for token in json.loads(connection.getresponse().read())["text"].split()]

    return list(clients.map(ask, asked))


def by_transformers(model: Any, asked: Sequence[Asked], device: str) -> Texts:
    longest, most = max(len(one.prompt) for one in asked), max(one.tokens for one in asked)
    ids = torch.tensor([[0] * (longest - len(one.prompt)) + one.prompt for one in asked])
    mask = torch.tensor([[0] * (longest - len(one.prompt)) + [1] * len(one.prompt) for one in asked])
    with torch.inference_mode():
        written = model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=most,
            do_sample=False,
            pad_token_id=0,
        )
    return [row[longest : longest + one.tokens].tolist() for row, one in zip(written, asked, strict=True)]


def measured(preset: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    ours, theirs = models(preset)
    with ExitStack() as stack:
        generator = generator_of(ours, args.device)
        options = ServeOptions(workers=1, batches=BatchLimits(batch=CLIENTS, deadline_s=200.0))
        clients = stack.enter_context(ThreadPoolExecutor(CLIENTS))
        served: dict[str, Callable[[Sequence[Asked]], Texts]] = {}
        try:
            server = stack.enter_context(ModelServer(generator, preset, options))  # takes a copy
            served["served"] = lambda asked: by_server(server, clients, asked)
        except UserError as error:
            print(f"served is left out: {error}", flush=True)
        generator.prepare()
        if args.device != "cpu":
            theirs = theirs.to(args.device, torch.bfloat16)
        contenders: dict[str, Callable[[Sequence[Asked]], Texts]] = {
            "engine": lambda asked: by_engine(generator, asked),
            "batch": lambda asked: by_transformers(theirs, asked, args.device),
            "one by one": lambda asked: [
                text for one in asked[: args.alone] for text in by_transformers(theirs, [one], args.device)
            ],
            **served,
        }
        for run in contenders.values():  # warm
            run([Asked([1, 2, 3], 2)] * CLIENTS)
        for case in ("even", "uneven"):
            asked = asked_for(case, ours.sizes.vocabulary, args.longer)
            rates: dict[str, list[float]] = {name: [] for name in contenders}
            texts: dict[str, Texts] = {}
            for _ in range(args.rounds):
                for name, run in contenders.items():
                    begun = time.perf_counter()
                    texts[name] = run(asked)
                    rates[name].append(sum(map(len, texts[name])) / (time.perf_counter() - begun))
            yield {
                "model": preset,
                "case": case,
                "tokens": sum(one.tokens for one in asked),
                "tokens_per_s": {name: statistics.median(found) for name, found in rates.items()},
                "rounds": rates,
                "equal_to_one_by_one": {
                    name: [text == other for text, other in zip(found, texts["one by one"], strict=False)]
                    for name, found in texts.items()
                },
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", default="tiny,gpt2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longer", type=int, default=1, help="times as many tokens in each text")
    parser.add_argument("--alone", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    result = {
        "cores": len(os.sched_getaffinity(0)),
        "machine": platform.machine() if args.device == "cpu" else torch.cuda.get_device_name(),
        "device": args.device,
        "precision": "fp32" if args.device == "cpu" else "bf16",
        "clients": CLIENTS,
        "alone": args.alone,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": rows,
    }
    for preset in args.models.split(","):
        for row in measured(preset, args):
            rows.append(row)
            shown = ", ".join(f"{name} {rate:,.0f}" for name, rate in row["tokens_per_s"].items())
            print(f"{row['model']}, {row['case']}: tokens/s {shown}", flush=True)
            if args.json:
                args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
