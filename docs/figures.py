"""Draw the pictures of docs/guide.md into docs/guide: needs matplotlib.

    python docs/figures.py                                  # all that are computed
    python docs/figures.py collectives stages               # some of them
    python docs/figures.py units out/profile/rank_00000.json.gz
    python docs/figures.py input out/real/log.jsonl out/syn/log.jsonl out/io/log.jsonl

units is drawn from a trace of `train_fsdp.py --profile`, input from the logs of runs, the others
from the plan. Colours are those of a style sheet for colour-blind readers; hatches say the same in
print.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from matplotlib import style  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.patches import FancyArrow, Rectangle  # noqa: E402

import plan  # noqa: E402
from planner.estimate import Plan  # noqa: E402
from planner.machines import LINKS, wire_bytes  # noqa: E402
from planner.memory import GIB, MEMORY_PARTS  # noqa: E402
from planner.traffic import link_bytes  # noqa: E402
from runtime import step_profile  # noqa: E402
from sweeps.report import RC_PARAMS, STYLE_SHEET, device_axis  # noqa: E402

HATCHES = ("", "//", "..", "xx", "\\\\", "--", "oo", "++")
EDGE: dict[str, Any] = {"edgecolor": "black", "linewidth": 0.6}


def new_figure(width: float, height: float, columns: int = 1, **kwargs: Any) -> tuple[Figure, list]:
    """Make a figure of `columns` panels, in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(1, columns, squeeze=False, **kwargs)[0])


def plan_of(command: str) -> Plan:
    """Plan the run of a command line of plan.py."""
    return plan.read_command(command.split())[1]


def stack(panel: Axes, labels: Sequence[str], parts: dict[str, list[float]]) -> None:
    """Draw a stacked bar for each label; `parts` has the heights of each kind."""
    bottom = [0.0] * len(labels)
    for i, (kind, heights) in enumerate(parts.items()):
        look = EDGE | {"color": f"C{i}", "hatch": HATCHES[i % len(HATCHES)]}
        panel.bar(labels, heights, bottom=bottom, label=kind, width=0.7, **look)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    panel.grid(axis="x", visible=False)
    panel.set_ylim(0, 1.12 * max(bottom))


# ---------------------------------------------------------------------------------------------
# The collectives

RANKS = 4
SUM = RANKS  # a cell with the sum of all ranks
# (rank, part) -> the rank whose numbers lie there, SUM, or None
Cells = Callable[[int, int], int | None]
STATES: dict[str, Cells] = {
    "own": lambda rank, part: rank,
    "own part": lambda rank, part: rank if part == rank else None,
    "all parts": lambda rank, part: part,
    "on rank 0": lambda rank, part: None if rank else 0,
    "of rank 0": lambda rank, part: 0,
    "sum": lambda rank, part: SUM,
    "sum on rank 0": lambda rank, part: None if rank else SUM,
    "part of sum": lambda rank, part: SUM if part == rank else None,
}
COLLECTIVES = (  # name, where it is used, STATES before and after
    ("reduce", "in no mode here", "own", "sum on rank 0"),
    ("broadcast", "ZeRO-1: new\nparameters", "on rank 0", "of rank 0"),
    ("all-reduce", "DDP: gradients", "own", "sum"),
    ("all-gather", "FSDP: parameters", "own part", "all parts"),
    ("reduce-scatter", "FSDP: gradients", "own", "part of sum"),
)


def draw_cells(panel: Axes, left: float, top: float, cells: Cells) -> None:
    """Draw the tensors of all ranks, one below the other, each of as many parts as ranks."""
    for rank in range(RANKS):
        for part in range(RANKS):
            owner = cells(rank, part)
            corner = (left + part, top - rank - 0.85)
            if owner is None:
                panel.add_patch(
                    Rectangle(corner, 0.95, 0.8, fill=False, linestyle=":", linewidth=0.6)
                )
                continue
            look = EDGE | {"facecolor": "white" if owner == SUM else f"C{owner}"}
            panel.add_patch(Rectangle(corner, 0.95, 0.8, alpha=0.75, **look))
            text = f"sum{part}" if owner == SUM else f"{'abcd'[owner]}{part}"
            panel.text(
                corner[0] + 0.47, corner[1] + 0.38, text, ha="center", va="center", fontsize=8
            )


