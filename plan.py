"""Plan a run before it is queued: its memory, traffic and time, by arithmetic alone.

    python plan.py --model 15b --mode hybrid --group 4 --world-size 512 --batch 32 --memory-gib 64
    python plan.py --model 15b --world-size 1024 --compare      # every mode and group, best first
    python plan.py --model 15b --group 4 --explain              # where the memory goes

It says whether the run fits, up to which local batch, how many bytes go over which link, and how
fast the run can be at best. It needs neither a GPU nor a process group, whatever the number of
ranks. It takes all flags of train_fsdp.py, and plans for --world-size ranks (default: one node of
the machine). The arithmetic is in planner/: memory.py for the peak of memory, traffic.py for the
bytes, estimate.py for time and verdict.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from planner.estimate import Plan, compare, describe_fit
from planner.machines import LINKS, read_machine, with_ranks_per_node
from planner.memory import GIB, MEMORY_PARTS
from planner.traffic import PlannedRun, link_bytes
from runtime import process
from runtime.config import Config, Parser, make_config, nonempty, number, training_parser
from runtime.run import resolve

# --- The command line


def plan_parser() -> Parser:
    """Return the parser of train_fsdp.py with the flags of plan.py added."""
    parser = training_parser("plan.py", __doc__)
    add = parser.add_argument_group("the plan itself").add_argument
    add("--encoder-only", action="store_true", help="a plain ViT, no MAE decoder")
    gib = "per rank (default: the machine's)"
    add("--memory-gib", type=number(0.1, 10**6), metavar="GIB", help=gib)
    add("--compare", action="store_true", help="every mode and group, best first")
    add("--explain", action="store_true", help="where the memory goes")
    add("--json", action="store_true", help="one JSON object")
    add("--measure", type=nonempty, metavar="FILE", help="measure this machine, for --machine FILE")
    return parser


def read_command(argv: Sequence[str], node_ranks: int | None = None) -> tuple[Config, Plan]:
    """Parse the command line and plan its run; one sentence and exit status 2 if it is refused.

    `node_ranks`: the ranks on each node, by default as many as a node of the machine has.
    """
    parser = plan_parser()
    return make_plan(parser, parser.parse_args(argv), node_ranks)


def make_plan(
    parser: Parser, args: argparse.Namespace, node_ranks: int | None = None
) -> tuple[Config, Plan]:
    """Plan the run of a parsed command line -> its flags, its plan; refuse as `read_command`."""
    try:
        args.machine = args.machine or "frontier"
        machine = read_machine(args.machine)
        if node_ranks:
            machine = with_ranks_per_node(machine, node_ranks)
        if args.world_size is None:
            args.world_size = machine.ranks_per_node
        config = make_config(parser, args)
        # A plain ViT may see all patches (--mask-ratio 0), but train_fsdp.py refuses that.
        checked = replace(config, mask_ratio=0.75) if args.encoder_only else config
        run = resolve(checked, args.world_size, machine.ranks_per_node)
        flags = run.record()
        flags["encoder_only"] = args.encoder_only
        flags["mask_ratio"] = config.mask_ratio
        planned = PlannedRun.from_flags(run.vit_config, flags)
        return config, Plan(planned, machine, args.memory_gib)
    except ValueError as error:
        parser.error(str(error))


# --- What is printed


def summary_lines(plan: Plan, global_batch: bool) -> Iterator[str]:
    """Describe a plan in a few lines: if the run does not fit, also what would."""
    run = plan.run
    found = plan.json()
    parts = [(part, size / GIB) for part, size in plan.peak.bytes.items()]
    gib = ", ".join(f"{part} {size:.1f}" for part, size in parts if size >= 0.05)
    by_kind = found["traffic_bytes_per_rank"].values()  # each by link
    sent = {link: sum(by_link[link] for by_link in by_kind) for link in LINKS}
    links = ", ".join(f"{link} {size / 1e9:.1f}" for link, size in sent.items())
    shape = f"{run.replicate} x {run.shard}"
    if run.tp > 1:
        shape += f" x {run.tp} (tp)"
    yield (
        f"{found['params']:,} parameters, {plan.label}, {shape} ranks of {plan.machine.name}, "
        f"local batch {run.batch}"
    )
    yield describe_fit(plan, global_batch)
    yield f"memory   GiB: {gib}"
    for flag, size in found["host_gib"].items():
        yield f"host     GiB per rank for {flag}: {size:.1f}, pinned blocks rounded up"
    count = sum(found["collectives"].values())
    yield f"traffic  GB per rank and step: {links}; {count} collectives"
    yield (
        "step     {step:.2f} s: compute {compute:.2f}, optimizer {optimizer:.2f}, exposed "
        "communication {exposed:.2f} of {communication:.2f}".format(**plan.seconds)
    )
    yield f"speed    at most {plan.images_per_second:.0f} img/s, efficiency {plan.efficiency:.0%}"


def comparison_lines(plans: Sequence[Plan]) -> Iterator[str]:
    """Format the table of `--compare`; "exposed s" is communication that compute does not hide."""
    yield (
        f"{'mode':19}{'verdict':7}{'peak GiB':>9}{'img/s':>9}{'step s':>9}{'exposed s':>11}"
        f"{'optimizer s':>13}{'network GB':>12}"
    )
    for plan in plans:
        by_kind = link_bytes(plan.run, plan.machine).values()
        sent = sum(by_link["network"] for by_link in by_kind)
        time = plan.seconds
        yield (
            f"{plan.label:19}{plan.verdict:7}{plan.peak_gib:9.1f}{plan.images_per_second:9.0f}"
            f"{time['step']:9.3f}{time['exposed']:11.3f}{time['optimizer']:13.3f}{sent / 1e9:12.2f}"
        )


def explanation_lines(plan: Plan) -> Iterator[str]:
    """Format the table of `--explain`: memory by part, at the largest moment of each phase."""
    yield "GiB at the largest moment of each phase of a step"
    yield f"{'moment':28}" + "".join(f"{part[:11]:>12}" for part in MEMORY_PARTS) + f"{'sum':>9}"
    for phase in ("forward", "loss", "backward", "reduction", "optimizer"):
        moments = [s for s in plan.snapshots if s.name.startswith(phase)]
        if not moments:
            continue
        s = max(moments, key=lambda moment: moment.total)
        cells = "".join(f"{s.bytes[part] / GIB:12.3f}" for part in MEMORY_PARTS)
        yield f"{s.name:28}{cells}{s.total / GIB:9.3f}"


def measure_here(parser: Parser, args: argparse.Namespace) -> int:
    """Measure this machine with the ranks that the launcher started; return the exit status."""
    from runtime.measure_machine import measure_machine
    from runtime.session import run_session

    config = make_config(parser, args)
    return run_session(config, partial(measure_machine, path=args.measure))


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; one sentence and exit status 2 if the flags clash."""
    parser = plan_parser()
    args = parser.parse_args(argv)
    if args.measure:
        return measure_here(parser, args)
    _, plan = make_plan(parser, args)
    plans = compare(plan) if args.compare else []
    if args.json:
        rows = [p.json() | {"mode": p.label} for p in plans]
        print(json.dumps(rows if args.compare else plan.json()))
        return 0
    if args.explain:
        print("\n".join(explanation_lines(plan)) + "\n")
    summary = summary_lines(plan, bool(args.global_batch))
    print("\n".join(comparison_lines(plans) if args.compare else summary))
    if plan.machine.name != "frontier" and not plan.machine.measured:
        print("note     times are estimates: plan.py --measure FILE measures a machine")
    return 0


if __name__ == "__main__":
    process.ignore_output_errors()
    sys.exit(main())
