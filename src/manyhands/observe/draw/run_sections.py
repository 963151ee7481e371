"""The sections of a run's page, each a function from a view to its heading and body; `page` lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from html import escape
from itertools import chain

from manyhands.errors import format_bytes, format_seconds
from manyhands.observe.analyse.recent import WINDOW_NS
from manyhands.observe.analyse.view import Curve, PartiesView, PartyView, Phase, Presence, RunView
from manyhands.observe.draw import paper
from manyhands.observe.draw.axes import short_number
from manyhands.observe.draw.charts import Series, bar_chart, histogram, line_chart, loss_chart, share_bars

_TILE_LETTERS = 14
_FACT_LETTERS = 24  # characters of a value that fit in one of two columns on a phone
_MAX_NARROW_WAITS = 6  # workers whose waits fit in one column of the page
_MOST_PARTY_COLUMNS, _MOST_PARTY_ROWS, _MOST_COURSES = 24, 60, 4
_MOST_DRAWN = 20  # labels of a confusion table
_COMMON = "{} of the common model"


def now(view: RunView) -> paper.PageSection:
    ended = view.phase is Phase.ENDED
    left = view.seconds_left
    values = {
        "state": "evaluating" if view.evaluating else view.phase.value,
        "loss": "–" if view.loss is None else f"{view.loss:.4g}",
        "samples/s": f"{view.samples_per_s:,.0f}",
        "elapsed": format_seconds(view.seconds),
        "time left": format_seconds(left) if left is not None and view.phase is Phase.RUNNING else "–",
    }
    if ended:
        del values["time left"]
    of_all = f" of {view.steps_asked:,}" if view.steps_asked else ""
    tiles = [paper.tile(name, text) for name, text in values.items()]
    # A phone shows two tiles per row; a number that may be too long for one gets a full row.
    kind = "long" if len(f"{view.steps_asked:,}{of_all}") > _TILE_LETTERS else ""
    tiles.insert(1, paper.tile("step", f"{view.step:,}", of_all, kind))
    best = paper.tile("best metric", "–")  # reserved before there is one
    if view.best is not None:
        name, value, step = view.best
        best = paper.tile(f"best {_words(name)}", f"{value:.4g}", f" step {step:,}")
    tiles.insert(3, best)
    done, most = min(view.step, view.steps_asked), max(1, view.steps_asked)
    bar = f'<progress value="{done}" max="{most}" aria-label="step {view.step:,}{of_all}"></progress>'
    heading = "The whole run" if ended else "Now"
    said = paper.sentence_list(view.notices) if view.notices else ""
    return paper.PageSection(heading, f'<dl class="tiles">{"".join(tiles)}</dl>{bar}{said}', "wide")


def wrong(view: RunView) -> paper.PageSection:
    if view.warnings:
        body = paper.sentence_list(view.warnings)
    elif view.phase is Phase.STARTING:
        body = paper.quiet("Nothing so far; waiting for the first step.")
    else:
        body = '<p class="good">Nothing that the events tell of.</p>'
    spoken = f'<div class="wrong" role="status" aria-live="polite">{body}</div>'
    kind = "wide alarm" if view.warnings else "wide"
    return paper.PageSection("What is wrong", _fill("What is wrong", spoken), kind)


def loss(view: RunView) -> paper.PageSection:
    series = [_by_step(curve) for curve in view.curves if "loss" in curve.name]
    chart = loss_chart(series, title="Training and evaluation", x_label="step", empty=_none_yet(view))
    return paper.PageSection("Loss", chart)


def metrics(view: RunView) -> paper.PageSection:
    curves = [one for one in view.curves if "loss" not in one.name and one.name != "samples_per_s"]
    empty = "Nothing was evaluated." if view.phase is Phase.ENDED else "Nothing was evaluated yet."
    if view.final:
        empty = "Only losses; see the chart of the loss."
    chart = line_chart(
        [_by_step(curve) for curve in curves],
        title="On the evaluation data",
        x_label="step",
        y_label="metric",
        empty=empty,
    )
    return paper.PageSection("Metrics", chart)


def optimizer(view: RunView) -> paper.PageSection | None:
    """The learning rate and the gradient's norm, each with axes of its own; None where the run logs neither."""
    kinds = {"learning rate": "lr", "gradient norm": "grad_norm"}
    charts = []
    for title, name in kinds.items():
        series = [_by_step(curve) for curve in view.logged if curve.name.startswith(name)]
        if series:
            charts.append(line_chart(series, title=title.capitalize(), x_label="step", y_label=title))
    return paper.PageSection("Optimizer", "".join(charts)) if charts else None


