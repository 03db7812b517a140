"""The command line of train_fsdp.py: its parser, made from the table in config.py, and its errors.

A wrong value gets one sentence from the parser, flags that clash get one from `clashes`; both end
the program with status 2 before any rank waits for another.
"""

import argparse
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from importlib.util import find_spec
from typing import Any, NoReturn

import torch

import shard
from runtime import ranges
from runtime.config import DEFAULT_STEPS, Config

STARTUP_TIMEOUT_FACTOR = 4  # what is done for the first time may take so many times --timeout
RANK0_REPORT_GRACE_SECONDS = 5.0  # that the other ranks leave to rank 0 for its error message
TORCHRUN_NOTE = "note: ignore the torchrun output below, including its traceback"
PROGRAM = "train_fsdp.py"  # in error messages
MAX_FAKE_RANKS = 2**17  # the process group of a dry run lists them all


class TrainingParser(ranges.Parser):
    """Print an error as one sentence, by rank 0 alone; exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(usage_error(message, program=self.prog))


@contextmanager
def errors_name(program: str) -> Iterator[None]:
    """Let the error messages of a run name another program than train_fsdp.py."""
    global PROGRAM
    before, PROGRAM = PROGRAM, program
    try:
        yield
    finally:
        PROGRAM = before


def print_error(message: str, program: str | None = None) -> None:
    """Print an error of the whole run."""
    print(f"{program or PROGRAM}: error: {message}", file=sys.stderr, flush=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        print(TORCHRUN_NOTE, file=sys.stderr, flush=True)


def usage_error(message: str, local: bool = False, program: str | None = None) -> int:
    """Print why a command is refused before any rank waits for another; return exit status 2.

    Rank 0 prints it, as the environment names it: nothing else is known yet. The others wait a
    little, because a rank that leaves first makes its launcher end rank 0 before it has printed.
    Where the cause may be the rank's own (`local`: variables, GPU, disk), those that are still
    there print it too.
    """
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    if rank == "0":
        print_error(message, program)
    else:
        time.sleep(RANK0_REPORT_GRACE_SECONDS)
        if local:
            print_error(f"{message} (rank {rank})", program)
    return 2


def training_parser(program: str = "train_fsdp.py") -> TrainingParser:
    """Make the parser from the table. * marks what changes the result."""
    parser = TrainingParser(
        program,
        description="Pretrain a ViT-MAE. * marks flags that decide the result of the training: a "
        "resumed run must not change them without --allow-changes.",
    )
    add_flags(parser, Config)
    return parser


def add_flags(
    parser: argparse.ArgumentParser, table: type[Config], left_out: Collection[str] = ()
) -> None:
    """Give a parser the flags of a table, but for those left out."""
    add = parser.add_argument
    for row in fields(table):
        mark = row.metadata
        if mark["group"]:
            add = parser.add_argument_group(mark["group"]).add_argument
        if row.name in left_out:
            continue
        help = "* " * mark["result"] + mark["help"]
        if row.default is not None and not isinstance(row.default, bool):
            help += f" (default {row.default})"
        options: dict[str, Any] = {"default": row.default, "help": help.replace("%", "%%")}
        kind = mark["kind"]
        if kind is bool and row.default is False:
            options["action"] = "store_true"
        elif kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif callable(kind):
            options |= {"type": kind, "metavar": mark["unit"]}
        else:
            options["choices"] = kind
        spellings = ["--" + row.name.replace("_", "-")]
        if row.name == "run":  # torchrun takes a bare --run for its own --run-path
            spellings, options["dest"] = ["--run-mode", "--run"], "run"
        add(*spellings, **options, **mark["argparse"])


def launched(environ: Mapping[str, str]) -> bool:
    """Tell whether torchrun, or srun with more than one task, started this process."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    return "RANK" in environ or (in_step and tasks != "1")


