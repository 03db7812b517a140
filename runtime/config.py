"""The one table of flags, `Config`, and its parser; what follows from the flags is in run.py.

To add a flag, add a field to `Config` and use it: parser, --help, resume check, plan, sweep and log
read the table. What a flag means is the business of the file that uses it.
"""

import argparse
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, replace
from importlib.util import find_spec
from types import NoneType
from typing import Any, ClassVar, Literal, NoReturn, get_args, get_origin, get_type_hints

import torch

import mesh
import shard
import vit
from runtime import devices, process

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DEFAULT_STEPS = 100  # if neither --steps nor --epochs is given
DEFAULT_BATCH = 32
DEFAULT_BLR = 1.5e-4  # the base learning rate of MAE's pretraining
# Marks of flags
RESULT = "changes the result"  # a resumed run must not change it; the star in --help
COMPARED = "compared"  # a sweep compares only runs with the same value
SHARDING = "sharding"  # a sweep draws a line for each value


def number(low: float, high: float = math.inf, kind: type = float) -> Callable[[str], Any]:
    """Make an argparse type: a finite number of this kind from `low` to `high`."""
    what = "whole number" if kind is int else "number"
    limits = f"from {low:g} to {high:g}"
    if high == math.inf:
        limits = f"from {low:g} up"

    def convert(text: str) -> Any:
        with suppress(ValueError):
            value = kind(text)
            if low <= value <= high and value != math.inf:
                return value
        raise argparse.ArgumentTypeError(f"{text!r:.40} is not a {what} {limits}")

    return convert


def int_in_range(low: int, high: float = math.inf) -> Callable[[str], int]:
    """Make an argparse type: a whole number from `low` to `high`."""
    return number(low, high, int)