def draw_collectives() -> Figure:
    """Draw five collectives of four ranks, before and after, with the bytes of a ring."""
    figure, (panel,) = new_figure(6.6, 7.6)
    for row, (name, use, before, after) in enumerate(COLLECTIVES):
        top = -5.2 * row
        panel.text(0, top - 0.9, name, weight="bold", fontsize=10, va="center")
        panel.text(0, top - 2.0, use, va="center")
        sent = wire_bytes(name.replace("-", "_"), 1, RANKS)
        panel.text(0, top - 3.3, f"{sent:g} S per rank", va="center")
        for rank in range(RANKS):
            panel.text(6.3, top - rank - 0.45, f"rank {rank}", fontsize=7, ha="right", va="center")
        draw_cells(panel, 6.5, top, STATES[before])
        look: Any = {"head_width": 0.5, "length_includes_head": True, "color": "black"}
        panel.add_patch(FancyArrow(10.9, top - 2, 1.5, 0, width=0.1, **look))
        draw_cells(panel, 12.8, top, STATES[after])
    panel.text(8.5, 0.5, "before", ha="center")
    panel.text(14.8, 0.5, "after", ha="center")
    panel.set(xlim=(-0.2, 17), ylim=(-5.2 * len(COLLECTIVES) + 0.9, 1.2))
    panel.set_axis_off()
    figure.suptitle(
        f"Collectives of {RANKS} ranks; bytes that a rank sends in a ring, of a tensor of S bytes"
    )
    return figure


# ---------------------------------------------------------------------------------------------
# Memory and traffic, from the plan


def draw_bytes_per_parameter() -> Figure:
    """Draw the bytes per parameter of one device: fp32, bf16 under FSDP, a careless count."""
    found = {}
    for precision in ("fp32", "bf16"):
        plan = plan_of(f"--model 1b --mode full_shard --world-size 1 --precision {precision}")
        memory, numel = plan.peak.bytes, plan.json()["params"]
        last = next(s for s in plan.snapshots if s.name == "optimizer step").bytes
        found[precision] = [
            memory["parameters"] / numel,
            last["gradients"] / numel,
            memory["optimizer"] / numel,
        ]
    bars = {
        "fp32": [*found["fp32"], 0, 0, 0],
        "bf16 by FSDP\n(train_fsdp.py)": [*found["bf16"], 2, 2, 0],
        "a careless\ncount": [4, 4, 8, 0, 0, 8],
    }
    kinds = (
        "parameters, fp32",
        "gradients, fp32",
        "AdamW's two states, fp32",
        "bf16 copy of a unit, while it is gathered",
        "bf16 gradients of a unit, until they are reduced",
        "activations, counted per parameter",
    )
    figure, (panel,) = new_figure(5.6, 4.4)
    stack(panel, list(bars), {k: [bar[i] for bar in bars.values()] for i, k in enumerate(kinds)})
    for x, bar in enumerate(bars.values()):
        kept, passing = sum(bar[:3]) + bar[5], bar[3] + bar[4]
        text = f"{kept:.0f}" + f" + {passing} for a unit in use" * bool(passing)
        panel.text(x, kept + passing + 0.3, text, ha="center")
    panel.set(ylabel="bytes per parameter", title="Before any sharding, without activations")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8)
    return figure


def draw_stages() -> Figure:
    """Draw the planned memory per rank of 15b on 64 ranks, by mode and by sharding factor."""
    ranks, base = 64, "--model 15b --batch 32 --world-size 64"
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
    figure.suptitle(f"15b on {ranks} ranks, 32 images per rank (plan.py)")
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
    for bar in right.bar(labels, rates, width=0.7, color="C4", **EDGE):
        middle, height = bar.get_x() + bar.get_width() / 2, bar.get_height()
        right.text(middle, height, f"{height:.0f}", ha="center", va="bottom")
    right.grid(axis="x", visible=False)
    right.set(ylabel="images/s", title="speed at most", ylim=(0, 1.12 * max(rates)))
    for panel in (left, right):
        panel.set_xlabel("--group")
    figure.suptitle("3b, hybrid, on 64 GCDs of Frontier, 32 images per rank (plan.py)")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