def model(run: RunView) -> paper.PageSection:
    view = run.model
    if view is None:
        return paper.PageSection("The model", "", "absent")
    parts = []
    if view.scores:
        tiles = "".join(paper.tile(name, f"{value:.4g}") for name, value in view.scores.items())
        parts.append(f'<dl class="tiles">{tiles}</dl>')
    if 0 < len(view.confusion) <= _MOST_DRAWN:
        parts.append(
            paper.matrix(
                view.confusion,
                [f"label {name}" for name in view.labels],
                [f"predicted {name}" for name in view.labels],
                title=f"Labels and predictions, {view.measured_on}",
                show=lambda count: f"{count:,.0f}",
            )
        )
    if view.by_label:
        figures = [
            (name, f"{rows:,}", *(f"{one:.3f}" for one in rest)) for name, rows, *rest in view.by_label
        ]
        parts.append(
            paper.data_table(("label", "rows", "precision", "recall", "F1"), figures, title="By label")
        )
    body = "\n".join(parts)
    if view.importance:
        rows = [(name, short_number(gain), f"{splits:,}") for name, gain, splits in view.importance]
        some = f", {len(rows)} of {view.features}" * (len(rows) < view.features)
        table = paper.data_table(("feature", "gain", "splits"), rows, title=f"Important features{some}")
        body = f'<div class="pair"><div>{body}</div><div>{table}</div></div>' if parts else table
    heading = f"The model on {view.measured_on}" if view.measured_on else "The model"
    return paper.PageSection(heading, body, "wide")


def throughput(view: RunView) -> paper.PageSection:
    curves = [curve for curve in view.curves if curve.name == "samples_per_s"]
    chart = line_chart(
        [Series(name="samples/s", xs=one.seconds, ys=one.values) for one in curves],
        title="All workers together, over the run's seconds",
        x_label="seconds",
        y_label="samples/s",
        from_zero=True,
        empty=_none_yet(view),
    )
    return paper.PageSection("Throughput", chart)


def _none_yet(view: RunView) -> str:
    return "No step was recorded." if view.phase is Phase.ENDED else "Waiting for the first step."


def workers(view: RunView) -> paper.PageSection:
    heading = "Workers and their time"
    if not view.workers:
        return paper.PageSection(heading, paper.quiet("No worker has started yet."), "wide")
    is_over = view.phase is Phase.ENDED
    lately = f"the last {WINDOW_NS // 10**9} seconds"
    bars = share_bars(
        [(worker.name, astuple(worker.recent)) for worker in view.workers],
        list(paper.PART_COLOURS),
        title="Time over the whole run" if is_over else f"Time in {lately}",
        colours=list(paper.PART_COLOURS.values()),
    )
    rows = [
        (
            _named(worker.name, worker.presence, view.phase),
            f"{worker.steps:,}",
            short_number(worker.steps_per_s),
            f"{worker.compute_ms:.2f}",
            f"{100 * worker.shares.wait:.0f} %",
            worker.waits_for or "–",
            format_bytes(worker.bytes_sent),
            f"{worker.messages_sent:,}",
        )
        for worker in view.workers
    ]
    columns = ("worker", "steps", "steps/s", "compute, ms", "waited", "waits for", "sent", "messages")
    over = "The whole run" if is_over else f"Since the beginning; steps/s, compute and waits for in {lately}"
    table = paper.data_table(columns, rows, title=over, words=(0, 5), scrolls=False)
    both = f'<div class="pair">{bars}<div>{table}</div></div>'
    return paper.PageSection(heading, _fill(heading, both), "wide")


def waits(view: RunView) -> paper.PageSection:
    heading = "Who waits for whom"
    if len(view.waits) < 2:
        return paper.PageSection(heading, _fill(heading, paper.quiet("A single worker waits for no other.")))
    names = [worker.name for worker in view.workers][: len(view.waits)]
    names += [f"worker {index}" for index in range(len(names), len(view.waits))]
    table = paper.matrix(
        view.waits,
        names,
        [f"for {name.removeprefix('worker ')}" for name in names],
        title="Seconds that a row's worker waited",
        corner="waited",
        show=lambda seconds: f"{seconds:.2f}",
        scrolls=False,
    )
    return paper.PageSection(heading, _fill(heading, table), "broad" if _is_large(view) else "")


