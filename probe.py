"""See what a pretrained model has learned.

    python probe.py reconstruct RUN --data DIR    a picture: removed patches, filled in
    python probe.py knn RUN --data DIR --test DIR       a score of its features, without training
    python probe.py linear RUN --data DIR --test DIR    the same by a linear classifier
    torchrun --nproc-per-node 8 probe.py finetune RUN --data DIR --test DIR    a classifier

RUN is the --out folder of train_fsdp.py, or one of its checkpoints. Each subcommand is in a module
of downstream/.
"""

import argparse
import os
from collections.abc import Sequence
from importlib import import_module

from runtime import process
from runtime.config import Parser, int_in_range, nonempty

# To add a subcommand: one row, and a module with HELP, add_arguments(parser) and run(args), which
# returns the exit status and raises ValueError or OSError, one sentence, where it fails.
COMMANDS = {
    "reconstruct": "downstream.reconstruct",
    "knn": "downstream.scores",
    "linear": "downstream.scores",
    "finetune": "downstream.finetune",
}


def read_subcommand(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; SystemExit with status 2 for bad usage."""
    parser = Parser("probe.py", doc=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module_name in COMMANDS.items():
        module = import_module(module_name)
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        add = command.add_argument
        add("run", type=nonempty, metavar="RUN", help="--out of a run, or one checkpoint")
        images = "folder of images, or a pack"
        add("--data", type=nonempty, required=True, metavar="DIR", help=images)
        if name != "finetune":  # which has those of training
            help = "only images whose name or folder matches; may be repeated"
            add("--include", type=nonempty, action="append", metavar="PATTERN", help=help)
            help = "no images whose name or folder matches; may be repeated"
            add("--exclude", type=nonempty, action="append", metavar="PATTERN", help=help)
        img_size = "side of an image (default: as in pretraining)"
        add("--img-size", type=int_in_range(1, 4096), metavar="PIXELS", help=img_size)
        add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")
        module.add_arguments(command)
        command.set_defaults(start=module.run)
    args = parser.parse_args(argv)
    if args.command != "finetune" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        parser.error(f"{args.command} runs in one process: start it without torchrun")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand -> exit status: 1 where it failed, 2 for bad usage."""
    args = read_subcommand(argv)
    try:
        return args.start(args)
    except (ValueError, ImportError, OSError) as error:
        process.usage_error(str(error), program="probe.py")
        return 2 if isinstance(error, ValueError) else 1


if __name__ == "__main__":
    process.ignore_output_errors()
    raise SystemExit(main())
