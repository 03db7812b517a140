"""What a run will need, before it is queued: memory, traffic and time, by arithmetic alone.

    python plan.py --model 15b --mode hybrid --group 4 --world-size 512 --batch 32 --memory-gib 64
    python plan.py --model 15b --world-size 1024 --compare      # every mode and group, best first
    python plan.py --model 15b --group 4 --explain              # where the numbers come from

Does it fit, with which local batch at most, how many bytes go over which link, and how fast can it
be at best. No GPU and no process group is needed, for any number of ranks. planner/memory.py says
what a step asks of a rank, planner/machines.py what a machine gives; here both meet.

`peak` is live tensors (CUDA's max_memory_allocated), `peak_active` counts freed memory too that
waits for another stream, as FSDP1 leaves it. The allocator's fragmentation, the context and RCCL's
or NCCL's buffers are in neither: `margin_gib` stands for them. The step is a lower bound: nothing
waits for data, a slow rank or a disk.
"""

if __name__ == "__main__":
    # Above the imports, which take seconds: Ctrl-C meanwhile ends the program without a traceback.
    import os
    import signal

    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import shard
import vit
from planner import estimate
from planner.estimate import PHASES, Plan, compare, phase_peak, reason
from planner.machines import LINKS, MACHINES, collective_seconds, read_machine, ring
from planner.memory import GIB, PARTS, StepMemory
from planner.traffic import Run, collectives, link_bytes, model_units, part_of
from runtime import flags, terminal
from runtime.ranges import filled, number

# ---------------------------------------------------------------------------------------------
# Command line


def mode_name(run: Run) -> str:
    """`hybrid 4`, or the mode alone."""
    grouped = shard.STRATEGIES[run.mode].group == "group"
    return f"{run.mode} {run.shard}" if grouped else run.mode


def comparison_text(plans: Sequence[Plan]) -> str:
    """The table of `--compare`."""
    best = plans[0]
    lines = [
        f"{'mode':19}{'verdict':7}{'peak GiB':>9}{'img/s':>10}{'step s':>9}{'effic.':>8}"
        f"{'network GB':>12}  why"
    ]
    for plan in plans:
        sent = sum(by["network"] for by in link_bytes(plan.run, plan.machine).values())
        lines.append(
            f"{mode_name(plan.run):19}{plan.verdict:7}{plan.peak_gib:9.1f}"
            f"{plan.images_per_second:10.0f}{plan.speed.step:9.3f}{plan.efficiency:8.0%}"
            f"{sent / 1e9:12.2f}  {reason(plan, best)}"
        )
    return "\n".join(lines)


def summary_text(plan: Plan) -> str:
    """Some lines for a person."""
    run, found = plan.run, plan.json()
    parts = ", ".join(
        f"{k} {v:.1f}" for k, v in found["memory_gib"].items() if k in PARTS and v >= 0.05
    )
    sent = {
        link: sum(by[link] for by in found["traffic_bytes_per_rank"].values()) for link in LINKS
    }
    links = ", ".join(f"{link} {value / 1e9:.1f}" for link, value in sent.items())
    s = plan.speed
    lines = (
        f"{found['params']:,} parameters, {mode_name(run)}, {run.replicate} x {run.shard} ranks of "
        f"{plan.machine.name}, local batch {run.local_batch}",
        f"{plan.verdict}: {plan.peak_gib:.1f} GiB at the peak ({plan.peak.name}) + "
        f"{found['margin_gib']:.1f} margin, of {plan.memory_gib:g}; largest local batch "
        f"{found['max_local_batch']}",
        f"memory   GiB: {parts}",
        f"traffic  GB a rank and step: {links}; {sum(found['collectives'].values())} collectives",
        f"step     {s.step:.2f} s: compute {s.compute:.2f}, optimizer {s.optimizer:.2f}, exposed "
        f"communication {s.exposed:.2f} of {s.communication:.2f}",
        f"speed    at most {plan.images_per_second:.0f} img/s, efficiency {plan.efficiency:.0%}",
    )
    return "\n".join(lines)