def servers(view: RunView) -> paper.PageSection:
    heading = "Servers and their shards"
    if not view.servers:
        return paper.PageSection(heading, "", "absent")
    even = 1 / len(view.servers)
    lately = "" if view.phase is Phase.ENDED else ", recently"
    bars = bar_chart(
        [(server.name, server.share) for server in view.servers],
        title=f"Share of all applying{lately} (even: {100 * even:.0f} % each)",
        show=lambda share: f"{100 * share:.0f} %",
    )
    rows = [
        (
            _named(server.name, server.presence, view.phase),
            _shards(server.primary_of),
            _shards(server.backup_of),
            format_bytes(server.num_bytes) if server.num_bytes else "–",
            f"{server.updates:,}",
            short_number(server.updates_per_s),
            f"{server.apply_ms:.3f}",
        )
        for server in view.servers
    ]
    columns = ("server", "primary of", "backup of", "parameters", "updates", "updates/s", "apply, ms")
    over = "The whole run" if view.phase is Phase.ENDED else "Updates since the beginning; rates recently"
    table = paper.data_table(columns, rows, title=over, words=(0, 1, 2), scrolls=False)
    both = f'<div class="pair">{bars}<div>{table}</div></div>'
    return paper.PageSection(heading, _fill(heading, both), "wide")


def staleness(view: RunView) -> paper.PageSection:
    if not view.servers:
        return paper.PageSection("Staleness", "", "absent")
    stale = view.staleness
    newest = f": mean {stale.mean:.2f}, most {stale.max}" if stale.histogram else ""
    chart = histogram(
        stale.histogram,
        title=f"Steps that updates missed{newest}",
        x_label="steps missed",
        y_label="updates",
        empty="No server has applied an update.",
    )
    return paper.PageSection("Staleness", chart)


def traffic(view: RunView) -> paper.PageSection:
    heading = "Traffic by link and codec"
    kind = "roomy" if view.servers and not _is_large(view) else ""
    if not view.traffic:
        return paper.PageSection(heading, _fill(heading, paper.quiet("Nothing was sent.")), kind)
    rows = [(one.wire, one.codec, format_bytes(one.num_bytes), f"{one.messages:,}") for one in view.traffic]
    steps = max(1, view.step)
    each = format_bytes(sum(one.num_bytes for one in view.traffic) / steps)
    columns = ("link", "codec", "sent", "messages")
    table = paper.data_table(
        columns, rows, title=f"In steps, all roles together; {each} each", words=(0, 1), scrolls=False
    )
    return paper.PageSection(heading, _fill(heading, table), kind)


def members(view: RunView) -> paper.PageSection:
    heading = "Members, faults and recoveries"
    kind = "broad" if view.servers else "wide" if _is_large(view) else ""
    if not view.happenings:
        nobody = _fill(heading, paper.quiet("No process has joined or left."))
        return paper.PageSection(heading, nobody, kind)
    has_epochs = any(one.epoch for one in view.happenings)
    rows = [
        (
            f"{one.at_s:.1f} s",
            *((str(one.epoch) if one.epoch else "–",) if has_epochs else ()),
            one.who,
            one.sentence or one.what,
        )
        for one in reversed(view.happenings)
    ]
    epoch = f"; the membership is in epoch {view.epoch}" if view.epoch else ""
    columns = ("at", *(("epoch",) if has_epochs else ()), "who", "what happened")
    words = (len(columns) - 2, len(columns) - 1)
    table = paper.data_table(columns, rows, title=f"The newest first{epoch}", words=words, scrolls=False)
    return paper.PageSection(heading, _fill(heading, table), kind)


def notes(view: RunView) -> paper.PageSection:
    heading = "What is missing here"
    if not view.notes:
        return paper.PageSection(heading, "", "absent")
    return paper.PageSection(heading, paper.sentence_list(view.notes), "wide slim")


def made(view: RunView) -> paper.PageSection:
    heading = "How this was made"
    if not view.about:
        return paper.PageSection(heading, paper.quiet("This is not known yet."), "wide")
    facts = []
    for name, text in view.about:
        kind = ' class="long"' if name == "command" or len(text) > _FACT_LETTERS else ""
        shown = f"<code>{escape(text)}</code>" if name == "command" else escape(text)
        facts.append(f"<div{kind}><dt>{escape(name)}</dt><dd>{shown}</dd></div>")
    return paper.PageSection(heading, f'<dl class="facts">{"".join(facts)}</dl>', "wide")


