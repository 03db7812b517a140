"""Draw the figures of docs/guide.md into docs/guide: needs matplotlib.

    python docs/figures.py                    # all that are computed
    python docs/figures.py stages groups      # some of them
    python docs/figures.py units out/profile/rank_00000.json.gz    # a trace of --profile

The pictures that never change are in docs/guide already. Colours are those of a style sheet for
colour-blind readers; hatches say the same in grey.
"""

import gzip
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from matplotlib import style  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

import plan  # noqa: E402
from machines import LINKS  # noqa: E402
from plan import GIB, MEMORY_PARTS, Plan, link_bytes  # noqa: E402
from sweep import RC_PARAMS, STYLE_SHEET, device_axis  # noqa: E402

HATCHES = ("", "//", "..", "xx", "\\\\", "--", "oo", "++")
EDGE: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.6}
# of each part of the memory, the same in all figures
LOOKS: dict[str, dict[str, str]] = {
    part: {"color": f"C{i}", "hatch": hatch}
    for i, (part, hatch) in enumerate(zip(MEMORY_PARTS, HATCHES, strict=True))
}


def new_figure(width: float, height: float, columns: int = 1, **kwargs: Any) -> tuple[Figure, list]:
    """Make a figure of `columns` panels, in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False, **kwargs)[0])


def plan_of(command: str) -> Plan:
    """Plan the run of a command line of plan.py."""
    _, planned = plan.read_command(command.split())
    return planned


def stack(panel: Axes, labels: Sequence[str], parts: dict[str, list[float]]) -> None:
    """Draw a stacked bar for each label; `parts` has the heights of each kind."""
    bottom = [0.0] * len(labels)
    for i, (kind, heights) in enumerate(parts.items()):
        look = EDGE | LOOKS.get(kind, {"color": f"C{i}", "hatch": HATCHES[i]})
        panel.bar(labels, heights, bottom=bottom, label=kind, width=0.7, **look)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    panel.grid(axis="x", visible=False)
    panel.set_ylim(0, 1.12 * max(bottom))


# --- Memory and traffic, from the plan


def moments(found: Plan) -> dict[float, dict[str, float]]:
    """Return the bytes by part at the moments of a step, by their place on its axis.

    Forward through the blocks, the loss, backward, the optimizer step. The plan has the blocks at
    the ends of encoder and decoder; between them what is live changes by as much in each.
    """
    depth = found.run.config.depth
    blocks = depth + found.run.config.decoder_depth
    ends = {"loss": blocks, "reduction of root": 2 * blocks + 1, "optimizer step": 2 * blocks + 2}
    places: dict[float, dict[str, float]] = {}
    for snapshot in found.snapshots:
        match = re.search(r"(decoder_)?blocks\.(\d+)", snapshot.name)
        if snapshot.name in ends:
            place = ends[snapshot.name]
        elif match:
            block = int(match[2])
            if match[1]:
                block += depth
            place = block if snapshot.name.startswith("forward") else 2 * blocks - block
        else:
            raise ValueError(f"a step has no place for {snapshot.name}")
        if sum(snapshot.bytes.values()) > sum(places.get(place, {}).values()):
            places[place] = snapshot.bytes
    return places


def draw_step_memory() -> Figure:
    """Draw the planned memory of a rank at each moment of a step of 1b, in two modes."""
    figure, panels = new_figure(9.2, 3.8, 2, sharey=True)
    base = "--model 1b --world-size 8 --machine dgx-a100-80"
    for panel, mode in zip(panels, ("no_shard", "full_shard"), strict=True):
        found = plan_of(f"{base} --mode {mode}")
        places = moments(found)
        blocks = found.run.config.depth + found.run.config.decoder_depth
        parts = ("optimizer", "parameters", "gradients", "unsharded", "activations")
        sizes = [[moment[part] / GIB for moment in places.values()] for part in parts]
        colours = [LOOKS[part]["color"] for part in parts]
        drawn = panel.stackplot([*places], *sizes, labels=parts, colors=colours, **EDGE)
        for area, part in zip(drawn, parts, strict=True):
            area.set_hatch(LOOKS[part]["hatch"])
        panel.axvline(blocks, color="black", linestyle="--", linewidth=1)
        ticks = {"forward": blocks / 2, "loss": blocks, "backward": 1.5 * blocks}
        ticks["optimizer\nstep"] = 2 * blocks + 2
        panel.set_xticks([*ticks.values()], [*ticks])
        panel.set(title=mode, xlabel="one training step, block by block")
        panel.grid(axis="x", visible=False)
    panels[0].set(ylabel="GiB per rank")
    figure.suptitle("1b on 8 GPUs, 32 images per rank (plan.py)")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return figure


def draw_stages() -> Figure:
    """Draw the planned memory per rank of 15b on 64 ranks, by mode and by sharding factor."""
    base = "--model 15b --batch 32 --world-size 64"
    modes = ["ddp", "zero1", "shard_grad_op", "full_shard"]
    modes += [f"hybrid --group {2**i}" for i in range(5, 0, -1)]
    plans = {mode: plan_of(f"{base} --mode {mode}") for mode in modes}
    figure, (left, right) = new_figure(9.2, 4.6, 2, width_ratios=(1.6, 1))
    parts = {
        part: [plan.peak.bytes[part] / GIB for plan in plans.values()] for part in MEMORY_PARTS
    }
    names = [mode.replace("hybrid --group", "hybrid") for mode in modes]
    stack(left, names, {part: sizes for part, sizes in parts.items() if max(sizes) > 1})
    for tick in left.get_xticklabels():
        tick.set(rotation=40, ha="right", rotation_mode="anchor")
    left.set(ylabel="GiB per rank at the peak", title="by mode")
    factors = [2**i for i in range(7)]
    for mode, mark in (("hybrid_grad_op", "s"), ("hybrid", "o")):
        peaks = [plan_of(f"{base} --mode {mode} --group {group}").peak_gib for group in factors]
        right.plot(factors, peaks, marker=mark, label=f"peak, {mode}")
    whole = plans["ddp"].json()["params"] * 16 / GIB
    right.plot(factors, [whole / f for f in factors], "k:", label="16 bytes per parameter / factor")
    device_axis(right, factors)
    right.set_yscale("log", base=2)
    right.set_yticks([4, 16, 64, 256], ["4", "16", "64", "256"])
    right.set(xlabel="sharding factor (ranks per group)", ylabel="GiB", title="by sharding factor")
    for panel in (left, right):
        panel.axhline(64, color="black", linestyle="--", linewidth=1)
    left.text(4.5, 66, "64 GiB of a GCD", ha="center", va="bottom")
    right.text(64, 66, "64 GiB", ha="right", va="bottom")
    figure.suptitle("15b on 64 ranks, 32 images per rank (plan.py)")
    figure.legend(loc="outside lower center", ncols=5, fontsize=8)
    return figure


def draw_groups() -> Figure:
    """Draw the planned traffic per link and speed of 3b in hybrid groups on 64 ranks."""
    groups = (1, 2, 4, 8, 16)
    plans = [
        plan_of(f"--model 3b --mode hybrid --group {g} --world-size 64 --batch 32") for g in groups
    ]
    figure, (left, right) = new_figure(7.2, 3.6, 2)
    sent = {
        link: [
            sum(by[link] for by in link_bytes(plan.run, plan.machine).values()) / 1e9
            for plan in plans
        ]
        for link in LINKS
    }
    names = {"package": "within an MI250X", "node": "within a node", "network": "between nodes"}
    labels = [str(group) for group in groups]
    stack(left, labels, {names[link]: heights for link, heights in sent.items()})
    left.set(ylabel="GB sent per rank and step", title="traffic per link")
    rates = [plan.images_per_second for plan in plans]
    right.bar_label(right.bar(labels, rates, width=0.7, color="C4", **EDGE), fmt="%.0f")
    right.grid(axis="x", visible=False)
    right.set(ylabel="images/s", title="speed at most", ylim=(0, 1.12 * max(rates)))
    for panel in (left, right):
        panel.set_xlabel("--group")
    figure.suptitle("3b, hybrid, on 64 GCDs of Frontier, 32 images per rank (plan.py)")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


# --- Measured: a trace

# PyTorch's calls: their lane, and the work of gloo, whose reduce-scatter is an all-reduce of which
# each rank keeps its part.
CALLS = {
    "c10d::_allgather_base_": ("all-gather", "gloo:all_gather"),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", "gloo:all_reduce"),
    "c10d::allreduce_": ("all-reduce", "gloo:all_reduce"),
}
LANES = ["", "blocks", *(lane for lane, _ in CALLS.values())]
LANE_COLOURS = ("white", "C4", "C5", "C1", "C2")
Event = dict[str, Any]
Box = tuple[str, float, float, str]  # lane, begin, end (microseconds), unit


def end_of(event: Event) -> float:
    """Return when an event ends, in the trace's microseconds."""
    return event["ts"] + event["dur"]


