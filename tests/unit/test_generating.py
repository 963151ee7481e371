"""Texts by a model: with a cache as without one, together as alone, and as transformers writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import manyhands as mh
from manyhands.cli.main import app
from manyhands.cli.use_commands import generate_command, predict_command
from manyhands.errors import UserError
from manyhands.serving.decoding import CachedDecoder, RecomputingDecoder
from manyhands.serving.opening import open_predictor
from manyhands.serving.text_coding import BYTES, TextCoding, coding_by
from manyhands.serving.text_generator import Prompt, TextGenerator, TextPieces
from manyhands.serving.text_scheduler import TextLimits, TokensOfRow, TokenWritten
from manyhands.workloads.language.gpt import GPT
from manyhands.workloads.language.huggingface import write_checkpoint
from manyhands.workloads.language.recurrent import RecurrentNetwork
from manyhands.workloads.language.sampling import Sampling, chosen, likely
from manyhands.workloads.tasks import build
from manyhands.workloads.text.tokenizer import train_tokenizer

CONTEXT = 12
TEXTS = (("a", 30), ("twelve bytes", 7), ("é", 18), ("xyz", 40), ("ab", 1), ("abcdef", 9))


def model(name: str = "gpt") -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = RecurrentNetwork(layers=2, width=16)
    if name == "gpt":
        made = GPT(context=CONTEXT, layers=2, width=16, heads=2)
        for parameter in made.parameters():  # scores that differ by more than rounding does
            nn.init.normal_(parameter, std=0.5)
    return made


def written_plainly(model: nn.Module, prompt: str, tokens: int) -> list[int]:
    """The likeliest bytes one after another, each computed from its whole window, without batches and padding."""
    text, begin = list(prompt.encode()), 0
    for _ in range(tokens):
        if len(text) - begin > CONTEXT:  # full: it goes on from the newest half
            begin = len(text) - CONTEXT // 2
        with torch.inference_mode():
            scores: Tensor = model(torch.tensor([text[begin:]]))
        text.append(int(scores[0, -1].argmax()))
    return text[len(prompt.encode()) :]


@pytest.mark.parametrize("name", ["gpt", "recurrent"])
def test_texts_together_are_those_that_each_gives_alone_without_a_cache(name: str) -> None:
    """More texts than rows, of different lengths, some beyond the model's positions: they join and leave in between."""
    generator = TextGenerator(model(name).eval(), CONTEXT)
    prompts = [Prompt(prompt=prompt, tokens=tokens) for prompt, tokens in TEXTS]
    expected = [written_plainly(generator.model, prompt.prompt, prompt.tokens) for prompt in prompts]
    assert generator.continued(prompts) == expected
    for rows, prefill in ((1, 1), (3, 1), (4, 14)):
        engine = generator.engine(TextLimits(rows=rows, prefill=prefill))
        found: list[list[int]] = [[] for _ in prompts]
        waiting = list(enumerate(prompts))
        while waiting or not engine.is_idle:
            if waiting:  # each joins while those before it are being written
                number, prompt = waiting.pop(0)
                engine.submit(generator.request(prompt, number))
            for event in engine.step(0.0):
                assert isinstance(event, TokenWritten)
                assert event.token is not None
                found[event.number].append(event.token)
        assert found == expected


def test_a_text_that_is_cancelled_leaves_the_others_as_they_are() -> None:
    generator = TextGenerator(model().eval(), CONTEXT)
    engine = generator.engine(TextLimits(rows=3))
    prompts = [Prompt(prompt=prompt, tokens=tokens) for prompt, tokens in TEXTS]
    for number, prompt in enumerate(prompts):
        engine.submit(generator.request(prompt, number))
    found: list[list[int]] = [[] for _ in prompts]
    for place in range(200):
        if place == 5:
            engine.cancel(0)  # has the first row, into which another one moves
            engine.cancel(4)  # has none yet
        for event in engine.step(0.0):
            assert isinstance(event, TokenWritten)
            assert event.token is not None
            found[event.number].append(event.token)
    assert engine.is_idle
    assert [len(text) for text in found] == [5, 7, 18, 40, 0, 9]
    for number in (1, 2, 3, 5):
        assert found[number] == written_plainly(generator.model, *TEXTS[number])


