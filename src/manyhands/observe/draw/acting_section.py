"""The acting of reinforcement learning: what is earned, by how many frames and in what time, and who waits."""

from __future__ import annotations

import base64

from manyhands.observe.analyse.view import RunView
from manyhands.observe.draw.charts import Series, histogram, line_chart
from manyhands.observe.draw.paper import PageSection, figure, tile


def acting(run: RunView) -> PageSection | None:
    view = run.acting
    if view is None:
        return None
    values = {
        "frames": f"{view.frames:,}",
        "frames/s": f"{view.frames_per_s:,.0f}",
        "updates/s": f"{view.updates_per_s:,.1f}",
        "episodes": f"{view.episodes:,}",
    }
    if view.lags:
        values |= {
            "learner waited": f"{view.learner_waited:.0%}",
            "actors waited": f"{view.actors_waited:.0%}",
            "actors replaced": f"{view.replaced:,}",
            "rollouts dropped": f"{view.dropped:,}",
        }
    tiles = "".join(tile(name, text) for name, text in values.items())
    curve, empty = view.returns, "No episode has ended."
    charts = [
        line_chart(
            [Series(name="return", xs=xs, ys=curve.values)] if curve is not None else [],
            title=f"Mean return of the last 100 episodes, over {unit}",
            x_label=unit,
            y_label="return",
            empty=empty,
        )
        for unit, xs in (
            ("frames", curve.steps if curve else ()),
            ("seconds", curve.seconds if curve else ()),
        )
    ]
    pairs = f'<div class="pair"><div>{charts[0]}</div><div>{charts[1]}</div></div>'
    if view.lags:
        total = sum(view.lags.values())
        mean = sum(lag * count for lag, count in view.lags.items()) / total
        pairs += histogram(
            view.lags,
            title=f"Policy lag: mean {mean:.2f}, most {max(view.lags)}",
            x_label="batches that the weights of a rollout were behind",
            y_label="rollouts",
        )
    if view.episode:
        data = base64.b64encode(view.episode).decode()
        image = f'<img class="episode" alt="An episode" src="data:image/png;base64,{data}"/>'
        pairs += figure("An episode of the trained policy, always with the best action", image)
    return PageSection("Acting", f'<dl class="tiles">{tiles}</dl>{pairs}', "wide")