def explanation_text(plan: Plan) -> str:
    """Bytes per parameter by mode, memory of each phase by part, time of each collective."""
    run = plan.run
    numel = sum(u.numel for u in model_units(run.config, run.encoder_only))
    lines = [
        f"bytes per parameter on each of {run.world_size} ranks (AdamW, fp32 states)",
        f"{'mode':18}{'parameters':>11}{'gradients':>11}{'states':>11}{'sum':>8}",
    ]
    for mode, row in shard.STRATEGIES.items():
        group = run.shard if row.group == "group" else None
        other = replace(run, mode=mode, shard=shard.mesh_shape(mode, run.world_size, group)[1])
        other = replace(other, replicate=run.world_size // other.shard, accum=1)
        memory = StepMemory(other, plan.machine)
        states = memory.states()
        held = [states["parameters"], memory.gradients(memory.units), states["optimizer"]]
        cells = "".join(f"{value / numel:11.3f}" for value in held)
        lines.append(f"{mode_name(other):18}{cells}{sum(held) / numel:8.3f}")
    lines += ["", "GiB at the largest moment of each phase of a step"]
    lines.append(f"{'moment':28}" + "".join(f"{part[:11]:>12}" for part in PARTS) + f"{'sum':>9}")
    for moment in dict.fromkeys(phase_peak(plan.moments, phase).name for phase in PHASES):
        m = max((m for m in plan.moments if m.name == moment), key=lambda m: m.total)
        cells = "".join(f"{m.bytes[part] / GIB:12.3f}" for part in PARTS)
        lines.append(f"{m.name:28}{cells}{m.total / GIB:9.3f}")
    lines += ["", f"{'collective':16}{'unit':20}{'ranks':>6}{'a step':>8}{'MB':>10}{'ms each':>9}"]
    grouped: Counter[tuple] = Counter()
    for c in collectives(run):
        part = "bucket" if c.unit.startswith("bucket") else part_of(c.unit)
        grouped[c.kind, part, c.ranks, c.stride, c.payload] += c.count
    for (kind, part, ranks, stride, payload), count in grouped.items():
        where = ring(plan.machine, run.world_size, ranks, stride)
        each = collective_seconds(plan.machine, kind, payload, where)
        lines.append(f"{kind:16}{part:20}{ranks:6}{count:8}{payload / 1e6:10.1f}{each * 1e3:9.2f}")
    return "\n".join(lines)


def build_parser() -> flags.Parser:
    """The flags of train_fsdp.py, all of them, and those of the plan."""
    parser = flags.build_parser("plan.py")
    parser.description = (
        f"{(__doc__ or '').splitlines()[0]} It takes the whole command line of train_fsdp.py, "
        "refuses what that refuses, and plans --world-size ranks (default 8)."
    )
    parser.set_defaults(world_size=8)
    add = parser.add_argument_group("the plan itself").add_argument
    add("--encoder-only", action="store_true", help="a plain ViT, no MAE decoder")
    add(
        "--machine",
        type=filled,
        default="frontier",
        metavar="NAME",
        help=f"{', '.join(MACHINES)}, or a JSON file (default frontier)",
    )
    add(
        "--memory-gib",
        type=number(0.1, 10**6),
        metavar="GIB",
        help="of a rank (default: the machine's)",
    )
    add(
        "--measured-ips",
        type=number(0.001, 10**9),
        metavar="IMAGES",
        help="images/s of one whole node, measured under the same flags",
    )
    add("--compare", action="store_true", help="every mode and group, best first")
    add("--explain", action="store_true", help="where the numbers come from")
    add("--json", action="store_true", help="one JSON object")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; exit status 2 and a sentence where the flags make none."""
    parser = build_parser()
    args = flags.settled(parser, parser.parse_args(argv))
    try:
        machine = read_machine(args.machine)
        group, _, batch, _ = flags.sizes(args, args.world_size, machine.ranks_per_node)
        plan = estimate.estimate(
            vit.MODELS[args.model],
            img_size=args.img_size,
            mask_ratio=args.mask_ratio,
            mode=args.mode,
            group=group,
            fsdp=args.fsdp,
            world_size=args.world_size,
            local_batch=batch,
            accum=args.accum,
            precision=args.precision,
            reduce_dtype=args.reduce_dtype,
            ac=args.ac,
            prefetch=args.prefetch,
            forward_prefetch=args.forward_prefetch,
            cpu_offload=args.cpu_offload,
            bucket_cap_mb=args.bucket_cap_mb,
            encoder_only=args.encoder_only,
            memory_gib=args.memory_gib,
            machine=machine,
            measured_ips=args.measured_ips,
        )
    except ValueError as error:
        parser.error(str(error))
    plans = compare(plan, args.measured_ips) if args.compare else []
    if args.json:
        rows = [p.json() | {"mode": mode_name(p.run), "why": reason(p, plans[0])} for p in plans]
        print(json.dumps(rows if args.compare else plan.json()))
        return 0
    if args.explain:
        print(explanation_text(plan) + "\n")
    print(comparison_text(plans) if args.compare else summary_text(plan))
    return 0


if __name__ == "__main__":
    terminal.make_safe()
    sys.exit(main() or terminal.lost())
