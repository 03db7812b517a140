"""The command line of plan.py, and the plan it describes; sweeps plan their points by it too."""

import argparse
from collections.abc import Sequence

from planner.estimate import Plan
from planner.machines import MACHINES, read_machine
from planner.traffic import PlannedRun
from runtime.config import Parser, filled, make_config, number, training_parser
from runtime.run import resolve


def plan_parser() -> Parser:
    """Add the flags of the plan to those of train_fsdp.py."""
    parser = training_parser("plan.py")
    parser.description = (
        "What a run will need, before it is queued: memory, traffic and time, by arithmetic alone. "
        "It takes the whole command line of train_fsdp.py, refuses what that refuses, and plans "
        "--world-size ranks (default: one node of the machine)."
    )
    add = parser.add_argument_group("the plan itself").add_argument
    add("--encoder-only", action="store_true", help="a plain ViT, no MAE decoder")
    names = f"{', '.join(MACHINES)}, or a JSON file (default frontier)"
    add("--machine", type=filled, default="frontier", metavar="NAME", help=names)
    add("--machines", action="store_true", help="print the table of machines, and no plan")
    gib = "per rank (default: the machine's)"
    add("--memory-gib", type=number(0.1, 10**6), metavar="GIB", help=gib)
    ips = "images/s of one whole node, measured under the same flags"
    add("--measured-ips", type=number(0.001, 10**9), metavar="IMAGES", help=ips)
    add("--compare", action="store_true", help="every mode and group, best first")
    add("--explain", action="store_true", help="where the numbers come from")
    add("--json", action="store_true", help="one JSON object")
    return parser


def read_command(argv: Sequence[str] | None) -> tuple[argparse.Namespace, Plan]:
    """Parse the command line and plan its run; one sentence and exit status 2 if it is refused."""
    parser = plan_parser()
    args = parser.parse_args(argv)
    try:
        machine = read_machine(args.machine)
        args.world_size = args.world_size or machine.ranks_per_node
        config = make_config(parser, args)
        run = resolve(config, args.world_size, machine.ranks_per_node)
        planned = PlannedRun.from_flags(
            run.model, run.record() | {"encoder_only": args.encoder_only}
        )
        return args, Plan(planned, machine, args.memory_gib, args.measured_ips)
    except ValueError as error:
        parser.error(str(error))