def parties(run: RunView) -> paper.PageSection | None:
    view = run.parties
    if view is None:
        return None
    often = Counter(view.rounds.values())
    if view.count > len(view.rounds):
        often[0] = view.count - len(view.rounds)
    title = f"{len(view.rounds)}{f' of {view.count}' if view.count else ''} parties have taken part"
    empty = "No round has ended yet."
    parts = [histogram(often, title=title, x_label="rounds", y_label="parties", empty=empty)]
    for name, curves in list(view.courses.items())[:_MOST_COURSES]:
        series = [Series(name=one.name.replace("_", " "), xs=one.steps, ys=one.values) for one in curves]
        title = f"{name} over the parties, at each evaluation"
        parts.append(line_chart(series, title=title, x_label="round", y_label=name))
    if view.parties:
        parts += [skew_picture(view), _parties_spread(view), _parties_table(view)]
    else:
        parts.append(paper.quiet("Each party's samples and metrics are known at the end."))
    return paper.PageSection("Parties", "\n".join(part for part in parts if part), "wide")


def skew_picture(view: PartiesView) -> str:
    """Draw the samples of each label (row) per party (column), darker for more; empty without labels."""
    shown = _some([party for party in view.parties if party.labels], _MOST_PARTY_COLUMNS)
    if not shown:
        return ""
    some = "" if len(shown) == view.count else f", {len(shown)} of {view.count} parties"
    title = f"Samples of each label{some}"
    values = [[float(party.labels[row]) for party in shown] for row in range(len(view.labels))]
    names = [party.name.removeprefix("client ") for party in shown]
    return paper.matrix(values, view.labels, names, title=title, corner="label")


def _parties_spread(view: PartiesView) -> str:
    if not view.spread:
        return ""
    columns = ("mean", "lowest_tenth", "highest_tenth", "deviation")
    named = [*view.spread.items(), *((_COMMON.format(name), one) for name, one in view.spread_common.items())]
    rows = [(name, *(_cell(parts, column) for column in columns)) for name, parts in named]
    head = ("measure", "mean", "lowest tenth", "highest tenth", "standard deviation")
    which = "held out" if view.held_out else "that they trained on"
    return paper.data_table(head, rows, title=f"On the parties' own samples, {which}, over the parties")


def _parties_table(view: PartiesView) -> str:
    shown = _some(view.parties, _MOST_PARTY_ROWS)
    own = list(dict.fromkeys(chain.from_iterable(party.measures for party in shown)))
    common = list(dict.fromkeys(chain.from_iterable(party.common for party in shown)))
    rows = []
    for party in shown:
        cells = [
            *(_cell(party.measures, name) for name in own),
            *(_cell(party.common, name) for name in common),
        ]
        rows.append((party.name, f"{party.samples:,}", f"{party.rounds:,}", *cells))
    title = "Each party" if len(shown) == view.count else f"{len(shown)} of {view.count} parties"
    names = [*own, *(_COMMON.format(name) for name in common)]
    return paper.data_table(("party", "samples", "rounds", *names), rows, title=title)


def _cell(measures: Mapping[str, float], name: str) -> str:
    return f"{measures[name]:.4g}" if name in measures else "–"


def _some(parties: Sequence[PartyView], most: int) -> list[PartyView]:
    if len(parties) <= most:
        return list(parties)
    return [parties[place * (len(parties) - 1) // (most - 1)] for place in range(most)]


def _is_large(view: RunView) -> bool:
    return len(view.waits) > _MAX_NARROW_WAITS


def _by_step(curve: Curve) -> Series:
    """Sort by step: asynchronous workers end their steps in another order."""
    points = sorted(zip(curve.steps, curve.values, strict=True), key=lambda point: point[0])
    # That of the loss is already among the tiles.
    newest = f"{curve.values[-1]:.4g}" if curve.values and curve.name != "loss" else ""
    return Series(name=_words(curve.name), xs=[x for x, _ in points], ys=[y for _, y in points], note=newest)


def _fill(label: str, body: str) -> str:
    """Return the scrollable part of a section, focusable by keyboard."""
    return f'<div class="fill" tabindex="0" role="region" aria-label="{escape(label)}">{body}</div>'


def _named(name: str, presence: Presence, phase: Phase) -> str:
    """Return a member's name, and why it does not take part; at the end of a run all have left."""
    takes_part = presence is Presence.PRESENT or phase is Phase.ENDED
    return name if takes_part else f"{name} ({presence.value})"


def _shards(numbers: tuple[int, ...]) -> str:
    spans: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans) or "–"


def _words(name: str) -> str:
    return name.replace("_", " ")