def test_texts_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is in the extra `integrations`")
    torch.manual_seed(1)
    sizes = {"n_positions": 48, "n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 256}
    ends = {"bos_token_id": None, "eos_token_id": None}
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **ends, initializer_range=0.5)
    ).eval()
    theirs.save_pretrained(tmp_path)
    generator = open_predictor(tmp_path)
    assert isinstance(generator, TextGenerator)
    assert generator.task == "gpt"
    prompts = [Prompt(prompt=text, tokens=30) for text in ("a", "a longer prompt", "é")]
    for prompt, found in zip(prompts, generator.continued(prompts), strict=True):
        ids = torch.tensor([list(prompt.prompt.encode())])
        written = theirs.generate(ids, max_new_tokens=30, do_sample=False, pad_token_id=0)
        assert found == written[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 0.8, "top_k": 7, "top_p": 0.9},
        {"temperature": 2.0, "top_k": 50, "top_p": 1.0},
    ],
)
def test_the_likely_tokens_are_those_of_transformers(how: dict[str, Any]) -> None:
    processes = pytest.importorskip(
        "transformers.generation.logits_process", reason="transformers is in the extra `integrations`"
    )
    scores = torch.randn(4, 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 3
    expected = processes.TemperatureLogitsWarper(how["temperature"])(None, scores)
    if how.get("top_k"):
        expected = processes.TopKLogitsWarper(how["top_k"])(None, expected)
    if how.get("top_p", 1.0) < 1:
        expected = processes.TopPLogitsWarper(how["top_p"])(None, expected)
    found = likely(scores, [Sampling(**how)] * len(scores))
    torch.testing.assert_close(found, expected.softmax(-1), rtol=1e-12, atol=1e-15)


def test_tokens_are_drawn_as_often_as_is_likely() -> None:
    scores = torch.tensor([0.0, 1.0, 2.0, -1.0])
    for how in (Sampling(temperature=0.5), Sampling(temperature=3.0), Sampling(temperature=1.0, top_k=2)):
        drawn = chosen(scores.expand(3000, -1), [how] * 3000, range(3000)).tolist()
        (expected,) = likely(scores[None], [how])
        counted = torch.tensor([drawn.count(token) / len(drawn) for token in range(4)])
        spread = (expected * (1 - expected) / len(drawn)).sqrt()
        assert ((counted - expected).abs() <= 4 * spread).all()
    assert chosen(scores[None], [Sampling(temperature=1e-300)], [0]).tolist() == [2]


def test_what_is_chosen_for_a_row_does_not_depend_on_the_others() -> None:
    scores = torch.randn(7, 50, generator=torch.Generator().manual_seed(3)) * 2
    how = [
        Sampling(),
        Sampling(temperature=1.0, seed=4),
        Sampling(temperature=0.8, top_k=3),
        Sampling(temperature=1.5, top_p=0.4),
        Sampling(temperature=0.7, top_k=900, top_p=0.9, seed=1),
        Sampling(temperature=2.0, top_k=20),
        Sampling(top_k=2),
    ]
    alone = [likely(row[None], [one])[0] for row, one in zip(scores, how, strict=True)]
    assert torch.equal(likely(scores, how), torch.stack(alone))
    for place in range(50):
        together = chosen(scores, how, [place] * len(how)).tolist()
        singly = [chosen(row[None], [one], [place]).item() for row, one in zip(scores, how, strict=True)]
        assert together == singly


@pytest.mark.parametrize("name", ["gpt", "recurrent"])
@torch.inference_mode()
def test_a_step_on_a_device_never_waits_and_stays_there(name: str) -> None:
    """On `meta`, whose tensors have no numbers: torch refuses to read one, and to compute with those of the CPU."""
    made = model(name).to("meta")
    decoder = CachedDecoder(made, 4) if isinstance(made, GPT) else RecomputingDecoder(made)
    scores = decoder.start([TokensOfRow(0, [1, 2, 3], 0), TokensOfRow(1, [4], 0)])
    decoder.move(1, 0, 1)
    more = decoder.extend([TokensOfRow(1, [7], 1), TokensOfRow(0, [5], 3)])
    how = [Sampling(), Sampling(temperature=1.0), Sampling(temperature=1.0, top_k=3, top_p=0.5)]
    tokens = chosen(torch.cat([scores, more])[:3], how, [0, 1, 2])
    assert tokens.is_meta
    with pytest.raises(NotImplementedError):
        tokens.tolist()


def test_bf16_writes_texts_and_int8_is_for_the_cpu() -> None:
    generator = TextGenerator(model().eval(), CONTEXT)
    generator.precision = "bf16"
    generator.prepare()
    assert next(generator.model.parameters()).dtype == torch.bfloat16
    assert len(generator.continued(generator.inputs(["a", "bcd"]))[1]) == 200
    generator.check_device("cpu")
    with pytest.raises(UserError, match="this machine has no GPU that torch can use"):
        generator.check_device("cuda")


def test_a_seed_fixes_what_is_written() -> None:
    generator = TextGenerator(model().eval(), CONTEXT)
    values = [{"prompt": "x", "temperature": 1.0, "seed": seed} for seed in (0, 1, 0)]
    first, other, again = generator.continued(generator.inputs(values))
    assert first == again != other
    (alone,) = generator.continued(generator.inputs([values[1]]))
    assert alone == other, "whatever is beside it"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "input 0 is not text"),
        ("", "prompt is ''"),
        ({"tokens": 3}, "prompt is ''"),
        ({"prompt": "a", "tokns": 3}, "did you mean 'tokens'"),
        ({"prompt": "a", "tokens": 10**9}, "tokens is 1000000000; it must be an integer from 1 to 4096"),
        ({"prompt": "a", "tokens": True}, "tokens is True"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature is nan"),
        ({"prompt": "a", "temperature": -1}, "temperature is -1; it must be a number from 0 to 100"),
        ({"prompt": "a", "temperature": "hot"}, "temperature is 'hot'"),
        ({"prompt": "a", "top_k": -1}, "top_k is -1; it must be an integer from 0"),
        ({"prompt": "a", "top_p": 1.5}, "top_p is 1.5; it must be a number from 0 to 1"),
        ({"prompt": "a", "top_p": 0}, "top_p is 0, which leaves no token"),
        ({"prompt": "a", "seed": -1}, "seed is -1"),
        ({"prompt": "a\ud800"}, "prompt is not text: it has half of a surrogate pair at character 1"),
        ({"prompt": "a" * 13}, "prompt has 13 bytes; the model takes 1 to 12"),
        ({"prompt": ["a"] * 10**6}, r"prompt is \['a', .{1,60}…; it must be text"),
        ({"prompt": "a", "seed": [0] * 10**6}, r"seed is \[0, .{1,60}…; it must be"),
        ({"prompt": "a", "x" * 10**6: 1}, r"a field 'x{1,60}…; allowed"),
    ],
)
def test_prompts_that_make_no_sense_are_refused(value: Any, said: str) -> None:
    generator = TextGenerator(RecurrentNetwork(layers=1, width=4), context=CONTEXT)
    with pytest.raises(UserError, match=said):
        generator.inputs([value])