def unit_label(name: str) -> str:
    """Shorten the name of FSDP's range to its unit: "FSDP::all_gather (blocks.0)" to "b0"."""
    unit = re.search(r"\((\w)\w*\.(\d+)", name)
    return unit[1] + unit[2] if unit else "root"


def unit_boxes(events: Sequence[Event]) -> Iterator[Box]:
    """Yield a box for each collective, whose n-th call is gloo's n-th work, and for each pass."""
    ranges = [e for e in events if e["name"].startswith(("FSDP::all_g", "FSDP::post_backward_red"))]
    for work in ("gloo:all_gather", "gloo:all_reduce"):
        calls = [e for e in events if CALLS.get(e["name"], ("", ""))[1] == work]
        done = [e for e in events if e["name"] == work]
        for call, event in zip(calls, done, strict=True):
            around = [r["name"] for r in ranges if r["ts"] <= call["ts"] <= end_of(r)]
            label = unit_label(around[-1]) if around else ""
            yield CALLS[call["name"]][0], event["ts"], end_of(event), label
    begun: dict[str, float] = {}
    for event in events:
        found = re.fullmatch(r"FSDP::(\w+) \((.+)\)", event["name"])
        if found and found[1] in ("pre_forward", "pre_backward"):
            begun[found[2]] = end_of(event)
        elif found and found[1] in ("post_forward", "post_backward_reshard"):
            yield "blocks", begun.pop(found[2]), event["ts"], unit_label(event["name"])


