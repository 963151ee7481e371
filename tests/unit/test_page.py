"""The page of a run: everything a view holds is said, in place, escaped, and the same in a report."""

import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import numpy as np
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from manyhands.data.store.rundir import RunDirectory
from manyhands.observe.analyse.follow import RunFollower
from manyhands.observe.analyse.run_view import Gather, model_view
from manyhands.observe.analyse.view import Curve, Phase
from manyhands.observe.draw.page import report, sections, title_of
from views import empty_view, run_view, starting_view

KEYS = [
    "now", "wrong", "loss", "metrics", "model", "throughput", "workers", "servers", "waits", "traffic", "staleness",
    "members", "made", "notes",
]  # fmt: skip
ROOT = Path(__file__).parents[2]
HOSTILE = '<script>alert(1)</script>"onload="x'


def words(html: str) -> str:
    return " ".join("".join(ET.fromstring(html).itertext()).split())


def test_every_section_keeps_its_place_whatever_there_is_to_say() -> None:
    for view in (empty_view(), run_view(), run_view(phase=Phase.ENDED), run_view(workers=64)):
        found = sections(view)
        assert list(found) == KEYS
        for key, html in found.items():
            root = ET.fromstring(html)
            assert (root.tag, root.get("id")) == ("section", key)
            assert root.find("h2") is not None


def test_without_servers_their_sections_keep_their_place_unseen() -> None:
    found = sections(empty_view(strategy="mirrored"))
    assert list(found) == KEYS
    for key in ("servers", "staleness"):
        assert ET.fromstring(found[key]).get("class") == "absent"


def test_a_section_is_a_file_and_a_line(tmp_path: Path) -> None:
    """The recipe of docs/internals/extending.md, word by word, in a copy of the sources."""
    recipe = (
        (ROOT / "docs" / "internals" / "extending.md")
        .read_text()
        .partition("## A section of a run's page\n")[2]
    )
    file = recipe.partition("```python\n")[2].partition("```")[0]
    line = recipe.partition("```text\n")[2].partition("```")[0]
    shutil.copytree(
        ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info")
    )
    draw = tmp_path / "src" / "manyhands" / "observe" / "draw"
    (draw / "samples_section.py").write_text(file)
    page, (before, after) = draw / "page.py", ((draw / "page.py").read_text().split('    "made": ', 1))
    page.write_text(f'{before}{line}    "made": {after}')
    asked = (
        "from manyhands.observe.analyse.run_view import Gather\n"
        "from manyhands.observe.draw.page import report, sections\n"
        "view = Gather(task='digits', workers=2).view(0)\n"
        "print(list(sections(view)), 'Of each worker' in report(view))"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src")},
        capture_output=True,
        text=True,
    )
    assert done.stdout == f"{[*KEYS[:-2], 'samples', *KEYS[-2:]]} True\n", done.stderr


def test_the_page_says_what_the_view_holds() -> None:
    view = run_view()
    said = {key: words(html) for key, html in sections(view).items()}
    assert "120 of 400" in said["now"]
    assert "running" in said["now"]
    assert "worker 2 is 2.9× slower" in said["wrong"]
    assert "worker 2" in said["workers"]
    assert "4.20" in said["waits"]
    assert "0–2" in said["servers"]
    assert "server 1 (gone)" in said["servers"]
    assert "mean 0.56, most 5" in said["staleness"]
    assert "tcp" in said["traffic"]
    assert "server 0 took shard 3 over" in said["members"]
    assert said["members"].index("died") < said["members"].index("started"), "the newest first"
    assert "stops at its bound" in said["notes"]
    assert "best accuracy0.925 step 120" in said["now"]


def test_a_report_says_by_which_command_where_when_and_with_which_settings(tmp_path: Path) -> None:
    said = words(sections(run_view())["made"])
    for name, text in run_view().about:
        assert f"{name} {text}" in re.sub(f"({name})", r"\1 ", said, count=1), name
    config = {
        "task": "t",
        "seed": 3,
        "batch_size": 8,
        "samples": 4,
        "parameters": {},
        "task_options": {"width": 16},
    }
    RunDirectory.create(tmp_path / "run", config).close()
    began = RunDirectory.open(tmp_path / "run", lock=False).origin["unix_s"]
    page = words(sections(RunFollower(tmp_path / "run").poll())["made"])
    assert socket.gethostname() in page
    assert time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(began)) in page
    assert Path(sys.argv[0]).name in page, "the command"
    assert "width=16" in page


