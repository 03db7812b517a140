"""Draw the figures of docs/guide.md into docs/guide: needs matplotlib.

    python docs/figures.py                    # all that are computed
    python docs/figures.py stages groups      # some of them
    python docs/figures.py units out/profile/rank_00000.json.gz    # a trace of --profile

The others are drawn from the plan, the mesh and an image. Colours are those of a style sheet for
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
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from matplotlib import style  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import Rectangle  # noqa: E402
from PIL import Image  # noqa: E402

import plan  # noqa: E402
import vit  # noqa: E402
from planner.estimate import Plan  # noqa: E402
from planner.machines import LINKS, wire_bytes  # noqa: E402
from planner.memory import GIB, MEMORY_PARTS  # noqa: E402
from planner.traffic import link_bytes  # noqa: E402
from sweeps.report import RC_PARAMS, STYLE_SHEET, device_axis  # noqa: E402

HATCHES = ("", "//", "..", "xx", "\\\\", "--", "oo", "++")
EDGE: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.6}
# of each part of the memory, the same in all figures
LOOKS: dict[str, dict[str, str]] = {
    part: {"color": f"C{i}", "hatch": hatch}
    for i, (part, hatch) in enumerate(zip(MEMORY_PARTS, HATCHES, strict=True))
}
ARROW: dict[str, Any] = {"arrowprops": {"arrowstyle": "-|>", "color": "black"}}


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


# --- What happens: to an image, in a collective, who is in which group


def draw_mae() -> Figure:
    """Draw a tile on its way through a masked autoencoder."""
    patch = 16  # pixels
    side = 6  # patches
    with Image.open(HERE.parent / "examples/tiles/train/islands/islands_aegean_01.jpg") as tile:
        pixels = np.array(tile.convert("RGB").resize((side * patch, side * patch)))
    images = torch.from_numpy(pixels).permute(2, 0, 1).unsqueeze(0)  # (1, C, H, W)
    patches = vit.patchify(images, patch).reshape(-1, patch, patch, 3).numpy()
    everything = range(side * side)
    order = torch.randperm(side * side, generator=torch.Generator().manual_seed(0))
    visible = order[:9].tolist()
    columns = (  # title, patches in a row, patches shown, what stands in a removed one
        ("an image, cut into patches", side, everything, ""),
        ("75 % are removed", side, visible, ""),
        ("the encoder\nsees these", 1, range(len(visible)), ""),
        ("the decoder predicts each ?", side, visible, "?"),
    )
    figure, panels = new_figure(9.2, 2.9, 4, width_ratios=(6, 6, 2, 6))
    for panel, (title, width, shown, mark) in zip(panels, columns, strict=True):
        height = side if width > 1 else len(visible)
        panel.set_axis_off()
        panel.set_title(title, fontsize=9)
        for place in range(width * height):
            y, x = divmod(place, width)
            panel.add_patch(Rectangle((x, y), 1, 1, facecolor="#bbbbbb", **EDGE))
            if place in shown:
                image = patches[place if width > 1 else visible[place]]
                panel.imshow(image, extent=(x, x + 0.95, y + 0.95, y), zorder=3)
            else:
                panel.text(x + 0.5, y + 0.5, mark, ha="center", va="center")
        panel.set(xlim=(0, width), ylim=(height, 0), aspect="equal")
    return figure


OWN = "aaaa bbbb cccc dddd"
SUMS = "++++ ++++ ++++ ++++"
PART_OF_SUM = "+... .+.. ..+. ...+"
COLLECTIVES = (  # name, where it is used, what each of four ranks has before and after
    ("broadcast", "ZeRO-1: new\nparameters", "aaaa .... .... ....", "aaaa aaaa aaaa aaaa"),
    ("all-reduce", "DDP: gradients", OWN, SUMS),
    ("all-gather", "FSDP: parameters", "a... .b.. ..c. ...d", "abcd abcd abcd abcd"),
    ("reduce-scatter", "FSDP: gradients", OWN, PART_OF_SUM),
)


def draw_collectives() -> Figure:
    """Draw four collectives of four ranks, before and after, with the bytes of a ring."""
    figure, (panel,) = new_figure(6.6, 6.2)
    for i, (name, use, *states) in enumerate(COLLECTIVES):
        top = -5.2 * i
        panel.text(0, top - 0.9, name, weight="bold", fontsize=10, va="center")
        panel.text(0, top - 2.0, use, va="center")
        sent = wire_bytes(name.replace("-", "_"), 1, ranks=4)
        panel.text(0, top - 3.3, f"{sent:g} S per rank", va="center")
        panel.annotate("", (12.5, top - 2), (10.8, top - 2), **ARROW)
        for left, state in zip((6.5, 12.8), states, strict=True):
            for rank, cells in enumerate(state.split()):
                y = top - rank - 0.85
                panel.text(6.3, y + 0.38, f"rank {rank}", fontsize=7, ha="right", va="center")
                for part, owner in enumerate(cells):
                    color = f"C{'abcd'.index(owner)}" if owner in "abcd" else "white"
                    look = EDGE | {"facecolor": color, "linestyle": ":" if owner == "." else "-"}
                    panel.add_patch(Rectangle((left + part, y), 0.95, 0.8, alpha=0.75, **look))
                    text = {".": "", "+": f"sum{part}"}.get(owner, f"{owner}{part}")
                    middle = (left + part + 0.47, y + 0.38)
                    panel.text(*middle, text, ha="center", va="center", fontsize=8)
    panel.text(8.5, 0.5, "before", ha="center")
    panel.text(14.8, 0.5, "after", ha="center")
    panel.set(xlim=(-0.2, 17), ylim=(-5.2 * len(COLLECTIVES) + 0.9, 1.2))
    panel.set_axis_off()
    figure.suptitle(
        "4 ranks; bytes that a rank sends in a ring, on average, of a tensor of S bytes"
    )
    return figure


def draw_zero() -> Figure:
    """Draw what each of four ranks keeps between two steps, in the stages of ZeRO."""
    stages = {"ddp": 0, "zero1": 1, "ZeRO-2": 2, "full_shard": 3}
    parts = {"optimizer": 8, "gradients": 4, "parameters": 4}  # bytes, as they are sharded
    figure, panels = new_figure(8.4, 3.2, 4, sharey=True)
    for panel, (name, stage) in zip(panels, stages.items(), strict=True):
        bottom = np.zeros(4)
        for i, (part, size) in enumerate(parts.items()):
            held = np.full(4, size / 4 if stage > i else size)
            look = EDGE | LOOKS[part]
            panel.bar(range(4), held, bottom=bottom, width=0.7, label=part, **look)
            bottom += held
        panel.set_xticks(range(4))
        panel.set(title=f"{name}: {bottom[0]:g}", xlabel="rank", ylim=(0, 17))
        panel.grid(axis="x", visible=False)
    panels[0].set(ylabel="bytes per parameter", yticks=range(0, 17, 4))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def draw_prefetch() -> Figure:
    """Draw the backward pass over four blocks as two timelines, without and with prefetching."""
    blocks = ("b3", "b2", "b1", "b0")
    gather = 6  # ms
    compute = 10
    figure, panels = new_figure(8.4, 2.6, 2, sharey=True)
    for panel, prefetch in zip(panels, ("none", "backward_pre"), strict=True):
        link = device = 0.0  # when each is free again
        for i, block in enumerate(blocks):
            # the first is needed at once; a prefetched one is asked for as the block before begins
            asked = device - compute if prefetch != "none" and i else device
            link = max(link, asked) + gather
            device = max(device, link)
            for y, right, width, colour in (
                (0, link, gather, "C1"),
                (-1, device + compute, compute, "C0"),
            ):
                look = EDGE | {"color": colour, "hatch": "//" if y == 0 else ""}
                panel.barh(y, width, left=right - width, height=0.7, **look)
                plate = {"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"}
                middle = right - width / 2
                panel.text(middle, y, block, ha="center", va="center", fontsize=8, bbox=plate)
            device += compute
        panel.axvline(device, color="black", linestyle="--", linewidth=1)
        panel.set(title=f"--prefetch {prefetch}", xlabel="ms", xlim=(0, 70))
        panel.set_xticks([0, gather, device])
        panel.set_yticks([0, -1], ["all-gather", "backward"])
        panel.grid(visible=False)
    figure.suptitle("a backward pass over four blocks, without its reduce-scatters")
    return figure


def draw_mesh() -> Figure:
    """Draw eight ranks on two nodes as a mesh of two replicas by four shards."""
    figure, (panel,) = new_figure(6.4, 2.8)
    for rank in range(8):
        row, column = divmod(rank, 4)
        look = EDGE | {"facecolor": f"C{column}", "alpha": 0.75, "hatch": HATCHES[column]}
        panel.add_patch(Rectangle((column + 0.1, -row - 0.8), 0.8, 0.6, **look))
        plate = {"boxstyle": "round", "facecolor": "white", "edgecolor": "none"}
        panel.text(column + 0.5, -row - 0.5, f"rank {rank}", ha="center", va="center", bbox=plate)
    for row in range(2):
        panel.add_patch(Rectangle((0, -row - 0.9), 4, 0.8, fill=False, linestyle="--"))
        panel.text(-0.1, -row - 0.5, f"replica {row}\n(node {row})", ha="right", va="center")
        panel.text(4.1, -row - 0.5, "shard group:\nall-gather,\nreduce-scatter", va="center")
    for column in range(4):
        panel.text(column + 0.5, 0.05, f"part {column}", ha="center")
    panel.text(2, -2.2, "columns are replicate groups: all-reduce of one part", ha="center")
    panel.set(xlim=(-1, 5.2), ylim=(-2.3, 0.4))
    panel.set_axis_off()
    figure.suptitle("--mode hybrid --group 4 on 8 ranks: mesh 2 x 4 (replicate x shard)")
    return figure


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
    "mae": draw_mae,
    "collectives": draw_collectives,
    "step_memory": draw_step_memory,
    "stages": draw_stages,
    "zero": draw_zero,
    "mesh": draw_mesh,
    "prefetch": draw_prefetch,
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