# ---------------------------------------------------------------------------------------------
# Measured: speed of the input, a trace


def draw_input(*logs: str) -> Figure:
    """Draw the images/s of runs from their logs, each named by its folder, without a number."""
    does = {"real": "read and train", "syn": "train only", "io": "read only"}
    figure, (panel,) = new_figure(1.4 + 1.1 * len(logs), 3.4)
    rates, names = [], []
    for i, path in enumerate(logs):
        records = [json.loads(line) for line in Path(path).read_text().splitlines() if line]
        by_event = {record["event"]: record for record in records}  # the last of each
        run = by_event["start"]["run_mode"]
        rates.append(by_event["end"]["images_per_second"])
        names.append(re.sub(r"^\d+-", "", Path(path).parent.name) + f":\n{does[run]}")
        look = EDGE | {"color": f"C{[*does].index(run)}", "hatch": HATCHES[[*does].index(run)]}
        panel.bar(i, rates[-1], width=0.6, **look)
        panel.text(i, rates[-1], f"{rates[-1]:.0f}", ha="center", va="bottom")
    panel.set_xticks(range(len(logs)), names, fontsize=8)
    panel.grid(axis="x", visible=False)
    panel.set(ylabel="images/s", ylim=(0, 1.12 * max(rates)))
    return figure


# PyTorch's calls: their lane, and the work of gloo, whose reduce-scatter is an all-reduce of which
# each rank keeps its part.
CALLS = {
    "c10d::_allgather_base_": ("all-gather", "gloo:all_gather"),
    "c10d::_reduce_scatter_base_": ("reduce-scatter", "gloo:all_reduce"),
    "c10d::allreduce_": ("all-reduce", "gloo:all_reduce"),
}
LANES = [lane for lane, _ in CALLS.values()]
Event = dict[str, Any]


def end_of(event: Event) -> float:
    """Return when an event ends, in the trace's microseconds."""
    return event["ts"] + event["dur"]


def unit_label(name: str) -> str:
    """Shorten the name of FSDP's range to its unit: "FSDP::all_gather (blocks.0)" to "b0"."""
    unit = re.search(r"\((\w)\w*\.(\d+)", name)
    return unit[1] + unit[2] if unit else "root"


def collective_boxes(events: Sequence[Event]) -> Iterator[tuple[str, Event, str]]:
    """Yield (lane, gloo's event, unit) of each collective: the n-th call is the n-th work."""
    ranges = [e for e in events if e["name"].startswith(("FSDP::all_g", "FSDP::post_backward_red"))]
    for work in ("gloo:all_gather", "gloo:all_reduce"):
        calls = [e for e in events if CALLS.get(e["name"], ("", ""))[1] == work]
        done = [e for e in events if e["name"] == work]
        if len(calls) != len(done):
            raise SystemExit(f"the trace has {len(calls)} calls for {len(done)} {work}")
        for call, event in zip(calls, done, strict=True):
            around = [r for r in ranges if r["ts"] <= call["ts"] <= end_of(r)]
            label = unit_label(around[-1]["name"]) if around else ""
            yield CALLS[call["name"]][0], event, label


def compute_boxes(events: Sequence[Event]) -> Iterator[tuple[float, float, str]]:
    """Yield (from, to, unit) of the forward and of the backward pass of each block."""
    begun: dict[str, float] = {}
    for event in events:
        found = re.fullmatch(r"FSDP::(\w+) \((.+)\)", event["name"])
        if found and found[1] in ("pre_forward", "pre_backward"):
            begun[found[2]] = end_of(event)
        elif found and found[1] in ("post_forward", "post_backward_reshard"):
            yield begun.pop(found[2]), event["ts"], unit_label(event["name"])