def test_a_run_of_an_older_release_has_its_settings_and_no_command(tmp_path: Path) -> None:
    config = {
        "task": "t",
        "strategy": "ps",
        "seed": 3,
        "batch_size": 8,
        "samples": 4,
        "parameters": {"w": "float32 4"},
    }
    kept = {"format": "manyhands run", "version": 1, "config": config}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    about = dict(RunFollower(tmp_path).poll().about)
    assert about == {"task": "t", "strategy": "ps", "seed": "3", "batch size": "8", "samples": "4"}


def test_before_the_first_step_the_page_says_that_it_waits_for_it() -> None:
    for view in (starting_view(), empty_view()):
        said = {key: words(html) for key, html in sections(view).items()}
        assert "Waiting for the first step." in said["loss"]
        assert "Waiting for the first step." in said["throughput"]
        assert "waiting for the first step" in said["wrong"]
    assert title_of(Gather().view(0)) == "A run that has not started"


def test_losses_that_were_evaluated_are_not_nothing_and_a_short_run_took_some_time() -> None:
    gather = Gather(task="gbdt", strategy="single", steps_asked=2, workers=1)
    gather.meet(0, "worker-0")
    gather.add_rows(
        [{"step": 1, "loss": 0.6, "at_s": 0.1}, {"step": 1, "metrics": {"valid_loss": 0.7}, "at_s": 0.2}]
    )
    gather.summary = {}
    view = replace(gather.view(0), seconds=0.276)
    said = {key: words(html) for key, html in sections(view).items()}
    assert "valid loss" in said["loss"]
    assert "Nothing was evaluated" not in said["metrics"]
    assert "chart of the loss" in said["metrics"]
    assert "elapsed276 ms" in said["now"]
    assert "Nothing was evaluated" in words(sections(empty_view(phase=Phase.ENDED))["metrics"])


def test_who_has_not_come_yet_is_starting_and_not_gone() -> None:
    view = Gather(strategy="ps servers=2", workers=2).view(0)
    said = words(sections(view)["workers"]) + words(sections(view)["servers"])
    for name in ("worker 0", "worker 1", "server 0", "server 1"):
        assert f"{name} (starting)" in said
    assert "gone" not in said


def test_equal_views_give_equal_text_and_one_change_changes_few_sections() -> None:
    before, after = sections(run_view()), sections(run_view())
    assert before == after
    quicker = sections(replace(run_view(), samples_per_s=9999.0))
    assert [key for key in KEYS if quicker[key] != before[key]] == ["now"]


def test_hostile_text_stays_text() -> None:
    view = run_view()
    hostile = replace(
        view,
        task=HOSTILE,
        strategy=HOSTILE,
        warnings=(HOSTILE,),
        best=(HOSTILE, 1.0, 1),
        about=((HOSTILE, HOSTILE), ("command", HOSTILE)),
        notes=(HOSTILE,),
        curves=(*view.curves, Curve(name=HOSTILE, steps=(1.0,), seconds=(1.0,), values=(1.0,))),
        workers=tuple(replace(one, name=HOSTILE, waits_for=HOSTILE) for one in view.workers),
        servers=tuple(replace(one, name=HOSTILE) for one in view.servers),
        traffic=tuple(replace(one, wire=HOSTILE, codec=HOSTILE) for one in view.traffic),
        happenings=tuple(
            replace(one, who=HOSTILE, what=HOSTILE, sentence=HOSTILE) for one in view.happenings
        ),
    )
    page = report(hostile)
    assert "<script" not in page
    assert not any(name.startswith("on") for one in ET.fromstring(page).iter() for name in one.attrib)


def test_a_report_is_one_file_that_asks_for_nothing() -> None:
    page = report(run_view(phase=Phase.ENDED))
    assert not re.search(r"""(src|href)=["'](?!#|data:,)""", page)
    assert "url(" not in page
    assert "default-src 'none'" in page
    ET.fromstring(page)


def test_every_part_that_scrolls_can_be_reached_and_has_a_name() -> None:
    for html in sections(run_view()).values():
        for one in ET.fromstring(html).iter("div"):
            if one.get("class") in ("fill", "scroll"):
                assert (one.get("tabindex"), one.get("role")) == ("0", "region")
                assert one.get("aria-label")