def read_trace(path: str) -> list[Event]:
    """Read the events of a trace file that have a duration, in the order in which they begin."""
    with gzip.open(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    timed = [event for event in events if "dur" in event]
    return sorted(timed, key=lambda event: event["ts"])


def draw_units(path: str) -> Figure:
    """Draw the last step of a trace of FSDP2 on CPUs: passes, blocks, collectives of one rank."""
    trace = read_trace(path)
    step = [e for e in trace if e["name"].startswith("ProfilerStep#")][-1]
    wanted = ("FSDP::root_pre_forward", "FSDP::pre_backward", "FSDP::root_post_b", "Optimizer.step")
    start, backward, last, update = (
        next(e for e in trace if e["ts"] >= step["ts"] and e["name"].startswith(name))
        for name in wanted
    )
    boxes = [
        ("", start["ts"], backward["ts"], "forward"),
        ("", backward["ts"], end_of(last), "backward"),
        ("", update["ts"], end_of(update), "optimizer"),
        *(box for box in unit_boxes(trace) if start["ts"] <= box[1] < end_of(step)),
    ]
    figure, (panel,) = new_figure(8.4, 3.8)
    span = (end_of(step) - start["ts"]) / 1e3
    free_from = dict.fromkeys(LANES, -np.inf)  # where the next label of a lane may begin
    for lane, begin, end, text in boxes:
        i = LANES.index(lane)
        left = (begin - start["ts"]) / 1e3
        width = (end - begin) / 1e3
        panel.barh(-i, width, left=left, height=0.7, color=LANE_COLOURS[i], **EDGE)
        middle = left + width / 2
        half = 0.006 * span * len(text)
        if middle - half >= free_from[lane]:  # a label that would touch the one before is left out
            panel.text(middle, 0.48 - i, text, ha="center", va="center", fontsize=7)
            free_from[lane] = middle + half
    panel.set(xlim=(-0.02 * span, 1.04 * span), ylim=(0.5 - len(LANES), 0.7), xlabel="ms")
    panel.set_yticks([-i for i in range(len(LANES))], LANES)
    panel.set_title("one step of rank 0: b0 is blocks.0, d0 decoder_blocks.0")
    panel.grid(axis="y", visible=False)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {
    "step_memory": draw_step_memory,
    "stages": draw_stages,
    "groups": draw_groups,
}


def main(argv: Sequence[str]) -> None:
    """Draw the figures named, or all but units, which is followed by its trace."""
    with style.context([STYLE_SHEET, RC_PARAMS]):
        if argv[:1] == ["units"]:
            drawn = {"units": draw_units(argv[1])}
        else:
            drawn = {name: FIGURES[name]() for name in argv or FIGURES}
        for name, figure in drawn.items():
            (HERE / "guide").mkdir(exist_ok=True)
            figure.savefig(HERE / "guide" / f"{name}.png")


if __name__ == "__main__":
    main(sys.argv[1:])
