"""The documents' tables of models that are split, or larger than a memory."""

from __future__ import annotations

from typing import Any

from manyhands.errors import format_bytes
from results_read import has, load, markdown


def pipeline_speed() -> str:
    """A step beside compute + bubble, and beside torch's pipelines on Gloo."""
    result = load("pipeline-16")
    rounds = len(result["pipelines"][0]["rounds"]["ours"])
    about = f"**{result['cores']} cores**, a core for each stage, medians of {rounds} rounds"
    return f"{about}\n\n{_speed(result['pipelines'])}"


def _speed(pipelines: list[dict[str, Any]]) -> str:
    head = ["schedule", "stages", "a step", "÷ (compute + bubble)", "a p-th of one process"]
    rows = [[*head, "torch on Gloo", "torch ÷ ours"]]
    for row in pipelines:
        torchs = row["torch_s"]
        rows.append(
            [
                row["schedule"],
                str(row["stages"]),
                f"{1000 * row['ours_s']:.0f} ms",
                f"{row['over_formula']:.2f}",
                f"{1000 * row['alone_s'] / row['stages']:.0f} ms",
                "" if torchs is None else f"{1000 * torchs:.0f} ms",
                "" if torchs is None else f"{row['torch_over_ours']:.2f}×",
            ]
        )
    return markdown(rows)


def wavefronts() -> str:
    """An LSTM as a wavefront on two cores, beside the same workers layer by layer, and one process with both cores."""
    result = load("pipeline")
    head = ["layers", "workers", "sequences", "time steps", "slices"]
    rows = [[*head, "layer by layer", "wavefront", "faster by", "one process, 2 threads"]]
    for row in result["wavefronts"]:
        rows.append(
            [
                *(str(row[name]) for name in ("layers", "workers", "batch_size", "time_steps", "slices")),
                f"{1000 * row['layer_by_layer_s']:.0f} ms",
                f"{1000 * row['wavefront_s']:.0f} ms",
                f"{row['speed_up']:.2f}×",
                f"{1000 * row['one_process_s']:.0f} ms",
            ]
        )
    return markdown(rows)


def offload() -> str:
    """A model whose states do not fit the device, beside fewer of its layers with and without the limit."""
    result = load("offload")
    rows = [["layers", "strategy", "a step", "peak on the device"]]
    for way in (result["limited"], *result["few"]):
        cells = [f"`{way['strategy']}`{', compiled' * way['compiled']}", f"{way['step_s']:.2f} s"]
        rows.append([str(way["layers"]), *cells, format_bytes(way["peak_allocated_bytes"])])
    clipped = ", gradients clipped" if result["clip"] else ""
    about = (
        f"{result['parameters'] / 1e9:.1f} billion parameters, whose states take "
        f"{format_bytes(result['states_bytes'])}; {result['batch']} rows of {result['context']} tokens{clipped}, "
        f"{result['steps']} steps"
    )
    shares = ", ".join(
        f"{share:.0%} of the speed in memory ({name}, {result['in_memory_s'][name]:.2f} s, computed from two depths)"
        for name, share in result["speed"].items()
    )
    layers, apart = result["few"][0]["layers"], result["largest_relative_difference"]
    said = (
        f"{result['tokens_per_s']:,.0f} tokens a second, {shares}. The losses of {layers} layers, with the limit and "
        f"without, differ by {apart:.0e} of their value at most."
    )
    return f"**{result['device']}**, {about}\n\n{markdown(rows)}\n\n{said}"


def codecs_speed() -> str:
    """Each codec's share of the bytes and its rate, beside torch's hooks and numpy."""
    result = load("codecs")
    rows = [["codec", "share of the bytes", "manyhands, GB/s", "torch's hook", "numpy"]]
    for row in result["rows"]:
        rates = row["gb_per_s"]
        cells = [f"{rates[name]:.2f}" if name in rates else "" for name in ("manyhands", "torch", "numpy")]
        rows.append([f"`{row['codec']}`", f"{100 * row['share']:.3g} %", *cells])
    return f"**{result['cores']} cores, {result['items']:,} items**\n\n{markdown(rows)}"


_LOOPS = {
    "ours": "manyhands",
    "fp8": "manyhands, fp8",
    "two": "manyhands, two workers",
    "plain": "a plain compiled loop",
    "usual": "nanoGPT",
    "trainer": "HF Trainer",
}


def language_speed() -> str:
    """GPT-2 and BERT on one GPU by ours and by other loops, and where the GPU's time goes."""
    result = load("language-gpu")
    about = (
        f"One {result['device']}, torch {result['torch']}, bfloat16. MFU: 6 FLOP a token for each parameter but the "
        f"positions, and 12·layers·width·context, of {result['peak'] / 1e12:.0f} TFLOP/s."
    )
    return "\n\n".join([about, *(_language(name, found) for name, found in result["models"].items())])


def _language(name: str, found: dict[str, Any]) -> str:
    unit, title = ("tokens/s", "GPT-2") if name == "gpt" else ("sequences/s", "BERT-large")
    loops, work, trace = found["loops"], found["work"], found["trace"]
    table = [["loop", unit, "MFU", "memory", "manyhands ÷ it"]]
    for loop, row in loops.items():
        if "step_s" in row:
            cells = [
                _LOOPS[loop],
                f"{row[unit.replace('/', '_per_')]:,.0f}",
                f"{row['mfu']:.1%}" if row["mfu"] is not None else "",
            ]
            ratio = loops["ours"]["tokens_per_s"] / row["tokens_per_s"]
            memory = f"{row['peak_memory_gib']:.1f} GiB" if row["peak_memory_gib"] is not None else ""
            table.append([*cells, memory, f"{ratio:.2f}"])
    turns, steps = loops["ours"]["turns"], found["steps"]
    about = (
        f"**{title}**: {work['layers']} layers of width {work['width']}, context {work['context']}, "
        f"{work['batch'] * work['context']:,} tokens a step; {turns} turn{'s' * (turns > 1)} of {steps} steps each."
    )
    text = f"{about}\n\n{markdown(table)}"
    if "groups" not in trace:
        return text
    groups = ", ".join(f"{group} {share:.0%}" for group, share in trace["groups"].items() if share >= 0.01)
    return f"{text}\n\nThe GPU idles {trace['idle']:.1%} of the time; of its work: {groups}."


def two_workers() -> str:
    """What two workers on one GPU, and on the cores of a host, wait for the exchange of a GPT's gradients."""
    head = [
        "two workers on",
        "one worker",
        "two",
        "two, no exchange",
        "left to wait for",
        "of it hidden",
        "two to one",
    ]
    rows = [head]
    for result in [load(name) for name in ("two-workers-gpu", "two-workers-16") if has(name)]:
        found, work = result["medians"], result["work"]
        place = f"{result['cores']} cores" if result["device"] == "cpu" else f"one {result['device']}"
        size = f"{result['parameters'] / 1e6:.0f} M parameters, {work['batch'] * work['context']:,} tokens a step"
        for kind in ("", "compiled "):
            if f"{kind}two" not in found or f"{kind}apart" not in found:
                continue
            one, two, apart = (found[name] for name in ("one", f"{kind}two", f"{kind}apart"))
            hidden = found.get(f"{kind}hidden")
            share = "not measured" if hidden is None else f"{100 * min(1.0, max(0.0, hidden)):.0f} %"
            times = [f"{1e3 * seconds:,.0f} ms" for seconds in (one, two, apart, two - apart)]
            about = f"{place}{', `compile=True`' * bool(kind)}: {size}"
            rows.append([about, *times, share, f"{one / two:.2f}×"])
    return markdown(rows)