def draw_units(path: str) -> Figure:
    """Draw the last step of a trace of FSDP2 on CPUs: passes, blocks, collectives of one rank."""
    trace = sorted(step_profile.read_trace(Path(path)), key=lambda e: e["ts"])
    if not any(e["name"] == "FSDP::root_pre_forward" for e in trace):
        raise SystemExit(f"{path} is no trace of FSDP2: give that of a run with --mode full_shard")
    step = [e for e in trace if e["name"].startswith("ProfilerStep#")][-1]
    events = [e for e in trace if step["ts"] <= e["ts"] < end_of(step)]

    def when(name: str) -> Event:
        return next(e for e in events if e["name"].startswith(name))

    backward, last = when("FSDP::pre_backward")["ts"], end_of(when("FSDP::root_post_backward"))
    update = when("Optimizer.step")
    start = when("FSDP::root_pre_forward")["ts"]
    phases = [
        (start, backward, "forward"),
        (backward, last, "backward"),
        (update["ts"], end_of(update), "optimizer"),
    ]
    figure, (panel,) = new_figure(8.4, 3.8)
    lanes = ["", "blocks", *LANES]
    span = (end_of(step) - start) / 1e3
    free_from = [-span] * len(lanes)  # where the next label of a lane may begin

    def box(lane: int, begin: float, end: float, text: str, **look: Any) -> None:
        left, width = (begin - start) / 1e3, (end - begin) / 1e3
        panel.barh(-lane, width, left=left, height=0.7, **EDGE | look)
        height = 0 if width > 0.12 * span else 0.48  # above a box that is too narrow
        middle, half = left + width / 2, 0.006 * span * len(text)
        if middle - half >= free_from[lane]:  # a label that would touch the one before is left out
            panel.text(middle, height - lane, text, ha="center", va="center", fontsize=7)
            free_from[lane] = middle + half

    for i, (begin, end, name) in enumerate(phases):
        box(0, begin, end, name, color=("white", "#dddddd", "C1")[i])
    for begin, end, name in compute_boxes(events):
        box(1, begin, end, name, color="C4")
    for lane, event, unit in collective_boxes(trace):
        if event in events:
            i = LANES.index(lane)
            box(2 + i, event["ts"], end_of(event), unit, color=f"C{(5, 1, 2)[i]}", alpha=0.8)
    panel.set_ylim(0.5 - len(lanes), 0.7)
    panel.set_yticks([-i for i in range(len(lanes))], lanes)
    panel.set(xlabel="ms", title="one step of rank 0: b0 is blocks.0, d0 decoder_blocks.0")
    panel.grid(axis="y", visible=False)
    return figure


PICTURES: dict[str, Callable[..., Figure]] = {
    "collectives": draw_collectives,
    "bytes_per_parameter": draw_bytes_per_parameter,
    "stages": draw_stages,
    "groups": draw_groups,
    "input": draw_input,
    "units": draw_units,
}
FROM_FILES = {"units": "a trace", "input": "logs"}


def main(argv: Sequence[str]) -> int:
    """Draw the pictures named, each followed by its files; status 2 for a bad command."""
    jobs: list[tuple[str, list[str]]] = []
    for word in argv or [name for name in PICTURES if name not in FROM_FILES]:
        if word in PICTURES:
            jobs.append((word, []))
        elif jobs:
            jobs[-1][1].append(word)
    wrong = [name for name, files in jobs if bool(files) != (name in FROM_FILES)]
    if not jobs or wrong or any(name == "units" and len(files) > 1 for name, files in jobs):
        needed = ", ".join(f"{name} {files}" for name, files in FROM_FILES.items())
        print(f"figures.py: give some of {', '.join(PICTURES)}, followed by files: {needed}")
        return 2
    (HERE / "guide").mkdir(exist_ok=True)
    with style.context([STYLE_SHEET, RC_PARAMS]):
        for name, files in jobs:
            PICTURES[name](*files).savefig(HERE / "guide" / f"{name}.png")
            print(HERE.name + f"/guide/{name}.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