def default_mode(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """Choose ddp for a single process, which it leaves alone; hybrid for several, or for FSDP."""
    single = environ.get("WORLD_SIZE", "1") == "1" and ("RANK" in environ or not launched(environ))
    if args.world_size:
        single = args.world_size == 1
    fsdp = [args.group, args.fsdp, args.wrap, args.prefetch, args.forward_prefetch]
    fsdp += [args.cpu_offload, args.tp > 1, args.limit_all_gathers is not None]
    return "ddp" if single and not any(fsdp) else "hybrid"


def parse(argv: Sequence[str] | None) -> Config:
    """Read the flags of a training run; one sentence and exit status 2 where they clash."""
    parser = training_parser()
    config = make_config(parser, parser.parse_args(argv))
    if config.dry_run and not config.world_size:
        parser.error("--dry-run requires --world-size")
    if config.dry_run and not find_spec("planner"):
        parser.error("--dry-run needs the folder planner/: copy it too")
    if (config.eval_data or config.init_from) and not find_spec("downstream"):
        parser.error("--eval-data and --init-from need the folder downstream/: copy it too")
    if config.tensorboard and not find_spec("tensorboard"):
        parser.error("--tensorboard needs the package tensorboard: pip install tensorboard")
    if config.world_size and not config.dry_run:
        parser.error(
            "--world-size is for --dry-run: a real run has the ranks that its launcher starts"
        )
    if config.dry_run and launched(os.environ):
        parser.error(
            "--dry-run simulates its ranks in one process: run it without torchrun or srun"
        )
    if config.dry_run and (config.world_size or 0) > MAX_FAKE_RANKS:
        parser.error(f"--dry-run steps at most {MAX_FAKE_RANKS} ranks: plan.py has the same flags")
    return config


def make_config(
    parser: TrainingParser, args: argparse.Namespace, table: type[Config] = Config
) -> Config:
    """Make a Config of what the parser read, with the defaults that follow from the mode.

    Of a table that extends it, where one is given. For every program that takes the flags of
    training; the namespace may have more.
    """
    args.mode = args.mode or default_mode(args, os.environ)
    # a plan or a dry run may be made on a login node, where the job's GPUs are not visible
    gpu = args.device == "cuda" or (
        args.device == "auto" and (args.world_size or torch.cuda.is_available())
    )
    for sentence in clashes(args, "cuda" if gpu else "cpu"):
        parser.error(sentence)
    # What has no meaning in this mode stays None, so that the log does not claim it.
    for name in ("fsdp", "wrap", "prefetch", "limit_all_gathers"):
        value = getattr(shard.ShardingOptions, name)
        has_meaning = not any(shard.misuses(args.mode, {"fsdp": args.fsdp, name: value}))
        if getattr(args, name) is None and has_meaning:
            setattr(args, name, value)
    return table(**{row.name: getattr(args, row.name) for row in fields(table)})


def clashes(args: argparse.Namespace, device_type: str) -> Iterator[str]:
    """Yield a sentence for each flag, given explicitly, that has no meaning with the others."""
    given = {f.name: v for f in fields(Config) if (v := getattr(args, f.name)) != f.default}
    yield from shard.misuses(args.mode, given, lambda name: "--" + name.replace("_", "-"))
    use = "leave it out"
    if args.cpu_offload and device_type == "cpu":
        yield f"--cpu-offload moves parameters off a GPU, but this run is on the CPU: {use}"
    if args.batch and args.global_batch:
        yield "--batch and --global-batch: give one of them"
    if args.steps and args.epochs:
        yield "--steps and --epochs: give one of them"
    steps = args.steps or DEFAULT_STEPS
    if not args.epochs and (args.warmup_steps or 0) > steps:
        yield f"--warmup-steps {args.warmup_steps} is more than the {steps} --steps"
    if args.stage_dir and args.data == "synthetic":
        yield f"--stage-dir copies images, --data synthetic has none: {use}"
    if args.exact_decode and args.data == "synthetic":
        yield f"--exact-decode is for JPEGs, --data synthetic has none: {use}"
    if args.profile and args.run == "io":
        yield "--profile is for training steps, --run io makes none: leave one of them out"