def test_a_page_of_many_workers_stays_small() -> None:
    assert len(report(run_view(workers=64))) < 400_000


def test_the_best_evaluation_is_that_of_the_first_metric_that_is_no_loss() -> None:
    def best_of(*metrics: dict[str, float]) -> object:
        gather = Gather(task="t", strategy="single")
        gather.add_rows(
            [{"step": 10 * (n + 1), "at_s": 1.0, "metrics": one} for n, one in enumerate(metrics)]
        )
        return gather.view(0).best

    assert best_of() is None
    rising = ({"evaluation_loss": 0.9, "accuracy": 0.7}, {"evaluation_loss": 0.5, "accuracy": 0.6})
    assert best_of(*rising) == ("accuracy", 0.7, 10)
    assert best_of({"absolute_error": 0.7}, {"absolute_error": 0.2}, {"absolute_error": 0.4}) == (
        "absolute_error",
        0.2,
        20,
    )
    assert best_of({"evaluation_loss": math.nan}, {"evaluation_loss": 0.4}) == ("evaluation_loss", 0.4, 20)
    # A loss on what was trained on gives way to one on rows held out, which come in rows of their own.
    both = ({"pass_loss": 0.2}, {"valid_loss": 0.6}, {"pass_loss": 0.1}, {"valid_loss": 0.5})
    assert best_of(*both) == ("valid_loss", 0.5, 40)


def test_a_model_of_tables_has_its_scores_confusion_and_important_features() -> None:
    summary = {
        "quality": {
            "measured_on": "10 rows held out",
            "scores": {"accuracy": 0.9, "AUC": 0.95},
            "labels": ["0", "1"],
            "confusion": [[5, 1], [0, 4]],
        },
        "importance": [{"feature": f"f{n}", "gain": 30.0 - n, "splits": n} for n in range(12)],
    }
    html = sections(replace(run_view(phase=Phase.ENDED), model=model_view(summary)))["model"]
    words = " ".join(ET.fromstring(html).itertext())
    for expected in ("The model on 10 rows held out", "0.95", "predicted 1", "f9", "10 of 12"):
        assert expected in words
    assert "f10" not in words, "the ten that gain most"


def test_several_classes_have_their_precision_and_recall() -> None:
    drawn = np.random.default_rng(3)
    own, said = drawn.integers(0, 3, 200), drawn.integers(0, 3, 200)
    said[:120] = own[:120]
    confusion = confusion_matrix(own, said).tolist()
    view = model_view({"quality": {"labels": ["a", "b", "c"], "confusion": confusion, "scores": {}}})
    assert view is not None
    *expected, rows = precision_recall_fscore_support(own, said)
    np.testing.assert_allclose([one[2:] for one in view.by_label], np.transpose(expected))
    assert [one[:2] for one in view.by_label] == list(zip("abc", rows, strict=True))
    html = sections(replace(run_view(phase=Phase.ENDED), model=view))["model"]
    assert {"By label", "predicted c", f"{expected[1][2]:.3f}"} <= set(ET.fromstring(html).itertext())
    many = {"labels": list(range(30)), "confusion": np.eye(30, dtype=int).tolist(), "scores": {}}
    view = model_view({"quality": many})
    html = sections(replace(run_view(phase=Phase.ENDED), model=view))["model"]
    assert "By label" in html
    assert "predicted" not in html, "a table of 30 columns is not drawn"


def test_a_damaged_summary_shows_what_can_be_read() -> None:
    assert model_view({}) is None
    assert model_view({"quality": 7, "importance": {"a": 1}}) is None
    for confusion in ([[1]], [[1, 2], [3]], [[1, 2], 3], "text", None):
        found = model_view({"quality": {"labels": ["a", "b"], "confusion": confusion, "scores": {"x": "y"}}})
        assert found is not None
        assert (found.confusion, found.labels, found.scores) == ((), (), {})
    assert 'class="absent"' in sections(run_view())["model"]


def test_what_is_missing_is_a_section_only_where_something_is() -> None:
    assert 'class="absent"' in sections(replace(run_view(), notes=()))["notes"]
    assert "one file is damaged" in sections(replace(run_view(), notes=("one file is damaged",)))["notes"]
