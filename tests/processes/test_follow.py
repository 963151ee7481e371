"""A real run with a straggler, followed from before its beginning to its end."""

from pathlib import Path

from manyhands.engine.background_run import start
from manyhands.engine.options import Options, Slowdown
from manyhands.observe.analyse.follow import RunFollower
from manyhands.observe.analyse.view import Phase
from manyhands.observe.draw.time_table import end_table
from manyhands.workloads.tasks import TASKS

POLL_S = 0.2


def test_the_last_view_of_a_run_equals_its_summary_and_all_name_the_straggler(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    follower = RunFollower(run)
    views = [follower.poll()]
    options = Options(slow=Slowdown(worker=1, factor=3))
    with start(TASKS["digits"].build(), "mirrored", workers=2, steps=60, out=run, options=options) as running:
        while not running.done:
            views.append(follower.poll())
            try:
                running.result(POLL_S)
            except TimeoutError:
                continue
        summary = running.result().summary
    view = follower.poll()

    assert view.phase is Phase.ENDED
    assert (view.step, view.steps_asked) == (summary["steps"], summary["steps_asked"])
    assert view.samples_per_s == summary["samples_per_s"]
    for worker, report in zip(view.workers, summary["per_worker"], strict=True):
        assert (worker.steps, worker.samples) == (report["steps"], report["samples"])
        assert (worker.bytes_sent, worker.messages_sent) == (report["bytes_sent"], report["messages_sent"])
        assert view.waits[worker.role] == tuple(report["wait_for_s"])
    assert {"loss": summary["final"]["loss"], **view.final} == summary["final"]
    assert sum(one.num_bytes for one in view.traffic) == sum(
        report["bytes_sent"] for report in summary["per_worker"]
    )

    assert [slow["worker"] for slow in summary["slow"]] == [1]
    (warning,) = view.warnings
    assert warning.startswith("worker 1 is")
    assert " ".join(warning.split()) in " ".join(str(end_table(summary).caption).split())

    assert views[0].phase is Phase.STARTING
    steps = [seen.step for seen in views]
    assert steps == sorted(steps)
    assert RunFollower(run).poll() == view
