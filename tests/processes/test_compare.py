"""`manyhands compare` as a user meets it, and its figures held against what made them."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import warm
from commands import run_command
from manyhands.lab.compare.bandwidth import Rate, why_not
from manyhands.strategies.ps.audit import audit
from manyhands.strategies.ps.strategy import Ps
from manyhands.strategies.ps.update_files import read_logs
from manyhands.strategy import Strategy
from manyhands.workloads.tasks import build


def test_strategies_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [
        "allreduce algorithm=ring", "allreduce algorithm=master-worker", "ps consistency=async", "local steps=5",
    ]  # fmt: skip
    workers = 3
    status = run_command(
        monkeypatch, "compare", "digits", "--strategies", ";".join(names), "--steps", "20", "--repeats", "1",
        "--workers", str(workers), "--slow", "worker=1,factor=10", "--json", "f.json", "--out", "both",
    )  # fmt: skip
    printed = capfd.readouterr()
    assert status == 0, printed.err
    *_, report, heading, explain, watch, scaling = printed.out.splitlines()
    assert (report, heading) == ("report  both/report.html", "next")
    fastest = explain.split()[2]
    assert (tmp_path / fastest / "summary.json").exists()
    assert (explain.split()[1], watch.split()[1:3]) == ("explain", ["show", fastest])
    assert scaling.split()[:3] == ["manyhands", "scaling", "digits"]
    assert "Worker 1 was slowed down, 10 times" in " ".join(printed.out.split())
    assert printed.err.splitlines()[0] == f"run 1 of 4 · {names[0]}"
    figures = json.loads((tmp_path / "f.json").read_text())
    ring, master, server, local = figures["strategies"]
    assert [one["strategy"] for one in figures["strategies"]] == names
    text = "".join(
        ElementTree.fromstring((tmp_path / "both/report.html").read_text().split("\n", 1)[1]).itertext()
    )
    assert all(name in text for name in names)

    # A ring sends 2 (P - 1) / P of the gradient from each of P workers, and each frame's head and loss; a master sends
    # the same total, but P - 1 whole gradients of it itself.
    num_bytes = sum(parameter.nbytes for parameter in build("digits").model().parameters())
    total = 2 * (workers - 1) * num_bytes
    for one, busiest in ((ring, total / workers), (master, (workers - 1) * num_bytes)):
        assert 0 <= one["bytes_per_step"]["median"] - total <= 0.02 * total
        assert 0 <= one["busiest_bytes_per_step"]["median"] - busiest <= 0.02 * busiest
    assert ring["waits_mostly_for"] == 1

    # Staleness is that which the logs of the run prove.
    directory = tmp_path / "both/03-ps-1"
    strategy = Strategy.parse(names[2])
    assert isinstance(strategy, Ps)
    histogram = audit(read_logs(directory).files, strategy.consistency, 20).shards[0].staleness
    mean = sum(value * count for value, count in histogram.items()) / sum(histogram.values())
    assert server["staleness_mean"]["median"] == pytest.approx(mean)
    assert server["staleness_max"] == max(histogram)
    summary = json.loads((directory / "summary.json").read_text())
    assert server["final"]["accuracy"]["median"] == summary["final"]["accuracy"]

    # Local replicas meet at averages: nothing is stale, and there alone they are evaluated.
    assert local["failures"] == []
    assert (local["staleness_max"], local["waits_mostly_for"]) == (0, 1)
    assert local["target_steps"]["median"] % 5 == 0
    assert "evaluations wait for the next average" in text


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--strategies", "single; alreduce"], ["'alreduce'", "did you mean 'allreduce'?"]),
        (["--strategies", "single; single"], ["'single' twice"]),
        (["--target", "precision=0.9"], ["precision", "accuracy"]),
        (["--slow", "worker=7,factor=2"], ["no worker 7"]),
        (["--bandwidth", "fast"], ["'fast'", "1Gbit"]),
        (["--batch-size", "zero"], ["batch_size", "'zero'"]),
        (["--json", "no/such/folder/f.json"], ["no/such/folder"]),
    ],
)
def test_mistakes_are_one_line_and_exit_status_2(
    arguments: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command(monkeypatch, "compare", "digits", *arguments) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert all(part in error for part in parts), error
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_is_shown_and_exit_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    status = run_command(
        monkeypatch, "compare", "digits", "--strategies", "single", "--repeats", "1", "--steps", "30",
        "--learning-rate", "1e38", "--out", "c",
    )  # fmt: skip
    printed = capfd.readouterr().out
    assert status == 1
    assert "failed" in printed
    assert "No run finished." in printed
    assert "single failed: " in (tmp_path / "c/report.html").read_text()


@pytest.mark.soak
def test_an_interrupt_leaves_the_figures_of_what_was_done(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "manyhands", "compare", "digits", "--strategies", "single; mirrored"]
    process = warm.Popen(
        [*command, "--steps", "20", "--repeats", "1", "--out", "c"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("run 2 of 2"):
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert "not run" in out
    assert out.splitlines()[-1] == "report  c/report.html"


@pytest.mark.soak
def test_a_shaped_network_is_no_faster_than_its_rate(tmp_path: Path) -> None:
    rate = Rate.parse("8Mbit")
    reason = why_not(rate)
    if reason is not None:
        pytest.skip(f"this machine cannot shape its loopback: {reason}")
    command = [sys.executable, "-m", "manyhands", "compare", "digits", "--strategies"]
    strategies = "ps link=tcp; ps; allreduce link=tcp; allreduce link=tcp codec=topk:0.01"
    done = warm.run(
        [*command, strategies, "--steps", "20", "--repeats", "1", "--out", "c", "--bandwidth", "8Mbit"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "c/01-ps-1/summary.json").read_text())
    most = rate.burst_bytes + rate.bits_per_s / 8 * summary["seconds"]
    pushed = sum(worker["bytes_sent"] for worker in summary["per_worker"])
    assert pushed <= most
    assert 2 * pushed <= most, "what workers push, they have pulled before"
    # In each step every worker pushes its gradient and pulls the parameters: 2 P n bytes, and one pull more at the end.
    num_bytes = sum(parameter.nbytes for parameter in build("digits").model().parameters())
    figures = json.loads((tmp_path / "c/figures.json").read_text())["strategies"]
    assert figures[0]["bytes_per_step"]["median"] == pytest.approx(2 * 2 * num_bytes, rel=0.1)
    said = " ".join(done.stdout.split())
    assert "TCP was limited to 8 Mbit/s" in said
    assert "ps does not use the network on one host, so --bandwidth did not affect it." in said
    assert "Under allreduce link=tcp, beside no codec and by the time to the target: topk:0.01" in said
    # Of two workers each sends half of the gradient and half of the sum, or a hundredth of the items and their places.
    ring, few = figures[2:]
    assert ring["busiest_bytes_per_step"]["median"] == pytest.approx(num_bytes, rel=0.1)
    assert few["busiest_bytes_per_step"]["median"] < num_bytes / 20
    for folder in ("03-allreduce-1", "04-allreduce-1"):
        summary = json.loads((tmp_path / "c" / folder / "summary.json").read_text())
        sent = sum(worker["bytes_sent"] for worker in summary["per_worker"])
        assert sent <= rate.burst_bytes + rate.bits_per_s / 8 * summary["seconds"]


def test_densities_are_compared_on_examples_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sparse"
    status = run_command(
        monkeypatch, "compare", "sparse", "--density", "0.02,0.5", "--features", "100", "--nonzeros", "20000",
        "--strategies", "single; hogwild", "--passes", "2", "--out", out,
    )  # fmt: skip
    printed = capfd.readouterr()
    assert status == 0, printed.err
    found = json.loads((out / "figures.json").read_text())
    assert [(row["density"], row["strategy"]) for row in found["rows"]] == [
        (0.02, "single"), (0.02, "hogwild"), (0.5, "single"), (0.5, "hogwild"),
    ]  # fmt: skip
    assert all(0 < row["loss"] < 0.7 for row in found["rows"])
    assert (out / "report.html").exists()
    assert "manyhands train logreg --strategy hogwild --no-bias --train" in printed.out
    for words, part in (
        (["--density", "x"], "'x' is not a number"),
        (["--density", "2"], "density=2 must be"),
    ):
        assert run_command(monkeypatch, "compare", "sparse", *words, "--out", tmp_path / "none") == 2
        assert part in capfd.readouterr().err
