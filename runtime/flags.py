"""The command line of train_fsdp.py: every flag, and the sentences for those that clash.

Names, groups and defaults stand here; what a flag means is the business of the file it goes to.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn

import torch

import mesh
import shard
import vit
from runtime import ranges
from runtime.ranges import MOST_SECONDS, MOST_STEPS, filled, number, whole

# Flags (and what follows from them) that decide the result: a resumed run must not change them.
RESULT = (
    "model",
    "img_size",
    "mask_ratio",
    "norm_pix_loss",
    "precision",
    "reduce_dtype",
    "images",
    "image_names_and_sizes",
    "exact_decode",
    "global_batch",
    "blr",
    "weight_decay",
    "warmup_steps",
    "steps",
    "clip",
    "seed",
)
STARTUP_TIMEOUT_FACTOR = 4  # what is done for the first time may take so many times --timeout
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
RANK0_REPORT_GRACE_SECONDS = 5.0  # that a rank leaves to rank 0 for its error
TORCHRUN_NOTE = "note: what torchrun prints below this, its traceback too, means nothing"
STEPS = 100  # of a run that says neither --steps nor --epochs
MOST_FAKE_RANKS = 2**17  # the process group of a dry run lists them all


class Parser(ranges.Parser):
    """Errors are one sentence, printed by rank 0 alone; exit status 2."""

    def error(self, message: str) -> NoReturn:
        raise SystemExit(usage_error(message, program=self.prog))


def print_error(message: str, program: str = "train_fsdp.py") -> None:
    """Print an error of the whole run."""
    print(f"{program}: error: {message}", file=sys.stderr, flush=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        print(TORCHRUN_NOTE, file=sys.stderr, flush=True)


def usage_error(message: str, local: bool = False, program: str = "train_fsdp.py") -> int:
    """Say why a command is refused before any rank waits for another; returns exit status 2.

    Rank 0 speaks, as the environment names it, nothing else being known yet. The others wait a
    little: a rank that leaves first makes its launcher end rank 0 before it has spoken. Who is
    still there then speaks too where the trouble may be its own (`local`): variables, GPU, disk.
    """
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    if rank == "0":
        print_error(message, program)
    else:
        time.sleep(RANK0_REPORT_GRACE_SECONDS)
        if local:
            print_error(f"{message} (rank {rank})", program)
    return 2


def save_interval(text: str) -> tuple[int | None, float | None]:
    """--save-every as (steps, seconds); None for what is not asked for."""
    if text == "none":
        return None, None
    with suppress(argparse.ArgumentTypeError):
        if text.endswith("m"):
            return None, 60 * number(0.001, 10**5)(text[:-1])
        return whole(1, MOST_STEPS)(text), None
    raise argparse.ArgumentTypeError(
        f"{text!r:.40} is neither steps (500) nor minutes (30m) nor `none`"
    )


def save_every(text: str) -> str:
    """An argparse type: what `save_interval` understands."""
    save_interval(text)
    return text


def build_parser(program: str = "train_fsdp.py") -> Parser:
    """The flags, in the order of the data flow. * changes the result, others speed and memory."""
    parser = Parser(
        program,
        description="Pretrain a ViT-MAE. * marks flags that change the result "
        "of the training; the others change its speed and memory only.",
    )
    switch = argparse.BooleanOptionalAction

    add = parser.add_argument_group("model").add_argument
    add("--model", choices=vit.MODELS, default="base", help="* size (default base)")
    add(
        "--img-size",
        type=whole(1, 4096),
        default=224,
        metavar="PIXELS",
        help="* side (default 224)",
    )
    add("--mask-ratio", type=number(0, 1), default=0.75, help="* share removed (default 0.75)")
    add(
        "--norm-pix-loss",
        action=switch,
        default=True,
        help="* predict patches normalised by their own mean and deviation (default)",
    )

    add = parser.add_argument_group("sharding").add_argument
    add(
        "--mode",
        choices=shard.STRATEGIES,
        help="strategy (default hybrid; of one process, which has nothing to shard, ddp)",
    )
    add(
        "--group",
        type=whole(1, 10**8),
        metavar="RANKS",
        help="hybrid modes: ranks that share one copy (default: the ranks of a node)",
    )
    add(
        "--fsdp",
        type=whole(1, 2),
        metavar="ENGINE",
        help="engine: fully_shard 2, or the old 1 (default 2)",
    )
    add(
        "--prefetch",
        choices=("none", "backward_pre", "backward_post"),
        help="all-gather of the next unit in backward (default backward_pre; post: --fsdp 1 only, "
        "and it prefetches the wrong unit where MAE's decoder meets its encoder)",
    )
    add("--forward-prefetch", action="store_true", help="all-gather the next unit in forward")
    add("--limit-all-gathers", action=switch, help="--fsdp 1: bound gathers in flight (default on)")
    add("--cpu-offload", action="store_true", help="parameters, gradients, states in host memory")
    add(
        "--bucket-cap-mb",
        type=whole(1, 2**16),
        metavar="MIB",
        help="ddp, zero1: bucket (default 25)",
    )

    add = parser.add_argument_group("memory, speed").add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="cuda is ROCm too")
    add("--precision", choices=DTYPES, default="bf16", help="* of the computation (default bf16)")
    add("--reduce-dtype", choices=DTYPES, default="fp32", help="* of gradient sums (default fp32)")
    add(
        "--ac",
        choices=("none", "selective", "full"),
        default="none",
        help="activation checkpointing: recompute norms and GELU, or whole blocks",
    )
    add("--compile", action="store_true", help="torch.compile every block")

    add = parser.add_argument_group("data").add_argument
    add(
        "--data",
        type=filled,
        metavar="DIR",
        default="synthetic",
        help="* images, or `synthetic` (default)",
    )
    add(
        "--run",
        choices=("real", "syn", "io"),
        default="real",
        help="real: train (default); syn: the same with one batch kept on the device, compute and "
        "communication only; io: loader and copy only, no model. The rest of the command "
        "may stay as it is",
    )
    add(
        "--workers",
        type=whole(0, 1024),
        metavar="N",
        help="loader processes a rank (default: its CPU cores less one, at most 6)",
    )
    add(
        "--stage-dir",
        type=filled,
        metavar="DIR",
        help="node-local folder: images are copied there when first read, and the rest in the "
        "background, so that a node asks the shared file system once for each",
    )
    add(
        "--max-bad",
        type=number(0, 1),
        default=0.01,
        metavar="SHARE",
        help="unreadable images, of those of the data set, before the run ends (default 0.01)",
    )
    add(
        "--exact-decode",
        action="store_true",
        help="* decode JPEGs whole, not at the scale their crop needs: half as fast",
    )

    add = parser.add_argument_group("optimisation").add_argument
    add("--batch", type=whole(1, 10**6), metavar="IMAGES", help="* a rank and step (default 32)")
    add(
        "--global-batch",
        type=whole(1, 10**8),
        metavar="IMAGES",
        help="* of all ranks and accumulation steps, instead of --batch",
    )
    add("--accum", type=whole(1, 10**4), default=1, metavar="STEPS", help="* accumulation steps")
    add(
        "--blr",
        type=number(0, 1000),
        default=1.5e-4,
        help="* lr = blr x global batch / 256 (1.5e-4)",
    )
    add("--weight-decay", type=number(0, 1000), default=0.05, help="* of matrices (default 0.05)")
    add(
        "--warmup-steps",
        type=whole(0, MOST_STEPS),
        metavar="STEPS",
        help="* linear (default: 5 %% of the steps)",
    )
    add("--steps", type=whole(1, MOST_STEPS), help="* optimizer steps (default 100)")
    add("--epochs", type=whole(1, MOST_STEPS), help="* passes over the data, instead of --steps")
    add(
        "--clip",
        type=number(1e-6, 1e6),
        metavar="NORM",
        help="* largest gradient norm (default: none)",
    )
    add(
        "--max-skips",
        type=whole(0, 10**6),
        default=0,
        metavar="STEPS",
        help="bad steps (loss or norm not finite) in a row that are left out before the run ends "
        "(default 0)",
    )
    add(
        "--seed",
        type=whole(0, 2**63 - 1),
        default=0,
        help="* of weights, order, crops, masks (default 0)",
    )

    add = parser.add_argument_group("output").add_argument
    add(
        "--out", type=filled, metavar="DIR", default="out", help="log.jsonl goes here (default out)"
    )
    add("--log-every", type=whole(1, MOST_STEPS), default=10, metavar="STEPS", help="(default 10)")
    add(
        "--save-every",
        type=save_every,
        default="30m",
        metavar="WHAT",
        help="a checkpoint every so many steps (500) or minutes (30m, the default), and always "
        "of the last step; none: no checkpoint at all",
    )
    add(
        "--async-save",
        action="store_true",
        help="write checkpoints while training goes on; takes host memory for a copy of the state",
    )
    add(
        "--keep",
        type=whole(1, 10**6),
        default=2,
        metavar="N",
        help="newest checkpoints kept (default 2)",
    )
    add(
        "--resume",
        type=filled,
        default="auto",
        metavar="WHAT",
        help="auto: newest good checkpoint in --out, if any (default); none; or PATH",
    )
    add("--allow-changes", action="store_true", help="* resume with flags that change the result")
    add(
        "--timeout",
        type=whole(1, MOST_SECONDS),
        default=300,
        metavar="SECONDS",
        help="without progress of a rank, before all end (default 300; four times as long for "
        "start-up, compiling and saves)",
    )
    add(
        "--profile",
        type=whole(1, 1000),
        nargs="?",
        const=3,
        metavar="STEPS",
        help="profile so many steps (3) of rank 0 from the sixth on: a trace in --out/profile, a "
        "table of where the time goes, a GPU's memory",
    )

    add = parser.add_argument_group("plan").add_argument
    add(
        "--dry-run",
        action="store_true",
        help="play rank 0 of --world-size in one CPU process, without a launcher: check the "
        "command, step once on tensors without memory, print memory and traffic, train "
        "nothing",
    )
    add(
        "--world-size",
        type=whole(1, 10**8),
        metavar="RANKS",
        help="ranks to pretend, on nodes of 8; `auto` is a GPU then",
    )
    return parser


def launched(environ: Mapping[str, str]) -> bool:
    """Whether torchrun, or srun with more than one task, started this process."""
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "1")
    in_step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    return "RANK" in environ or (in_step and tasks != "1")


def default_mode(args: argparse.Namespace, environ: Mapping[str, str]) -> str:
    """ddp, which leaves a single process alone; hybrid for several, or where FSDP is asked for."""
    single = environ.get("WORLD_SIZE", "1") == "1" and ("RANK" in environ or not launched(environ))
    if args.world_size:
        single = args.world_size == 1
    fsdp = (args.group, args.fsdp, args.prefetch, args.forward_prefetch, args.cpu_offload)
    return "ddp" if single and not any(fsdp) and args.limit_all_gathers is None else "hybrid"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags of a training run; a sentence and exit status 2 where they clash."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for wrong, sentence in (
        (args.dry_run and not args.world_size, "--dry-run: of how many ranks? add --world-size"),
        (
            args.world_size and not args.dry_run,
            "--world-size is for --dry-run: a real run has the ranks that its launcher starts",
        ),
        (
            args.dry_run and launched(os.environ),
            "--dry-run pretends its ranks in one process: start it without torchrun or srun",
        ),
        (
            args.dry_run and (args.world_size or 0) > MOST_FAKE_RANKS,
            f"--dry-run steps at most {MOST_FAKE_RANKS} ranks: plan.py has the same flags",
        ),
    ):
        if wrong:
            parser.error(sentence)
    return settled(parser, args)


def settled(parser: Parser, args: argparse.Namespace) -> argparse.Namespace:
    """What the parser read, with the defaults that follow; the same for every program."""
    args.mode = args.mode or default_mode(args, os.environ)
    # the job that a plan or a dry run is of is not here: this may be a login node
    gpu = args.device == "cuda" or (
        args.device == "auto" and (args.world_size or torch.cuda.is_available())
    )
    for sentence in flag_errors(args, "cuda" if gpu else "cpu"):
        parser.error(sentence)
    # What has no meaning in this mode stays None, so that the log does not claim it.
    row = shard.STRATEGIES[args.mode]
    if row.fsdp1 is not None:
        args.fsdp = args.fsdp or 2
    if row.reshard:
        args.prefetch = args.prefetch or "backward_pre"
    if args.fsdp == 1 and args.mode != "no_shard":
        args.limit_all_gathers = args.limit_all_gathers is not False
    return args


def flag_errors(args: argparse.Namespace, device_type: str) -> Iterator[str]:
    """A sentence for each flag, given explicitly, that has no meaning beside the others."""
    mode, ddp = args.mode, args.mode in ("ddp", "zero1")
    row, fsdp1 = shard.STRATEGIES[mode], args.fsdp == 1
    use = "leave it out"
    for wrong, sentence in (
        (
            args.group and row.group != "group",
            f"--group is for --mode hybrid and hybrid_grad_op, not {mode}: {use}",
        ),
        (args.fsdp and ddp, f"--fsdp chooses between FSDP engines, --mode {mode} is none: {use}"),
        (
            args.prefetch and not row.reshard,
            f"--prefetch: --mode {mode} gathers nothing in backward: {use}, or use full_shard",
        ),
        (
            args.prefetch == "backward_post" and not fsdp1,
            "--prefetch backward_post exists in FSDP1 only: add --fsdp 1, or use backward_pre",
        ),
        (
            args.forward_prefetch and (ddp or mode == "no_shard"),
            f"--forward-prefetch: --mode {mode} gathers no parameters: {use}",
        ),
        (
            args.limit_all_gathers is not None and (not fsdp1 or mode == "no_shard"),
            f"--limit-all-gathers is for sharded modes of --fsdp 1: {use}, or add --fsdp 1",
        ),
        (args.cpu_offload and ddp, f"--cpu-offload is FSDP's, --mode {mode} has none: {use}"),
        (
            args.cpu_offload and device_type == "cpu",
            f"--cpu-offload moves parameters off a GPU, but this run is on the CPU: {use}",
        ),
        (
            args.bucket_cap_mb and not ddp,
            f"--bucket-cap-mb is for --mode ddp and zero1, not {mode}: {use}",
        ),
        (args.batch and args.global_batch, "--batch and --global-batch: give one of them"),
        (args.steps and args.epochs, "--steps and --epochs: give one of them"),
        (
            not args.epochs and (args.warmup_steps or 0) > (args.steps or STEPS),
            f"--warmup-steps {args.warmup_steps} is more than the {args.steps or STEPS} --steps",
        ),
        (
            args.stage_dir and args.data == "synthetic",
            f"--stage-dir copies images, --data synthetic has none: {use}",
        ),
        (
            args.exact_decode and args.data == "synthetic",
            f"--exact-decode is of JPEGs, --data synthetic has none: {use}",
        ),
        (
            args.profile and args.run == "io",
            "--profile is of training steps, --run io makes none: leave one of them out",
        ),
    ):
        if wrong:
            yield sentence


def batch_sizes(
    world_size: int, accum: int, batch: int | None, global_batch: int | None
) -> tuple[int, int]:
    """(local batch, global batch), in images; ValueError where the latter does not divide."""
    if global_batch is None:
        return batch or 32, (batch or 32) * accum * world_size
    share = world_size * accum
    if global_batch % share:
        below = max(global_batch // share, 1) * share
        raise ValueError(
            f"--global-batch {global_batch} does not divide over {world_size} ranks x {accum} "
            f"accumulation steps: use {below} or {below + share}"
        )
    return global_batch // share, global_batch


def sizes(
    args: argparse.Namespace, world_size: int, node_ranks: int
) -> tuple[int | None, tuple[int, int], int, int]:
    """Flags -> (shard group, shape of the mesh, local batch, global batch) of so many ranks.

    ValueError, one sentence, where flags and ranks do not go together. `node_ranks` is what a group
    is if the flags do not say it.
    """
    group = None
    if shard.STRATEGIES[args.mode].group == "group":
        group = args.group or min(node_ranks, world_size)
    mesh.check_group(world_size, group or 1)
    batches = batch_sizes(world_size, args.accum, args.batch, args.global_batch)
    return group, shard.mesh_shape(args.mode, world_size, group), *batches


def check_masking(config: vit.ViTConfig, img_size: int, mask_ratio: float) -> int:
    """Count the patches of an image; ValueError where none of them is left to predict."""
    patches = vit.patch_count(config, img_size)
    if vit.kept_patches(patches, mask_ratio) == patches:
        raise ValueError(f"--mask-ratio {mask_ratio} removes no patch: nothing to learn")
    return patches