@pytest.mark.parametrize(
    "tokens",
    [list("aé→😀z".encode()), [0xC3, 0x61, 0xFF, 0xE2, 0x86]],
    ids=["letters of several bytes", "bytes that are no text"],
)
def test_pieces_are_whole_letters_and_together_the_text(tokens: list[int]) -> None:
    coding, pieces = BYTES, TextPieces(BYTES)
    given = [pieces.push(token) for token in tokens] + [pieces.rest()]
    assert "".join(given) == coding.decode(tokens)
    if len(tokens) > 5:
        assert [piece for piece in given if piece] == ["a", "é", "→", "😀", "z"]


@pytest.mark.parametrize("kind", ["bpe", "wordpiece"])
def test_pieces_of_a_tokenizer_are_together_its_text(kind: str) -> None:
    text = "one two, three (four) one two é→😀 five! six"
    coding = coding_by(train_tokenizer(kind, [text] * 3, 280))
    tokens, pieces = coding.encode(text), TextPieces(coding)
    assert "".join([pieces.push(token) for token in tokens] + [pieces.rest()]) == coding.decode(tokens)


def folder_with_tokenizer(folder: Path, vocabulary: int, ends: bool = False) -> TextCoding:
    tokenizer = train_tokenizer("bpe", ["one two three one two"] * 9, 262)
    coding = coding_by(tokenizer)
    assert coding.end_of_text is not None
    torch.manual_seed(0)
    made = GPT(context=16, layers=1, width=8, heads=2, vocabulary=vocabulary)
    with torch.no_grad():
        if ends:  # the likeliest token is the end, or one of padding that no text has
            made.transformer.ln_f.bias.fill_(1.0)
            made.transformer.wte.weight[coding.end_of_text] = 5.0
            made.transformer.wte.weight[coding.vocabulary :] = 9.0
    write_checkpoint(made, folder)
    (folder / "tokenizer.json").write_text(tokenizer.json)
    return coding