def nonempty(text: str) -> str:
    """Return the text, as an argparse type; refuse an empty one, as an unset variable gives it."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r:.40} is empty: is a shell variable unset?")
    return text


def pair_below_one(text: str) -> tuple[float, float]:
    """Convert "0.9,0.95", two numbers from 0 to below 1, as an argparse type does."""
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        first = second = math.nan
    if not (0 <= first < 1 and 0 <= second < 1):
        raise argparse.ArgumentTypeError(
            f"{text!r:.40} is not two numbers from 0 to below 1, as in 0.9,0.95"
        )
    return first, second


def flag(default: Any, help: str, *marks: str, group: str = "", **argparse_options: Any) -> Any:
    """Describe one flag as a dataclass field; its annotation says how it is read.

    `marks` are RESULT, COMPARED, SHARDING. `group` is a heading of --help.
    """
    about = {"help": help, "marks": marks, "group": group, "options": argparse_options}
    return field(default=default, metadata=about)


@dataclass(frozen=True)
class Config:
    """Hold what was typed. None: not given; the mode, the ranks, the device or the data decide."""

    default_blr: ClassVar[float] = DEFAULT_BLR

    model: str = flag(
        "base",
        f"{', '.join(vit.MODELS)}; or base:depth=6,mlp_width=512",
        RESULT,
        COMPARED,
        group="model",
    )
    img_size: int = flag(224, "side of an image in pixels", RESULT, COMPARED)
    channels: int = flag(3, "channels of an image (not 3: .npy, TIFF in packs)", RESULT, COMPARED)
    mask_ratio: float = flag(0.75, "fraction of patches masked", RESULT, COMPARED)
    norm_pix_loss: bool = flag(True, "normalise each target patch by mean and variance", RESULT)
    init_from: str | None = flag(None, "weights to begin with: a run's, or of a file", RESULT)

    mode: str | None = flag(  # one process has nothing to shard
        None, "default hybrid; 1 process: ddp", SHARDING, group="sharding", choices=shard.STRATEGIES
    )
    group: int | None = flag(None, "hybrid: ranks that share a copy (default: a node)", SHARDING)
    tp: int = flag(1, "FSDP2: ranks that split the matrices of each block", SHARDING)
    fsdp: Literal[1, 2] | None = flag(None, "2: fully_shard (default); 1: FSDP1", SHARDING)
    wrap: Literal["block", "root"] | None = flag(None, "FSDP: the unit (default block)", SHARDING)
    prefetch: Literal["none", "backward_pre", "backward_post"] | None = flag(
        None, "when backward gathers the next unit (default backward_pre)", SHARDING
    )
    forward_prefetch: bool = flag(False, "all-gather the next unit in forward", SHARDING)
    limit_all_gathers: bool | None = flag(None, "FSDP1: few at a time (default)", SHARDING)
    cpu_offload: bool = flag(False, "FSDP: parameters and AdamW on the host", COMPARED)
    bucket_cap_mb: int | None = flag(None, "ddp, zero1: MiB of a bucket (default 25)", SHARDING)

    device: Literal["auto", "cpu", "cuda"] = flag("auto", "cuda: ROCm too", COMPARED, group="speed")
    precision: str | None = flag(None, "default by device", RESULT, COMPARED, choices=DTYPES)
    reduce_dtype: str = flag("fp32", "of gradients over ranks", RESULT, COMPARED, choices=DTYPES)
    ac: Literal["none", "selective", "full"] = flag(
        "none", "activation checkpointing: recompute norms and GELU, or whole blocks", COMPARED
    )
    compile: bool = flag(False, "torch.compile every block", COMPARED)

    data: str = flag("synthetic", "folder of images, or a pack", group="data")
    eval_data: str | None = flag(None, "folder of held-out images: their loss at each save")
    include: Sequence[str] | None = flag(
        None, "only images whose name or folder matches", RESULT, action="append"
    )
    exclude: Sequence[str] | None = flag(
        None, "no images whose name or folder matches, such as masks", RESULT, action="append"
    )
    run_mode: Literal["real", "syn", "io"] = flag(
        "real", "real: train; syn: the same batch each step, not saved; io: loader and copy only"
    )
    workers: int | None = flag(
        None, "loader processes per rank (default cores - 1, at most 16)", type=int_in_range(0)
    )
    max_bad: float = flag(0.01, "share of unreadable images that ends the run", type=number(0, 1))
    exact_decode: bool = flag(False, "decode JPEGs at full size (slower)", RESULT)

    batch: int | None = flag(
        None, "images per data-parallel rank (default 32)", COMPARED, group="optimisation"
    )
    global_batch: int | None = flag(None, "images per step of all ranks (no --batch)", RESULT)
    accum: int = flag(1, "accumulation steps", COMPARED)
    blr: float | None = flag(
        None, f"lr = blr x global batch / 256 (default {DEFAULT_BLR:g})", RESULT
    )
    lr: float | None = flag(None, "peak learning rate, instead of --blr", RESULT)
    betas: tuple[float, float] = flag((0.9, 0.95), "of AdamW", RESULT, type=pair_below_one)
    weight_decay: float = flag(0.05, "of AdamW, not applied to biases and norms", RESULT)
    warmup_steps: int | None = flag(
        None, "linear warm-up (5 % of all)", RESULT, type=int_in_range(0)
    )
    steps: int | None = flag(None, f"optimizer steps (default {DEFAULT_STEPS})", RESULT)
    epochs: int | None = flag(None, "passes over the data, instead of --steps")
    clip: float | None = flag(None, "largest gradient norm (default: none)", RESULT)
    max_skips: int = flag(0, "consecutive steps with NaN or inf to skip", type=int_in_range(0))
    seed: int = flag(0, "of weights, image order, crops and masks", RESULT, type=int_in_range(0))

    out: str = flag("out", "log and checkpoints go here", group="output")
    log_every: int = flag(10, "steps between two log lines")
    tensorboard: bool = flag(False, "write the log's numbers to --out/tensorboard too")
    save_every: str = flag("30m", "steps (500), minutes (30m) or none; the last step is saved too")
    async_save: bool = flag(False, "save in the background; needs host memory for a copy")
    keep: int = flag(2, "newest checkpoints to keep")
    resume: str = flag("auto", "auto: newest complete checkpoint in --out; none; or a path")
    allow_changes: bool = flag(False, "resume even if flags marked * have changed")
    timeout: int = flag(300, "seconds without progress of a rank after which the run ends")
    profile: int | None = flag(None, "steps to profile (3): --out/profile", nargs="?", const=3)

    dry_run: bool = flag(False, "plan, and simulate --world-size ranks", group="plan")
    world_size: int | None = flag(None, "ranks to plan for; then --device auto means GPU")
    machine: str | None = flag(
        None, "to plan for: a known one, or a file of plan.py --measure (default by device)"
    )


def names(*marks: str, table: type[Config] = Config) -> tuple[str, ...]:
    """List the flags that have one of these marks, in the order of the table."""
    found = []
    for row in fields(table):
        if {*marks} & {*row.metadata["marks"]}:
            found.append(row.name)
    return tuple(found)


class Parser(argparse.ArgumentParser):
    """Print errors as one sentence, on rank 0 only; exit status 2. Reject abbreviated flags.

    --help begins and ends with the first two paragraphs of a command's docstring, `doc`: what it
    does, and examples.
    """

    def __init__(self, *args: Any, doc: str | None = None, **kwargs: Any) -> None:
        if doc:
            kwargs["description"], kwargs["epilog"], *_ = doc.split("\n\n")
            kwargs["formatter_class"] = argparse.RawDescriptionHelpFormatter
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise SystemExit(process.usage_error(message, program=self.prog))


def training_parser(program: str = "train_fsdp.py", doc: str | None = None) -> Parser:
    """Make the parser from the table. * marks what changes the result."""
    parser = Parser(program, doc=doc)
    note = "* marks flags that a resumed run must not change without --allow-changes."
    parser.description = f"{parser.description or ''}\n{note}"
    add_flags(parser, Config)
    return parser


def add_flags(
    parser: argparse.ArgumentParser, table: type[Config], left_out: Collection[str] = ()
) -> None:
    """Give a parser the flags of a table, but for those left out."""
    add = parser.add_argument
    hints = get_type_hints(table)
    for row in fields(table):
        about = row.metadata
        if about["group"]:
            add = parser.add_argument_group(about["group"]).add_argument
        if row.name in left_out:
            continue
        spellings = [flag_name(row.name)]
        if row.name == "run_mode":  # torchrun takes a bare --run for its own --run-path
            spellings.append("--run")
        help = flag_help(row)
        options = reading_options(hints[row.name], row.default) | about["options"]
        add(*spellings, default=row.default, help=help, **options)


def flag_help(row: Field) -> str:
    """Return the help of a flag, as argparse formats it: with a star and the default."""
    help = row.metadata["help"]
    if RESULT in row.metadata["marks"]:
        help = f"* {help}"
    shown = row.default
    if isinstance(shown, tuple):
        shown = ",".join(str(part) for part in shown)
    if shown is not None and not isinstance(shown, bool):
        help += f" (default {shown})"
    return help.replace("%", "%%")


def reading_options(hint: Any, default: Any) -> dict[str, Any]:
    """Return how argparse reads a flag with this annotation, unless it has options of its own."""
    kind = hint
    arguments = get_args(hint)  # X and None for X | None; the values for a Literal
    if NoneType in arguments:
        kind = arguments[0]
    if kind is bool and default is False:
        return {"action": "store_true"}
    if kind is bool:  # --no-norm-pix-loss
        return {"action": argparse.BooleanOptionalAction}
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return {"choices": choices, "type": type(choices[0])}
    if kind is int:
        return {"type": int_in_range(1), "metavar": "N"}
    if kind is float:
        return {"type": number(0), "metavar": "X"}
    return {"type": nonempty}


def parse(argv: Sequence[str] | None, doc: str | None = None) -> Config:
    """Read the flags of a training run; one sentence and exit status 2 if they clash."""
    parser = training_parser(doc=doc)
    config = make_config(parser, parser.parse_args(argv))
    if config.dry_run != bool(config.world_size):
        parser.error("--dry-run and --world-size go together; a run has its launcher's ranks")
    if config.tensorboard and not find_spec("tensorboard"):
        parser.error("--tensorboard needs tensorboard, which is not here: pip install it")
    return config


def make_config(parser: Parser, args: argparse.Namespace, table: type[Config] = Config) -> Config:
    """Make a Config (or a subclass, `table`) from parsed arguments; fill in its defaults.

    From here on the run's error messages begin with the program of `parser`.
    """
    process.PROGRAM = parser.prog
    values = {row.name: getattr(args, row.name) for row in fields(table)}
    config = table(**values)
    try:
        return fill_defaults(config)
    except RuntimeError as error:  # the launcher's variables, perhaps of this rank alone
        raise SystemExit(process.usage_error(str(error), local=True)) from None
    except ValueError as error:
        parser.error(str(error))


def flag_name(option: str) -> str:
    """Return the flag of an option."""
    return "--" + option.replace("_", "-")


def fill_defaults(c: Config) -> Config:
    """Add the defaults that follow from mode and device; ValueError if flags clash."""
    model_config(c.model)
    save_interval(c.save_every)
    if c.machine:
        from planner.machines import read_machine  # the trainer does without planner/

        read_machine(c.machine)
    # a plan or a dry run may be made on a login node, where the job's GPUs are not visible
    seen = bool(c.world_size) or torch.cuda.is_available()
    gpu = c.device == "cuda" or (c.device == "auto" and seen)
    given = {}
    for row in fields(Config):
        value = getattr(c, row.name)
        if value != row.default:
            given[row.name] = value
    mode = c.mode
    if mode is None:
        mode = default_mode(c.world_size, given)
    problem = next(shard.invalid_options(mode, given, flag_name), None)
    if problem:
        raise ValueError(problem)
    if c.clip == 0:
        raise ValueError("--clip 0 would make every gradient 0: leave it out to clip none")
    if c.cpu_offload and not gpu:
        raise ValueError("--cpu-offload moves parameters off a GPU, but this run is on the CPU")
    for one, other in (("batch", "global_batch"), ("steps", "epochs"), ("blr", "lr")):
        if one in given and other in given:
            raise ValueError(f"{flag_name(one)} and {flag_name(other)}: give one of them")
    known: dict[str, Any] = {"mode": mode}
    if c.precision is None:
        known["precision"], _ = devices.default_precision(gpu)
    if c.lr is None and c.blr is None:
        known["blr"] = c.default_blr
    # A flag without meaning in this mode stays None, so the log does not claim that it was used.
    for name in ("fsdp", "wrap", "prefetch", "limit_all_gathers"):
        value = getattr(shard.ShardingOptions, name)
        option = {"fsdp": c.fsdp, name: value}
        if name not in given and not any(shard.invalid_options(mode, option)):
            known[name] = value
    return replace(c, **known)


def default_mode(world_size: int | None, given: Mapping[str, Any]) -> str:
    """Return the mode of so many ranks, the launcher's by default, that have these flags."""
    if world_size is None:
        world_size = mesh.read_ranks(os.environ).world_size
    # one process has nothing to shard, unless it is given a flag that ddp does not have
    if world_size == 1 and not any(shard.invalid_options("ddp", given)):
        return "ddp"
    return "hybrid"


def save_interval(text: str) -> tuple[int | None, float | None]:
    """Parse --save-every into (steps, seconds), at most one of which is not None; ValueError."""
    try:
        if text.endswith("m"):
            return None, 60 * number(0.001)(text[:-1])
        if text == "none":
            return None, None
        return int_in_range(1)(text), None
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"--save-every takes steps (500), minutes (30m), none: {error}") from None


def model_config(text: str) -> vit.ViTConfig:
    """Return the shape of the model `base`, or `base:depth=6,mlp_width=1536`; ValueError."""
    name, _, rest = text.partition(":")
    try:
        changes: dict[str, Any] = {}
        for part in filter(None, rest.split(",")):
            option, value = part.split("=")
            lowest = 0 if option == "gated_mlp" else 1
            changes[option] = int_in_range(lowest)(value)
        return replace(vit.MODELS[name], **changes)
    except (KeyError, TypeError, ValueError, argparse.ArgumentTypeError) as error:
        example = f"use {', '.join(vit.MODELS)}, or as base:depth=6,mlp_width=1536"
        raise ValueError(f"--model {text}: {error}; {example}") from None
