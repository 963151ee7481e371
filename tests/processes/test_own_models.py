"""An own CNN and an own transformer: trained by three strategies, asked, served under load with kills, on devices."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
import torch

import manyhands as mh
import own_models
import warm
from commands import run_command
from fleet import Fleet
from manyhands.lab.bench.inference import run_bench
from manyhands.serving.batching import BatchLimits
from manyhands.serving.model_parts import cut_predictor
from manyhands.serving.model_server import ModelServer, ServeOptions
from manyhands.serving.opening import open_predictor
from manyhands.strategy import Strategy
from manyhands.task import Task
from manyhands.workloads.exporting import export_run
from served_load import asked, connected, under_load

HERE = Path(own_models.__file__)
REQUESTS, ROUNDS = 240, 4


@pytest.mark.parametrize(
    ("make", "strategy"),
    [
        (own_models.cnn, "mirrored"),
        (own_models.cnn, "ps"),
        (own_models.cnn, "pipeline stages=2"),
        (own_models.transformer, "allreduce"),
        (own_models.transformer, "sharded"),
        (own_models.transformer, "pipeline stages=2"),
    ],
)
def test_trained_by_three_strategies_and_asked_alike(make: Any, strategy: str, tmp_path: Path) -> None:
    task: Task = make()
    run = mh.fit(task, strategy, workers=2, steps=12, out=tmp_path / "run")
    predictor = open_predictor(tmp_path / "run", task)
    values = (
        ["ABC", "XY", "LMNOP"]
        if make is own_models.transformer
        else (own_models.images(3)[0].float() / 16).tolist()
    )
    write = task.write_answer or torch.Tensor.tolist
    read = task.read_input or torch.tensor
    with torch.inference_mode():
        expected = [write(run.model.eval()(read(value)[None])[0]) for value in values]
    found = predictor.answers(predictor.inputs(values))
    if make is own_models.transformer:
        assert found == expected
    else:
        np.testing.assert_allclose(found, expected, rtol=1e-4)


@pytest.mark.parametrize("strategy", [None, "pipeline stages=2", "tensor slices=2"])
def test_images_under_load_with_kills_are_neither_lost_nor_mixed(
    strategy: str | None, tmp_path: Path
) -> None:
    """Of the file that `export` writes; every request has another number of images, and no two images are alike."""
    task = own_models.cnn()
    mh.fit(task, "single", steps=3, out=tmp_path / "run")
    place = export_run(tmp_path / "run", tmp_path / "model.safetensors", task=task).path
    predictor, module = open_predictor(place, task), mh.load(tmp_path / "run", task)
    brightness = torch.linspace(0.1, 4, 720).view(-1, 1, 1, 1)
    pixels = torch.rand(720, 1, 8, 8, generator=torch.Generator().manual_seed(0)) * brightness
    with torch.inference_mode():
        scores = module(pixels)
    apart = torch.cdist(scores, scores, compute_mode="donot_use_mm_for_euclid_dist") + torch.eye(720)
    pixels, expected = (
        one[apart.amin(1) > 1e-3][:480] for one in (pixels, scores)
    )  # another's would be seen
    requests = [part.tolist() for part in torch.split(pixels, [1, 2, 3] * 80)]
    expected = torch.split(expected, [1, 2, 3] * 80)
    if strategy is not None:
        cut_predictor(predictor, Strategy.parse(strategy))
    options = ServeOptions(workers=2, batches=BatchLimits(wait_s=0.001, deadline_s=30.0))
    with ModelServer(predictor, "sides", options) as server:
        for number, answers in under_load(server, requests, kills=2):
            np.testing.assert_allclose(answers, expected[number], rtol=0, atol=1e-5)
        assert server.view().batch_mean > 1, "requests of several clients share batches"


def test_texts_under_load_with_kills_are_neither_lost_nor_mixed(tmp_path: Path) -> None:
    task = own_models.transformer()
    mh.fit(task, "single", steps=60, out=tmp_path / "run")
    predictor = open_predictor(tmp_path / "run", task)
    drawn = np.random.default_rng(0)
    texts = [
        "".join(chr(65 + (start + place) % 26) for place in range(length))
        for start, length in zip(
            drawn.integers(0, 26, REQUESTS), drawn.integers(2, own_models.CONTEXT, REQUESTS), strict=True
        )
    ]
    expected = [chr(65 + (ord(text[-1]) - 64) % 26) for text in texts]
    options = ServeOptions(workers=2, batches=BatchLimits(wait_s=0.001, deadline_s=30.0))
    with ModelServer(predictor, "letters", options) as server:
        for number, (answer,) in under_load(server, [[text] for text in texts], kills=2):
            assert answer["next"] == expected[number], "each text has the letter after its own"
        connection = connected(server)
        status, said = asked(server, ["A" * (own_models.CONTEXT + 1)], connection)
        assert (status, "a shape that it takes is 5" in said["error"]) == (400, True), said
        status, said = asked(server, ["AB", 7], connection)
        assert (status, said["error"][:7]) == (400, "input 1")
        for path in ("/healthz", "/readyz"):
            connection.close()
            connection.request("GET", path)
            assert connection.getresponse().status == 200
        connection.close()
        connection.request("GET", "/openapi.json", headers={"Authorization": f"Bearer {server.token}"})
        described = json.loads(connection.getresponse().read())
        sent = described["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]
        assert sent["example"] == {"inputs": ["HELLO"]}
        connection.close()


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_on_three_devices_over_https_of_which_one_is_killed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named, task = f"{HERE}:{name}", getattr(own_models, name)()
    options = ("--min-reports", "3", "--deadline", "20", "--select", "5", "--hold", "1", "--linger", "10")
    strategy = "epochs=2 batch=8"
    with Fleet(
        tmp_path, strategy, devices=3, rounds=ROUNDS, options=("--over", "1", *options), own=named
    ) as fleet:
        fleet.until_round(1, 60)
        fleet.strike_in_a_round(1, 30)
        fleet.until_end(90)
        assert [len(row["counted"]) for row in fleet.rows()] == [3] * ROUNDS, fleet.log
        simulated = mh.fit(task, f"federated clients=3 {strategy}", rounds=ROUNDS)
        final = mh.load(fleet.run, task).state_dict()
        for key, tensor in simulated.model.state_dict().items():
            # AdamW moves each weight by about 0.1 in all, and scales the rounding of small gradients up as well.
            torch.testing.assert_close(final[key], tensor, rtol=1e-3, atol=1e-3)
        for number in range(3):
            predictor = open_predictor(fleet.device_state(number), task)
            for key, tensor in predictor.model.state_dict().items():
                assert torch.equal(tensor, final[key]), f"device {number} has not the last model"
    values = ["AB", "XYZ"] if name == "transformer" else (own_models.images(2)[0].float() / 16).tolist()
    (tmp_path / "two.json").write_text(json.dumps(values))
    words = ("predict", fleet.device_state(1), tmp_path / "two.json", "--task", named)
    assert run_command(monkeypatch, *words) == 0
    assert [len(json.loads(line)) for line in capsys.readouterr().out.splitlines()] == [2, 2]


@pytest.mark.parametrize("name", ["cnn", "transformer"])
def test_the_commands_export_it_and_name_the_row_of_a_file_that_is_wrong(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    task, named = getattr(own_models, name)(), ("--task", f"{HERE}:{name}")
    mh.fit(task, "single", steps=3, out="run")
    values: list[Any] = (
        (own_models.images(1600)[0].float() / 16).tolist()
        if name == "cnn"
        else [chr(65 + number % 26) * (1 + number % 5) for number in range(1600)]
    )
    values[1500] = [[[0.5] * 8] * 7] if name == "cnn" else "A" * (own_models.CONTEXT + 1)
    Path("many.json").write_text(json.dumps(values))
    Path("before.txt").write_text("of before")
    assert run_command(monkeypatch, "predict", "run", "many.json", "--out", "before.txt", *named) == 2
    assert Path("before.txt").read_text() == "of before", "a file is replaced by a whole one only"
    shape = "1×7×8 (float64)" if name == "cnn" else "13 (int64)"
    assert f"input 1500 has shape {shape}" in capsys.readouterr().err
    assert run_command(monkeypatch, "export", "run", "--out", "model.safetensors", *named) == 0
    program = ("export", "run", "--format", "torch-export", "--out", "model.pt2", *named)
    assert run_command(monkeypatch, *program) == 0
    capsys.readouterr()
    for place in ("run", "model.safetensors"):
        words = ("predict", place, "many.json", "--skip-bad", "--out", f"{place}.txt", *named)
        assert run_command(monkeypatch, *words) == 0
        assert "1 bad row of many.json left out" in capsys.readouterr().err
    answers = [json.loads(line) for line in Path("run.txt").read_text().splitlines()]
    assert len(answers) == 1599
    assert Path("model.safetensors.txt").read_text() == Path("run.txt").read_text()
    loaded, read = torch.export.load("model.pt2").module(), task.read_input or torch.tensor
    chosen = [number for number in range(1599) if name == "cnn" or number % 5 == 4][:40]
    batch = torch.stack([read(values[number]) for number in chosen])
    with torch.inference_mode():
        found = [(task.write_answer or torch.Tensor.tolist)(row) for row in loaded(batch)]
    for number, one in zip(chosen, found, strict=True):
        pairs = (
            (one, answers[number]) if name == "cnn" else (one["probability"], answers[number]["probability"])
        )
        np.testing.assert_allclose(*pairs, rtol=0, atol=2e-4)


def test_the_command_serves_an_own_task_in_stages_with_a_given_token(tmp_path: Path) -> None:
    mh.fit(own_models.transformer(), "single", steps=60, out=tmp_path / "run")
    (tmp_path / "letters.py").write_text("import own_models\ntask = own_models.transformer()\n")
    words = [
        "--task",
        "letters:task",
        "--workers",
        "1",
        "--strategy",
        "pipeline stages=2",
        "--names",
        "model.test",
    ]
    command = [sys.executable, "-m", "manyhands", "serve", "run", *words]
    environment = {**os.environ, "MANYHANDS_TOKEN": "a-token-of-letters", "PYTHONPATH": str(HERE.parent)}
    with warm.Popen(command, cwd=tmp_path, stderr=PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        report = ""
        for line in process.stderr:
            report += line
            if line.startswith("Ctrl-C"):
                break
        assert "a-token-of-letters" not in report, "logs are kept"
        found = re.search(r"curl -s http://(\S+)/predict -H .*MANYHANDS_TOKEN\" -d '(.*)'", report)
        assert found is not None, report
        assert json.loads(found[2]) == {"inputs": ["HELLO"]}
        connection = http.client.HTTPConnection(found[1], timeout=240)
        headers = {"Authorization": "Bearer a-token-of-letters", "Host": "model.test"}
        connection.request("POST", "/predict", '{"inputs": ["ABC", "XY"]}', headers)
        answer = connection.getresponse()
        assert [one["next"] for one in json.loads(answer.read())["answers"]] == ["D", "Z"]
        connection.request("GET", "/readyz", headers={"Host": "model.test"})
        assert connection.getresponse().status == 200
        connection.close()
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=240)[1]
        assert "manyhands serve run --task letters:task starts it again" in said
        assert process.returncode == 0


def test_speed_is_measured_of_an_own_model_too() -> None:
    result = run_bench([f"{HERE}:transformer"], ["fp32", "bf16"], [1, 4], [1], seconds=0.05)
    assert [(row["precision"], row["batch"]) for row in result["rows"]] == [
        ("fp32", 1),
        ("bf16", 1),
        ("fp32", 4),
        ("bf16", 4),
    ]
    assert all(row["inputs_per_s"] > 0 for row in result["rows"])
    assert result["rows"][0]["agreement"] == 1.0


def test_weights_of_servers_that_are_not_those_of_the_task_get_a_sentence(tmp_path: Path) -> None:
    mh.fit(own_models.cnn(), "ps", workers=1, steps=2, out=tmp_path / "run")
    with pytest.raises(mh.errors.UserError, match=r"do not fit the task's model: .* is missing"):
        open_predictor(tmp_path / "run", own_models.transformer())