def test_a_directory_of_hugging_face_is_asked_with_its_tokenizer(tmp_path: Path) -> None:
    coding = folder_with_tokenizer(tmp_path, 262)
    shown = CliRunner().invoke(app, ["generate", str(tmp_path), "--prompt", "one two", "--tokens", "5"])
    generator = open_predictor(tmp_path)
    (tokens,) = generator.continued(generator.inputs([{"prompt": "one two", "tokens": 5}]))
    assert shown.exit_code == 0
    assert shown.stdout == f"one two{coding.decode(tokens)}\n"


def test_a_text_ends_at_the_end_token_and_padding_is_never_written(tmp_path: Path) -> None:
    folder_with_tokenizer(tmp_path, 320, ends=True)
    generator = open_predictor(tmp_path)
    assert generator.continued(generator.inputs(["one two"])) == [[]]


def test_models_that_cannot_be_asked_are_refused(tmp_path: Path) -> None:
    folder_with_tokenizer(tmp_path / "small", 200)
    with pytest.raises(
        UserError, match=r"the tokenizer of .*small has 26\d tokens, but the model's vocabulary is 200"
    ):
        open_predictor(tmp_path / "small")
    write_checkpoint(GPT(context=8, layers=1, width=8, heads=1, vocabulary=300), tmp_path / "none")
    with pytest.raises(UserError, match=r"has no tokenizer.json, and its model has a vocabulary of 300"):
        open_predictor(tmp_path / "none")
    (tmp_path / "none" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="has a model of type 'llama'"):
        open_predictor(tmp_path / "none")
    with pytest.raises(UserError, match="is not a run directory"):
        open_predictor(tmp_path)
    generator = TextGenerator(model(), CONTEXT)
    with pytest.raises(UserError, match=r"needs a cache of 3.0 KiB, more than cache_bytes=100 B"):
        generator.engine(TextLimits(cache_bytes=100))


def test_generate_writes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "book.txt"
    text.write_text("ab" * 3000)
    task = build("recurrent", path=text, context=8, width=16, layers=1, learning_rate=0.03)
    mh.fit(task, "single", steps=60, out=tmp_path / "run")
    generate_command(tmp_path / "run", prompt="ba", tokens=6)
    assert capsys.readouterr().out == "babababa\n"
    with pytest.raises(UserError, match="manyhands generate RUN --prompt"):
        predict_command(tmp_path / "run", "hello")
    mh.fit(build("line"), "single", steps=2, out=tmp_path / "line")
    with pytest.raises(UserError, match="does not write text; use manyhands predict"):
        generate_command(tmp_path / "line")
